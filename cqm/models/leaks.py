"""Leaks: observations that were recorded after the action, and rows that were copied.

An observation that was made before the action cannot depend on it, except through the propensities.
If these are known, this is tested. If they are not, an observation that moves with the action may
be its cause or its consequence, and only copies are recognised: exact ones, nearly exact ones that
leave the action no effect, and noisy ones that depend on everything else through the outcome alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, chi2, f as f_distribution, rankdata

from cqm.models.log_effects import contrasts
from cqm.models.sensitivity import correlations

EXACT = 1 - 1e-6  # squared correlation above which an observation is the outcome in other units
_NEARLY_EXACT = 0.95  # share of the outcome that one observation explains beyond all others
_LITTLE_EFFECT = 0.2  # share of an effect that is left given an observation that absorbs it
_CLEAR, _VERY_CLEAR, _NOT_CLEAR = 1e-4, 1e-6, 0.01  # p-values
_SOME = 0.05  # squared correlation below which nothing is said about an observation
_BINS = 20
_NO_GAP = 20.0  # median distances between outcomes; longer ones are a gap


@dataclass(frozen=True)
class Copy:
    """An observation and an outcome."""

    observation: int
    outcome: int
    share: float  # of the outcome's variance that the observation explains


def imbalances(observations: np.ndarray, taken: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """p-values of the hypothesis that an observation tells no more of the action than propensities.

    Each observation is tested by itself and by what the others do not explain of it; the smaller
    p-value counts, doubled.

    Args:
        observations: `[n, observations]`.
        taken: Indicators of the actions taken, `[n, actions]`.
        propensities: Their known probabilities, `[n, actions]`.

    Returns:
        One p-value per observation.
    """
    ranks = rankdata(observations, axis=0)
    ranks = (ranks - ranks.mean(axis=0)) / np.maximum(ranks.std(axis=0), 1e-12)
    precision = np.linalg.inv(correlations(ranks) + 1e-6 * np.eye(ranks.shape[1]))
    rest = ranks @ (precision / np.diag(precision))
    coding = contrasts(taken.shape[1])
    surprise, expected = (taken - propensities) @ coding, propensities @ coding
    spread = np.einsum("na,ai,aj->nij", propensities, coding, coding, optimize=True)
    spread -= expected[:, :, None] * expected[:, None]
    found = []
    for columns in (ranks, rest):
        totals = columns.T @ surprise
        covariances = np.einsum("nd,nij->dij", columns**2, spread, optimize=True)
        sizes = np.einsum("di,dij,dj->d", totals, np.linalg.pinv(covariances), totals)
        found.append(chi2.sf(sizes, coding.shape[1]))
    return np.minimum(1.0, 2 * np.min(found, axis=0))


def closest_copy(observations: np.ndarray, outcomes: np.ndarray, skipped: np.ndarray) -> Copy:
    """The observation and the outcome that are most alike.

    Args:
        observations: `[n, observations]`.
        outcomes: `[n, outcomes]`.
        skipped: Pairs that are not compared, `[observations, outcomes]`.
    """
    size = observations.shape[1]
    joint = correlations(np.concatenate([observations, outcomes], axis=1))
    shares = np.where(skipped, 0.0, joint[:size, size:] ** 2)
    one, other = np.unravel_index(shares.argmax(), shares.shape)
    return Copy(int(one), int(other), float(min(1.0, shares[one, other])))


def noisy_copies(
    observations: np.ndarray, taken: np.ndarray, outcomes: np.ndarray, skipped: np.ndarray
) -> list[Copy]:
    """Observations that look like an outcome with noise or in other units.

    Such an observation depends on the action. If the noise is small, it also explains nearly all of
    the outcome, and leaves next to no effect of the action. Otherwise, it depends on the action and
    on the other observations, but not once the outcome is given: an unlikely coincidence for a
    cause of the outcome.

    Args:
        observations: `[n, observations]`.
        taken: Indicators of the actions taken, `[n, actions]`.
        outcomes: `[n, outcomes]`.
        skipped: Pairs that are not compared, `[observations, outcomes]`.
    """
    num, size = observations.shape
    acted = taken @ contrasts(taken.shape[1])
    joint = _Joint(correlations(np.concatenate([observations, acted, outcomes], axis=1)), num)
    action = list(range(size, size + acted.shape[1]))
    found = []
    for own in range(size):
        rest = [i for i in range(size) if i != own and joint.values[own, i] ** 2 < EXACT]
        for outcome in range(outcomes.shape[1]):
            target = action[-1] + 1 + outcome
            alike = joint.values[own, target] ** 2
            if skipped[own, outcome] or alike < _SOME:
                continue
            if joint.p_value(own, action, rest) > _CLEAR:
                continue
            if joint.nearly_exact(own, target, action, rest) or joint.child(
                own, target, action, rest
            ):
                found.append(Copy(own, outcome, float(alike)))
    return found


@dataclass(frozen=True)
class _Joint:
    """Linear regressions among columns, from their correlations."""

    values: np.ndarray  # [columns, columns]
    num: int  # number of rows

    def left(self, column: int, given: list[int]) -> float:
        """Share of a column's variance that others do not explain."""
        joint = self.values[given, column]
        weights = np.linalg.solve(self.values[np.ix_(given, given)], joint)
        return float(max(self.values[column, column] - joint @ weights, 1e-9))

    def p_value(self, column: int, more: list[int], given: list[int]) -> float:
        """p-value of the hypothesis that more columns explain no more of a column."""
        before, after = self.left(column, given), self.left(column, [*given, *more])
        free = self.num - 1 - len(given) - len(more)
        if not more or free < 1:
            return 1.0
        ratio = max(before - after, 0.0) / len(more) / (after / free)
        return float(f_distribution.sf(ratio, len(more), free))

    def effect(self, target: int, action: list[int], given: list[int]) -> np.ndarray:
        """Coefficients of the action in a regression of a column."""
        columns = [*given, *action]
        joint = self.values[np.ix_(columns, columns)]
        return np.linalg.solve(joint, self.values[columns, target])[len(given) :]

    def nearly_exact(self, own: int, target: int, action: list[int], rest: list[int]) -> bool:
        """Whether an observation carries nearly all of the outcome, and with it the effect."""
        left, given = self.left(target, rest), [*rest, own]
        if self.left(target, given) > (1 - _NEARLY_EXACT) * left:
            return False
        total, direct = self.effect(target, action, rest), self.effect(target, action, given)
        return float(np.linalg.norm(direct)) < _LITTLE_EFFECT * float(np.linalg.norm(total))

    def child(self, own: int, target: int, action: list[int], rest: list[int]) -> bool:
        """Whether an observation depends on all else through the outcome alone."""
        others = [*action, *rest]
        if not rest or self.p_value(own, rest, []) > _VERY_CLEAR:
            return False
        explained = 1 - self.left(own, others)
        # There must be enough rows to see a tenth of what is explained without the outcome.
        visible = chi2.ppf(1 - _NOT_CLEAR, len(others)) / self.num < 0.1 * explained
        return (
            1 - self.left(own, rest) > _SOME
            and bool(visible)
            and self.p_value(own, others, [target]) > _NOT_CLEAR
        )


