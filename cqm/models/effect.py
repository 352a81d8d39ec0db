"""EffectModel (CQM-B): from branches to the effect κ(s, a) of every candidate action."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike

from cqm import decisions
from cqm.arguments import choice, function, instance, number, shown, texts, whole_number
from cqm.branches.dataset import Branches, as_branches
from cqm.branches.redraw import redraw
from cqm.calibration import FEWEST_DRAWS, Calibration, Groups
from cqm.measures import SampledMeasure
from cqm.models.answers import CalibrationSteps, RewardAnswer, best_answer, with_answers
from cqm.models.box import BoxDecision, best_controls
from cqm.models.choice import CANDIDATES, Choice, Comparison, of_families, seconds_of
from cqm.models.controls import (
    box_codes,
    box_rule,
    checked_controls,
    codes_in_box,
)
from cqm.models.direct import Distilled
from cqm.models.estimator import Estimator
from cqm.models.held_out import HeldOut
from cqm.models.layout import TRANSITION, arrays_under
from cqm.models.predictors import (
    Predictor,
    StackedPredictor,
    UnrolledPredictor,
    check_draws,
    restore_predictor,
    with_menu,
)
from cqm.models.preprocessing import Conditioning
from cqm.models.rewards import EventFn, happens, rewards_of, sampled_futures
from cqm.models.scorer import Scorer
from cqm.models.training import Training
from cqm.names import Action, action_indices, checked_action_names, shortened
from cqm.observations import as_observations
from cqm.queries import Query, QueryLike, RewardFn
from cqm.quotient import ComparisonGraph, Reference, as_reference, center
from cqm.verdicts import Verdict
from cqm.worlds.actions import checked_actions
from cqm.worlds.contract import World

FEWEST_SCORES = 19  # calibration states that a confidence of 95% needs
_POOR = 1.25  # a transition whose error is higher than the lowest by this factor is poor
_GOOD = 0.01  # unless its error is below this, in units of the effects' size
_BOX_STATES = 1024  # states in which the box is searched at once
_CLAIM = 0.95  # confidence with which a control is said to be better than the menu
_REMEMBERED = 64  # queries whose best answers are remembered
_FUTURES = 256  # sampled futures per action; rewards and events vary more than effects


class EffectModel(Estimator):
    """Learns from branches what actions change, without any reward.

    `fit` compares several candidates on families that they did not learn from, averages those that
    may be the best, and fits them again to all families:

    - `constant`: the same effects in every state;
    - `ridge`: ridge regression on the state, products of its coordinates, or random cosines of it;
    - `direct`: a network that maps state and action to the effect, as in the paper;
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
            alone, `none`, `whiten` or `effect` as in the benchmark.
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
    _choices: dict[Any, RewardAnswer]  # answers to earlier queries
    calibration_steps_: CalibrationSteps | None = None  # to certify rewards that are not linear
    _reward_errors: dict[Any, tuple[Query, Calibration]]  # of answers certified before

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
        self._check_comparisons(branches)
        self.comparison_, self.transition_, self.updates_ = (), None, {}
        self.box_ = None if branches.has_menu else branches.box
        self.rule_ = None if self.box_ is None else box_rule(self.box_.shape[1])
        self.held_out_, self._choices = None, {}
        self.calibration_steps_, self._reward_errors = None, {}
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
        predictor, states = self._fitted(), self._states(observations)
        rows, asked = np.atleast_2d(states), self._codes(actions, states)
        base, weights = self._base()
        num, parts = asked.shape[-2], []
        for start in range(0, max(1, len(rows)), _BOX_STATES):
            block = slice(start, start + _BOX_STATES)
            own = asked if asked.ndim == 2 else asked[block]
            effects = predictor(rows[block], _side_by_side(own, base))
            mean = np.einsum("a,mnaf->mnf", weights, effects[:, :, num:])
            parts.append(effects[:, :, :num] - mean[:, :, None])
        effects = np.concatenate(parts, axis=1)
        return effects if states.ndim == 2 else effects[:, 0]

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
        states, predictor = np.atleast_2d(self._states(observations)), self._fitted()
        query = decisions.single_query(query)
        self._warn_of_unlearned_features(query)
        self._check_weights(query)
        box = self._box()
        assert self.rule_ is not None
        menu = box_codes(self.candidate_actions_, box)
        found = []
        for start in range(0, max(1, len(states)), _BOX_STATES):
            rows = states[start : start + _BOX_STATES]

            def values(codes: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
                return predictor(rows, codes).mean(axis=0) @ query.weights

            found.append(best_controls(values, len(rows), box, menu, self.rule_))
        return BoxDecision.joined(found, self._claim_radius(query))

    def _claim_radius(self, query: Query) -> float | None:
        """Bound on the error of a contrast between controls; None without enough calibration."""
        if self.calibration_ is None or self.calibrated_on_ != "box":
            return None
        if len(self.calibration_.residuals) < FEWEST_SCORES:
            return None
        slack = decisions.projection_slack(query, self.recipe_.discount, self.recipe_.horizon)
        return self.calibration_.radius(query.weights, _CLAIM) + slack

    def with_actions(self, actions: ArrayLike, *, names: Sequence[str] | None = None) -> Self:
        """The same model with other candidate actions, without retraining.

        Args:
            actions: Controls in the box, `[actions, controls]`, at least two.
            names: Their names; their indices by default.

        The model must have learned from branches collected with `actions="box"`. It has no
        calibration, because the calibration was made for other actions.
        """
        predictor, box = self._fitted(), self._box()
        if self.reference is not None:
            raise ValueError(
                "the reference is a distribution over the old actions; call recenter(None) first"
            )
        law = self.recipe_.continuation
        unrolled = self.transition_ is not None or not law.open_loop
        if not law.on_box and (unrolled or isinstance(law.law, tuple)):
            raise ValueError(
                f"the later actions of this model ({law}) are from its old menu, so the menu "
                "cannot change; fit the model to branches collected with continuation='box'"
            )
        controls = checked_actions(actions, *box)
        changed = copy.copy(self)
        if "candidate_actions" in self.world_:
            changed.world_ = {**self.world_, "candidate_actions": controls.tolist()}
        changed.candidate_actions_, changed.calibration_ = controls, None
        changed.action_names_ = checked_action_names(names, len(controls))
        codes = box_codes(controls, box)
        changed.predictor_ = with_menu(predictor, codes)
        if self.transition_ is not None:
            changed.transition_ = replace(self.transition_, controls=codes)
            parts = zip(self._parts(), changed._parts(), strict=True)
            for new in (new for old, new in parts if old is self.transition_):
                assert isinstance(new, UnrolledPredictor)
                changed.transition_ = new  # so that it is saved only once
        return changed

    def centering_gap(self, observations: ArrayLike) -> float:
        """How well the points that stand for the box represent it, as a share of the effects.

        A second, independent set of points is used as the reference instead; the root mean square
        change of the effects is divided by that of the effects of the candidate actions. It is 0
        for a reference on the menu, which needs no such points.
        """
        self._box()
        other = copy.copy(self)
        assert self.rule_ is not None
        other.rule_ = box_rule(self.rule_.shape[1], seed=1)
        effects = self.effect(observations)
        change = other.effect(observations) - effects
        return float(np.sqrt(np.mean(change**2) / max(np.mean(effects**2), 1e-300)))

    def _states(self, observations: ArrayLike) -> np.ndarray:
        return as_observations(observations, self.observation_names, self.columns_)

    def _check_weights(self, query: Query) -> None:
        if len(query.weights) != len(self.feature_names):
            raise ValueError(
                f"the query has {len(query.weights)} weights; the model has "
                f"{len(self.feature_names)} features"
            )

    def _box(self) -> np.ndarray:
        self._fitted()
        if self.box_ is None:
            raise ValueError(
                "the model knows only its candidate actions; to ask about any control, fit it to "
                "branches collected with actions='box'"
            )
        return self.box_

    def _codes(self, actions: ArrayLike | None, states: np.ndarray) -> np.ndarray:
        """Codes of the controls asked about."""
        box = self._box()
        if actions is None:
            return box_codes(self.candidate_actions_, box)
        return box_codes(checked_controls(actions, box, len(np.atleast_2d(states))), box)

    def _base(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes of the actions at which effects are centred, and their weights."""
        assert self.rule_ is not None
        if self.reference is None:
            return self.rule_, np.full(len(self.rule_), 1 / len(self.rule_))
        menu = self._codes(None, np.empty((0, 1)))
        return menu, np.asarray(as_reference(self.reference, np.empty((len(menu), 1))))

    def _reference_weights(self, num_actions: int) -> np.ndarray:
        """Weights of the reference; for a box, of candidate actions and base actions together."""
        if self.box_ is None:
            return np.asarray(as_reference(self.reference, np.empty((num_actions, 1))))
        _, weights = self._base()
        return np.concatenate([np.zeros(num_actions - len(weights)), weights])

    def _comparable_effects(self, observations: ArrayLike) -> np.ndarray:
        """Effects up to a shift that all actions share, which is all that a ranking needs."""
        if self.box_ is None:
            return super()._comparable_effects(observations)
        states = self._states(observations)
        effects = self._fitted()(np.atleast_2d(states), self._codes(None, states)).mean(axis=0)
        return effects if states.ndim == 2 else effects[0]

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
        self.calibration_steps_, self._reward_errors = None, {}
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
        answers = {}
        for i, query in enumerate(asked := decisions.several_queries(queries)):
            answer = self._known_answer(query)
            if answer is None:
                continue
            if self.calibration_steps_ is None:
                warnings.warn(
                    f"the verdict is about the projection of {query.name!r} onto the features, "
                    f"which the model would answer differently ({answer.way}); calibrate it with "
                    "branches collected with per_step=True",
                    stacklevel=5,
                )
                continue
            key = _query_key(query)
            if key not in self._reward_errors:
                _forget_oldest(self._reward_errors)
                errors = self.calibration_steps_.calibration(answer)
                self._reward_errors[key] = (query, errors)
            answers[i] = answer, self._reward_errors[key][1]
        if not answers:
            return super()._certified(states, queries, calibration)
        return with_answers(answers, asked, states, self.effect(states), calibration)

    def _effects_of(self, branches: Branches) -> np.ndarray:
        """Predicted effects of the controls that each family tried, or of the candidate actions."""
        if branches.has_menu:
            return super()._effects_of(branches)
        self._box()
        return of_families(self._fitted(), branches)

    # Any reward.

    def answer(
        self, reward: Query | RewardFn, branches: Branches | str | Path | None = None
    ) -> RewardAnswer:
        """The best answer to a reward, by the way that does best on held-out families.

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
        key = _query_key(query)
        if key not in self._choices:
            _forget_oldest(self._choices)
            self._choices[key] = self.answer(query)
        answer = replace(self._choices[key], model=self)  # it may have been recentred
        return None if set(answer.weights) == {"projected"} else answer

    def reward_advantage(
        self, observations: ArrayLike, reward_fn: RewardFn | Query, *, draws: int = _FUTURES
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

        def values(futures: np.ndarray) -> np.ndarray:
            return rewards_of(reward_fn, futures) @ discounts

        return self._integrated(observations, values, draws)

    def event_effect(
        self, observations: ArrayLike, event_fn: EventFn, *, draws: int = _FUTURES
    ) -> np.ndarray:
        """How much likelier each action makes an event than the reference does, `[n, actions]`.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            event_fn: Maps paths `[..., horizon, features]` to booleans `[...]`: whether the event
                happens along the path. Native features if a nuisance is mixed into them.
            draws: Number of futures per action to average over.

        Whether the first feature ever exceeds 5, for example::

            model.event_effect(states, lambda paths: (paths[..., 0] > 5).any(axis=-1))
        """
        return self._integrated(observations, lambda futures: happens(event_fn, futures), draws)

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
                so that the measure integrates the features to its effects.
        """
        transition = self._sampling(draws)
        state = as_observations(observations, self.observation_names, self.columns_)
        if state.ndim != 1:
            raise ValueError(
                f"effect_measure takes the observations of one state; got shape {state.shape}"
            )
        index, names = action_indices(action, self.action_names_), self.action_names_
        if index.ndim or not 0 <= index < len(names):
            raise ValueError(
                f"action must be the name or the index of one of {shortened(names)}; got "
                f"{shown(action)}"
            )
        codes = None
        if self.box_ is not None:
            codes = np.concatenate([self._codes(None, state), self._base()[0]])
        [futures] = transition.futures(state[None], codes)
        _, num, num_actions, horizon, size = futures.shape
        assert transition.levels is not None
        futures[..., transition.levels.unknown > 0] = np.nan
        chosen = np.eye(num_actions)[int(index)]
        by_action = chosen - self._reference_weights(num_actions)
        weights = np.multiply.outer(by_action, self.recipe_.discounts) / num
        weights = np.broadcast_to(weights, (num, num_actions, horizon))
        return SampledMeasure(futures.reshape(-1, size), weights.reshape(-1))

    def _integrated(
        self,
        observations: ArrayLike,
        values_fn: Callable[[np.ndarray], np.ndarray],
        draws: int,
    ) -> np.ndarray:
        """Centred means of a function of futures, `[n, actions]`."""
        self._sampling(draws)
        states, codes = self._states(observations), None
        if self.box_ is not None:
            menu, (base, weights) = self._codes(None, states), self._base()
            codes = np.concatenate([menu, base])
        means = self._integral(np.atleast_2d(states), values_fn, draws=draws, controls=codes)
        if self.box_ is None:
            values = center(means[..., None], self.reference)[..., 0]
        else:
            values = means[:, : len(menu)] - means[:, len(menu) :] @ weights[:, None]
        return values if states.ndim == 2 else values[0]

    def _integral(
        self,
        states: np.ndarray,
        values_fn: Callable[[np.ndarray], np.ndarray],
        *,
        draws: int = _FUTURES,
        transition: UnrolledPredictor | None = None,
        controls: np.ndarray | None = None,
    ) -> np.ndarray:
        """Means of a function of futures, `[n, actions]`, by the model's transition or another."""
        transition = transition or self.transition_
        assert transition is not None
        names = () if self.world_.get("nuisance") else self.feature_names
        transition = self._with_draws(transition, draws)
        blocks = sampled_futures(transition, states, values_fn, names, controls)
        return np.concatenate([values_fn(futures).mean(axis=1) for futures in blocks])

    def _sampling(self, draws: int | None) -> UnrolledPredictor:
        """The learned transition, if it can sample futures, with a number of draws if given."""
        self._fitted()
        transition = self.transition_
        if transition is None:
            raise ValueError(
                "only a model with a learned transition can sample futures; fit it to branches "
                "collected with per_step=True, with 'unrolled' among its candidates"
            )
        if transition.levels is None:
            raise ValueError(
                "the transition predicts only mean futures, because the world's noise is given "
                "as seeds or the model was saved by an earlier version of cqm; describe the noise "
                "as a signal (a FunctionWorld with exogenous=...), or fit the model again"
            )
        self._warn_of_a_poor_transition()
        return transition if draws is None else self._with_draws(transition, draws)

    def _with_draws(self, transition: UnrolledPredictor, draws: int) -> UnrolledPredictor:
        """A transition that samples this number of futures."""
        draws = whole_number("draws", draws, least=1)
        horizon, num_actions = self.recipe_.horizon, len(self.candidate_actions_)
        check_draws(draws, horizon, num_actions, int(self.width))
        size = transition.controls.shape[1:] if self.recipe_.continuation.on_box else ()
        drawn = np.random.default_rng([self.seed, 4]).random((draws, horizon - 1, *size))
        if self.recipe_.continuation.on_box:
            drawn = codes_in_box(drawn)
        elif transition.behaviour is None:
            drawn = self.recipe_.continuation.draw(drawn, num_actions)
        return transition.with_continuations(drawn)

    def _warn_of_a_poor_transition(self) -> None:
        errors = {row.candidate: row.error for row in self.comparison_ if np.isfinite(row.error)}
        lowest = min(errors.values(), default=np.nan)
        if errors.get("unrolled", 0.0) > max(_POOR * lowest, _GOOD):
            warnings.warn(
                f"on held-out families, the transition's error is {errors['unrolled']:.2g}, and "
                f"the lowest of all candidates is {lowest:.2g}; answers from its futures may "
                "mislead",
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without remembered answers, whose functions may not be picklable."""
        forgotten: dict[str, Any] = {"_choices": {}, "_reward_errors": {}}
        return {**self.__dict__, **forgotten} if self.predictor_ is not None else self.__dict__

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
        """Arrays of the rule for a box, the held-out families, and a transition kept aside."""
        arrays = {} if self.rule_ is None else {"rule": self.rule_}
        if self.calibration_steps_ is not None:
            arrays |= self.calibration_steps_.arrays()
        if self.held_out_ is not None:
            arrays |= self.held_out_.arrays(self.transition_)
        if self.transition_ is not None and not any(
            part is self.transition_ for part in self._parts()
        ):
            own = self.transition_.arrays()
            arrays |= {f"{TRANSITION}{name}": values for name, values in own.items()}
        return arrays

    def _parts(self) -> tuple[Predictor, ...]:
        predictor = self._fitted()
        return predictor.parts if isinstance(predictor, StackedPredictor) else (predictor,)

    def _extra_entries(self) -> dict[str, Any]:
        rows = [
            {
                "candidate": row.candidate,
                "error": row.error if np.isfinite(row.error) else None,
                "standard_error": row.standard_error if np.isfinite(row.standard_error) else None,
                "note": row.note,
            }
            for row in self.comparison_
        ]
        entries = {"comparison": rows, "updates": self.updates_}
        if self.box_ is None:
            return entries
        box = self.box_.tolist()
        return {**entries, "box": box, "calibrated_on": self.calibrated_on_}

    def _restore_extras(self, config: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> None:
        def known(value: float | None) -> float:
            return np.nan if value is None else value

        self.comparison_ = tuple(
            Comparison(
                row["candidate"],
                known(row["error"]),
                known(row["standard_error"]),
                np.nan,
                row["note"],
            )
            for row in config.get("comparison", [])
        )
        self.updates_ = config.get("updates", {})
        self.rule_ = arrays.get("rule")
        self.box_ = np.array(config["box"], float) if config.get("box") else None
        self.calibrated_on_ = config.get("calibrated_on", "menu")
        if (self.box_ is None) != (self.rule_ is None):
            raise ValueError("a model of controls needs both a box and a rule")
        aside = arrays_under(TRANSITION, arrays)
        found = (restore_predictor(aside),) if aside else self._parts()
        self.transition_ = next((p for p in found if isinstance(p, UnrolledPredictor)), None)
        self.held_out_, self._choices = HeldOut.from_arrays(arrays, self.transition_), {}
        self.calibration_steps_, self._reward_errors = CalibrationSteps.from_arrays(arrays), {}

    def _check_params(self) -> None:
        self._check_common()
        names = self.names_of_candidates
        if not names or len(set(names)) < len(names) or not set(names) <= set(CANDIDATES):
            raise ValueError(
                f"candidates must be distinct names out of {list(CANDIDATES)}; got "
                f"{shown(self.candidates)}"
            )
        self._one_of("conditioning", "none", "whiten", "effect", "learned")
        whole_number("width", self.width, least=1)
        whole_number("draws", self.draws, least=1)
        number("memory_gb", self.memory_gb, above=0)
        if isinstance(self.updates, Mapping):
            for name, cycles in self.updates.items():
                choice("a name in updates", name, (*CANDIDATES, Distilled.name))
                what = "a list of numbers for each candidate"
                for num in instance("updates", cycles, Sequence, what):
                    whole_number("the number of updates in a cycle", num, least=1, most=2**31 - 1)
        if self.budget is not None:
            seconds_of(self.budget)
        if self.validation is not None:
            number("validation", self.validation, least=0, below=1)
            if self.validation == 0 and len(names) > 1:
                raise ValueError(
                    f"validation=0 leaves no families to compare {len(names)} candidates on; pass "
                    "a single candidate, or a validation above 0"
                )

    def _check_comparisons(self, branches: Branches) -> None:
        """Refuse families or a graph that leave some actions uncompared."""
        num_actions, graph = branches.num_actions, self.graph
        if not branches.has_menu:
            if graph is not None or self.reference is not None:
                given = "graph" if graph is not None else "reference"
                raise ValueError(
                    f"a {given} is over candidate actions, but the first actions are controls from "
                    f"the box; leave it out{', and recenter the model' * (graph is None)}"
                )
            return
        compared = [
            ComparisonGraph.from_families(num_actions, part.arms) for part in branches.batches()
        ]
        ComparisonGraph.union(compared).check_connected()
        if graph is None:
            return
        if graph.num_actions != num_actions or branches.num_arms < num_actions:
            raise ValueError(
                f"a graph of {graph.num_actions} actions needs families that branch all of them; "
                f"got {branches.num_arms} of {num_actions}"
            )
        graph.check_connected()


def _query_key(query: Query) -> tuple[Any, bytes]:
    """Identifies a query; what is remembered under it keeps its function alive."""
    reward_fn = query.reward_fn
    own = reward_fn if isinstance(reward_fn, Hashable) else id(reward_fn)
    return own, query.weights.tobytes()


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    """Make room for one more entry."""
    for oldest in [*remembered][: 1 - _REMEMBERED]:
        del remembered[oldest]


def _side_by_side(asked: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Codes of the controls asked about, followed by those of the reference, for every state."""
    return np.concatenate([asked, np.broadcast_to(base, (*asked.shape[:-2], *base.shape))], axis=-2)


def set_aside(
    branches: Branches, share: float, world: World | None, show_progress: bool | None = None
) -> tuple[Branches, Branches]:
    """Families to learn from, and the last ones with enough draws to calibrate with."""
    share = number("calibration", share, above=0, below=1)
    num = round(share * len(branches))
    if not FEWEST_SCORES <= num < len(branches):
        raise ValueError(
            f"calibration must set aside at least {FEWEST_SCORES} of the {len(branches)} families "
            f"and leave some to learn from; got {share}, which is {num}"
        )
    learned, held_out = branches[: len(branches) - num], branches[len(branches) - num :]
    if world is not None:
        return learned, redraw(held_out, world, draws=FEWEST_DRAWS, show_progress=show_progress)
    if branches.recipe.draws < FEWEST_DRAWS:
        raise ValueError(
            f"calibration needs at least {FEWEST_DRAWS} draws per state; the branches have "
            f"{branches.recipe.draws}; pass world= to draw the families set aside again"
        )
    held_out.require_all_arms()
    return learned, held_out
