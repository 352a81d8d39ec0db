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

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import null_space

from cqm.logs.trajectories import Trajectories, indicators
from cqm.models.direction_test import NUM_GROUPS, DirectionTest, Scores
from cqm.models.preprocessing import second_moments, whitenings
from cqm.regression import RandomFourierFeatures, unit_folds
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros

_DRAWN_AT = 8192  # rows whose spread sets the scale of the random Fourier features
_UNPREDICTABLE = 0.01  # directions with a smaller share of unexplained variance are kept
_NEGLIGIBLE = 1e-10
_WAVES = 32
_ROWS_PER_FUNCTION = 4  # rows per function of the state
_MOST_PRODUCTS = 512  # largest number of products of actions and functions of the state
_MOST_STEPS = 2**18  # steps that are looked at, if there are no more trajectories than that
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


def visible_subspace(rows: Rows, logs: Trajectories) -> Subspace:
    """The directions in which logs show effects; the least noisy one if they show none.

    Estimated from single steps if the features are the next observation, otherwise from outcomes.

    Args:
        rows: The trajectories, with a column `propensities` if those of the first actions are
            known or were estimated.
        logs: The logs that they come from.
    """
    single_steps = logs.features_are_next_observation
    decisions = rows.having(
        before=lambda block: block["observations"],
        after=lambda block: block["outcomes"],
    )
    if single_steps:
        decisions = _steps(rows, logs)
    if "propensities" not in rows.columns or decisions.num > rows.num:
        shares = decisions.mean("taken")
        decisions = decisions.having(
            propensities=lambda block: np.broadcast_to(shares, block["taken"].shape)
        )
    found = find_subspace(decisions, features_are_next_observation=single_steps)
    if len(found):
        return found
    mean = rows.mean("outcomes")
    quietest = np.linalg.eigh(second_moments(rows, lambda block: block["outcomes"] - mean))[1][
        :, :1
    ]
    return Subspace(quietest, quietest, significant=False)


