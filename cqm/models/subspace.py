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
from cqm.models.direction_test import NUM_GROUPS, DirectionTest, Scores
from cqm.models.preprocessing import whitening
from cqm.regression import RandomFourierFeatures, fold_numbers

_CHUNK = 8192
_UNPREDICTABLE = 0.01  # directions with a smaller share of unexplained variance are kept
_NEGLIGIBLE = 1e-10
_WAVES = 32
_ROWS_PER_FUNCTION = 4  # rows per function of the state
_MOST_PRODUCTS = 512  # largest number of products of actions and functions of the state
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


def visible_subspace(logs: Logs, propensities: np.ndarray | None) -> Subspace:
    """The directions in which logs show effects; the least noisy one if they show none.

    Estimated from single steps if the features are the next observation, otherwise from outcomes.

    Args:
        logs: The trajectories.
        propensities: Probabilities of the first actions, `[n, actions]`; None if unknown.
    """
    single_steps = logs.features_are_next_observation
    before, after, actions = logs.observations, logs.outcomes, logs.first_actions
    groups = np.arange(len(logs)) if logs.groups is None else logs.groups
    if single_steps:
        steps = np.concatenate([before[:, None], logs.features[:, :-1]], axis=1)
        before = steps.reshape(-1, steps.shape[-1])
        after = logs.features.reshape(-1, after.shape[1])
        actions = logs.actions.ravel()
        groups = np.repeat(groups, logs.recipe.horizon)
    if propensities is None or len(propensities) < len(actions):
        shares = np.bincount(actions, minlength=logs.num_actions) / len(actions)
        propensities = np.tile(shares, (len(actions), 1))
    found = find_subspace(
        before,
        after,
        actions,
        propensities,
        features_are_next_observation=single_steps,
        groups=groups,
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
    groups: np.ndarray | None = None,
) -> Subspace:
    """The directions that actions visibly move.

    Args:
        before: Observations, `[n, observations]`.
        after: Features that followed, `[n, features]`.
        actions: The actions taken, `[n]`.
        propensities: Probabilities of all actions, `[n, actions]`.
        features_are_next_observation: Whether `after` are the observations that follow `before`.
        groups: Group number of each row, `[n]`; rows of one group are not independent. By default
            each row is a group.
    """
    num, size = after.shape
    # Units must not decide what counts as noise, but observations and features must share them.
    units = np.ones(size) if features_are_next_observation else after.std(axis=0)
    units = np.where(units > 0, units, 1.0)
    after = after / units
    centered = before - before.mean(axis=0)
    to_white = whitening(centered, np.eye(before.shape[1]), negligible=_NEGLIGIBLE)
    regressors = _Regressors.of(centered, to_white, actions, propensities)
    shift = after.mean(axis=0)
    scores, noise, total = _scores(regressors, after - shift, groups)
    basis = np.zeros((size, 0))
    if features_are_next_observation:
        shares, own = np.linalg.eigh(to_white.T @ noise @ to_white)
        basis = np.linalg.qr(to_white @ own[:, shares < _UNPREDICTABLE])[0]
    floor = max(_NEGLIGIBLE * float(np.trace(total)) / num, 1e-30)
    # First with all interactions of actions and state; then with effects that are the same in all
    # states, which have fewer regressors and so stand out sooner; then feature by feature.
    alike = scores.part(list(range(0, len(scores.observed), regressors.interacting)))
    tests = (
        DirectionTest.of(scores, single=False),
        DirectionTest.of(alike, single=False),
        DirectionTest.of(alike, single=True),
    )
    # One direction at a time, each orthogonal to the previous ones: those with the best signal-to-
    # noise ratios may all be close to the one with the smallest noise.
    first = True
    while basis.shape[1] < size:
        rest = null_space(basis.T) if basis.shape[1] else np.eye(size)
        tried = (test.clearest(rest, noise, floor, first=first) for test in tests)
        direction = next((direction for visible, direction in tried if visible), None)
        if direction is None:
            break
        basis, first = np.column_stack([basis, direction]), False
    return Subspace(basis / units[:, None], basis * units[:, None])


