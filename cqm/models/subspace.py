"""Directions that matter in logs: where the noise of outcomes lets effects be seen.

Most of what makes outcomes differ between trajectories is noise that no action moves. It lives in
some directions of the features and leaves others nearly alone. The covariance of what a
regression on state and action cannot explain tells which (generalised least squares): measured in
units of that noise, the directions that actions move stand out, one after the other.

Where the features are the next observation, directions that are predicted almost perfectly belong
to them as well: carrying them along costs nothing, and they tell how the moved ones go on.

Along directions in which the noise hides whatever actions do, effects are taken to be zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import null_space

from cqm.logs.dataset import Logs
from cqm.models.ridge import Waves

_CHUNK = 8192
_UNPREDICTABLE = 0.01  # share of a direction's variance; below it the direction is carried along
_NEGLIGIBLE = 1e-10
_WAVES = 32
_LATER = 1200  # regressors for later actions, at most


@dataclass(frozen=True)
class Directions:
    """Where effects are seen: `effects @ measures` are coordinates, `coordinates @ stands_for.T`
    the effects again."""

    measures: np.ndarray  # [features, kept]
    stands_for: np.ndarray  # [features, kept]
    stand_out: bool = True  # from the noise; otherwise the quietest is kept for want of another

    def __len__(self) -> int:
        return self.measures.shape[1]


def visible_log_directions(logs: Logs) -> Directions:
    """Where logs show effects; the least noisy direction if they show none.

    From single steps where the features are the next observation, from outcomes otherwise.
    """
    num_actions, horizon = logs.num_actions, logs.recipe.horizon
    before, after, actions = logs.observations, logs.outcomes, logs.first_actions
    if logs.features_are_next_observation:
        steps = np.concatenate([before[:, None], logs.features[:, :-1]], axis=1)
        before, after = (
            steps.reshape(-1, steps.shape[-1]),
            logs.features.reshape(-1, after.shape[1]),
        )
        actions = logs.actions.ravel()
    chances = np.bincount(actions, minlength=num_actions) / len(actions)
    if logs.propensities is not None and (not logs.features_are_next_observation or horizon == 1):
        every = logs.propensities
    else:
        every = np.tile(chances, (len(actions), 1))
    found = visible_directions(before, after, actions, every, closed=logs.features_are_next_observation)
    if len(found):
        return found
    axes = np.linalg.svd(logs.outcomes - logs.outcomes.mean(axis=0), full_matrices=False)[2]
    return Directions(axes[-1:].T, axes[-1:].T, stand_out=False)


def later_regressors(logs: Logs, seen: np.ndarray) -> np.ndarray:
    """What later actions did, as regressors `[n, ...]`, where their law does not see the state.

    Then they are independent of the first action, and explaining them away leaves less noise. Where
    they answer to the state they carry a part of the first action's effect, and must not be used.
    """
    num, horizon = logs.actions.shape
    if not logs.recipe.continuation.open_loop or horizon == 1:
        return np.empty((num, 0))
    chances = logs.recipe.continuation.probabilities(logs.num_actions)
    others = logs.num_actions - 1
    state = np.concatenate([np.ones((num, 1)), seen], axis=1)
    most = min(_LATER, num // 10)  # regressors that these trajectories can support
    state = state[:, : max(1, most // ((horizon - 1) * others))]
    taken = (logs.actions[:, 1:, None] == np.arange(others)) - chances[:others]
    return (taken[..., None] * state[:, None, None]).reshape(num, -1)


def visible_directions(
    before: np.ndarray,
    after: np.ndarray,
    actions: np.ndarray,
    propensities: np.ndarray,
    *,
    closed: bool,
) -> Directions:
    """The directions that actions are seen to move.

    Args:
        before: Observations, `[n, observations]`.
        after: Features that followed, `[n, features]`.
        actions: Taken, `[n]`.
        propensities: `[n, actions]`, what the actions' indicators are centred at.
        closed: Whether `after` are the observations that follow `before`.
    """
    num, size = after.shape
    # Units must not decide what counts as noise; of observations and features they are the same.
    units = np.ones(size) if closed else after.std(axis=0)
    units = np.where(units > 0, units, 1.0)
    after = after / units
    shift, whitening = _whitening(before, num)
    design, explained = _moments(before - shift, whitening, after, actions, propensities)
    states = 1 + whitening.shape[1] + _WAVES
    total = explained[-1]
    by_state = _residual(design[:states, :states], explained[0][:states], total)
    by_both = _residual(design, explained[0], total)
    noise = by_both / (degrees := max(1, num - len(design)))
    # What the actions explain: with all interactions; and, where that shows nothing, alike in all
    # states, which takes fewer regressors and so stands out sooner.
    others = propensities.shape[1] - 1
    alike = [*range(states), *range(states, len(design), (len(design) - states) // others)]
    by_alike = _residual(design[np.ix_(alike, alike)], explained[0][alike], total)
    signals = (
        ((by_state - by_both) / num, len(design) - states),
        ((by_state - by_alike) / num, others),
    )
    basis = np.zeros((size, 0))
    if closed:
        shares, own = np.linalg.eigh(whitening.T @ noise @ whitening)
        basis = np.linalg.qr(whitening @ own[:, shares < _UNPREDICTABLE])[0]
    floor = max(_NEGLIGIBLE * float(np.trace(total)) / num, 1e-30)
    carried = basis.shape[1]
    for signal, extra in signals:
        # One by one, each among those orthogonal to the ones before: the clearest ratios of signal
        # to noise may all point nearly the same way, where the noise is least.
        while basis.shape[1] < size:
            rest = null_space(basis.T) if basis.shape[1] else np.eye(size)
            strength, direction = _clearest(rest.T @ signal @ rest, rest.T @ noise @ rest, floor)
            # The largest strength that chance alone would give.
            edge = (np.sqrt(extra) + np.sqrt(rest.shape[1]) + 3) ** 2 / degrees
            if strength <= edge:
                break
            basis = np.column_stack([basis, rest @ direction])
        if basis.shape[1] > carried:
            break
    return Directions(basis / units[:, None], basis * units[:, None])


def _clearest(signal: np.ndarray, noise: np.ndarray, floor: float) -> tuple[float, np.ndarray]:
    """The largest ratio of signal to noise variance, and the unit direction that has it."""
    scales, axes = np.linalg.eigh(noise)
    to_white = axes / np.sqrt(np.maximum(scales, floor))
    strengths, found = np.linalg.eigh(to_white.T @ signal @ to_white)
    direction = to_white @ found[:, -1]
    return float(strengths[-1]), direction / np.linalg.norm(direction)


def _whitening(values: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean, and a map to coordinates of unit variance, `[values, coordinates]`."""
    shift = values.mean(axis=0)
    centered = values - shift
    variances, axes = np.linalg.eigh(centered.T @ centered / num)
    kept = variances > _NEGLIGIBLE * max(float(variances[-1]), 1e-300)
    return shift, axes[:, kept] / np.sqrt(variances[kept])