def _steps(rows: Rows, logs: Trajectories) -> Rows:
    """The steps of all trajectories, each with what came before and after it.

    Of very many trajectories, the first steps are enough.
    """
    num_actions = logs.num_actions
    horizon = min(logs.recipe.horizon, max(1, _MOST_STEPS // rows.num))

    def before(block: Block) -> np.ndarray:
        observations, features = block["observations"], block["features"][:, :horizon]
        steps = np.concatenate([observations[:, None], features[:, :-1]], axis=1)
        return steps.reshape(-1, steps.shape[-1])

    columns = {
        "before": before,
        "after": lambda block: block["features"][:, :horizon].reshape(-1, len(logs.feature_names)),
        "taken": lambda block: indicators(block["actions"][:, :horizon].ravel(), num_actions),
    }
    if "propensities" in rows.columns:
        columns["propensities"] = rows.columns["propensities"]
    return replace(
        rows.having(**columns),
        num=rows.num * horizon,
        block=max(1, rows.block // horizon),
        per_unit=horizon,
    )


def later_regressors(logs: Trajectories, num: int) -> ColumnFn | None:
    """Regressors for the later actions, `[n, ...]`; None unless their law ignores the state.

    If their law ignores the state, they are independent of the first action, and regressing on them
    leaves less noise. Otherwise they carry part of the first action's effect and must not be used.

    Args:
        logs: The logs.
        num: Number of trajectories.
    """
    horizon = logs.recipe.horizon
    if not logs.recipe.continuation.open_loop or horizon == 1:
        return None
    propensities = logs.recipe.continuation.probabilities(logs.num_actions)
    others = logs.num_actions - 1
    most = min(_MOST_LATER, num // 10)  # number of regressors that these logs can support
    few = max(1, most // ((horizon - 1) * others))

    def regressors(block: Block) -> np.ndarray:
        state = np.concatenate([np.ones((len(block), 1)), block["main_inputs"]], axis=1)[:, :few]
        taken = (block["actions"][:, 1:, None] == np.arange(others)) - propensities[:others]
        return (taken[..., None] * state[:, None, None]).reshape(len(block), -1)

    return regressors


def find_subspace(rows: Rows, *, features_are_next_observation: bool) -> Subspace:
    """The directions that actions visibly move.

    Args:
        rows: Rows with columns `before` (observations), `after` (the features that followed),
            `taken` (indicators of the actions) and `propensities`. Rows that are not independent
            share a number in a column `groups`.
        features_are_next_observation: Whether `after` are the observations that follow `before`.
    """
    num, size = rows.num, rows.shape("after")[0]
    level = rows.mean("after")
    # Units must not decide what counts as noise, but observations and features must share them.
    units = np.ones(size)
    if not features_are_next_observation:
        units = np.sqrt(
            rows.having(squares=lambda block: (block["after"] - level) ** 2).mean("squares")
        )
        units = np.where(units > 0, units, 1.0)
    shift = rows.mean("before")
    centered = rows.having(
        values=lambda block: block["before"] - shift,
        scaled=lambda block: (block["after"] - level) / units,
    )
    width = len(shift)
    to_white = whitenings(centered, np.eye(width), negligible=_NEGLIGIBLE)[0]
    regressors = _Regressors.of(centered, to_white)
    scores, noise, total = _scores(regressors, centered)
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

    to_white: np.ndarray  # [observations, coordinates], coordinates of large variance first
    fourier: RandomFourierFeatures
    num_actions: int
    interacting: int  # the first functions of the state, which are multiplied with actions

    @classmethod
    def of(cls, rows: Rows, to_white: np.ndarray) -> _Regressors:
        """As many functions as the number of rows supports."""
        num, num_actions = rows.num, rows.shape("taken")[-1]
        most = max(1, num // _ROWS_PER_FUNCTION - 1)
        to_white = to_white[:, ::-1][:, :most]
        inputs = rows.head(_DRAWN_AT)["values"][:_DRAWN_AT] @ to_white
        waves = max(0, min(_WAVES, most - inputs.shape[1]))
        fourier = RandomFourierFeatures.draw(inputs, waves, np.random.default_rng(0))
        others = num_actions - 1
        enough = min(num // (20 * others), _MOST_PRODUCTS // others)
        return cls(
            to_white,
            fourier,
            num_actions,
            int(np.clip(enough, 1, 1 + inputs.shape[1] + waves)),
        )

    @property
    def num_states(self) -> int:
        """Number of functions of the state."""
        return 1 + self.to_white.shape[1] + len(self.fourier.phases)

    @property
    def size(self) -> int:
        """Number of all regressors."""
        return self.num_states + self.interacting * (self.num_actions - 1)

    def __call__(self, block: Block) -> np.ndarray:
        """The regressors of a block, those of the state first."""
        state = self.fourier(block["values"] @ self.to_white)
        taken = block["taken"] - block["propensities"]
        both = taken[:, :-1, None] * state[:, None, : self.interacting]
        return np.concatenate([state, both.reshape(len(state), -1)], axis=1)


def _scores(regressors: _Regressors, rows: Rows) -> tuple[Scores, np.ndarray, np.ndarray]:
    """Scores of the actions, covariance of the noise, and sums of squares of the outcomes."""
    num, features = rows.num, rows.shape("scaled")[0]
    size, states = regressors.size, regressors.num_states

    def add_moments(sums: Sums, block: Block) -> None:
        own, outcomes = regressors(block), block["scaled"]
        sums["design"] += own.T @ own
        sums["joint"] += own.T @ outcomes
        sums["total"] += outcomes.T @ outcomes

    empty = zeros(design=(size, size), joint=(size, features), total=(features, features))
    sums = rows.total("directions", empty, add_moments)
    design, joint, total = sums["design"], sums["joint"], sums["total"]
    inverse, rank = _inverse(design)
    weights = inverse @ joint
    by_state = _inverse(design[:states, :states])[0] @ design[:states, states:]
    degrees = max(1, num - rank)
    noise = (total - joint.T @ weights) / degrees
    num_groups = min(NUM_GROUPS, rows.num_units)
    signs = np.zeros(rows.num_units, np.int16)  # group of rows that share a sign, of each unit
    if num_groups > 1:
        signs = unit_folds(rows.num_units, num_groups, "groups")
    variances = np.maximum(np.diag(noise), _NEGLIGIBLE * np.trace(total) / num + 1e-30)

    def add_scores(sums: Sums, block: Block) -> None:
        own, units = regressors(block), _units(rows, block)
        moved = own[:, states:] - own[:, :states] @ by_state
        # A row pulls the regression towards itself, the more the further out it lies.
        outside = np.maximum(1 - ((own @ inverse) * own).sum(axis=1), 0.1)
        errors = (block["scaled"] - own @ weights) / outside[:, None]
        # Each group's scores are one product.
        order = np.argsort(signs[units], kind="stable")
        ends = np.cumsum(np.bincount(signs[units], minlength=num_groups))
        for group, members in enumerate(np.split(order, ends[:-1])):
            sums["by_chance"][group] += moved[members].T @ errors[members]
        energies = (errors**2 / variances).sum(axis=1)
        if rows.num_groups is not None:
            np.add.at(sums["energies"], units, energies)
        else:  # whole units
            energies = energies.reshape(-1, rows.per_unit).sum(axis=1)
            sums["energies"] += [energies.sum(), (energies**2).sum()]

    empty = zeros(
        by_chance=(num_groups, size - states, features),
        energies=(2 if rows.num_groups is None else rows.num_groups,),
    )
    sums = rows.total("signs", empty, add_scores)
    energies = sums["energies"]
    if rows.num_groups is not None:
        energies = np.array([energies.sum(), (energies**2).sum()])
    # The noise is known only as well as from so many independent rows of the same size.
    effective = energies[0] ** 2 / max(float(energies[1]), 1e-300) * (1 + 2 / features)
    degrees = int(min(1.0, effective / num) * degrees)
    observed = joint[states:] - by_state.T @ joint[:states]
    left = design[states:, states:] - by_state.T @ design[:states, states:]
    found = Scores((left + left.T) / 2, observed, sums["by_chance"], degrees)
    return found, noise, total


def _units(rows: Rows, block: Block) -> np.ndarray:
    """The unit of each row of a block, `[n]`."""
    own = block["groups"] if rows.num_groups is not None else np.arange(block.start, block.stop)
    return np.repeat(own, rows.per_unit)


def _inverse(square: np.ndarray) -> tuple[np.ndarray, int]:
    """The pseudo-inverse of a matrix of second moments, and its rank."""
    values, axes = np.linalg.eigh(square)
    kept = values > _NEGLIGIBLE * max(float(values[-1]), 1e-300)
    return (axes[:, kept] / values[kept]) @ axes[:, kept].T, int(kept.sum())
