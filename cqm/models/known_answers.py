"""Known answers: what a model remembers of the rewards that it answered, and their certificates.

Rewards that are not projected are certified as if they were features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cqm import decisions
from cqm.branches.dataset import Branches
from cqm.calibration import Calibration
from cqm.models.answers import RewardAnswer
from cqm.models.rewards import rewards_of
from cqm.queries import Query, QueryLike
from cqm.warn import warn_user

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

_REMEMBERED = 64  # queries whose best answers are remembered
_STEPS = "calibration."  # prefix of the arrays of calibration steps
_MOST_BYTES = 2**28  # calibration steps that are kept with a model

Found = TypeVar("Found")
Known = dict[Any, tuple[Query, Found]]  # the query keeps its function, and so its id, alive


@dataclass(frozen=True, eq=False)
class KnownAnswers:
    """The best answers to the latest queries, and the errors of those that were certified."""

    answers: Known[RewardAnswer] = field(default_factory=dict)
    errors: Known[Calibration] = field(default_factory=dict)

    def answer(self, query: Query, answer_fn: Callable[[Query], RewardAnswer]) -> RewardAnswer:
        """The answer to a query, found if it is not known."""
        return _remembered(self.answers, query, lambda: answer_fn(query))

    def calibration(self, answer: RewardAnswer, steps: CalibrationSteps) -> Calibration:
        """The errors of an answer, measured if they are not known."""
        return _remembered(self.errors, answer.query, lambda: steps.calibration(answer))

    def forget_errors(self) -> None:
        """Forget the errors, because the calibration states have changed."""
        self.errors.clear()


def _remembered(known: Known[Found], query: Query, find_fn: Callable[[], Found]) -> Found:
    """The stored result for a query; if new, it is computed, and the oldest makes room for it."""
    reward_fn = query.reward_fn
    own = reward_fn if isinstance(reward_fn, Hashable) else id(reward_fn)
    key = own, query.weights.tobytes()
    if key not in known:
        for oldest in [*known][: 1 - _REMEMBERED]:
            del known[oldest]
        known[key] = query, find_fn()
    return known[key][1]


@dataclass(frozen=True, eq=False)
class CalibrationSteps:
    """Calibration states with the features of every step, which give a truth for any reward."""

    observations: np.ndarray  # [n, observations]
    steps: np.ndarray  # [n, draws, actions, horizon, native]

    @classmethod
    def of(cls, branches: Branches) -> CalibrationSteps | None:
        """Those of branches; None if they have no steps, or too many to keep with a model."""
        if not branches.recipe.per_step or branches.recipe.continuation.on_box:
            return None
        per_family = branches[:1].array("steps").astype(np.float32).nbytes
        if per_family * len(branches) > _MOST_BYTES:
            return None
        parts = [part.array("steps").astype(np.float32) for part in branches.batches()]
        return cls(branches.observations, np.concatenate(parts))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for the file of a model."""
        return {f"{_STEPS}observations": self.observations, f"{_STEPS}steps": self.steps}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> CalibrationSteps | None:
        """What `arrays` returned; None if nothing was kept."""
        if f"{_STEPS}steps" not in arrays:
            return None
        return cls(arrays[f"{_STEPS}observations"], arrays[f"{_STEPS}steps"])

    def calibration(self, answer: RewardAnswer) -> decisions.Calibration:
        """The errors of an answer, as those of effects on a single feature: the reward."""
        reward_fn, discounts = answer.query.reward_fn, answer.model.recipe_.discounts
        assert reward_fn is not None
        rewards = [rewards_of(reward_fn, each.astype(float)) @ discounts for each in self.steps]
        predicted = answer.advantage(self.observations)
        return decisions.calibrate(predicted[..., None], np.stack(rewards)[..., None])


def with_answers(
    answers: Mapping[int, tuple[RewardAnswer, decisions.Calibration]],
    queries: Sequence[Query],
    states: np.ndarray,
    effects: np.ndarray,
    calibration: decisions.Calibration,
) -> tuple[np.ndarray, list[Query], decisions.Calibration]:
    """Effects, queries and calibration with rewards as further features.

    Args:
        answers: Answers to some of the queries, by position, and their errors.
        queries: All queries.
        states: Observations, `[n, observations]`, or those of one state.
        effects: Predicted effects, `[n, actions, features]`.
        calibration: Their errors.
    """
    size, num = effects.shape[-1], len(answers)
    values = [answer.advantage(states)[..., None] for answer, _ in answers.values()]
    own = [each for _, each in answers.values()]
    asked = []
    for i, query in enumerate(queries):
        weights = np.zeros(size + num)
        if i in answers:
            weights[size + list(answers).index(i)] = 1.0
            asked.append(Query(weights, query.name))
        else:
            weights[:size] = query.weights
            asked.append(replace(query, weights=weights))
    assert calibration.predicted is not None
    together = replace(
        calibration,
        residuals=np.concatenate([calibration.residuals, *(c.residuals for c in own)], axis=-1),
        predicted=np.concatenate([calibration.predicted, *(c.predicted for c in own)], axis=-1),
        noise=np.concatenate([calibration.noise, *(c.noise for c in own)]),
        size=np.concatenate([calibration.size, *(c.size for c in own)]),
    )
    return np.concatenate([effects, *values], axis=-1), asked, together


def certified(
    model: EffectModel, states: np.ndarray, queries: QueryLike, calibration: Calibration
) -> tuple[np.ndarray, QueryLike, Calibration]:
    """What to certify: effects, queries and calibration, with rewards as further features."""
    answers = {}
    for i, query in enumerate(asked := decisions.several_queries(queries)):
        answer = model._known_answer(query)
        if answer is None:
            continue
        if model.calibration_steps_ is None:
            warn_user(
                f"the verdict is about the projection of {query.name!r} onto the features, "
                f"which the model would answer differently ({answer.way}); calibrate it with "
                "branches collected with per_step=True",
            )
            continue
        answers[i] = answer, model._known.calibration(answer, model.calibration_steps_)
    effects = model.effect(states)
    if not answers:
        return effects, queries, calibration
    return with_answers(answers, asked, states, effects, calibration)
