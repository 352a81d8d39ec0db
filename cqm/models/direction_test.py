"""Whether actions visibly move some direction of the features: a test by random signs.

Regressors for the actions and residual outcomes have products that sum to nothing if actions move
nothing. How far from nothing the sum strays by chance is seen by flipping the signs of the products
at random, one sign per group of trajectories. Unlike a formula, this holds for noise of any shape,
and for rows that are not independent within a trajectory.

The noise is estimated as well, which makes the strongest of many directions look stronger than with
known noise; a factor for this follows from the law of the largest root of an F matrix (Johnstone
2008, "Multivariate analysis and Jacobi ensembles: largest eigenvalue, Tracy-Widom limits and rates
of convergence").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_GROUPS = 128  # groups of rows that share a sign
_FLIPS = 100
_SURE = 3.5  # standard deviations above the mean by chance; exceeded in about 1 of 500 null sets
_LIKELY = 2.0  # the same for further directions, once one is sure; exceeded in about 1 of 25
_MANY = 8  # number of features from which on the first direction must be sure
_DAMPED = 0.05  # regressors whose variance is a smaller share of the mean count for less


@dataclass(frozen=True)
class Scores:
    """Products of regressors for the actions with outcomes, summed over rows."""

    regressors: np.ndarray  # [q, q], second moments of the regressors, sums over rows
    observed: np.ndarray  # [q, features]
    by_chance: np.ndarray  # [groups, q, features], from the residuals of the full regression
    degrees: int  # degrees of freedom of the noise

    def part(self, columns: list[int]) -> Scores:
        """The scores of some of the regressors."""
        return Scores(
            self.regressors[np.ix_(columns, columns)],
            self.observed[columns],
            self.by_chance[:, columns],
            self.degrees,
        )


@dataclass(frozen=True)
class DirectionTest:
    """Scores in units that make all regressors for the actions equally uncertain."""

    observed: np.ndarray  # [r, features]
    flipped: np.ndarray  # [flips, r, features]
    rank: float  # effective number of regressors
    degrees: int
    single: bool  # whether to test the features one by one, instead of all their combinations

    @classmethod
    def of(cls, scores: Scores, *, single: bool) -> DirectionTest:
        """Prepare a test."""
        values, axes = np.linalg.eigh(scores.regressors)
        values = np.maximum(values, 0)
        damping = _DAMPED * values.mean() + 1e-300
        root = (axes / np.sqrt(values + damping)).T
        rng = np.random.default_rng(0)
        signs = rng.choice([-1.0, 1.0], size=(_FLIPS, len(scores.by_chance)))
        drawn = np.tensordot(signs, scores.by_chance, 1)
        rank = float((values / (values + damping)).sum())
        return cls(root @ scores.observed, root @ drawn, rank, scores.degrees, single)

    def clearest(
        self, rest: np.ndarray, noise: np.ndarray, floor: float, *, first: bool
    ) -> tuple[bool, np.ndarray]:
        """Whether the clearest direction within `rest` stands out, and that direction.

        Args:
            rest: Orthonormal directions that are still to be tested, `[features, size]`.
            noise: Covariance of the noise, `[features, features]`.
            floor: Least variance of the noise in any direction.
            first: Whether no direction has stood out yet. Where actions move something, they often
                move more, so that further directions need less evidence; so do few features, whose
                noise does little harm.
        """
        many = min(1.0, (len(rest) - 1) / (_MANY - 1)) if first else 0.0
        sure = _LIKELY + many * (_SURE - _LIKELY)
        if self.single:
            return self._clearest_feature(rest, noise, floor, sure)
        scales, axes = np.linalg.eigh(rest.T @ noise @ rest)
        to_white = rest @ (axes / np.sqrt(np.maximum(scales, floor)))
        _, strengths, found = np.linalg.svd(self.observed @ to_white)
        direction = to_white @ found[0]
        factor = _unknown_noise_factor(rest.shape[1], self.rank, self.degrees)
        if not np.isfinite(factor):  # too few rows to know the noise in all directions
            return False, direction
        chance = np.linalg.norm(self.flipped @ to_white, ord=2, axis=(1, 2))
        return _stands_out(strengths[0], chance * factor, sure), direction / np.linalg.norm(
            direction
        )

    def _clearest_feature(
        self, rest: np.ndarray, noise: np.ndarray, floor: float, sure: float
    ) -> tuple[bool, np.ndarray]:
        within = rest @ rest.T  # column j: the part of feature j that is still to be tested
        length = np.sqrt(np.diag(within))
        within = within[:, length > 0.3] / length[length > 0.3]
        if within.shape[1] == 0:
            return False, rest[:, 0]
        spread = np.sqrt(np.maximum(np.einsum("ij,ik,kj->j", within, noise, within), floor))
        strengths = np.linalg.norm(self.observed @ within, axis=0) / spread
        chance = (np.linalg.norm(self.flipped @ within, axis=1) / spread).max(axis=1)
        best = int(strengths.argmax())
        return _stands_out(strengths[best], chance, sure), within[:, best]


def _stands_out(strength: float, chance: np.ndarray, sure: float) -> bool:
    return bool(strength > chance.mean() + sure * chance.std())


def _unknown_noise_factor(size: int, rank: float, degrees: int) -> float:
    """Factor of the strongest signal-to-noise ratio by chance if the noise is estimated."""
    if degrees <= size + 1:
        return np.inf
    total = degrees + rank - 1
    phi = 2 * np.arcsin(np.sqrt(min(1.0, (max(size, rank) - 0.5) / total)))
    gamma = 2 * np.arcsin(np.sqrt(min(1.0, max(min(size, rank) - 0.5, 0.25) / total)))
    if phi + gamma >= np.pi:
        return np.inf
    estimated = degrees * np.tan((phi + gamma) / 2) ** 2
    known = (np.sqrt(max(size, rank) - 0.5) + np.sqrt(max(min(size, rank) - 0.5, 0.25))) ** 2
    return float(np.sqrt(max(1.0, estimated / known)))