@dataclass(frozen=True)
class _Regressors:
    """Functions of the state, and their products with each action's centred indicator."""

    inputs: np.ndarray  # [n, coordinates], coordinates of large variance first
    fourier: RandomFourierFeatures
    actions: np.ndarray  # [n]
    propensities: np.ndarray  # [n, actions]
    interacting: int  # the first functions of the state, which are multiplied with actions

    @classmethod
    def of(
        cls,
        centered: np.ndarray,
        to_white: np.ndarray,
        actions: np.ndarray,
        propensities: np.ndarray,
    ) -> _Regressors:
        """As many functions as the number of rows supports."""
        num, num_actions = propensities.shape
        most = max(1, num // _ROWS_PER_FUNCTION - 1)
        to_white = to_white[:, ::-1][:, :most]
        inputs = centered @ to_white
        waves = max(0, min(_WAVES, most - inputs.shape[1]))
        fourier = RandomFourierFeatures.draw(inputs[:_CHUNK], waves, np.random.default_rng(0))
        others = num_actions - 1
        enough = min(num // (20 * others), _MOST_PRODUCTS // others)
        return cls(
            inputs,
            fourier,
            actions,
            propensities,
            int(np.clip(enough, 1, 1 + inputs.shape[1] + waves)),
        )

    @property
    def num_states(self) -> int:
        """Number of functions of the state."""
        return 1 + self.inputs.shape[1] + len(self.fourier.phases)

    @property
    def size(self) -> int:
        """Number of all regressors."""
        return self.num_states + self.interacting * (self.propensities.shape[1] - 1)

    def __call__(self, rows: np.ndarray | slice) -> np.ndarray:
        """The regressors of some rows, those of the state first."""
        state = self.fourier(self.inputs[rows])
        shares = self.propensities[rows]
        taken = (self.actions[rows, None] == np.arange(shares.shape[1])) - shares
        both = taken[:, :-1, None] * state[:, None, : self.interacting]
        return np.concatenate([state, both.reshape(len(state), -1)], axis=1)


def _scores(
    regressors: _Regressors, outcomes: np.ndarray, groups: np.ndarray | None
) -> tuple[Scores, np.ndarray, np.ndarray]:
    """Scores of the actions, covariance of the noise, and sums of squares of the outcomes."""
    num, features = outcomes.shape
    size, states = regressors.size, regressors.num_states
    design, joint = np.zeros((size, size)), np.zeros((size, features))
    for start in range(0, num, _CHUNK):
        rows = slice(start, start + _CHUNK)
        own = regressors(rows)
        design += own.T @ own
        joint += own.T @ outcomes[rows]
    total = outcomes.T @ outcomes
    inverse, rank = _inverse(design)
    weights = inverse @ joint
    by_state = _inverse(design[:states, :states])[0] @ design[:states, states:]
    degrees = max(1, num - rank)
    noise = (total - joint.T @ weights) / degrees
    # Rows are taken group by group, so that each group's scores are one product.
    different, names = np.unique(np.arange(num) if groups is None else groups, return_inverse=True)
    num_groups = min(NUM_GROUPS, len(different))
    numbers = fold_numbers(num, num_groups, names) if num_groups > 1 else np.zeros(num, int)
    energies = np.zeros(len(different))
    variances = np.maximum(np.diag(noise), _NEGLIGIBLE * np.trace(total) / num + 1e-30)
    by_chance = np.zeros((num_groups, size - states, features))
    for group in range(num_groups):
        members = np.flatnonzero(numbers == group)
        for start in range(0, len(members), _CHUNK):
            some = members[start : start + _CHUNK]
            own = regressors(some)
            moved = own[:, states:] - own[:, :states] @ by_state
            # A row pulls the regression towards itself, the more the further out it lies.
            outside = np.maximum(1 - ((own @ inverse) * own).sum(axis=1), 0.1)
            errors = (outcomes[some] - own @ weights) / outside[:, None]
            by_chance[group] += moved.T @ errors
            np.add.at(energies, names[some], (errors**2 / variances).sum(axis=1))
    # The noise is known only as well as from so many independent rows of the same size.
    effective = energies.sum() ** 2 / max(float((energies**2).sum()), 1e-300) * (1 + 2 / features)
    degrees = int(min(1.0, effective / num) * degrees)
    observed = joint[states:] - by_state.T @ joint[:states]
    left = design[states:, states:] - by_state.T @ design[:states, states:]
    return Scores((left + left.T) / 2, observed, by_chance, degrees), noise, total


def _inverse(square: np.ndarray) -> tuple[np.ndarray, int]:
    """The pseudo-inverse of a matrix of second moments, and its rank."""
    values, axes = np.linalg.eigh(square)
    kept = values > _NEGLIGIBLE * max(float(values[-1]), 1e-300)
    return (axes[:, kept] / values[kept]) @ axes[:, kept].T, int(kept.sum())
