"""The part of the audit that measures what sharing noise is worth, and compares it with theory."""

from __future__ import annotations

import numpy as np
from scipy import stats

from cqm.branches.dataset import Branches
from cqm.branches.simulate import Plan, roll_open_loop
from cqm.quotient import center
from cqm.worlds.check import Check
from cqm.worlds.contract import Status, take

FALSE_ALARMS = 5e-7  # probability that a correct set fails a statistical check
_STATES, _DRAWS = 32, 16  # of fresh continuations, for the variance of a difference
_ROUNDING = 64 * np.finfo(float).eps  # relative size below which a difference is rounding error


def common_signal(sample: Branches, rng: np.random.Generator) -> Check:
    """Whether a signal that all branches of a family have cancels from their effects."""
    outcomes = sample.outcomes
    effects = center(outcomes)
    size = float(np.abs(effects).max())
    signal = 1000 * size * rng.standard_normal((*effects.shape[:2], 1, effects.shape[3]))
    change = float(np.abs(center(outcomes + signal) - effects).max())
    # Effects far smaller than the outcomes have few digits, and effects of zero none.
    allowed = max(1e-9 * size, _ROUNDING * float(np.abs(outcomes).max() + np.abs(signal).max()))
    return Check(
        "a shared signal a thousand times larger than the effects cancels",
        change <= allowed,
        f"relative change {change / size:.1e}" if size else "all effects are zero",
    )


def nuisance_variance(plan: Plan, sample: Branches, rng: np.random.Generator) -> list[Check]:
    """Whether branches share the nuisance; separate copies would add twice its variance."""
    nuisance = plan.world.nuisance
    if nuisance is None:
        return []
    common = plan.recipe.discounted(sample.array("nuisance"))  # [n, draws, arms or 1, dimension]
    spread = float(np.ptp(common, axis=2).max())
    shared = Check(
        "the branches of a family share one nuisance", spread == 0, f"spread {spread:.2g}"
    )
    # In the discounted sum, given the start, the noise of step j has weight Σ_{k≥j} γᵏ pᵏ⁻ʲ.
    lags = np.arange(plan.recipe.horizon)
    weights = [
        np.sum(plan.recipe.discounts[j:] * nuisance.persistence ** (lags[j:] - j)) for j in lags
    ]
    predicted = 2 * nuisance.scale**2 * np.sum(np.square(weights))
    start = nuisance.start(len(sample), rng)[:, None]
    noise = nuisance.noise((len(sample), 2, plan.recipe.horizon), rng)
    pair = plan.recipe.discounted(nuisance.path(start, noise))
    squares = (pair[:, 0] - pair[:, 1]) ** 2
    added, num = squares.mean(), squares.size
    deviation = abs(added - predicted) / (predicted * np.sqrt(2 / num))
    # The nuisance is normal, so the sum of squares is chi-squared.
    law, total = stats.chi2(num), num * added / predicted
    p_value = 2 * min(law.cdf(total), law.sf(total))
    effect = np.var(center(sample.array("outcome")), axis=(0, 1, 2)).mean()
    return [
        shared,
        Check(
            "separate nuisance paths per branch add the predicted variance",
            bool(p_value > FALSE_ALARMS),
            f"{added:.3f} measured, {predicted:.3f} predicted, {deviation:.1f} standard errors "
            f"apart; after amplification, the added variance is "
            f"{nuisance.amplitude**2 * added / max(effect, 1e-300):.3g} times that of the effects",
        ),
    ]


def continuation_variance(plan: Plan, sample: Branches, rng: np.random.Generator) -> list[Check]:
    """Var_independent = Var_shared + 2 Cov_shared for the difference of two arms, given a state.

    The draws in which a branch fails are left out. Both draws of a pair roll out both arms, so that
    leaving some out does not give the two a different law.
    """
    if plan.policy is not None or plan.recipe.horizon == 1:
        return []
    name = "separate continuations per branch add the predicted variance"
    num = min(len(sample), _STATES)
    rows = np.repeat(np.linspace(0, len(sample) - 1, num).astype(int), _DRAWS)
    states = take(plan.world.native.restore(sample.states), rows)
    noise, pairs = stored_noise(sample, 0)[rows], sample.first_controls[rows, :2]
    size = pairs.shape[-1:] if plan.recipe.continuation.on_box else ()

    def outcomes() -> tuple[np.ndarray, np.ndarray]:
        """Outcomes of pairs under a fresh continuation, `[n, draws, 2, features]`; which are OK."""
        continuation = plan.later_actions(rng.random((len(rows), plan.recipe.horizon - 1, *size)))
        result = roll_open_loop(plan, states, pairs, continuation, noise)
        ok = result.status == Status.OK
        features = np.where(ok[:, None, None, None], result.features, np.nan)
        values = plan.recipe.discounted(features).reshape(num, _DRAWS, 2, -1)
        return values, ok.reshape(num, _DRAWS)

    (shared, both_ok), (other, other_ok) = outcomes(), outcomes()
    kept = both_ok & other_ok
    usable = np.flatnonzero(kept.sum(axis=1) >= 4)
    families = [(shared[i][kept[i]], other[i][kept[i]]) for i in usable]  # [draws, 2, features]
    if len(families) < 2:
        return [Check(name, True, "not measured: too few branches succeed")]
    scale = np.mean([values.std(axis=0).mean(axis=0) for values, _ in families], axis=0)
    largest = np.max([np.abs(values).max(axis=(0, 1)) for values, _ in families], axis=0)
    moved = scale > _ROUNDING * largest  # features that later actions move, not only rounding error
    if not moved.any():
        return [Check(name, True, "nothing to measure: later actions do not affect the features")]

    def variance(values: np.ndarray) -> float:
        """Variance of `[draws, features]` over draws, averaged over the features that move."""
        return float((values[:, moved] / scale[moved]).var(axis=0, ddof=1).mean())

    # Moments over draws per state; their spread between states gives the standard error.
    moments = np.array(
        [
            [variance(v) for v in (a - b, a - other_b, a, b)]
            for a, b, other_b in ((one[:, 0], one[:, 1], two[:, 1]) for one, two in families)
        ]
    )
    together, apart = moments[:, 0], moments[:, 1]
    covariance = (moments[:, 2] + moments[:, 3] - together) / 2
    gap = apart - (together + 2 * covariance)
    deviation = abs(gap.mean()) / max(gap.std(ddof=1) / np.sqrt(len(gap)), 1e-12)
    p_value = 2 * stats.t.sf(deviation, len(gap) - 1)  # the spread is estimated from few states
    return [
        Check(
            name,
            bool(p_value > FALSE_ALARMS),
            f"variance of the difference between two arms: {together.mean():.3g} with a shared "
            f"continuation, {apart.mean():.3g} with separate ones (predicted "
            f"{(together + 2 * covariance).mean():.3g}, {deviation:.1f} standard errors apart)",
        )
    ]


def stored_noise(sample: Branches, draw: int) -> np.ndarray:
    """World noise of a stored draw, `[n, horizon, noise]`."""
    if "noise" in sample.array_names():
        return sample.array("noise")[:, draw]
    return np.empty((len(sample), sample.recipe.horizon, 0))
