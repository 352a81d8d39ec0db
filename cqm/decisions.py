"""Decisions: from effects and a query to a ranking, and how far it can be trusted.

Guarantees are conformal: they need held-out calibration states that are exchangeable with the
states asked about. With at least the stated probability, every contrast of a query differs from its
prediction by at most a common radius, and the regret of the chosen action is within its bound. The
probability is marginal: it is taken over calibration states and new states, not for each state
separately. Strictly, the guarantee covers the mean of as many draws as the calibration set has per
state. On average, the expected effect is closer to the prediction than that mean, which still
contains noise.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cqm import bounds
from cqm.arguments import instance, number, real_numbers, shown, text
from cqm.display import counted, data_frame, html_table, text_table
from cqm.names import checked_action_names
from cqm.queries import Query, QueryLike
from cqm.quotient import center

SHOWN_STATES = 10  # rows of a printed verdict
NOTE_WIDTH = 90  # characters per line of the sentences below its table
UNLEARNED = 0.5  # excess error above which a feature counts as not learned
BLOCK_VALUES = 1_000_000  # action values that `act` computes at once: 8 MB


def query_weights(query: QueryLike) -> np.ndarray:
    """The weights of one query `[features]` or of several `[queries, features]`."""
    if isinstance(query, Query):
        return query.weights
    several = isinstance(query, Sequence) and all(isinstance(one, Query) for one in query)
    numbers = hasattr(query, "__array__") or isinstance(query, list | tuple)
    if numbers and not several:
        weights = real_numbers("query", query, finite=True)
        if weights.ndim not in (1, 2):
            raise ValueError(
                "weights must be [features] for one query or [queries, features] for several; "
                f"got shape {list(weights.shape)}"
            )
        return weights
    if not several or len({len(one.weights) for one in query}) != 1:
        raise ValueError(
            "query must be a cqm.Query, several of them on the same features, or an array of "
            f"weights; got {shown(query)}; make one from text with "
            'cqm.Query.formula("...", world)'
        )
    return np.stack([one.weights for one in query])


def single_query(query: Query | np.ndarray) -> Query:
    """One query, also from an array of its weights."""
    if isinstance(query, Query):
        return query
    weights = query_weights(query)
    if weights.ndim != 1:
        raise ValueError(
            f"bounds hold for one query at a time; got {len(weights)} of them; ask one by one"
        )
    return Query(weights, "the given weights")


def advantage(effects: np.ndarray, query: QueryLike) -> np.ndarray:
    """Centred action values, `[..., actions]`; `[..., queries, actions]` for several queries.

    >>> advantage(np.array([[[1.0, 0.0], [-1.0, 0.0]]]), np.array([2.0, 5.0])).tolist()
    [[2.0, -2.0]]
    """
    effects, weights = _fitting(effects, query)
    if weights.ndim == 1:
        return effects @ weights
    # A single matrix product for all states and queries.
    scores = effects.reshape(-1, effects.shape[-1]) @ weights.T
    return np.swapaxes(scores.reshape(*effects.shape[:-1], len(weights)), -1, -2)


def rank(advantages: np.ndarray) -> np.ndarray:
    """Actions from best to worst along the last axis; ties are ordered by index.

    >>> rank(np.array([0.1, 0.5, 0.1])).tolist()
    [1, 0, 2]
    """
    return np.argsort(-_checked(advantages), axis=-1, kind="stable")


def best(advantages: np.ndarray) -> np.ndarray:
    """The best action along the last axis; the first one if several are tied.

    >>> best(np.array([[0.1, 0.5], [0.5, 0.5]])).tolist()
    [1, 0]
    """
    return np.argmax(_checked(advantages), axis=-1)


def act(effects: np.ndarray, query: QueryLike) -> np.ndarray:
    """The best action in each state, `[...]`; `[..., queries]` for several queries.

    Equivalent to `best(advantage(effects, query))`, but handles a few states at a time, so that the
    action values fit in the processor's cache and are never all in memory at once.

    >>> act(np.array([[[1.0, 0.0], [-1.0, 0.0]]]), np.array([[2.0, 5.0], [-1.0, 0.0]])).tolist()
    [[0, 1]]
    """
    effects, weights = _fitting(effects, query)
    if weights.ndim == 1:
        return best(effects @ weights)
    leading, (num_actions, size) = effects.shape[:-2], effects.shape[-2:]
    effects, num = effects.reshape(-1, num_actions, size), math.prod(leading)
    columns = np.ascontiguousarray(weights.T)
    chosen = np.empty((num, len(weights)), np.int64)
    states = max(1, BLOCK_VALUES // (num_actions * max(1, len(weights))))
    space = np.empty((num_actions * min(states, num), len(weights)))
    for start in range(0, num, states):
        # Action by action, so that whole rows are compared; a maximum over a short axis is slow.
        rows = effects[start : start + states].swapaxes(0, 1).reshape(-1, size)
        values = np.matmul(rows, columns, out=space[: len(rows)])
        highest, *others = values.reshape(num_actions, -1, len(weights))
        index = np.zeros(highest.shape, np.int16)
        for action, value in enumerate(others, start=1):
            np.maximum(index, (value > highest) * np.int16(action), out=index)
            np.maximum(highest, value, out=highest)
        chosen[start : start + states] = index
    return chosen.reshape(*leading, len(weights))


def _fitting(effects: np.ndarray, query: QueryLike) -> tuple[np.ndarray, np.ndarray]:
    """Effects, and weights on as many features."""
    effects, weights = _checked_effects("effects", effects), query_weights(query)
    if weights.shape[-1] != effects.shape[-1]:
        raise ValueError(_misfit(weights.shape[-1], effects.shape[-1]))
    return effects, weights


def project(contrasts: np.ndarray, query: Query) -> np.ndarray:
    """The values `[...]` of a query for contrasts `[..., features]` between two actions."""
    if len(query.weights) != contrasts.shape[-1]:
        raise ValueError(_misfit(len(query.weights), contrasts.shape[-1]))
    return contrasts @ query.weights


def _misfit(weighed: int, num_features: int) -> str:
    return (
        f"the query weights {weighed} features, but the effects have {num_features}; build the "
        "query with the world that the model was trained on"
    )


def _checked_effects(name: str, effects: np.ndarray) -> np.ndarray:
    effects = real_numbers(name, effects, ("...", "actions", "features"))
    if effects.shape[-2] < 2:
        raise ValueError(
            f"{name} must be [..., at least 2 actions, features]; got shape {list(effects.shape)}"
        )
    return effects


def _checked(advantages: np.ndarray) -> np.ndarray:
    advantages = real_numbers("advantages", advantages, ("...", "actions"))
    if advantages.shape[-1] == 0:
        raise ValueError(
            f"advantages must be [..., at least 1 action]; got shape {list(advantages.shape)}"
        )
    return advantages


def ties(advantages: np.ndarray, *, tolerance: float = 1e-9) -> np.ndarray:
    """The number of actions tied for best, up to a tolerance relative to the spread.

    >>> ties(np.array([[0.1, 0.5], [0.5, 0.5]])).tolist()
    [1, 2]
    """
    advantages, tolerance = _checked(advantages), number("tolerance", tolerance, least=0)
    top = advantages.max(axis=-1, keepdims=True)
    spread = np.ptp(advantages, axis=-1, keepdims=True)
    return np.sum(top - advantages <= tolerance * spread, axis=-1)


@dataclass(frozen=True)
class Calibration:
    """A model's errors on held-out states, measured against the mean of several draws."""

    residuals: np.ndarray  # [n, actions, features], expected minus predicted effects
    draws: int  # number of draws averaged to estimate the expected effects
    # Per feature `[features]`, summed over actions and averaged over states:
    noise: np.ndarray  # squared distance of one draw's effects from the expected effects
    size: np.ndarray  # squared size of the expected effects

    @classmethod
    def from_draws(cls, predicted: np.ndarray, draws: np.ndarray) -> Calibration:
        """Calibrate with predicted effects `[n, actions, d]` and draws `[n, draws, actions, d]`.

        Two draws per state are enough here; `calibrate`, which is for guarantees, needs 16.
        """
        predicted, draws = _checked_draws(predicted, draws)
        if draws.shape[1] < 2:
            raise ValueError(
                "at least 2 draws per state are needed to separate noise from error; "
                f"got {draws.shape[1]}; collect with draws=2 or more"
            )
        draws, num_draws = center(draws), draws.shape[1]
        expected = draws.mean(axis=1)
        noise = np.mean(np.sum(draws.var(axis=1, ddof=1), axis=1), axis=0)
        size = np.mean(np.sum(expected**2, axis=1), axis=0) - noise / num_draws
        return cls(expected - center(predicted), num_draws, noise, size)

    @property
    def excess_error(self) -> float:
        """Squared error against the expected effects, as a share of their size; 0 is perfect.

        The noise left in the mean of the draws is subtracted, so the value may fall below 0.
        """
        return float(self._errors().sum() / self.size.sum())

    @functools.cached_property
    def feature_errors(self) -> np.ndarray:
        """`excess_error` per feature; NaN if its effects are indistinguishable from noise."""
        visible = self.size > self.noise / self.draws
        return self._errors() / np.where(visible, self.size, np.nan)

    def unlearned(self, weights: np.ndarray) -> np.ndarray:
        """Indices of the poorly learned features that matter for weights `[..., features]`.

        Their excess error is above 0.5, and their weighted effects are at least 1% as large as
        those of the feature that matters most.
        """
        weights = _of_features(weights, len(self.size))
        share = np.abs(weights) * np.sqrt(np.maximum(self.size, 0))
        weighed = (share > 0) & (share >= 0.01 * share.max(axis=-1, keepdims=True))
        weighed = weighed.reshape(-1, len(self.size)).any(axis=0)
        return np.flatnonzero(weighed & (self.feature_errors > UNLEARNED))

    def _errors(self) -> np.ndarray:
        """Squared errors in the expected effects, `[features]`."""
        return np.mean(np.sum(self.residuals**2, axis=1), axis=0) - self.noise / self.draws

    @property
    def noise_floor(self) -> float:
        """The smallest NMSE against single draws that any function of the state can reach."""
        noise = float(self.noise.sum())
        total = float(self.size.sum()) + noise
        return noise / total if total else 0.0  # without any effect there is no noise in them

    @property
    def nmse(self) -> float:
        """Squared error against single draws, as a share of their size."""
        return self.noise_floor + self.excess_error * (1 - self.noise_floor)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to save with a model; see `from_arrays`."""
        return {
            "calibration.residuals": self.residuals,
            "calibration.draws": np.array([self.draws]),
            "calibration.noise": self.noise,
            "calibration.size": self.size,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Calibration | None:
        """The calibration in the arrays of a saved model; None if it was not calibrated."""
        if "calibration.residuals" not in arrays:
            return None
        residuals, draws, noise, size = (
            arrays[f"calibration.{name}"] for name in ("residuals", "draws", "noise", "size")
        )
        return cls(residuals, int(draws[0]), noise, size)

    def radius(self, weights: np.ndarray, confidence: float) -> float:
        """With the given probability, a bound on the errors of a query's contrasts in a state."""
        errors = self.residuals @ _of_features(weights, len(self.size))
        return _conformal(np.ptp(errors, axis=1), confidence)

    def effect_error(self, confidence: float) -> float:
        """δ: with the given probability, a bound on the norms of all effect errors in a state."""
        return _conformal(np.linalg.norm(self.residuals, axis=-1).max(axis=1), confidence)


