"""Exact successor measures of a finite MDP, their signed effects, and what follows from them.

A family of measures is an array `[states, actions, events]`: the discounted mass that each event
receives after each first action. Centring the actions axis with `cqm.quotient.center`, exactly as
for features, gives the effect measures of the paper.

Events are next states or full transitions (state, action, next state). Only possible transitions
are listed: one for each nonzero transition probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.sparse import linalg as sparse_linalg

from cqm.arguments import choice, generator, instance, real_numbers, shown
from cqm.bounds import total_mass
from cqm.quotient import Reference, as_reference, center

EventSpace = Literal["next_state", "transition"]


class FiniteMDP:
    """Transition probabilities and a continuation policy over finitely many states and actions.

    Args:
        transitions: `[states, actions, states]`, or a SciPy sparse matrix `[states · actions,
            states]` whose row `s · actions + a` is the law of the next state.
        policy: π, the continuation, `[states, actions]`; uniform by default.

    >>> mdp = FiniteMDP(np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.0, 1.0]]]))
    >>> mdp.num_states, mdp.num_actions, len(mdp.events("transition"))
    (2, 2, 5)
    """

    def __init__(self, transitions: ArrayLike | sparse.sparray, policy: ArrayLike | None = None):
        if sparse.issparse(transitions):
            given: Any = transitions
            if given.ndim != 2 or given.dtype.kind not in "biuf":
                raise ValueError(
                    "sparse transitions must be numbers [states · actions, states]; "
                    f"got {shown(transitions)}"
                )
            self.transitions = sparse.csr_array(transitions, dtype=float, copy=True)
            rows, self.num_states = self.transitions.shape
            if self.num_states == 0 or rows % self.num_states:
                raise ValueError(
                    "sparse transitions must be [states · actions, states]; "
                    f"got shape {self.transitions.shape}"
                )
            self.num_actions = rows // self.num_states
        else:
            dense = real_numbers("transitions", transitions)
            if dense.ndim != 3 or dense.shape[0] != dense.shape[2] or not dense.size:
                raise ValueError(
                    f"transitions must be [states, actions, states]; got shape {dense.shape}"
                )
            self.num_states, self.num_actions = dense.shape[:2]
            self.transitions = sparse.csr_array(dense.reshape(-1, self.num_states))
        if self.num_actions < 2:
            raise ValueError(
                f"comparing actions needs an MDP with at least 2 actions; got {self.num_actions}"
            )
        self.transitions.sum_duplicates()
        self.transitions.eliminate_zeros()
        _check_stochastic("transitions", self.transitions.data, self.transitions.sum(axis=1))

        shape = (self.num_states, self.num_actions)
        if policy is None:
            policy = np.full(shape, 1 / self.num_actions)
        self.policy = real_numbers("policy", policy).copy()
        if self.policy.shape != shape:
            raise ValueError(f"policy must be [states, actions] = {shape}; got {self.policy.shape}")
        _check_stochastic("policy", self.policy, self.policy.sum(axis=1))

        by_state = sparse.block_diag(list(self.policy[:, None, :]), format="csr")
        self.state_transitions = sparse.csr_array(by_state @ self.transitions)  # [states, states]

    def events(self, space: EventSpace = "next_state") -> np.ndarray:
        """The events in the order of the last axis of a measure.

        Next states as `[events]`, transitions as rows (state, action, next state) `[events, 3]`.
        """
        if _checked_space(space) == "next_state":
            return np.arange(self.num_states)
        pairs, next_states = self.transitions.nonzero()
        return np.column_stack([pairs // self.num_actions, pairs % self.num_actions, next_states])


def successor_measure(
    mdp: FiniteMDP,
    *,
    discount: float,
    horizon: int | None = None,
    space: EventSpace = "next_state",
    states: ArrayLike | None = None,
) -> np.ndarray:
    """The exact measures M_{s,a}, `[states, actions, events]` (eq. successor-measure).

    The infinite horizon (`None`) is solved as a linear system. Pass `states` to compute only their
    rows, so that the measures of a large MDP over transitions fit in memory.

    >>> stay_or_go = FiniteMDP(np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]))
    >>> successor_measure(stay_or_go, discount=0.5, horizon=2)[0].tolist()
    [[1.25, 0.25], [0.0, 1.5]]
    """
    _checked_mdp(mdp)
    total_mass(discount, horizon)
    _checked_space(space)
    states = np.arange(mdp.num_states) if states is None else states
    chosen = _indices("states", states, mdp.num_states)
    pairs = (chosen[:, None] * mdp.num_actions + np.arange(mdp.num_actions)).ravel()
    first = mdp.transitions[pairs]  # [pairs, states], the law of the next state
    if space == "next_state" and len(pairs) >= mdp.num_states:
        # Solve once per state, then multiply by the sparse law of the first transition.
        measure = first @ _discounted_visits(mdp, None, discount, horizon)
    elif space == "next_state":
        measure = _discounted_visits(mdp, first, discount, horizon)
    else:
        later = None if horizon is None else horizon - 1
        visits = discount * _discounted_visits(mdp, first, discount, later)
        weights = visits[:, :, None] * mdp.policy
        weights = weights.reshape(len(pairs), mdp.num_states * mdp.num_actions)
        weights[np.arange(len(pairs)), pairs] += 1  # the first action is certain
        measure = weights[:, mdp.transitions.nonzero()[0]] * mdp.transitions.data
    return measure.reshape(len(chosen), mdp.num_actions, measure.shape[-1])


def _discounted_visits(
    mdp: FiniteMDP, start: sparse.csr_array | None, discount: float, horizon: int | None
) -> np.ndarray:
    """Σ_{k<H} γᵏ start P_πᵏ; without a start, the sum for every state, `[states, states]`."""
    if horizon is None:
        system = sparse.eye_array(mdp.num_states) - discount * mdp.state_transitions
        if start is None:
            return np.linalg.solve(system.toarray().T, np.eye(mdp.num_states)).T
        return sparse_linalg.splu(sparse.csc_array(system.T)).solve(start.toarray().T).T
    if start is None:
        visits = eye = np.eye(mdp.num_states)
        for _ in range(horizon - 1):
            visits = eye + discount * (mdp.state_transitions @ visits)
        return visits
    law = start.toarray()
    visits = np.zeros_like(law)
    for k in range(horizon):
        visits += discount**k * law
        law = law @ mdp.state_transitions
    return visits


def effect_measure(measures: np.ndarray, reference: Reference = None) -> np.ndarray:
    """K_{s,a} = M_{s,a} − Σ_b ρ(b) M_{s,b}: the signed effect of each action (eq. effect-measure).

    >>> effect_measure(np.array([[[1.25, 0.25], [0.0, 1.5]]]))[0].tolist()
    [[0.625, -0.625], [-0.625, 0.625]]
    """
    return center(measures, reference)


def reference_measure(measures: np.ndarray, reference: Reference = None) -> np.ndarray:
    """M̄_s = Σ_b ρ(b) M_{s,b}, `[states, events]` (eq. effect-measure).

    >>> reference_measure(np.array([[[1.25, 0.25], [0.0, 1.5]]])).tolist()
    [[0.625, 0.875]]
    """
    measures = _checked_measures(measures, 2)
    return (as_reference(reference, measures)[..., None] * measures).sum(axis=-2)


def jordan_parts(signed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positive and negative parts of signed measures: events made more and less likely.

    >>> [part.tolist() for part in jordan_parts(np.array([0.5, -0.5]))]
    [[0.5, 0.0], [0.0, 0.5]]
    """
    signed = _checked_measures(signed)
    return np.maximum(signed, 0), np.maximum(-signed, 0)


