"""Decisions: from effects and a query to a ranking, and how far it can be trusted.

Guarantees need held-out calibration states that are exchangeable with the states asked about. They
say how far contrasts may differ from their predictions, how large the regret of the chosen action
may be, and how many of the states that are marked certain may be wrong; `cqm.certificates` states
them exactly. Strictly, they cover the mean of as many draws as the calibration set has per state.
On average, the expected effect is closer to the prediction than that mean, which still contains
noise. `cqm.shift` notices states that are unlike the calibration states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from cqm import bounds
from cqm.arguments import choice, instance, number, real_numbers, shown, text
from cqm.calibration import Calibration, Groups, calibrate as calibrate, group_labels
from cqm.names import checked_action_names
from cqm.queries import Query, QueryLike
from cqm.shift import ShiftWarning
from cqm.verdicts import Verdict, meaning_of_best
from cqm.warn import warn_user

Shift = Literal["warn", "abstain", "ignore"]
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
            f"expected one query; got {len(weights)} of them; ask one by one, or use certify_all"
        )
    return Query(weights, "the given weights")


def several_queries(queries: QueryLike) -> list[Query]:
    """At least one query, also from an array of weights `[queries, features]`."""
    if isinstance(queries, Query):
        return [queries]
    weights = np.atleast_2d(query_weights(queries))
    if not len(weights):
        raise ValueError("expected at least one query; got none")
    if isinstance(queries, Sequence) and all(isinstance(one, Query) for one in queries):
        return [one for one in queries if isinstance(one, Query)]
    return [Query(row, "the given weights") for row in weights]


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


def contrast_radius(
    values: np.ndarray,
    query: Query,
    calibration: Calibration,
    *,
    discount: float,
    horizon: int,
    confidence: float,
    observations: np.ndarray | None = None,
    groups: Groups | None = None,
) -> np.ndarray:
    """A bound on the errors of all contrasts of a query in a state, `[n]`.

    It includes the query's projection error. With the given confidence over states, the contrasts
    of all pairs of actions in a state are within their bound together.

    Args:
        values: Predicted values of the query, `[n, actions]`.
        query: The reward.
        calibration: The model's errors on held-out states.
        discount: Discount factor of the outcomes.
        horizon: Horizon of the outcomes.
        confidence: Probability that the bound holds.
        observations: `[n, observations]`, if the calibration knows those of its states.
        groups: Group of each state; the bound then holds in each group separately.
    """
    slack = projection_slack(query, discount, horizon)
    inputs = _inputs(calibration, observations, len(values))
    labels = None if groups is None else group_labels(groups, len(values), observations)
    radius = np.full(len(values), slack)
    for group, rows in _by_group(labels, len(values)):
        (limits,) = calibration.limits(query.weights, confidence, group=group)
        own = None if inputs is None else inputs[rows]
        radius[rows] += limits.widest * limits.scale(values[rows], own)
    return radius


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
    observations: np.ndarray | None = None,
    groups: Groups | None = None,
    shift: Shift = "warn",
) -> Verdict:
    """Choose an action for each state and bound its expected regret; see `certify_all`."""
    (verdict,) = certify_all(
        effects,
        [single_query(query)],
        calibration,
        discount=discount,
        horizon=horizon,
        confidence=confidence,
        action_names=action_names,
        continuation=continuation,
        observations=observations,
        groups=groups,
        shift=shift,
    )
    return verdict


def certify_all(
    effects: np.ndarray,
    queries: QueryLike,
    calibration: Calibration,
    *,
    discount: float,
    horizon: int,
    confidence: float = 0.95,
    action_names: Sequence[str] | None = None,
    continuation: str = "the continuation of the data",
    observations: np.ndarray | None = None,
    groups: Groups | None = None,
    shift: Shift = "warn",
    effect_error: float | None = None,
) -> tuple[Verdict, ...]:
    """Verdicts on several queries; their bounds on the regret and their intervals hold at once.

    The regret of a chosen action is at most its one-sided error minus its lead over the second best
    action, and `cqm.certificates` bounds these errors. A reward that is not linear in the features
    adds 2·m_H·ε_r to the error; see `cqm.bounds.reward_projection_error`.

    Args:
        effects: Predicted effects `[n, actions, features]`, or `[actions, features]` for one state.
        queries: The rewards, or their weights `[queries, features]`.
        calibration: The model's errors on held-out states.
        discount: Discount factor of the outcomes.
        horizon: Horizon of the outcomes.
        confidence: Probability that the bounds hold, over states; of the states that are marked
            certain, at most a share of 1 − confidence is wrong.
        action_names: Names of the actions; their indices by default.
        continuation: What follows the first action, in words.
        observations: `[n, observations]`, or `[observations]` for one state; needed if the
            calibration knows those of its states.
        groups: Group of each state, one label per state or a function of the observations; the
            guarantees then hold in each group separately. The calibration must have groups too.
        shift: What to do if the states, taken together, do not look like the calibration states:
            `warn`, `abstain` (warn, and mark no state certain) or `ignore`.
        effect_error: δ of the general bounds; by default that of the calibration.
    """
    asked, effects = several_queries(queries), _checked_effects("effects", effects)
    effects = effects.reshape(-1, *effects.shape[-2:])
    instance("calibration", calibration, Calibration, "a Calibration, from decisions.calibrate")
    text("continuation", continuation)
    choice("shift", shift, get_args(Shift))
    num = len(effects)
    weights = np.stack([query.weights for query in asked])
    values = np.swapaxes(advantage(effects, weights), 0, 1)  # [queries, n, actions]
    slack = np.array([projection_slack(query, discount, horizon) for query in asked])
    inputs = _inputs(calibration, observations, num)
    labels = None if groups is None else group_labels(groups, num, observations)
    found = [
        (group, rows, calibration.limits(weights, confidence, slack=slack, group=group))
        for group, rows in _by_group(labels, num)
    ]
    unlike, shifted = _compared(calibration, inputs, num, shift)
    delta = calibration.effect_error(confidence) if effect_error is None else effect_error
    general: dict[str, Any] = {"discount": discount, "horizon": horizon}
    verdicts = []
    for i, query in enumerate(asked):
        ordered = -np.sort(-values[i], axis=1)
        gap = ordered[:, 0] - ordered[:, 1]
        typical, regret, radius = np.zeros((3, num))
        certain = np.zeros(num, bool)
        for _, rows, limits in found:
            own = limits[i]
            scale = own.scale(values[i, rows], None if inputs is None else inputs[rows])
            typical[rows], radius[rows] = own.typical * scale, own.widest * scale + slack[i]
            regret[rows] = np.maximum(0.0, own.one_sided * scale + slack[i] - gap[rows])
            certain[rows] = own.certain(gap[rows] - slack[i], scale)
        error = 0.0 if query.error is None else query.error.supremum
        norm = float(np.linalg.norm(query.weights))
        verdicts.append(
            Verdict(
                advantages=values[i],
                action=best(values[i]),
                gap=gap,
                radius=radius,
                typical_error=typical,
                regret_bound=regret,
                combined_bound=float(bounds.combined_regret(norm, delta, error, **general)),
                paper_bound=float(
                    bounds.combined_regret(norm, delta, error, **general, form="paper")
                ),
                separable=certain & ~unlike & (not (shifted and shift == "abstain")),
                unlike=unlike,
                shifted=shifted,
                confidence=confidence,
                calibration_states=len(calibration.residuals),
                limits={group: limits[i] for group, _, limits in found},
                action_names=checked_action_names(action_names, effects.shape[-2]),
                query=str(query),
                meaning=meaning_of_best(discount, horizon, continuation),
                projected=query.error is not None,
                num_queries=len(asked),
            )
        )
    return tuple(verdicts)


def projection_slack(query: Query, discount: float, horizon: int) -> float:
    """How far contrasts of a query may be from those of the reward that it approximates."""
    error = 0.0 if query.error is None else query.error.supremum
    return float(bounds.reward_projection_error(error, discount, horizon))


def _inputs(
    calibration: Calibration, observations: np.ndarray | None, num: int
) -> np.ndarray | None:
    """Inputs of the states asked about, `[n, inputs]`; None if the calibration has none."""
    if calibration.states is None:
        return None
    if observations is None:
        raise ValueError(
            "the calibration knows the observations of its states, so certificates need those of "
            "the states asked about; pass observations="
        )
    inputs = calibration.states.coordinates(np.atleast_2d(observations))
    if len(inputs) != num:
        raise ValueError(f"observations must be those of {num} states; got {len(inputs)}")
    return inputs


def _by_group(labels: np.ndarray | None, num: int) -> list[tuple[str | None, np.ndarray]]:
    """The groups, and which states are in each, `[n]`; without labels, one group of all states."""
    if labels is None:
        return [(None, np.ones(num, bool))]
    return [(group, labels == group) for group in sorted(set(labels.tolist()))]


def _compared(
    calibration: Calibration, inputs: np.ndarray | None, num: int, shift: Shift
) -> tuple[np.ndarray, bool]:
    """Which states are unlike the calibration states, `[n]`, and whether the whole batch is."""
    if calibration.states is None or inputs is None:
        return np.zeros(num, bool), False
    unlike = calibration.states.unlike(inputs)
    if shift == "ignore" or not calibration.states.shifted(inputs):
        return unlike, False
    warn_user(
        f"the {len(inputs)} states do not look like the {len(calibration.residuals)} calibration "
        "states, so the guarantees may not hold for them; calibrate on states like those that you "
        "ask about",
        ShiftWarning,
    )
    return unlike, True