@dataclass(frozen=True)
class Verdict:
    """A decision for each state, and how far to trust it; prints as a table."""

    advantages: np.ndarray  # [n, actions]
    action: np.ndarray  # [n], the best action according to the model
    gap: np.ndarray  # [n], advantage over the second-best action
    radius: float  # bound on the error of all contrasts at once
    regret_bound: np.ndarray  # [n], max(0, radius − gap): the sharp, empirical bound
    combined_bound: float  # 2Wδ + 2·m_H·ε_r
    paper_bound: float  # 2Wδ + 4·m_H·ε_r
    separable: np.ndarray  # [n], whether the chosen action is certified to be the best
    confidence: float  # probability that the bounds hold
    calibration_states: int
    action_names: tuple[str, ...]
    query: str  # the reward, in words
    meaning: str  # what "best" means, in one sentence
    projected: bool = False  # whether the reward is only approximately linear in the features
    settled: ClassVar[str] = "certain"  # said of a state in which one action is the best

    @property
    def best(self) -> tuple[str, ...]:
        """The name of the best action in each state."""
        return tuple(self.action_names[action] for action in self.action)

    @property
    def behind(self) -> np.ndarray:
        """Interval for how far each action is behind the chosen one, `[n, actions, 2]`."""
        lead = self.advantages.max(axis=1, keepdims=True) - self.advantages
        return np.stack([lead - self.radius, lead + self.radius], axis=-1)

    @property
    def trust(self) -> str:
        """What the confidence means, in one sentence."""
        sampled = "If the reward is nowhere further from linear than in the sampled steps, the"
        return (
            f"{sampled if self.projected else 'The'} intervals and the bounds on the regret hold "
            f"with {self._percent} confidence over states like the {self.calibration_states} "
            "calibration states, not for each state separately."
        )

    def summary(self) -> str:
        """In how many states the best action is certain, in one sentence."""
        certain, num = int(self.separable.sum()), len(self.separable)
        regret = (
            f"the regret of the chosen action is at most {self.regret_bound.max(initial=0):.3g}"
        )
        if certain == num:
            return f"The best action is certain in {counted(num, 'state')}."
        if certain == 0:
            return f"The best action is not certain in any state; {regret}."
        return f"The best action is certain in {certain} of {num} states; elsewhere, {regret}."

    def rows(self, most: int | None = None) -> list[dict[str, object]]:
        """The decisions as rows of a table; only the first `most` states if given."""
        order = rank(self.advantages[:most])
        return [
            {
                "state": i,
                "best": self.action_names[first],
                "second best": self.action_names[second],
                "lead": f"{self.gap[i]:.3g}",
                f"{self._percent} interval": (
                    f"[{self.gap[i] - self.radius:.3g}, {self.gap[i] + self.radius:.3g}]"
                ),
                "answer": self.settled if self.separable[i] else "cannot tell",
                "regret at most": f"{self.regret_bound[i]:.3g}",
            }
            for i, (first, second, *_) in enumerate(order)
        ]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per state."""
        return data_frame(
            {
                "best": self.best,
                "lead": self.gap,
                "low": self.gap - self.radius,
                "high": self.gap + self.radius,
                "certain": self.separable,
                "regret_bound": self.regret_bound,
            }
        )

    def __repr__(self) -> str:
        table = text_table(self.rows(SHOWN_STATES))
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self._notes())
        return "\n".join([self._title(), *([table] if table else []), *notes])

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return html_table(self.rows(SHOWN_STATES), title=self._title(), notes=self._notes())

    @property
    def _percent(self) -> str:
        return f"{100 * self.confidence:g}%"

    def _title(self) -> str:
        return f"Best first action for {self.query}"

    def _notes(self) -> list[str]:
        more = len(self.action) - SHOWN_STATES
        rest = [f"… and {counted(more, 'more state')}"] if more > 0 else []
        return [*rest, self.summary(), self.trust, self.meaning]


def query_radius(
    query: Query, calibration: Calibration, discount: float, horizon: int, confidence: float
) -> float:
    """A bound on the errors of a query's contrasts in a state, including its projection error."""
    query = single_query(query)
    instance("calibration", calibration, Calibration, "a Calibration, from decisions.calibrate")
    error = 0.0 if query.error is None else query.error.supremum
    projection = float(bounds.reward_projection_error(error, discount, horizon))
    return calibration.radius(query.weights, confidence) + projection


