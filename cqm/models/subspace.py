"""The effect subspace of logs: the feature directions in which effects stand out from the noise.

Most of the variation of outcomes between trajectories is noise that no action moves, and it is
concentrated in some directions of the features. Its covariance is that of the residuals of a
regression on state and action (generalised least squares). Measured in units of this noise, the
directions that actions move stand out, and are found one after another.

If the features are the next observation, directions that are predicted almost perfectly are kept as
well: they cost nothing, and the moved directions may depend on them later.

In all other directions the noise hides any effect, and effects are set to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import null_space

from cqm.logs.dataset import Logs
from cqm.models.preprocessing import whitening
from cqm.regression import RandomFourierFeatures

_CHUNK = 8192
_UNPREDICTABLE = 0.01  # directions with a smaller share of unexplained variance are kept
_NEGLIGIBLE = 1e-10
_WAVES = 32
_MOST_LATER = 1200  # largest number of regressors for later actions


@dataclass(frozen=True)
class Subspace:
    """Feature directions in which effects are learned.

    `effects @ measures` are coordinates; `coordinates @ reconstruction.T` are effects again.
    """

    measures: np.ndarray  # [features, kept]
    reconstruction: np.ndarray  # [features, kept]
    significant: bool = True  # False if no effect stood out and the quietest direction was kept

    def __len__(self) -> int:
        return self.measures.shape[1]


def visible_subspace(logs: Logs) -> Subspace:
    """The directions in which logs show effects; the least noisy one if they show none.

    Estimated from single steps if the features are the next observation, otherwise from outcomes.
    """
    single_steps = logs.features_are_next_observation
    before, after, actions = logs.observations, logs.outcomes, logs.first_actions
    if single_steps:
        steps = np.concatenate([before[:, None], logs.features[:, :-1]], axis=1)
        before = steps.reshape(-1, steps.shape[-1])
        after = logs.features.reshape(-1, after.shape[1])
        actions = logs.actions.ravel()
    if logs.propensities is not None and (not single_steps or logs.recipe.horizon == 1):
        propensities = logs.propensities
    else:
        shares = np.bincount(actions, minlength=logs.num_actions) / len(actions)
        propensities = np.tile(shares, (len(actions), 1))
    found = find_subspace(
        before, after, actions, propensities, features_are_next_observation=single_steps
    )
    if len(found):
        return found
    axes = np.linalg.svd(logs.outcomes - logs.outcomes.mean(axis=0), full_matrices=False)[2]
    return Subspace(axes[-1:].T, axes[-1:].T, significant=False)


def later_regressors(logs: Logs, seen: np.ndarray) -> np.ndarray:
    """Regressors for the later actions, `[n, ...]`; empty unless their law ignores the state.

    If their law ignores the state, they are independent of the first action, and regressing on them
    leaves less noise. Otherwise they carry part of the first action's effect and must not be used.
    """
    num, horizon = logs.actions.shape
    if not logs.recipe.continuation.open_loop or horizon == 1:
        return np.empty((num, 0))
    propensities = logs.recipe.continuation.probabilities(logs.num_actions)
    others = logs.num_actions - 1
    state = np.concatenate([np.ones((num, 1)), seen], axis=1)
    most = min(_MOST_LATER, num // 10)  # number of regressors that these logs can support
    state = state[:, : max(1, most // ((horizon - 1) * others))]
    taken = (logs.actions[:, 1:, None] == np.arange(others)) - propensities[:others]
    return (taken[..., None] * state[:, None, None]).reshape(num, -1)


def find_subspace(
    before: np.ndarray,
    after: np.ndarray,
    actions: np.ndarray,
    propensities: np.ndarray,
    *,
    features_are_next_observation: bool,
) -> Subspace:
    """The directions that actions visibly move.

    Args:
        before: Observations, `[n, observations]`.
        after: Features that followed, `[n, features]`.
        actions: The actions taken, `[n]`.
        propensities: Probabilities of all actions, `[n, actions]`.
        features_are_next_observation: Whether `after` are the observations that follow `before`.
    """
    num, size = after.shape
    # Units must not decide what counts as noise, but observations and features must share them.
    units = np.ones(size) if features_are_next_observation else after.std(axis=0)
    units = np.where(units > 0, units, 1.0)
    after = after / units
    centered = before - before.mean(axis=0)
    to_white = whitening(centered, np.eye(before.shape[1]), negligible=_NEGLIGIBLE)
    design, joint, total = _moments(centered, to_white, after, actions, propensities)
    states = 1 + to_white.shape[1] + _WAVES
    by_state = _residual(design[:states, :states], joint[:states], total)
    by_both = _residual(design, joint, total)
    noise = by_both / (degrees := max(1, num - len(design)))
    # The variance that actions explain: first with all interactions; if that shows nothing, with an
    # effect that is the same in all states, which needs fewer regressors and so stands out sooner.
    others = propensities.shape[1] - 1
    alike = [*range(states), *range(states, len(design), (len(design) - states) // others)]
    by_alike = _residual(design[np.ix_(alike, alike)], joint[alike], total)
    signals = (
        ((by_state - by_both) / num, len(design) - states),
        ((by_state - by_alike) / num, others),
    )
    basis = np.zeros((size, 0))
    if features_are_next_observation:
        shares, own = np.linalg.eigh(to_white.T @ noise @ to_white)
        basis = np.linalg.qr(to_white @ own[:, shares < _UNPREDICTABLE])[0]
    floor = max(_NEGLIGIBLE * float(np.trace(total)) / num, 1e-30)
    carried = basis.shape[1]
    for signal, extra in signals:
        # One at a time, each orthogonal to the previous ones: the directions with the best signal-
        # to-noise ratios may all be close to the one with the smallest noise.
        while basis.shape[1] < size:
            rest = null_space(basis.T) if basis.shape[1] else np.eye(size)
            strength, direction = _clearest(rest.T @ signal @ rest, rest.T @ noise @ rest, floor)
            # The largest strength to expect by chance alone.
            edge = (np.sqrt(extra) + np.sqrt(rest.shape[1]) + 3) ** 2 / degrees
            if strength <= edge:
                break
            basis = np.column_stack([basis, rest @ direction])
        if basis.shape[1] > carried:
            break
    return Subspace(basis / units[:, None], basis * units[:, None])


def _clearest(signal: np.ndarray, noise: np.ndarray, floor: float) -> tuple[float, np.ndarray]:
    """The largest ratio of signal to noise variance, and its unit direction."""
    scales, axes = np.linalg.eigh(noise)
    to_white = axes / np.sqrt(np.maximum(scales, floor))
    strengths, found = np.linalg.eigh(to_white.T @ signal @ to_white)
    direction = to_white @ found[:, -1]
    return float(strengths[-1]), direction / np.linalg.norm(direction)


def _moments(
    centered: np.ndarray,
    to_white: np.ndarray,
    after: np.ndarray,
    actions: np.ndarray,
    propensities: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Second moments of regressors, of regressors with outcomes, and of outcomes, in blocks.

    Regressors are random Fourier features of the state, and their products with each action's
    centred indicator, as many of these as the number of rows supports.
    """
    num, num_actions = propensities.shape
    width = 1 + to_white.shape[1] + _WAVES
    # Coordinates of large variance come first, because interactions start from that end.
    to_white = to_white[:, ::-1]
    rng = np.random.default_rng(0)
    fourier = RandomFourierFeatures.draw(centered[:_CHUNK] @ to_white, _WAVES, rng)
    interacting = int(np.clip(num // (20 * (num_actions - 1)), 1, width))
    shift = after.mean(axis=0)
    size = width + interacting * (num_actions - 1)
    design, joint = np.zeros((size, size)), np.zeros((size, after.shape[1]))
    total = np.zeros((after.shape[1], after.shape[1]))
    for start in range(0, num, _CHUNK):
        rows = slice(start, start + _CHUNK)
        state = fourier(centered[rows] @ to_white)
        taken = (actions[rows, None] == np.arange(num_actions)) - propensities[rows]
        both = taken[:, :-1, None] * state[:, None, :interacting]
        regressors = np.concatenate([state, both.reshape(len(state), -1)], axis=1)
        outcomes = after[rows] - shift
        design += regressors.T @ regressors
        joint += regressors.T @ outcomes
        total += outcomes.T @ outcomes
    return design, joint, total


def _residual(design: np.ndarray, joint: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Residual sum of squares of a regression."""
    ridge = 1e-10 * np.trace(design) / len(design) * np.eye(len(design))
    return total - joint.T @ np.linalg.solve(design + ridge, joint)
