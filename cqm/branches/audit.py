"""The audit: evidence that a set of branches is what it claims to be.

Everything downstream relies on branches that share the state, the noise and the continuation, and
differ only in the first action. `audit` does not take the manifest's word for it: it replays stored
families, collects a block again from its seed, and compares the variance that sharing removes with
the variance that theory predicts.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from scipy import stats

from cqm import storage
from cqm.branches.collect import plan_collection
from cqm.branches.dataset import Branches
from cqm.branches.recipe import BLOCK, Continuation, Policy
from cqm.branches.simulate import Plan, roll_closed_loop, roll_open_loop, simulate_block
from cqm.display import counted
from cqm.quotient import center
from cqm.storage import DamagedFileError
from cqm.worlds.check import Check, Report
from cqm.worlds.contract import World, take
from cqm.worlds.identity import stored_identity
from cqm.worlds.loading import reload_world

AUDIT = "audit.json"
FALSE_ALARMS = 5e-7  # probability that a correct set fails a statistical check


def audit(
    branches: Branches,
    world: World | None = None,
    *,
    policy: Policy | None = None,
    families: int = 64,
    seed: int = 0,
) -> Report:
    """Check a sample of stored families; the report is saved next to the manifest.

    Args:
        branches: The set to audit.
        world: The world it was collected from; by default it is loaded by its name.
        policy: The policy of a state-dependent continuation.
        families: Number of families to check, at least 2.
        seed: Random seed for choosing families and for the fresh noise used in the comparisons.

    >>> import cqm
    >>> branches = cqm.collect(cqm.load_world("cartpole-swingup"), states=8, horizon=3)
    >>> print(audit(branches, families=4))  # doctest: +ELLIPSIS
    Branches(cartpole-swingup, ...), 4 families checked
      ok    checksums  ...
    """
    if families < 2:
        raise ValueError(f"families must be at least 2; got {families}")
    if "combined_seeds" in branches.manifest:
        raise ValueError(
            f"the set combines collections with seeds {branches.manifest['combined_seeds']}; "
            "audit each collection separately"
        )
    try:
        branches.verify()
    except DamagedFileError as error:
        return _report(branches, 0, [Check("checksums", False, str(error))])
    plan = _plan_of(branches, world or reload_world(branches.world), policy)
    rng = np.random.default_rng(seed)
    sample = _sample(branches, families, rng)
    checks = [
        Check("checksums", True, f"{counted(len(branches), 'family')} intact"),
        _replay(plan, sample),
        _collected_again(plan, branches, rng),
        _duplicate_arm(plan, sample, rng),
        _permuted_arms(plan, sample, rng),
        _common_signal(sample, rng),
        *_nuisance_variance(plan, sample, rng),
        *_continuation_variance(plan, sample, rng),
    ]
    return _report(branches, len(sample), checks)


def _report(branches: Branches, num_checked: int, checks: list[Check]) -> Report:
    report = Report(f"{branches}, {counted(num_checked, 'family')} checked", tuple(checks))
    if branches.directory is not None:
        content = {"passed": report.passed, **asdict(report)}
        storage.write_json(Path(branches.directory) / AUDIT, content)
    return report


def _plan_of(branches: Branches, world: World, policy: Policy | None) -> Plan:
    """The plan that the set was collected with, according to its manifest."""
    recipe, continuation = branches.recipe, branches.recipe.continuation
    if policy is not None:
        recipe = replace(recipe, continuation=Continuation.of(policy))
        if recipe.continuation != continuation:
            raise ValueError(
                f"the continuation of the set is {str(continuation)!r}; got policy {policy.name!r}"
            )
    elif not continuation.open_loop:
        raise ValueError(f"the continuation of the set is {str(continuation)!r}; pass policy=")
    identity = stored_identity(world)
    if identity != branches.world:
        raise ValueError(f"the set was collected from world {branches.world}; got {identity}")
    return plan_collection(world, recipe)


def _sample(branches: Branches, families: int, rng: np.random.Generator) -> Branches:
    """Consecutive families from a random position."""
    if len(branches) == 0:
        raise ValueError("the set has no families; all were dropped or none was collected")
    start = int(rng.integers(max(1, len(branches) - families + 1)))
    return branches[start : start + families]


def _noise(sample: Branches, draw: int) -> np.ndarray:
    """World noise of a stored draw, `[n, horizon, noise]`."""
    if "noise" in sample.array_names():
        return sample.array("noise")[:, draw]
    return np.empty((len(sample), sample.recipe.horizon, 0))


def _outcomes(plan: Plan, sample: Branches, arms: np.ndarray, draw: int = 0) -> np.ndarray:
    """Outcomes of given arms under a stored draw, simulated again, `[n, arms, features]`."""
    states, noise = plan.world.native.restore(sample.states), _noise(sample, draw)
    if plan.policy is None:
        continuation = sample.continuation[:, draw, 0]
        result = roll_open_loop(plan, states, arms, continuation, noise)
    else:
        uniforms = sample.array("uniforms")[:, draw]
        nuisance = None
        if plan.world.nuisance is not None:
            nuisance = sample.array("nuisance")[:, draw, : arms.shape[1]]
        result = roll_closed_loop(plan, states, arms, uniforms, noise, nuisance)
    return plan.recipe.discounted(result.features)


def _replay(plan: Plan, sample: Branches) -> Check:
    again = np.stack(
        [_outcomes(plan, sample, sample.arms, draw) for draw in range(plan.recipe.draws)], axis=1
    )
    stored = sample.array("outcome")
    wrong, worst = int((again != stored).any(axis=(1, 2, 3)).sum()), np.abs(again - stored).max()
    return Check(
        "stored families replay bit for bit",
        wrong == 0,
        f"{wrong} of {len(sample)} differ" + (f", by up to {worst:.2g}" if wrong else ""),
    )


def _collected_again(plan: Plan, branches: Branches, rng: np.random.Generator) -> Check:
    index = branches.index
    block = int(rng.choice(index)) // BLOCK
    rows = np.flatnonzero(index // BLOCK == block)
    fresh = simulate_block(plan, block).arrays
    first, last = int(rows[0]), int(rows[-1]) + 1
    kept = np.isin(fresh["index"], index[first:last])
    stored = branches[first:last]
    wrong = sorted(
        name
        for name in stored.array_names()
        if not np.array_equal(stored.array(name), fresh[name][kept])
    )
    return Check(
        "a block collected again from its seed is identical",
        not wrong,
        f"block {block}, {counted(len(rows), 'family')}"
        + (f": {', '.join(wrong)} differ" if wrong else ""),
    )


def _duplicate_arm(plan: Plan, sample: Branches, rng: np.random.Generator) -> Check:
    arms = np.repeat(rng.integers(sample.num_actions, size=(len(sample), 1)), 2, axis=1)
    effects = center(_outcomes(plan, sample, arms))
    worst = np.abs(effects).max()
    return Check("a duplicated arm has no effect", bool(worst == 0), f"largest effect {worst:.2g}")


def _permuted_arms(plan: Plan, sample: Branches, rng: np.random.Generator) -> Check:
    order = rng.permutation(sample.arms.shape[1])
    permuted = _outcomes(plan, sample, sample.arms[:, order])
    wrong = int((permuted != sample.array("outcome")[:, 0][:, order]).any(axis=(1, 2)).sum())
    return Check(
        "permuting the arms permutes the outcomes", wrong == 0, f"{wrong} of {len(sample)} differ"
    )


def _common_signal(sample: Branches, rng: np.random.Generator) -> Check:
    outcomes = sample.outcomes
    effects = center(outcomes)
    size = np.abs(effects).max()
    signal = 1000 * size * rng.standard_normal((*effects.shape[:2], 1, effects.shape[3]))
    change = np.abs(center(outcomes + signal) - effects).max() / max(size, 1e-300)
    return Check(
        "a shared signal a thousand times larger than the effects cancels",
        bool(change <= 1e-9),
        f"relative {change:.1e}",
    )


def _nuisance_variance(plan: Plan, sample: Branches, rng: np.random.Generator) -> list[Check]:
    """Whether branches share the nuisance; independent copies would add twice its variance."""
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
            "an independent nuisance would add twice its variance",
            bool(p_value > FALSE_ALARMS),
            f"{added:.3f} measured, {predicted:.3f} predicted, {deviation:.1f} standard errors "
            f"apart; {nuisance.amplitude**2 * added / max(effect, 1e-300):.3g} times the variance "
            "of the effects",
        ),
    ]


def _continuation_variance(plan: Plan, sample: Branches, rng: np.random.Generator) -> list[Check]:
    """Var_independent = Var_shared + 2 Cov_shared for the difference of two arms, given a state."""
    if plan.policy is not None or plan.recipe.horizon == 1 or len(sample) < 2:
        return []
    num, draws = min(len(sample), 32), 16
    states = take(plan.world.native.restore(sample.states), np.repeat(np.arange(num), draws))
    noise = np.repeat(_noise(sample, 0)[:num], draws, axis=0)
    pairs = np.repeat(sample.arms[:num, :2], draws, axis=0)

    def outcomes(arms: np.ndarray) -> np.ndarray:
        """Outcomes of arms that share a fresh continuation, `[n, draws, arms, features]`."""
        uniforms = rng.random((num * draws, plan.recipe.horizon - 1))
        continuation = plan.recipe.continuation.draw(uniforms, sample.num_actions)
        features = roll_open_loop(plan, states, arms, continuation, noise).features
        return plan.recipe.discounted(features).reshape(num, draws, arms.shape[1], -1)

    shared, other = outcomes(pairs), outcomes(pairs[:, 1:])
    scale = shared.std(axis=1).mean(axis=(0, 1))
    scale = np.where(scale > 0, scale, 1)
    first, second, second_alone = shared[:, :, 0], shared[:, :, 1], other[:, :, 0]
    # Moments over draws per state; their spread between states gives the standard error.
    together = _variance(first - second, scale)
    apart = _variance(first - second_alone, scale)
    covariance = (_variance(first, scale) + _variance(second, scale) - together) / 2
    gap = apart - (together + 2 * covariance)
    deviation = abs(gap.mean()) / max(gap.std(ddof=1) / np.sqrt(num), 1e-12)
    p_value = 2 * stats.t.sf(deviation, num - 1)  # the spread is estimated from few states
    return [
        Check(
            "an independent continuation would add twice the covariance",
            bool(p_value > FALSE_ALARMS),
            f"variance of a difference {together.mean():.3g} shared, {apart.mean():.3g} "
            f"independent, {(together + 2 * covariance).mean():.3g} predicted, "
            f"{deviation:.1f} standard errors apart",
        )
    ]


def _variance(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Variance of `[n, draws, features]` over draws, in units of scale, averaged to `[n]`."""
    return (values / scale).var(axis=1, ddof=1).mean(axis=1)
