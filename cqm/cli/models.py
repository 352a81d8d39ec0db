"""`cqm fit`, `cqm query` and `cqm refute`: effect models fitted, asked and doubted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from cqm.arguments import whole_number
from cqm.branches.dataset import Branches
from cqm.cli.ranking import answer_row, answers_by_state, write_ranking
from cqm.cli.shared import Directory, Json, as_json, default, refuse_existing, says_what_is_kept
from cqm.display import counted, text_table
from cqm.logs.files import holds_logs
from cqm.names import shortened
from cqm.progress import say

if TYPE_CHECKING:
    from cqm.logs.dataset import Logs
    from cqm.logs.trajectories import Trajectories
    from cqm.models.answers import RewardAnswer
    from cqm.models.estimator import Estimator
    from cqm.models.projections import LogVerdict
    from cqm.queries import Query
    from cqm.verdicts import Verdict
    from cqm.worlds.contract import World


LogsDirectory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="LOGS")]
Candidate = Literal["constant", "ridge", "direct", "unrolled"]
_FIXED_BY_PAPER = ("candidates", "budget", "updates", "validation", "width", "members")


@dataclass(frozen=True)
class Fit:
    """Learn an effect model from branches or logs; rerun the command to resume it.

    Example: cqm fit reacher --out reacher-model

    From logs written by Logs.save: cqm fit plant-logs --estimator residual --out plant-model
    """

    directory: Directory
    """Directory of the branches or logs."""
    out: Path
    """Directory for the model."""
    estimator: Literal["branched", "residual", "hindsight"] = "branched"
    """How to learn: from branches, or from logs by residual regression or hindsight."""
    calibration: Annotated[float | Path | None, default("none")] = None
    """Share of the branches to set aside for calibration, such as 0.1 (they are drawn again if
    they have fewer than 16 draws), or a directory of held-out branches with at least 16 draws."""
    paper: bool = False
    """Fit the paper's model: raw input, rank 8, width 128, 4,000 updates."""
    candidates: Annotated[tuple[Candidate, ...], default("all")] = ()
    """Candidates to compare on held-out branches; the best one or the best combination is kept."""
    budget: Annotated[str | None, default("none")] = None
    """Time budget for learning from branches, such as 60s or 5min."""
    updates: Annotated[
        int | None, default("16000, more for controls from the box, or 2000 with hindsight")
    ] = None
    """Number of gradient steps per network; not for residual."""
    validation: Annotated[float | None, default("a tenth")] = None
    """Share of the branches to hold out, to compare candidates and to stop training early."""
    width: Annotated[int | None, default("128, or 256 with hindsight")] = None
    """Width of the hidden layers; not for residual."""
    members: Annotated[int | None, default("1, 4 for direct, 8 for logs")] = None
    """Number of networks to average; for logs, number of sets of random Fourier features."""
    seed: int = 0
    """Random seed for initialisation and batches."""

    def run(self) -> int:
        """Fit, save, and print the model card."""
        say(f"Loading {self.directory}")
        from_logs = self.estimator != "branched" or holds_logs(self.directory)
        with says_what_is_kept(self._kept):
            model = self._fit_logs() if from_logs else self._fit_branches()
        if isinstance(self.calibration, Path):
            say(f"Calibrating with {self.calibration}")
            model.calibrate(Branches.open(self.calibration))
        model.save(self.out)
        print(f"{model.summary()}\nsaved in {self.out}")
        return 0

    def _check_calibration(self, data: Branches | Trajectories) -> None:
        """Refuse calibration branches that share states with the data, before a long training."""
        if isinstance(self.calibration, Path):
            from cqm.models.provenance import Provenance

            held_out = Provenance.of(Branches.open(self.calibration))
            Provenance.of(data).check_held_out(
                held_out, "calibration branches", independent=isinstance(data, Branches)
            )

    def _kept(self) -> str:
        """What a stopped fit leaves behind, in words."""
        from cqm.models.training import checkpointed_updates
        from cqm.rows import ENDING

        steps = checkpointed_updates(self.out)
        if not steps and any(self.out.glob(f"*{ENDING}")):
            return f"sums over the logs are kept in {self.out}; rerun the command to resume"
        if not steps:
            return "nothing was kept; rerun the command to start again"
        runs = ", ".join(f"{name}: {counted(step, 'update')}" for name, step in steps.items())
        return f"checkpoints are kept in {self.out} ({runs}); rerun the command to resume"

    def _fit_branches(self) -> Estimator:
        from cqm.models.effect import EffectModel

        fixed = [n for n in _FIXED_BY_PAPER if getattr(self, n) != getattr(Fit, n)]
        if self.paper and fixed:
            flags = ", ".join(f"--{name}" for name in fixed)
            raise ValueError(f"--paper fixes all settings but the seed; leave out {flags}")
        model = EffectModel.paper(seed=self.seed) if self.paper else EffectModel(seed=self.seed)
        model.set_params(**{name: getattr(self, name) for name in fixed})
        branches = Branches.open(self.directory)
        self._check_calibration(branches)
        options: dict[str, Any] = {}
        if isinstance(self.calibration, float):
            options = {"calibration": self.calibration, "world": self._world(branches)}
        return model.fit(branches, directory=self.out, show_progress=True, **options)

    def _world(self, branches: Branches) -> World | None:
        """The world to draw the branches set aside again; None if they have enough draws."""
        from cqm.calibration import FEWEST_DRAWS
        from cqm.worlds import reload_world

        if branches.recipe.draws >= FEWEST_DRAWS:
            return None
        try:
            return reload_world(branches.world)
        except ValueError as error:
            raise ValueError(
                f"{error}; to calibrate without the world, pass the directory of held-out branches "
                f"with at least {FEWEST_DRAWS} draws as --calibration"
            ) from error

    def _fit_logs(self) -> Estimator:
        from cqm.logs.dataset import Logs
        from cqm.models.hindsight import HindsightModel
        from cqm.models.residual import ResidualModel

        if self.estimator == "branched":
            raise ValueError(
                f"{self.directory} contains logs; fit them with --estimator residual or "
                "--estimator hindsight"
            )
        if self.paper:
            raise ValueError(
                f"--paper fits the paper's model to branches, but --estimator {self.estimator} "
                "learns from logs; leave out one of the two"
            )
        if isinstance(self.calibration, float):
            raise ValueError(
                "logs cannot calibrate a model; pass a directory of held-out branches as "
                f"--calibration; got {self.calibration}"
            )
        for name in ("candidates", "budget", "validation"):
            if getattr(self, name) != getattr(Fit, name):
                raise ValueError(
                    f"--{name} is for branches, but --estimator {self.estimator} learns from "
                    "logs; leave it out"
                )
        if not holds_logs(self.directory):
            raise ValueError(
                f"--estimator {self.estimator} learns from logs, but {self.directory} contains "
                "none; write some there with cqm.Logs.save"
            )
        kinds = {"residual": ResidualModel, "hindsight": HindsightModel}
        model = kinds[self.estimator](
            width=self.width,
            members=self.members,
            updates=self.updates,
            seed=self.seed,
        )
        logs = Logs.open(self.directory)
        self._check_calibration(logs)
        print(logs.coverage())
        return model.fit(logs, directory=self.out, show_progress=True)


