"""EffectModel (CQM-B): from branches to the effect κ(s, a) of every candidate action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike

from cqm import decisions
from cqm.arguments import choice, function, instance, shown, texts
from cqm.branches.dataset import Branches, as_branches
from cqm.calibration import Calibration, Groups
from cqm.measures import SampledMeasure
from cqm.models import box_effects, futures
from cqm.models.answers import RewardAnswer, best_answer
from cqm.models.box import BoxDecision
from cqm.models.choice import CANDIDATES, Choice, Comparison, of_families
from cqm.models.controls import box_rule
from cqm.models.effect_checks import check_comparisons, check_params
from cqm.models.effect_files import extra_arrays, extra_entries, restore_extras
from cqm.models.estimator import Estimator
from cqm.models.futures import FUTURES
from cqm.models.held_out import HeldOut, set_aside
from cqm.models.known_answers import CalibrationSteps, KnownAnswers, certified
from cqm.models.predictors import (
    Predictor,
    StackedPredictor,
    UnrolledPredictor,
)
from cqm.models.preprocessing import Conditioning
from cqm.models.rewards import EventFn, happens, rewards_of
from cqm.models.scorer import Scorer
from cqm.models.training import Training
from cqm.names import Action
from cqm.observations import as_observations
from cqm.queries import Query, QueryLike, RewardFn
from cqm.quotient import ComparisonGraph, Reference
from cqm.verdicts import Verdict
from cqm.worlds.contract import World


class EffectModel(Estimator):
    """Learns from branches what actions change, without any reward.

    `fit` compares several candidates on families that they did not learn from, averages those that
    may be the best, and fits them again to all families:

    - `constant`: the same effects in every state;
    - `ridge`: ridge regression on the state, products of its coordinates, or random cosines of it;
    - `direct`: a network that maps state and action to the effect;
    - `unrolled`: a network that predicts one step, unrolled along branches with fresh later actions
      and fresh noise. It needs branches collected with `per_step=True`, and gets closest to the
      noise floor where labels are noisy and the world is complicated.

    Networks are trained in cycles and stop when another cycle does not help, so noisy labels are
    not overfitted. `comparison_` and the model card show how the candidates compared. The learned
    transition network, if any, is kept in `transition_` even if other candidates are chosen.

    Args:
        candidates: Names of the candidates to compare.
        budget: Time for fitting, such as `"60s"`, `"5min"` or a number of seconds. Networks that do
            not fit into it are trained for fewer updates or left out. Without a budget, the result
            does not depend on timing: the same seed gives the same model.
        conditioning: Coordinates of the inputs: `learned` (see `cqm.models.frame`) or, for `direct`
            alone, `none`, `whiten`, `effect` or `project` as in the benchmark.
        decoder_rank: Rank of the shared decoder of `direct`; by default the rank of the training
            effects. If given, only `direct` is fitted.
        width: Width of the hidden layers.
        members: Number of networks that are trained together and averaged; by default one for
            `unrolled` and four for `direct`.
        reference: Reference distribution over actions, for centring; uniform by default.
        graph: Comparison graph; if given, `direct` fits differences along its edges, and the other
            candidates are left out.
        draws: Number of fresh continuations that `unrolled` averages over.
        training: Settings of the training loop; by default those that suit the candidate.
        updates: Number of gradient steps per network; by default as in `training`. To repeat a fit
            that had a budget, pass its `updates_`.
        validation: Share of the families to hold out for the comparison; by default a tenth, or
            more in small sets. With 0, a single candidate is trained on all families, without
            early stopping.
        memory_gb: Memory for the training rows, in gigabytes; a larger set is read from its shards
            window by window (see `cqm.models.stream`).
        seed: Random seed for initialisation, fresh continuations and batches.

    >>> EffectModel(width=64)
    EffectModel(width=64)
    """

    kind, title = "effect", "Effect model"
    learns_from, examples = Branches, "branch families"

    # Set by `fit`.
    comparison_: tuple[Comparison, ...] = ()
    transition_: UnrolledPredictor | None = None
    updates_: dict[str, list[int]]  # updates of every cycle, by candidate
    box_: np.ndarray | None = None  # [2, controls], bounds of the controls; None with a menu only
    rule_: np.ndarray | None = None  # [points, controls], codes of controls that stand for the box
    calibrated_on_: str = "menu"  # or box, if the calibration branches tried random controls
    held_out_: HeldOut | None = None  # families that show how to answer a reward
    _known: KnownAnswers  # to earlier queries
    calibration_steps_: CalibrationSteps | None = None  # to certify rewards that are not linear

    def __init__(
        self,
        *,
        candidates: str | Sequence[str] = tuple(CANDIDATES),
        budget: str | float | None = None,
        conditioning: Conditioning = "learned",
        decoder_rank: int | None = None,
        width: int = 128,
        members: int | None = None,
        reference: Reference = None,
        graph: ComparisonGraph | None = None,
        draws: int = 64,
        training: Training | None = None,
        updates: int | Mapping[str, Sequence[int]] | None = None,
        validation: float | None = None,
        memory_gb: float = 2.0,
        seed: int = 0,
    ):
        self.candidates = candidates
        self.budget = budget
        self.conditioning = conditioning
        self.decoder_rank = decoder_rank
        self.width: int = width
        self.members = members
        self.reference = reference
        self.graph = graph
        self.draws = draws
        self.training = training
        self.updates = updates
        self.validation = validation
        self.memory_gb = memory_gb
        self.seed = seed

    @classmethod
    def paper(
        cls,
        *,
        conditioning: Conditioning = "none",
        decoder_rank: int | None = 8,
        training: Training | None = None,
        seed: int = 0,
    ) -> EffectModel:
        """The paper's model: raw input, rank 8, width 128, one network, 4,000 updates."""
        return cls(
            candidates="direct",
            conditioning=conditioning,
            decoder_rank=decoder_rank,
            width=128,
            members=1,
            training=Training() if training is None else training,
            validation=0.0,
            seed=seed,
        )

    def fit(
        self,
        branches: Branches | str | Path,
        *,
        calibration: float | None = None,
        world: World | None = None,
        directory: str | Path | None = None,
        show_progress: bool | None = None,
    ) -> Self:
        """Learn from branches.

        Args:
            branches: The families to learn from, or their directory.
            calibration: Share of the families to set aside. The model does not learn from them, and
                is calibrated with them, so that it gives certificates at once.
            world: The world that the branches were collected from, to redraw the families that are
                set aside, with 16 draws each. Not needed if they already have 16 or more.
            directory: Where to keep checkpoints; an interrupted fit resumes from them. None are
                written with a budget, because a resumed fit would plan other updates.
            show_progress: See `cqm.progress.progress`.
        """
        if calibration is None:
            if world is not None:
                raise ValueError("world is only needed for calibration; pass calibration=0.1, say")
            return self._fit(branches, directory, show_progress)
        given = Branches.open(branches) if isinstance(branches, str | Path) else branches
        given = instance("branches", given, Branches, "Branches or their directory")
        learned, held_out = set_aside(given, calibration, world, show_progress)
        return self._fit(learned, directory, show_progress).calibrate(held_out)

    def _learn(self, branches: Branches, options: Mapping[str, Any]) -> Predictor:
        if len(branches) == 0:
            raise ValueError("there are no families to learn from")
        check_comparisons(branches, self.graph, self.reference)
        self.comparison_, self.transition_, self.updates_ = (), None, {}
        self.box_ = None if branches.has_menu else branches.box
        self.rule_ = None if self.box_ is None else box_rule(self.box_.shape[1])
        self.held_out_ = self.calibration_steps_ = None
        self._known = KnownAnswers()
        return self._chosen(Choice(self, branches, options))

    def _chosen(self, choice: Choice) -> Predictor:
        return choice.predictor()

    # Any control in the box.

    def member_effects(
        self, observations: ArrayLike, *, actions: ArrayLike | None = None
    ) -> np.ndarray:
        """Effects predicted by each member of the ensemble, `[members, n, actions, features]`.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            actions: Controls, as for `effect`; the candidate actions by default.
        """
        if self.box_ is None and actions is None:
            return super().member_effects(observations)
        return box_effects.member_effects(self, observations, actions)

    def effect(
        self,
        observations: ArrayLike,
        *,
        action: Action | None = None,
        baseline: Action | None = None,
        actions: ArrayLike | None = None,
    ) -> np.ndarray:
        """Effects of all actions, `[n, actions, features]`, or one contrast, `[n, features]`.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state; or a table with
                these columns.
            action: A name, an index, or one per state. Together with `baseline`, it selects a
                single contrast: the effect of `action` relative to `baseline`.
            baseline: The action to compare with, given in the same way.
            actions: Controls to ask about instead of the candidate actions,
                `[actions, controls]`, or one set per state `[n, actions, controls]`. The model must
                have learned from branches collected with `actions="box"`. Effects are centred at
                the model's reference, whatever controls are asked about.
        """
        if actions is None:
            return super().effect(observations, action=action, baseline=baseline)
        if action is not None or baseline is not None:
            raise ValueError(
                "pass either actions, or an action and a baseline from the menu; got both"
            )
        return self.member_effects(observations, actions=actions).mean(axis=0)

    def rank(self, observations: ArrayLike, query: QueryLike) -> np.ndarray:
        """Actions, best first, `[n, actions]`; `[n, queries, actions]` for several queries."""
        if self.box_ is None:
            return super().rank(observations, query)
        values = decisions.advantage(self._comparable_effects(observations), query)
        self._warn_of_unlearned_features(query)
        return decisions.rank(values)

    @overload
    def act(
        self, observations: ArrayLike, query: QueryLike, *, over: Literal["menu"] = "menu"
    ) -> np.ndarray: ...

    @overload
    def act(
        self, observations: ArrayLike, query: Query | np.ndarray, *, over: Literal["box"]
    ) -> BoxDecision: ...

    def act(
        self, observations: ArrayLike, query: Any, *, over: Literal["menu", "box"] = "menu"
    ) -> np.ndarray | BoxDecision:
        """Index of the best action in each state, `[n]`; `[n, queries]` for several queries.

        With `over="box"`, the best control in the whole box instead, as a `BoxDecision`; for
        models that learned from branches collected with `actions="box"`.
        """
        choice("over", over, ("menu", "box"))
        if over == "menu":
            decisions.query_weights(query)  # raises if it is no query
            queries = [query] if isinstance(query, Query) else query
            if any(self._known_answer(one) for one in queries if isinstance(one, Query)):
                return decisions.best(self.advantage(observations, query))
            return super().act(observations, query)
        states = np.atleast_2d(self._states(observations))
        self._fitted()
        query = decisions.single_query(query)
        self._warn_of_unlearned_features(query)
        self._check_weights(query)
        return box_effects.best_in_box(self, states, query)

    def with_actions(self, actions: ArrayLike, *, names: Sequence[str] | None = None) -> Self:
        """The same model with other candidate actions, without retraining.

        Args:
            actions: Controls in the box, `[actions, controls]`, at least two.
            names: Their names; their indices by default.

        The model must have learned from branches collected with `actions="box"`. The model that is
        returned is not calibrated, because the calibration was made for other actions.
        """
        return box_effects.with_actions(self, actions, names)

    def centering_gap(self, observations: ArrayLike) -> float:
        """How much effects depend on the points that stand for the box, as a share of their size.

        A second, independent set of points is used as the reference instead; the root mean square
        change of the effects is divided by that of the effects of the candidate actions. It is 0
        for a reference on the menu, which needs no such points.
        """
        return box_effects.centering_gap(self, observations)

    def _states(self, observations: ArrayLike) -> np.ndarray:
        return as_observations(observations, self.observation_names, self.columns_)

    def _check_weights(self, query: Query) -> None:
        if len(query.weights) != len(self.feature_names):
            raise ValueError(
                f"the query has {len(query.weights)} weights; the model has "
                f"{len(self.feature_names)} features"
            )

    def _comparable_effects(self, observations: ArrayLike) -> np.ndarray:
        """Effects up to a shift that all actions share, which is all that a ranking needs."""
        if self.box_ is None:
            return super()._comparable_effects(observations)
        return box_effects.comparable_effects(self, observations)

    def calibrate(self, branches: Branches, *, groups: Groups | None = None) -> Self:
        """Measure the model's errors on held-out branches with at least 16 draws.

        Args:
            branches: Held-out branches. Those of the candidate actions are needed for `certify` and
                intervals, those of controls from the box for the claims of `act(over="box")`.
            groups: Group of each family, or a function that maps observations to groups; see
                `certify`.
        """
        branches = as_branches("branches", branches)
        self._fitted()
        if branches.has_menu and not np.array_equal(
            branches.candidate_actions, self.candidate_actions_
        ):
            raise ValueError(
                "the calibration branches have other candidate actions than the model: "
                f"{shown(branches.candidate_actions.tolist())} and "
                f"{shown(self.candidate_actions_.tolist())}"
            )
        super().calibrate(branches, groups=groups)
        self.calibrated_on_ = branches.recipe.actions
        self.calibration_steps_ = None
        self._known.forget_errors()
        if branches.has_menu and self.held_out_ is not None:
            self.calibration_steps_ = CalibrationSteps.of(branches)
        return self

    def _calibrated(self) -> Calibration:
        calibration = super()._calibrated()
        if self.calibrated_on_ == "box":
            raise ValueError(
                "the model was calibrated with random controls from the box; for certificates of "
                "its candidate actions, calibrate it with branches collected with actions='menu'"
            )
        return calibration

    def _verdicts(
        self,
        observations: ArrayLike,
        queries: QueryLike,
        confidence: float,
        groups: Groups | None,
        shift: decisions.Shift,
    ) -> tuple[Verdict, ...]:
        verdicts = list(super()._verdicts(observations, queries, confidence, groups, shift))
        for i, query in enumerate(decisions.several_queries(queries)):
            answer = self._known_answer(query)
            if answer is not None and self.calibration_steps_ is not None:
                # The paper's bounds are for rewards that are projected.
                verdicts[i] = replace(
                    verdicts[i], query=str(answer), combined_bound=np.nan, paper_bound=np.nan
                )
        return tuple(verdicts)

    def _certified(
        self, states: np.ndarray, queries: QueryLike, calibration: Calibration
    ) -> tuple[np.ndarray, QueryLike, Calibration]:
        """Rewards that are not projected are certified as if they were features."""
        return certified(self, states, queries, calibration)

    def _effects_of(self, branches: Branches) -> np.ndarray:
        """Predicted effects of the controls that each family tried, or of the candidate actions."""
        if branches.has_menu:
            return super()._effects_of(branches)
        box_effects.box_of(self)
        return of_families(self._fitted(), branches)

    # Any reward.

    def answer(
        self, reward: Query | RewardFn, branches: Branches | str | Path | None = None
    ) -> RewardAnswer:
        """Evaluate a reward in the way that has the lowest error on held-out families.

        A reward that is linear in the features has an exact answer. Any other is projected onto
        the features, integrated over predicted futures, or, if branches are given, regressed on the
        state; see `cqm.models.answers`. Ways that cannot be told apart are averaged. Without
        `per_step` branches there is nothing to compare, and the reward is projected.

        `advantage`, `rank` and `act` take the best answer without branches.

        Args:
            reward: A query, or a function that maps features `[..., features]` to rewards `[...]`;
                native features if a nuisance is mixed into them.
            branches: Branches to learn a regression from, or their directory; those that the model
                was fitted to will do. A model that kept no families to compare ways on, because it
                was fitted with `validation=0`, needs branches that it has not seen.

        >>> import cqm
        >>> move = lambda state, action, noise: 0.9 * state + action
        >>> world = cqm.FunctionWorld(move, lambda num, rng: rng.normal(size=(num, 1)),
        ...     candidate_actions=[[-1.0], [1.0]])
        >>> branches = cqm.collect(world, states=300, horizon=3, per_step=True, show_progress=False)
        >>> model = EffectModel(updates=300, seed=1).fit(branches, show_progress=False)
        >>> answer = model.answer(lambda features: -abs(features[..., 0]), branches)
        >>> answer.act([[-4.0], [4.0]])  # up from -4, down from 4
        array([1, 0])
        """
        self._fitted()
        if branches is not None:
            branches = as_branches("branches", branches)
        if not isinstance(reward, Query):
            function("reward", reward)
        else:
            self._check_weights(reward)
        return best_answer(self, reward, branches)

    def advantage(self, observations: ArrayLike, query: QueryLike) -> np.ndarray:
        """Centred action values, `[n, actions]`; `[n, queries, actions]` for several queries.

        A query that is not linear in the features gets the best answer that the model knows
        without branches; see `answer`. For its projection, pass the weights: `query.weights`.
        """
        if isinstance(query, Query) and (answer := self._known_answer(query)) is not None:
            return answer.advantage(observations)
        values = super().advantage(observations, query)
        for i, one in enumerate([] if isinstance(query, Query) else query):
            answer = self._known_answer(one) if isinstance(one, Query) else None
            if answer is not None:
                values[..., i, :] = answer.advantage(observations)
        return values

    def _known_answer(self, query: Query) -> RewardAnswer | None:
        """The best answer without branches; None if it is that of the query's weights."""
        if query.reward_fn is None or self.held_out_ is None:
            return None
        answer = self._known.answer(query, self.answer)
        return None if set(answer.weights) == {"projected"} else answer

    def reward_advantage(
        self, observations: ArrayLike, reward_fn: RewardFn | Query, *, draws: int = FUTURES
    ) -> np.ndarray:
        """Centred values of any reward, linear in the features or not, `[n, actions]`.

        The learned transition is unrolled under fresh continuations and noise, and the reward is
        integrated over the futures that it predicts, step by step, whether or not that is the best
        way to evaluate it; `advantage` and `answer` compare the ways.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            reward_fn: Maps features `[..., features]` to rewards `[...]`; native features if a
                nuisance is mixed into them. Or a query from a formula or a goal.
            draws: Number of futures per action to average over, for each member of the ensemble.

        >>> import cqm
        >>> move = lambda state, action, noise: 0.9 * state + action
        >>> world = cqm.FunctionWorld(move, lambda num, rng: rng.normal(size=(num, 1)),
        ...     candidate_actions=[[-1.0], [1.0]])
        >>> branches = cqm.collect(world, states=300, horizon=3, per_step=True, show_progress=False)
        >>> model = EffectModel(updates=300, seed=1).fit(branches, show_progress=False)
        >>> near = model.reward_advantage([[-4.0], [4.0]], lambda features: -abs(features[..., 0]))
        >>> near.argmax(axis=1)  # up from -4, down from 4
        array([1, 0])
        """
        self._fitted()
        discounts = self.recipe_.discounts
        if isinstance(reward_fn, Query):
            self._check_weights(reward_fn)
            if reward_fn.error is None:  # linear, so the effects give the exact answer
                return self.advantage(observations, reward_fn)
            if reward_fn.reward_fn is None:
                raise ValueError(
                    f"the query {reward_fn.name!r} knows its reward only on samples, so it cannot "
                    "be integrated; pass a function of the features"
                )
            reward_fn = reward_fn.reward_fn

        def values(paths: np.ndarray) -> np.ndarray:
            return rewards_of(reward_fn, paths) @ discounts

        return futures.centred_means(self, observations, values, draws)

    def event_effect(
        self, observations: ArrayLike, event_fn: EventFn, *, draws: int = FUTURES
    ) -> np.ndarray:
        """How much more likely each action makes an event than the reference, `[n, actions]`.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            event_fn: Maps paths `[..., horizon, features]` to booleans `[...]`: whether the event
                happens along the path. Native features if a nuisance is mixed into them.
            draws: Number of futures per action to average over.

        Whether the first feature ever exceeds 5, for example::

            model.event_effect(states, lambda paths: (paths[..., 0] > 5).any(axis=-1))
        """
        happening = lambda paths: happens(event_fn, paths)
        return futures.centred_means(self, observations, happening, draws)

    def effect_measure(
        self, observations: ArrayLike, action: Action, *, draws: int | None = None
    ) -> SampledMeasure:
        """What an action makes more likely and less likely in one state, as weighted events.

        Events are the features of single steps, native if a nuisance is mixed into them; those
        whose futures are not learned are NaN. Weights are discounted, and sum to zero.

        Args:
            observations: `[observations]` of one state.
            action: A name or an index.
            draws: Number of futures per action; by default those that `transition_` averages over,
                so that integrating the features gives the effects that `transition_` predicts.
        """
        return futures.effect_measure(self, observations, action, draws)

    def __getstate__(self) -> dict[str, Any]:
        """Without remembered answers, whose functions may not be picklable."""
        if self.predictor_ is None:
            return self.__dict__
        return {**self.__dict__, "_known": KnownAnswers()}

    def to_numpy(self) -> Scorer:
        """A scorer that computes the same effects with NumPy alone; see also `Scorer.load`."""
        arrays, names = self._fitted().arrays(), self.observation_names
        if self.rule_ is not None:
            arrays = {**arrays, "rule": self.rule_}
        return Scorer(arrays, self.reference, observation_names=names)

    @property
    def names_of_candidates(self) -> tuple[str, ...]:
        """Names of the candidates, as a tuple even if `candidates` is a single name."""
        given = self.candidates
        return (given,) if isinstance(given, str) else texts("candidates", given)

    def _extra_arrays(self) -> dict[str, np.ndarray]:
        return extra_arrays(self)

    def _parts(self) -> tuple[Predictor, ...]:
        predictor = self._fitted()
        return predictor.parts if isinstance(predictor, StackedPredictor) else (predictor,)

    def _extra_entries(self) -> dict[str, Any]:
        return extra_entries(self)

    def _restore_extras(self, config: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> None:
        restore_extras(self, config, arrays)

    def _check_params(self) -> None:
        self._check_common()
        check_params(self)
