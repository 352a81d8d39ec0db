"""Answers: the best way to evaluate one reward, found on held-out families.

A reward that is linear in the features has an exact answer. For any other there are four ways:

- *projected*: the effects on the features, weighted by the reward's projection onto them;
- *integrated*: the reward, summed along futures of the learned transition;
- *corrected*: the projected answer, plus the residual of the projection, summed along futures.
  Only the residual suffers from errors of sampling and of the transition;
- *regressed*: ridge regression of the reward's own effects on the state, which needs branches.

They are compared by their squared errors on families that none of them learned from. A label of a
single draw is noisy, so the noise that the transition explains is subtracted first: the
transition's prediction under the later actions and noise of the label, minus its mean prediction
under fresh ones. Ways that cannot be told apart are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cqm import decisions, storage
from cqm.branches.dataset import Branches
from cqm.display import html_table, text_table
from cqm.models.averaging import averaging_weights, standard_error
from cqm.models.futures import mean_values
from cqm.models.held_out import HeldOut, branch_actions, family_keys, num_kept
from cqm.models.predictors import FourierPredictor, UnrolledPredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.provenance import Provenance
from cqm.models.rewards import rewards_of
from cqm.models.ridge import MOST_FAMILIES, ridge_predictor
from cqm.observations import as_observations
from cqm.queries import Query, RewardFn, project
from cqm.quotient import center
from cqm.regression import one_thread

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

_SHARE = 0.25  # share of unseen branches that is held out if a model kept no families
_EVENTS = 10_000  # steps that a function is projected on
_FUTURES = 128  # futures per action, for the comparison
_FRESH_DRAWS = 8  # fresh continuations per family that explained noise is measured against


@dataclass(frozen=True)
class WayScore:
    """How one way to evaluate a reward did on held-out families."""

    way: str  # projected, integrated, corrected or regressed
    error: float  # squared error as a share of that of predicting no effect; NaN if not possible
    standard_error: float
    weight: float  # in the answer
    note: str = ""  # why it was not possible


@dataclass(frozen=True, eq=False)
class Split:
    """A reward and a linear part of it, which effects answer without sampling."""

    weights: np.ndarray  # [features], of the linear part
    native_weights: np.ndarray  # [native], of the linear part
    reward_fn: RewardFn

    @classmethod
    def of(cls, query: Query, held_out: HeldOut) -> Split:
        """The projection and what it leaves over, without features whose futures are unknown."""
        assert query.reward_fn is not None
        weights = query.weights @ held_out.native
        if held_out.transition is not None and held_out.transition.levels is not None:
            weights = np.where(held_out.transition.levels.unknown > 0, 0.0, weights)
        return cls(held_out.native @ weights, weights, query.reward_fn)

    def values(self, futures: np.ndarray, discounts: np.ndarray) -> np.ndarray:
        """Discounted rewards and their linear parts, `[..., 2]`, of native futures."""
        rewards = rewards_of(self.reward_fn, futures)
        return np.stack([rewards, futures @ self.native_weights], axis=-2) @ discounts

    def answers(
        self, model: EffectModel, states: np.ndarray, effects: np.ndarray, **options: Any
    ) -> dict[str, np.ndarray]:
        """The integrated and the corrected answer, `[n, actions]` each, up to a shared shift.

        Args:
            model: The model that samples futures.
            states: Observations, `[n, observations]`.
            effects: Predicted effects, `[n, actions, features]`.
            **options: For `cqm.models.futures.mean_values`.
        """
        discounts = model.recipe_.discounts
        value = lambda paths: self.values(paths, discounts)
        sums = mean_values(model, states, value, **options)
        integrated, linear = np.moveaxis(sums, -1, 0)
        return {
            "integrated": integrated,
            "corrected": effects @ self.weights + integrated - linear,
        }


@dataclass(frozen=True, eq=False)
class RewardAnswer:
    """A model's best answer for one reward; see `EffectModel.answer`."""

    model: EffectModel
    query: Query
    weights: Mapping[str, float]  # of the ways that are used, with sum 1
    comparison: tuple[WayScore, ...] = ()  # empty if there was nothing to compare
    num_families: int = 0  # held-out families in the comparison
    split: Split | None = None  # None if the reward cannot be integrated
    regression: FourierPredictor | None = None

    @property
    def way(self) -> str:
        """How the reward is answered, in words.

        >>> RewardAnswer(None, Query([1.0]), {"integrated": 0.7, "regressed": 0.3}).way
        'integrated (70 %) and regressed (30 %)'
        """
        if len(self.weights) == 1:
            [way] = self.weights
            return way
        parts = [f"{way} ({weight:.0%})".replace("%", " %") for way, weight in self.weights.items()]
        return f"{', '.join(parts[:-1])} and {parts[-1]}"

    def advantage(self, observations: ArrayLike) -> np.ndarray:
        """Centred action values, `[n, actions]`."""
        model = self.model
        if set(self.weights) <= {"exact", "projected"}:
            return model.effect(observations) @ self.query.weights
        states = as_observations(observations, model.observation_names, model.columns_)
        answers = self._by_way(np.atleast_2d(states))
        values = np.sum([w * answers[way] for way, w in self.weights.items()], axis=0)
        values = center(values[..., None], model.reference)[..., 0]
        return values if states.ndim == 2 else values[0]

    def rank(self, observations: ArrayLike) -> np.ndarray:
        """Actions, best first, `[n, actions]`."""
        return decisions.rank(self.advantage(observations))

    def act(self, observations: ArrayLike) -> np.ndarray:
        """Index of the best action in each state, `[n]`."""
        return decisions.best(self.advantage(observations))

    def _by_way(self, states: np.ndarray) -> dict[str, np.ndarray]:
        """The answers of the ways that are used, `[n, actions]` each, up to a shared shift."""
        answers, used = {}, set(self.weights)
        if self.regression is not None and "regressed" in used:
            answers["regressed"] = self.regression(states)[0, ..., 0]
        if used - {"regressed"}:
            effects = self.model.effect(states)
            answers["projected"] = answers["exact"] = effects @ self.query.weights
        if self.split is not None and used & {"integrated", "corrected"}:
            answers |= self.split.answers(self.model, states, effects)
        return answers

    def __str__(self) -> str:
        details = {
            "exact": "linear in the features",
            "projected": f"projected: {self.query.error}",
            "integrated": "integrated over predicted futures",
            "corrected": "projected, and corrected by predicted futures",
        }
        return f"{self.query.name} ({details.get(self.way, self.way)})"

    def table(self) -> str:
        """The comparison as text; empty if there was nothing to compare."""
        return f"{text_table(self._rows())}\n{self._caption()}" if self.comparison else ""

    def __repr__(self) -> str:
        return f"RewardAnswer({self.query.name!r}, {self.way})" + (
            f"\n{self.table()}" if self.comparison else ""
        )

    def _repr_html_(self) -> str:
        notes = [self._caption()] if self.comparison else ()
        return html_table(self._rows(), title=f"{self.query.name}: {self.way}", notes=notes)

    def _rows(self) -> list[dict[str, str]]:
        return [
            {
                "way": row.way,
                "error": f"{row.error:.4f}" if np.isfinite(row.error) else row.note,
                "standard error": f"{row.standard_error:.4f}" if row.standard_error >= 0 else "",
                "weight": f"{row.weight:.2f}",
            }
            for row in self.comparison
        ]

    def _caption(self) -> str:
        return (
            f"Squared errors on {self.num_families} held-out families, relative to "
            "predicting no effect; they include the noise left in the outcomes."
        )