@dataclass(frozen=True)
class Ask:
    """Rank the actions under a reward, in sampled states or in states from a file.

    Example: cqm query reacher-model --reward="-to_target_x - 0.1 * velocity_wrist"

    From logs, for a table of states:
    cqm query logs --reward="-pain - 0.01 * cost" --states patients.csv --out ranking.csv
    """

    directory: Directory
    """Directory of a model, or of logs, from which a residual model is learned first."""
    reward: str
    """Formula over the world's features; if it starts with a minus sign, write --reward="-x"."""
    integrate: bool = False
    """Integrate a reward that is not linear in the features over predicted futures, whether or not
    that is the best way to answer it."""
    branches: Annotated[Path | None, default("none")] = None
    """Directory of branches with the features of every step, such as those that the model was
    fitted to; a reward that is not linear may then be answered by a regression fitted to them."""
    over: Literal["menu", "box"] = "menu"
    """Rank the candidate actions, or (box) find the best control in the whole box, for a model
    fitted to branches collected with --actions box."""
    states: int | Path = 8
    """Number of states to sample from the world or the logs, or a file of observations (.csv,
    .tsv, .parquet, .npy or .safetensors)."""
    logs: Annotated[Path | None, default("none")] = None
    """Directory of the logs that the model was fitted to, which intervals need."""
    out: Annotated[Path | None, default("print")] = None
    """CSV file for the answers, one row per state."""
    id: Annotated[str | None, default("none")] = None
    """Column of the states file that names each state; it is kept in the answers."""
    overwrite: bool = False
    """Replace the file given by --out if it exists."""
    encoding: str = "utf-8"
    """Encoding of a states file in a text format, such as latin-1."""
    confidence: float = 0.95
    """Confidence level of the intervals and regret bounds, for a calibrated model or logs."""
    seed: int = 0
    """Random seed for the sampled states and for a model learned from logs."""
    json: Json = False

    def run(self) -> int:
        """Print the ranking for every state."""
        say(f"Loading {self.directory}")
        if self.out is not None:
            refuse_existing(self.out, self.overwrite)
            if isinstance(self.states, Path) and self.out.resolve() == self.states.resolve():
                raise ValueError(f"--out and --states must be different files; got {self.out}")
        from cqm.logs.dataset import Logs
        from cqm.models.effect import EffectModel
        from cqm.models.residual import ResidualModel
        from cqm.queries import Query
        from cqm.verdicts import meaning_of_best
        from cqm.worlds import reload_world

        (source, logs), world = self._source(), None
        if self.branches is not None and (self.integrate or not isinstance(source, EffectModel)):
            raise ValueError(
                "--branches needs a model fitted to branches, and cannot be combined with "
                "--integrate"
            )
        if self.integrate and not isinstance(source, EffectModel):
            raise ValueError(
                f"--integrate needs a model fitted from branches; {self.directory} holds logs or a "
                "model fitted from them"
            )
        try:
            world = reload_world(source.world if isinstance(source, Logs) else source.world_)
        except ValueError as error:  # common with logs; feature names and a file are enough
            if not isinstance(self.states, Path) and logs is None:
                raise ValueError(
                    f"{error}; to query without the world, pass --states FILE"
                ) from error
        with warnings.catch_warnings():
            if self.integrate or getattr(source, "held_out_", None) is not None:
                # A poor projection does not matter if there is another way.
                warnings.filterwarnings("ignore", message="on .* events, the reward")
            query = Query.formula(self.reward, world or source)
        observations, ids = self._observations(source, world, logs)
        if self.over == "box":
            return self._best_controls(source, observations, query)
        model = source  # learned only now, so that a mistake above costs no time
        if isinstance(model, Logs):
            model = ResidualModel(seed=self.seed).fit(model, show_progress=True)
        answer = self._answer(model, query)
        if answer is not None:
            advantages = answer.advantage(observations)
        elif self.integrate and isinstance(model, EffectModel):
            advantages = model.reward_advantage(observations, query)
        else:
            advantages = model.advantage(observations, query)
        recipe, names = model.recipe_, model.action_names_
        following = recipe.continuation.describe(names)
        meaning = meaning_of_best(recipe.discount, recipe.horizon, following)
        verdict, trust = self._verdict(model, logs, observations, query, advantages, answer)
        answers = answers_by_state(advantages, names, verdict)
        for each, name in zip(answers, ids, strict=False):
            each["id"] = name
        if self.out is not None:
            write_ranking(self.out, answers, names, self.id)
        if self.json:
            about = {
                "query": self._title(query, answer),
                "trust": trust,
                "meaning": meaning,
                "actions": names,
            }
            print(as_json({**about, "states": answers}))
        elif self.out is not None:
            print(f"{trust}\n{meaning}\nsaved {counted(len(answers), 'state')} in {self.out}")
        else:
            print(f"Best first action for {self._title(query, answer)}")
            print(text_table([answer_row(each, names) for each in answers]))
            print(f"{trust}\n{meaning}")
            if answer is not None and answer.comparison:
                print(f"\nWays to evaluate this reward:\n{answer.table()}")
        return 0

    def _best_controls(self, model: Any, observations: np.ndarray, query: Query) -> int:
        """Print the best control in every state."""
        from cqm.models.effect import EffectModel

        if not isinstance(model, EffectModel):
            raise ValueError(
                f"--over box needs a model fitted from branches; {self.directory} holds logs or a "
                "model fitted from them"
            )
        if self.integrate or self.out is not None:
            raise ValueError("--over box prints its answers; leave out --integrate and --out")
        decision = model.act(observations, query, over="box")
        rows = [
            {
                "state": i,
                "best control": " ".join(f"{value:.4g}" for value in control),
                "best on the menu": model.action_names_[action],
                "gain over it": float(gain) if self.json else f"{gain:.3g}",
            }
            for i, (control, action, gain) in enumerate(
                zip(decision.controls, decision.menu_action, decision.gain, strict=True)
            )
        ]
        if self.json:
            print(as_json({"query": str(query), "states": rows}))
        else:
            print(f"Best first control for {query}\n{text_table(rows)}")
        return 0

    def _title(self, query: Query, answer: RewardAnswer | None) -> str:
        integrated = self.integrate and query.error is not None
        if answer is None and integrated:
            return f"{query.name} (integrated over predicted futures)"
        return str(answer or query)

    def _answer(self, model: Estimator, query: Query) -> RewardAnswer | None:
        """The best answer of a model from branches; None if there is no choice of ways."""
        from cqm.models.effect import EffectModel

        if not isinstance(model, EffectModel) or query.error is None or self.integrate:
            return None
        return model.answer(query, self.branches)

    def _source(self) -> tuple[Estimator | Logs, Logs | None]:
        """The model to ask, or the logs to learn it from; the logs that intervals come from."""
        from cqm.logs.dataset import Logs
        from cqm.models.estimator import load_model
        from cqm.models.log_estimator import LogEstimator, check_same_names

        if holds_logs(self.directory):
            if self.logs is not None:
                raise ValueError(f"{self.directory} contains logs already; leave out --logs")
            logs = Logs.load(self.directory)
            return logs, logs
        model = load_model(self.directory)
        if self.logs is None:
            return model, None
        if not isinstance(model, LogEstimator):
            raise ValueError(
                f"--logs is for models fitted from logs; {self.directory} was fitted from branches"
            )
        logs = Logs.load(self.logs)
        check_same_names(model, logs, str(self.directory), str(self.logs))
        return model, logs

    def _verdict(
        self,
        model: Estimator,
        logs: Logs | None,
        observations: np.ndarray,
        query: Query,
        advantages: np.ndarray,
        answer: RewardAnswer | None,
    ) -> tuple[Verdict | LogVerdict | None, str]:
        """What is known about the answers, and how far to trust them in words."""
        from cqm.models.log_estimator import LogEstimator

        if self.integrate and query.error is not None:
            return None, "Predicted futures have no certificate, so their error is unknown."
        if answer is not None and answer.way != "projected":
            steps = getattr(model, "calibration_steps_", None)
            if steps is None or self.branches is not None:
                return None, (
                    "Only the average error of this answer is known; for a certificate, "
                    "calibrate the model with branches collected with --per-step, and leave out "
                    "--branches."
                )
        verdict: Verdict | LogVerdict
        if model.calibration_ is not None:
            with warnings.catch_warnings():
                # The ranking has warned already.
                warnings.filterwarnings("ignore", message="the query uses features that")
                verdict = model.certify(observations, query, confidence=self.confidence)
        elif logs is not None and isinstance(model, LogEstimator):
            try:
                projected = model.projected_effect(logs)
            except ValueError as error:
                return None, f"There are no intervals: {error}."
            verdict = projected.certify(
                observations, query, advantages=advantages, confidence=self.confidence
            )
        else:
            held_out = f"cqm fit ... --out {self.directory} --calibration HELD_OUT_BRANCHES"
            logs_too = "" if model.learns_from is Branches else ", or pass --logs LOGS"
            return None, (
                "The model is not calibrated, so its error is unknown; calibrate it with "
                f"{held_out}{logs_too}"
            )
        return verdict, f"{verdict.summary()} {verdict.trust}"

    def _observations(
        self, source: Estimator | Logs, world: World | None, logs: Logs | None
    ) -> tuple[np.ndarray, Sequence[str]]:
        """Observations `[n, observations]` of sampled states or of those in a file; their ids."""
        from cqm.branches.collect import collect
        from cqm.logs.dataset import Logs
        from cqm.observations import read_states

        if isinstance(self.states, Path):
            found = read_states(
                self.states,
                source.observation_names,
                source.columns if isinstance(source, Logs) else source.columns_,
                id_column=self.id,
                encoding=self.encoding,
            )
            if len(found.observations) == 0:
                raise ValueError(f"{self.states} contains no states")
            if found.ignored:
                columns = counted(len(found.ignored), "column")
                say(f"Ignored {columns} of {self.states}: {shortened(found.ignored)}")
            return found.observations, found.ids
        if self.id is not None:
            raise ValueError("--id names a column of a states file; pass --states FILE")
        if logs is not None:
            num = whole_number("--states", self.states, least=1)
            rows = np.random.default_rng(self.seed).permutation(len(logs))[:num]
            return logs.observations[np.sort(rows)], ()
        if world is None or isinstance(source, Logs) or source.recipe_.warmup is None:
            raise ValueError("a model fitted from logs cannot sample states; pass --states FILE")
        # Drawn and warmed up like the states the model was fitted on, with a different seed.
        sample = collect(
            world,
            states=self.states,
            horizon=1,
            warmup=source.recipe_.warmup,
            seed=source.recipe_.seed + 1 + self.seed,
            show_progress=False,
        )
        return sample.observations, ()