def told_actions(observations: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Share of the action's variance that each observation tells by itself, `[observations]`.

    Each observation is cut into a few ranges with about the same number of decisions.
    """
    num = len(taken)
    total = float((taken - taken.mean(axis=0)).var(axis=0).sum()) or 1.0
    shares = []
    for column in observations.T:
        ranges = ((rankdata(column, method="min") - 1) * _BINS // num).astype(int)
        counts = np.maximum(np.bincount(ranges, minlength=_BINS), 1)
        means = np.stack([np.bincount(ranges, own, _BINS) for own in taken.T], axis=1)
        left = float(((taken - (means / counts[:, None])[ranges]) ** 2).mean(axis=0).sum())
        shares.append(1 - left / total)
    return np.array(shares)


def repeated_rows(
    observations: np.ndarray,
    actions: np.ndarray,
    features: np.ndarray,
    propensities: np.ndarray,
    groups: np.ndarray | None,
) -> tuple[int, float]:
    """Number of repeated decisions, and a bound on the probability that this is due to chance.

    Where the same observation comes back, the action is chosen anew. Copies also repeat the action
    and the outcome. Repeats within a group are not counted, because a group counts as one.

    Args:
        observations: `[n, observations]`.
        actions: `[n, horizon]`.
        features: `[n, horizon, features]`.
        propensities: `[n, actions]`.
        groups: Group number of each row, `[n]`.
    """
    num = len(observations)
    whole = np.concatenate([observations, actions, features.reshape(num, -1)], axis=1)
    number = np.unique(whole + 0.0, axis=0, return_inverse=True)[1].ravel()
    place = np.unique(observations + 0.0, axis=0, return_inverse=True)[1].ravel()
    if groups is not None:
        kept = np.unique(np.stack([number, groups], axis=1), axis=0, return_index=True)[1]
        number, place, propensities = number[kept], place[kept], propensities[kept]
    rows = np.bincount(place)
    distinct = np.bincount(place[np.unique(number, return_index=True)[1]], minlength=len(rows))
    again, same = int((rows > 1).sum()), int(((rows > 1) & (distinct == 1)).sum())
    agreement = float((propensities**2).sum(axis=1).mean())
    copies = int((rows - 1)[(rows > 1) & (distinct == 1)].sum())
    return copies, float(binom.sf(same - 1, again, agreement)) if same else 1.0


def is_of_action_alone(outcome: np.ndarray, actions: np.ndarray) -> bool:
    """Whether all decisions with the same action have the same outcome.

    Args:
        outcome: `[n]`.
        actions: The actions taken, `[n]`.

    >>> is_of_action_alone(np.array([2.0, 5.0, 2.0]), np.array([0, 1, 0]))
    True
    """
    within = max(float(np.ptp(outcome[actions == name])) for name in np.unique(actions))
    return 1e9 * within <= float(np.ptp(outcome)) and bool(np.ptp(outcome))


def decides_action(outcome: np.ndarray, actions: np.ndarray) -> bool:
    """Whether each action has a range of outcomes of its own, next to those of other actions.

    This happens if the action follows from the outcome. A strong effect may also separate the
    outcomes of different actions, but leaves gaps between them.

    Args:
        outcome: `[n]`.
        actions: The actions taken, `[n]`.
    """
    order = np.argsort(outcome, kind="stable")
    steps, taken = np.diff(outcome[order]), actions[order]
    changes = taken[1:] != taken[:-1]
    if changes.sum() != len(np.unique(actions)) - 1:
        return False
    return 0 < float(steps[changes].max(initial=0)) < _NO_GAP * float(np.median(steps))