def _moments(
    centered: np.ndarray,
    whitening: np.ndarray,
    after: np.ndarray,
    actions: np.ndarray,
    propensities: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Second moments of regressors, of regressors with outcomes, and of outcomes, in pieces.

    Regressors are the state with waves of it, and these times each action's centred indicator, as
    many of them as the number of rows supports.
    """
    num, num_actions = propensities.shape
    width = 1 + whitening.shape[1] + _WAVES
    waves = Waves.draw(centered[:_CHUNK] @ whitening[:, ::-1], _WAVES, np.random.default_rng(0))
    interacting = int(np.clip(num // (20 * (num_actions - 1)), 1, width))
    shift = after.mean(axis=0)
    size = width + interacting * (num_actions - 1)
    design, joint = np.zeros((size, size)), np.zeros((size, after.shape[1]))
    total = np.zeros((after.shape[1], after.shape[1]))
    for start in range(0, num, _CHUNK):
        rows = slice(start, start + _CHUNK)
        # Leading whitened coordinates come last, so the interactions start from that end.
        state = waves(centered[rows] @ whitening[:, ::-1])
        taken = (actions[rows, None] == np.arange(num_actions)) - propensities[rows]
        both = taken[:, :-1, None] * state[:, None, :interacting]
        regressors = np.concatenate([state, both.reshape(len(state), -1)], axis=1)
        outcomes = after[rows] - shift
        design += regressors.T @ regressors
        joint += regressors.T @ outcomes
        total += outcomes.T @ outcomes
    return design, (joint, total)


def _residual(design: np.ndarray, joint: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Sum of squares that a regression leaves."""
    ridge = 1e-10 * np.trace(design) / len(design) * np.eye(len(design))
    return total - joint.T @ np.linalg.solve(design + ridge, joint)