def mass(measures: np.ndarray) -> np.ndarray:
    """The total mass of each measure: m_H for a successor measure, 0 for an effect measure.

    >>> float(mass(np.array([1.25, 0.25])))
    1.5
    """
    return _checked_measures(measures).sum(axis=-1)


def total_variation(measures: np.ndarray) -> np.ndarray:
    """The mass of the positive and negative parts together.

    >>> float(total_variation(np.array([0.5, -0.5])))
    1.0
    """
    return np.abs(_checked_measures(measures)).sum(axis=-1)


def integrate(measures: np.ndarray, reward: ArrayLike) -> np.ndarray:
    """∫ r dM for a bounded reward given per event `[events]` (eq. measure-value).

    A successor measure gives the value Q_r, an effect measure the centred value (thm. duality).

    >>> integrate(np.array([[1.25, 0.25], [0.0, 1.5]]), [1.0, 0.0]).tolist()
    [1.25, 0.0]
    """
    measures, reward = _checked_measures(measures), real_numbers("reward", reward)
    if reward.shape != measures.shape[-1:]:
        raise ValueError(
            f"reward must be [{measures.shape[-1]}], one per event; got shape {reward.shape}"
        )
    if not np.all(np.isfinite(reward)):
        raise ValueError(f"reward must be finite; got {reward[~np.isfinite(reward)][0]}")
    return measures @ reward