def best_answer(
    model: EffectModel, reward: Query | RewardFn, branches: Branches | None = None
) -> RewardAnswer:
    """The best answer of a fitted model for a reward; see `EffectModel.answer`."""
    if isinstance(reward, Query) and reward.error is None:
        return RewardAnswer(model, reward, {"exact": 1.0})
    held_out = model.held_out_
    if branches is not None:
        _check_branches(model, branches)
        if held_out is None:
            held_out, branches = _unseen(model, branches)
    query = reward if isinstance(reward, Query) else _as_query(reward, held_out)
    if query.error is None:
        return RewardAnswer(model, query, {"exact": 1.0})
    if query.reward_fn is None or held_out is None or query.error.is_negligible:
        return RewardAnswer(model, query, {"projected": 1.0})
    regression = None
    if branches is not None:
        with one_thread():
            regression = _regression(model, query.reward_fn, branches, held_out)
    return _compared(model, query, held_out, regression)


def _compared(
    model: EffectModel, query: Query, held_out: HeldOut, regression: FourierPredictor | None
) -> RewardAnswer:
    """Compare all ways that are possible, and average those that may be the best."""
    discounts, reward_fn = model.recipe_.discounts, query.reward_fn
    assert reward_fn is not None

    def values(paths: np.ndarray) -> np.ndarray:
        """Centred discounted rewards `[n, actions]` of paths, averaged over draws."""
        return _centred((rewards_of(reward_fn, paths) @ discounts).mean(axis=1))

    labels = values(held_out.steps.astype(float))
    effects, states = held_out.effects.astype(float), held_out.observations.astype(float)
    answers = {"projected": _centred(effects @ query.weights)}
    problems, explained, split = {}, None, Split.of(query, held_out)
    try:
        found = split.answers(model, states, effects, draws=_FUTURES, transition=_sampler(held_out))
        explained = _explained(model, held_out, values)
    except ValueError as error:
        problems["integrated"] = str(error)
    else:
        answers |= {way: _centred(answer) for way, answer in found.items()}
    if regression is not None:
        answers["regressed"] = _centred(regression(states)[0, ..., 0])
    misses = np.stack([answer - labels for answer in answers.values()])
    if explained is not None:
        labels = labels - _share(explained, misses) * explained
        misses = np.stack([answer - labels for answer in answers.values()])
    size = float(np.mean(labels**2)) or 1.0
    weights = averaging_weights(misses)
    rows = [
        WayScore(way, float(errors.mean()), standard_error(errors), float(weight))
        for way, errors, weight in zip(
            answers, np.mean(misses**2, axis=2) / size, weights, strict=True
        )
    ]
    rows += [WayScore(way, np.nan, np.nan, 0.0, why) for way, why in problems.items()]
    used = {row.way: row.weight for row in rows if row.weight}
    return RewardAnswer(model, query, used, tuple(rows), len(labels), split, regression)


