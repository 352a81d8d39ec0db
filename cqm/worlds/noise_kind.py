"""The part of `check_world` that tests whether a world's noise is of the kind it declares.

Rollouts with fresh noise are compared with rollouts in which each number of the noise is nudged
by about a thousandth of its spread. Nudging a signal changes the features only slightly, or in only
a few rows if there are thresholds. Nudging a seed gives another seed.
"""

from __future__ import annotations

import numpy as np

from cqm.worlds.contract import Rollout, Status, take
from cqm.worlds.trial import Trial

_ROWS, _STEPS = 64, 16  # rollouts to compare, and their steps
_NUDGE = 1e-3  # of the spread
_COMMON = 0.05  # share of equal values, such as 0 for "no arrival", that are not nudged
_WHOLE_SPREAD = 100  # least spread of whole numbers to nudge, by at least 1
_FEWEST = 8  # rows that fresh noise must change
_SEED_LIKE = 0.5  # share of the change by fresh noise; signals have about a thousandth
_ROUNDING = 1e-12  # relative size below which a change is rounding error


def noise_kind_problem(trial: Trial) -> str:
    """How the noise differs from what the world declares; empty if it does not."""
    world, kind = trial.world, trial.world.noise_kind
    if kind == "seeds" and trial.result.drew is None:
        return ""
    rows = trial.all if kind == "seeds" else np.resize(trial.all, _ROWS)
    steps, native = min(trial.horizon, _STEPS), world.native
    noise, other = (
        np.asarray(native.sample_noise(len(rows), steps, trial.rng(purpose)))
        for purpose in (20, 21)
    )
    if noise.size == 0:
        return ""

    def roll(noise: np.ndarray) -> Rollout:
        states = take(trial.states, rows)
        if world.nuisance is not None:
            del states["nuisance"]
        return native.rollout(states, trial.controls[rows, :steps], noise.copy(), final=False)

    first, fresh = roll(noise), roll(other)
    if kind == "none":
        return _undeclared(first, fresh)
    if kind == "seeds":
        return _unreported(first, fresh)
    nudged = [_nudged(noise, sign) for sign in (1, -1)]
    if all(np.array_equal(noise, each) for each in nudged):  # few values, so nothing is near
        return ""
    results = [roll(each) for each in nudged]
    like_seeds = [
        name
        for i, name in enumerate(native.feature_names)
        if _relative_change(i, first, fresh, results) > _SEED_LIKE
    ]
    if not like_seeds:
        return ""
    return (
        f"nudging the noise by a thousandth of its spread changes {like_seeds[0]!r} about as much "
        "as fresh noise does, so its numbers act as seeds; declare noise_kind 'seeds', or sample "
        "the random quantities themselves (demand, wind) and use them in the step"
    )


def _undeclared(first: Rollout, fresh: Rollout) -> str:
    """A message if noise matters although none is declared; empty otherwise."""
    ok = _both_ok(first, fresh)
    same_status = np.array_equal(first.status, fresh.status)
    if same_status and np.array_equal(first.features[ok], fresh.features[ok]):
        return ""
    return (
        "different noise changes the features, but noise_kind is 'none'; declare 'signal' if its "
        "numbers enter the step, such as demand or wind, and 'seeds' if they seed a generator"
    )


def _unreported(first: Rollout, fresh: Rollout) -> str:
    """A message if rows that report no draws depend on the noise; empty otherwise."""
    if first.drew is None or fresh.drew is None:
        return ""
    quiet = _both_ok(first, fresh) & ~first.drew & ~fresh.drew
    differ = (first.features[quiet] != fresh.features[quiet]).any(axis=(1, 2)).sum()
    if not differ:
        return ""
    return (
        f"{differ} of {quiet.sum()} rollouts that report no draws depend on the noise; "
        "Rollout.drew must be True for them, or None if unknown"
    )


def _relative_change(feature: int, first: Rollout, fresh: Rollout, nudged: list[Rollout]) -> float:
    """Change of a feature by nudged relative to fresh noise; the smaller of the two directions.

    It is measured at the first step at which fresh noise matters, because later a chaotic world
    has amplified any nudge.
    """
    size = np.abs(first.features[first.status == Status.OK]).max(initial=0)

    def changes(result: Rollout) -> np.ndarray:
        ok = _both_ok(first, result)
        gap = np.abs(result.features[ok, :, feature] - first.features[ok, :, feature])
        return np.where(gap > _ROUNDING * size, gap, 0.0)  # [rows, steps]

    by_fresh = changes(fresh)
    enough = np.flatnonzero((by_fresh > 0).sum(axis=0) >= _FEWEST)
    if not len(enough):
        return 0.0
    step = enough[0]
    scale = np.median(by_fresh[by_fresh[:, step] > 0, step])

    def mean_change(gaps: np.ndarray) -> float:
        # Bounded, so that no single row decides.
        return float(np.minimum(gaps[:, step] / scale, 1).mean()) if len(gaps) >= _FEWEST else 0.0

    return min(mean_change(changes(result)) for result in nudged) / mean_change(by_fresh)


def _nudged(noise: np.ndarray, sign: int) -> np.ndarray:
    """The noise, with each column shifted by a thousandth of its spread.

    Values that occur often stay as they are, and whole numbers stay whole.
    """
    columns = noise.reshape(noise.shape[0] * noise.shape[1], -1).copy()
    for i, column in enumerate(columns.T.copy()):
        _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
        rare = counts[which] <= _COMMON * len(column)
        if not rare.any():
            continue
        spread = np.subtract(*np.quantile(column[rare], [0.75, 0.25]))
        shift = _NUDGE * spread
        if np.array_equal(column, np.rint(column)):
            shift = max(1, round(shift)) if spread >= _WHOLE_SPREAD else 0
        # Not sign * shift, because whole numbers may be unsigned.
        moved = column[rare] + shift if sign > 0 else column[rare] - shift
        columns[rare, i] = moved.astype(noise.dtype)
    return columns.reshape(noise.shape)


def _both_ok(one: Rollout, other: Rollout) -> np.ndarray:
    return (one.status == Status.OK) & (other.status == Status.OK)