def project(measures: np.ndarray, features: ArrayLike) -> np.ndarray:
    """∫ φ dM for features given per event `[events, d]` (eq. feature-projection).

    >>> project(np.array([[1.25, 0.25], [0.0, 1.5]]), [[1.0, 2.0], [0.0, 1.0]]).tolist()
    [[1.25, 2.75], [0.0, 1.5]]
    """
    measures, features = _checked_measures(measures), real_numbers("features", features)
    if features.ndim != 2 or len(features) != measures.shape[-1]:
        raise ValueError(
            f"features must be [{measures.shape[-1]} events, d]; got shape {features.shape}"
        )
    if np.isnan(features).any():
        raise ValueError(f"features must not contain NaN; got {np.isnan(features).sum()} of them")
    return measures @ features


def density_ratio(measures: np.ndarray, base: np.ndarray) -> np.ndarray:
    """h = dM_{s,a}/dM̄_s − 1, with `base` M̄ `[states, events]` (eq. density-ratio).

    Raises if a measure puts mass on an event where the base has none. Where neither has mass, the
    ratio is set to 0, which changes no integral.

    >>> density_ratio(np.array([[[1.25, 0.25], [0.0, 1.5]]]), np.array([[0.625, 0.875]])).tolist()
    [[[1.0, -0.7142857142857143], [-1.0, 0.7142857142857142]]]
    """
    measures, base = real_numbers("measures", measures), real_numbers("base", base)
    if measures.ndim != 3 or np.isnan(measures).any() or np.isnan(base).any():
        raise ValueError(
            "measures must be [states, actions, events], and measures and base without NaN; "
            f"got shape {measures.shape}, {np.isnan(measures).sum()} and {np.isnan(base).sum()} NaN"
        )
    if base.shape != (measures.shape[0], measures.shape[2]):
        raise ValueError(
            f"base must be [states, events] = {(measures.shape[0], measures.shape[2])}; "
            f"got shape {base.shape}"
        )
    unreachable = (measures > 0) & (base[:, None] <= 0)
    if unreachable.any():
        state, action, event = np.argwhere(unreachable)[0]
        raise ValueError(
            "measures must be absolutely continuous with respect to the base; "
            f"state row {state}, action {action} puts mass {measures[state, action, event]:.3g} on "
            f"event {event}, where the base has none ({unreachable.sum()} such cases)"
        )
    safe = np.where(base > 0, base, 1)[:, None]
    return np.where(base[:, None] > 0, measures / safe - 1, 0)


def outcome_posterior(measures: np.ndarray, reference: Reference = None) -> np.ndarray:
    """p(A = a | s, Z = z) by Bayes' rule, if A ~ ρ and Z follows the normalised measure of A.

    Given an impossible event, the posterior is set to ρ itself.

    >>> outcome_posterior(np.array([[[3.0, 0.0], [1.0, 4.0]]]))[0].tolist()
    [[0.75, 0.0], [0.25, 1.0]]
    """
    measures = _checked_measures(measures, 2)
    weights = as_reference(reference, measures)[..., None]
    joint = weights * measures
    evidence = joint.sum(axis=-2, keepdims=True)
    return np.where(evidence > 0, joint / np.where(evidence > 0, evidence, 1), weights)


def ratio_from_posterior(posterior: np.ndarray, reference: Reference = None) -> np.ndarray:
    """h = p(a | s, z)/ρ(a | s) − 1 (eq. hindsight-ratio), if actions were drawn from ρ.

    >>> ratio_from_posterior(np.array([[[0.75, 0.0], [0.25, 1.0]]]))[0].tolist()
    [[0.5, -1.0], [-0.5, 1.0]]
    """
    posterior = real_numbers("posterior", posterior)
    return posterior / as_reference(reference, posterior)[..., None] - 1


@dataclass(frozen=True)
class EventSample:
    """Discounted future events of simulated trajectories."""

    events: np.ndarray  # [n], indices into `FiniteMDP.events`
    delays: np.ndarray  # [n], the step at which each was sampled