def _sampler(held_out: HeldOut) -> UnrolledPredictor:
    """The transition that has not seen the held-out families."""
    if held_out.transition is None:
        raise ValueError("not possible: no transition can sample futures")
    return held_out.transition


def _explained(
    model: EffectModel, held_out: HeldOut, values_fn: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray | None:
    """The noise in the labels that the transition explains, `[n, actions]`; None if unknown.

    Given the state, its expectation is zero, because fresh later actions and noise have the law of
    those in the label.
    """
    transition, continuation = held_out.transition, model.recipe_.continuation
    signal = transition is not None and transition.noise is not None
    if transition is None or not continuation.open_loop or (signal and held_out.noise is None):
        return None
    num, _, num_actions, horizon = held_out.steps.shape[:4]
    rng = np.random.default_rng([model.seed, 6])
    later = continuation.draw(rng.random((num, _FRESH_DRAWS, 1, horizon - 1)), num_actions)
    noise = None
    if signal:
        assert transition.levels is not None
        assert transition.levels.noise is not None
        paths = transition.levels.noise
        noise = paths[rng.integers(len(paths), size=(num, _FRESH_DRAWS))]
    fresh = branch_actions(later, num_actions)
    observations = held_out.observations.astype(float)
    own = transition.along(observations, held_out.actions, held_out.noise if signal else None)
    others = transition.along(observations, fresh, noise)
    return np.concatenate([values_fn(a) - values_fn(b) for a, b in zip(own, others, strict=True)])


def _share(explained: np.ndarray, misses: np.ndarray) -> float:
    """The share of the explained noise to subtract: the one that leaves the least error."""
    best = misses[np.argmin(np.mean(misses**2, axis=(1, 2)))]
    return float(np.clip(-np.sum(explained * best) / max(np.sum(explained**2), 1e-300), 0, 1))


def _regression(
    model: EffectModel, reward_fn: RewardFn, branches: Branches, held_out: HeldOut
) -> FourierPredictor:
    """Ridge regression of the reward's effects on the state, without held-out families."""
    left_out = {(int(seed), int(index)) for seed, index in held_out.families}
    observations, labels = [], []
    for part in branches[:MOST_FAMILIES].batches():
        rows = [tuple(key) not in left_out for key in family_keys(part).tolist()]
        rewards = rewards_of(reward_fn, part.array("steps")[rows]) @ part.recipe.discounts
        labels.append(_centred(rewards.mean(axis=1)))
        observations.append(part.observations[rows])
    states, targets = np.concatenate(observations), np.concatenate(labels)
    if len(states) < 2:
        raise ValueError(
            "there are no branches to learn a regression from, apart from those that the ways are "
            "compared on; pass the branches that the model was fitted to, or more of them"
        )
    size = float(np.sqrt(np.mean(targets**2))) or 1.0
    return ridge_predictor(
        _coordinates(model, states),
        states,
        targets[..., None] / size,
        np.array([[size]]),
        seed=int(model.seed),
    )


def _coordinates(model: EffectModel, observations: np.ndarray) -> Coordinates:
    """The coordinates of observations that the model has learned; else standardised ones."""
    for part in (model.transition_, *model._parts()):
        learned = getattr(part, "inputs", None) if model.conditioning == "learned" else None
        if learned is not None and learned.matrix.shape[1] > 0:
            return learned
    spread = observations.std(axis=0)
    return Coordinates(observations.mean(axis=0), np.diag(1 / np.where(spread > 0, spread, 1.0)))


def _as_query(reward_fn: RewardFn, held_out: HeldOut | None) -> Query:
    """A function of native features as a query, projected on steps of held-out families."""
    if held_out is None:
        raise ValueError(
            "a function of the features needs steps to learn from, and the model has kept none; "
            "pass branches collected with per_step=True, or a query"
        )
    events = held_out.steps.reshape(-1, held_out.steps.shape[-1]).astype(float)
    events = events[:: max(1, len(events) // _EVENTS)]
    rewards = rewards_of(reward_fn, events)
    weights, error = project(events, rewards)
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    mixed = held_out.native @ weights
    return Query(mixed, name) if error.is_negligible else Query(mixed, name, error, reward_fn)


def _check_branches(model: EffectModel, branches: Branches) -> None:
    """Raise unless branches can give labels for the model's answers."""
    branches.require_menu("the regression of a reward")
    branches.require_all_arms()
    if model.box_ is not None or branches.recipe.continuation.on_box:
        raise ValueError(
            "rewards can be regressed only if first and later actions are candidate actions; the "
            "model or the branches have controls from the box"
        )
    if not branches.recipe.per_step:
        raise ValueError(
            "rewards need the features of every step, which the branches lack; collect them with "
            "per_step=True"
        )
    if changes := storage.differences(model.world_, branches.world):
        raise ValueError(f"the branches come from another world than the model:\n{changes}")
    for name in ("horizon", "discount", "continuation"):
        got, wanted = getattr(branches.recipe, name), getattr(model.recipe_, name)
        if got != wanted:
            raise ValueError(f"the branches have {name} {got}; the model was fitted with {wanted}")


def _unseen(model: EffectModel, branches: Branches) -> tuple[HeldOut, Branches]:
    """Split branches that the model has not seen: to compare ways on, and to learn from."""
    if model.provenance_ is None:
        raise ValueError("the model does not know what it learned from; fit it again")
    model.provenance_.check_held_out(Provenance.of(branches), "branches", independent=True)
    num = min(num_kept(branches), round(_SHARE * len(branches)))
    if num < 1:
        raise ValueError(f"{len(branches)} families are too few to hold some out; pass more")
    held_out = branches[len(branches) - num :]
    effects, transition = center(model.effect(held_out.observations)), model.transition_
    if transition is not None and transition.levels is None:
        transition = None
    return HeldOut.of(held_out, effects, transition), branches[: len(branches) - num]


def _centred(values: np.ndarray) -> np.ndarray:
    return center(values[..., None])[..., 0]