@dataclass(frozen=True)
class Refute:
    """Try to refute a model fitted from logs: placebos, leaks, and hidden causes.

    Example: cqm refute plant-model plant-logs --reward harvest

    Returns 0 if nothing failed, 1 if a refuter failed, 2 if the model or logs cannot be used.
    """

    directory: Directory
    """Directory of the model."""
    logs: LogsDirectory
    """Directory of the logs that the model was fitted to."""
    reward: Annotated[str | None, default("every outcome")] = None
    """Formula over the outcomes, which says which action is best; if it starts with a minus sign,
    write --reward="-x"."""
    refuters: Annotated[tuple[str, ...], default("all")] = ()
    """Names of some refuters, such as placebo or hidden-cause."""
    seed: int = 0
    """Random seed for placebos, random causes and halves."""
    json: Json = False

    def run(self) -> int:
        """Print what the refuters found; returns 1 if one of them failed."""
        say(f"Loading {self.directory}")
        from dataclasses import asdict

        from cqm.logs.dataset import Logs
        from cqm.models.estimator import load_model
        from cqm.models.log_estimator import LogEstimator
        from cqm.queries import Query

        model = load_model(self.directory)
        if not isinstance(model, LogEstimator):
            raise ValueError(
                f"refuters are for models fitted from logs; {self.directory} was fitted from "
                "branches, which cqm audit checks"
            )
        logs = Logs.load(self.logs)
        query = None if self.reward is None else Query.formula(self.reward, logs)
        found = model.refute(
            logs, query, refuters=self.refuters or None, seed=self.seed, show_progress=True
        )
        print(as_json({"passed": found.passed, **asdict(found)}) if self.json else found)
        return 0 if found.passed else 1