def certify(
    effects: np.ndarray,
    query: Query | np.ndarray,
    calibration: Calibration,
    *,
    discount: float,
    horizon: int,
    confidence: float = 0.95,
    action_names: Sequence[str] | None = None,
    continuation: str = "the continuation of the data",
) -> Verdict:
    """Choose an action for each state and bound its expected regret.

    The radius bounds the errors of all contrasts (`Calibration.radius`), and the gap is the lead of
    the chosen action over the second best. The best action is then at most max(0, radius − gap)
    better than the chosen one. A reward that is not linear in the features adds 2·m_H·ε_r to the
    radius; see `cqm.bounds.reward_projection_error`.

    Args:
        effects: Predicted effects `[n, actions, features]`, or `[actions, features]` for one state.
        query: The reward, or its weights `[features]`.
        calibration: The model's errors on held-out states.
        discount: Discount factor of the outcomes.
        horizon: Horizon of the outcomes.
        confidence: Probability that all contrasts of a state are within the radius.
        action_names: Names of the actions; their indices by default.
        continuation: What follows the first action, in words.
    """
    query, effects = single_query(query), _checked_effects("effects", effects)
    effects = effects.reshape(-1, *effects.shape[-2:])
    instance("calibration", calibration, Calibration, "a Calibration, from decisions.calibrate")
    text("continuation", continuation)
    advantages = advantage(effects, query)
    chosen = best(advantages)
    ordered = -np.sort(-advantages, axis=1)
    gap = ordered[:, 0] - ordered[:, 1]
    error = 0.0 if query.error is None else query.error.supremum
    radius = query_radius(query, calibration, discount, horizon, confidence)
    delta = calibration.effect_error(confidence)
    general: dict[str, Any] = {"discount": discount, "horizon": horizon}
    norm = float(np.linalg.norm(query.weights))
    return Verdict(
        advantages=advantages,
        action=chosen,
        gap=gap,
        radius=radius,
        regret_bound=np.maximum(0.0, radius - gap),
        combined_bound=float(bounds.combined_regret(norm, delta, error, **general)),
        paper_bound=float(bounds.combined_regret(norm, delta, error, **general, form="paper")),
        separable=gap > radius,
        confidence=confidence,
        calibration_states=len(calibration.residuals),
        action_names=checked_action_names(action_names, effects.shape[-2]),
        query=str(query),
        meaning=meaning_of_best(discount, horizon, continuation),
        projected=query.error is not None,
    )