def sample_events(
    mdp: FiniteMDP,
    states: ArrayLike,
    actions: ArrayLike,
    rng: np.random.Generator,
    *,
    discount: float,
    horizon: int | None = None,
    space: EventSpace = "next_state",
) -> EventSample:
    """Draw one event per (state, first action) from its normalised successor measure.

    A delay is drawn with probability proportional to γᵏ, and the trajectory is simulated until
    then. The exact measures are not used, so they can be tested against the sample.

    >>> stay = FiniteMDP(np.array([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]))
    >>> sample_events(stay, [0, 1], [0, 0], np.random.default_rng(0), discount=0.9).events.tolist()
    [0, 1]
    """
    _checked_mdp(mdp)
    generator("rng", rng)
    normaliser = total_mass(discount, horizon)
    _checked_space(space)
    states = _indices("states", states, mdp.num_states)
    actions = _indices("actions", actions, mdp.num_actions)
    if len(states) != len(actions) and 1 not in (len(states), len(actions)):
        raise ValueError(
            "states and actions must have the same length, or one of them length 1; "
            f"got {len(states)} and {len(actions)}"
        )
    states, actions = np.broadcast_arrays(states, actions)
    num = len(states)
    if horizon is None:
        delays = rng.geometric(1 - discount, num) - 1
    else:
        delays = rng.choice(horizon, num, p=discount ** np.arange(horizon) / normaliser)
    # Inverting a single increasing sequence draws from every row: row r occupies (r, r + 1].
    cumulative = _row_cumulative(mdp.transitions)
    policy_cumulative = np.cumsum(mdp.policy, axis=1)
    pairs = states * mdp.num_actions + actions
    events = np.empty(num, dtype=int)
    remaining = np.arange(num)
    for k in range(int(delays.max(initial=0)) + 1):
        entries = _draw_entries(mdp.transitions, cumulative, pairs, rng)
        done = delays[remaining] == k
        next_states = mdp.transitions.indices[entries]
        events[remaining[done]] = next_states[done] if space == "next_state" else entries[done]
        remaining, next_states = remaining[~done], next_states[~done]
        uniforms = rng.random(len(remaining))[:, None]
        next_actions = (uniforms >= policy_cumulative[next_states, :-1]).sum(axis=1)
        pairs = next_states * mdp.num_actions + next_actions
    return EventSample(events, delays)


@dataclass(frozen=True, eq=False)
class SampledMeasure:
    """A signed measure over events as weighted samples, such as the effect of one action.

    >>> measure = SampledMeasure(np.array([[1.0], [3.0]]), np.array([0.5, -0.5]))
    >>> measure.mass, measure.integrate(lambda events: events[:, 0] ** 2)
    (0.0, -4.0)
    """

    events: np.ndarray  # [m, features]
    weights: np.ndarray  # [m], positive where the event becomes more likely

    @property
    def mass(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    def integrate(self, reward_fn: Callable[[np.ndarray], np.ndarray]) -> float:
        """The integral of a reward, which maps features `[..., features]` to rewards `[...]`."""
        rewards = real_numbers("the result of reward_fn", reward_fn(self.events), finite=True)
        if rewards.shape != self.weights.shape:
            raise ValueError(
                f"reward_fn must return rewards of shape {self.weights.shape} for events of shape "
                f"{self.events.shape}; got shape {rewards.shape}"
            )
        return float(self.weights @ rewards)

    def mean_features(self) -> np.ndarray:
        """The integral of every feature, `[features]`; for an effect measure, the effect."""
        return self.weights @ self.events


def _row_cumulative(matrix: sparse.csr_array) -> np.ndarray:
    """Cumulative sums of a stochastic matrix's entries; each row starts from its own index."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    running = np.cumsum(matrix.data)
    before = np.concatenate([[0.0], running])[matrix.indptr[:-1]]
    return rows + (running - before[rows])


def _draw_entries(
    matrix: sparse.csr_array, cumulative: np.ndarray, rows: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw one stored entry of each given row, with the entry's probability."""
    entries = np.searchsorted(cumulative, rows + rng.random(len(rows)), side="right")
    return np.clip(entries, matrix.indptr[rows], matrix.indptr[rows + 1] - 1)


def _check_stochastic(name: str, values: np.ndarray, sums: np.ndarray) -> None:
    if np.isnan(values).any() or np.any(values < 0):
        raise ValueError(f"{name} must be probabilities, not negative or NaN; got {values.min()}")
    if np.any(abs(sums - 1) > 1e-9):
        row = int(abs(sums - 1).argmax())
        raise ValueError(f"{name} must have rows that sum to 1; row {row} sums to {sums[row]}")


def _indices(name: str, values: ArrayLike, num: int) -> np.ndarray:
    rows = np.atleast_1d(real_numbers(name, values))
    whole = np.asarray(values).dtype.kind in "iu"
    if not whole or rows.ndim != 1 or not np.isin(rows, np.arange(num)).all():
        raise ValueError(f"{name} must be indices in 0..{num - 1}; got {shown(values)}")
    return rows.astype(np.int64)


def _checked_space(space: str) -> str:
    return choice("event space", space, ("next_state", "transition"))


def _checked_mdp(mdp: FiniteMDP) -> FiniteMDP:
    return instance("mdp", mdp, FiniteMDP, "a FiniteMDP")


def _checked_measures(values: np.ndarray, axes: int = 1) -> np.ndarray:
    return real_numbers("measures", values, ("...", *("actions", "events")[-axes:]))