def meaning_of_best(discount: float, horizon: int, continuation: str) -> str:
    """What "best" means, in one sentence."""
    if horizon == 1:
        return "The best action is the one with the highest expected reward in a single step."
    return (
        f"The best action is the one that, taken first and followed by {continuation}, gives the "
        f"highest expected sum of rewards over {horizon} steps (discount {discount:g})."
    )


def calibrate(predicted: np.ndarray, draws: np.ndarray) -> Calibration:
    """Calibrate for guarantees: `Calibration.from_draws` with at least 16 draws per state."""
    predicted, draws = _checked_draws(predicted, draws)
    if draws.shape[1] < 16:
        raise ValueError(
            "calibration needs at least 16 draws per state, so that their mean is close to the "
            f"expected effect; got {draws.shape[1]}; collect with draws=16 or more"
        )
    return Calibration.from_draws(predicted, draws)


def _checked_draws(predicted: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predicted effects and draws that fit together."""
    predicted = real_numbers("predicted", predicted, ("n", "actions", "features"), finite=True)
    draws = real_numbers("draws", draws, ("n", "draws", "actions", "features"), finite=True)
    num, _, num_actions, size = draws.shape
    if predicted.shape != (num, num_actions, size) or num == 0 or num_actions < 2:
        raise ValueError(
            "predicted effects [n, actions, features] and draws [n, draws, actions, features] "
            "must be of the same states, at least 1, and actions, at least 2; got shapes "
            f"{list(predicted.shape)} and {list(draws.shape)}"
        )
    return predicted, draws


def _of_features(weights: np.ndarray, num: int) -> np.ndarray:
    """Weights `[..., features]` that fit a calibration."""
    weights = real_numbers("weights", weights, ("...", "features"), finite=True)
    if weights.shape[-1] != num:
        raise ValueError(
            f"weights must be [..., {num}], one per feature; got shape {list(weights.shape)}"
        )
    return weights


def _conformal(scores: np.ndarray, confidence: float) -> float:
    """The smallest bound that a new, exchangeable score respects with the given probability."""
    confidence = number("confidence", confidence, above=0, below=1)
    needed = math.ceil((len(scores) + 1) * confidence)
    if needed > len(scores):
        raise ValueError(
            f"a confidence of {confidence} needs at least "
            f"{math.ceil(confidence / (1 - confidence) - 1e-9)} calibration states; "
            f"got {len(scores)}"
        )
    return float(np.sort(scores)[needed - 1])
