"""The audit: evidence that a set of branches is what it claims to be.

Everything downstream relies on branches that share the state, the noise and the continuation, and
differ only in the first action. `audit` does not take the manifest's word for it: it counts the
states and draws the inputs of every family again (`cqm.branches.census`), replays families from
every block, collects some blocks again from the seed, and compares the variance that sharing
removes with the variance that theory predicts (`cqm.branches.coupling`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from cqm import storage
from cqm.arguments import instance, whole_number, whole_number_or_none
from cqm.branches.census import blocks_of, census, shard_indices
from cqm.branches.collect import plan_collection
from cqm.branches.coupling import (
    common_signal,
    continuation_variance,
    nuisance_variance,
    stored_noise,
)
from cqm.branches.dataset import Branches, as_branches
from cqm.branches.recipe import BLOCK, Continuation, Policy
from cqm.branches.shards import MemoryShard
from cqm.branches.simulate import (
    FamilyRollout,
    Plan,
    roll_closed_loop,
    roll_open_loop,
    simulate_block,
    stored_draws,
)
from cqm.display import counted
from cqm.quotient import center
from cqm.storage import DamagedFileError
from cqm.worlds.check import Check, Report
from cqm.worlds.contract import Status, World
from cqm.worlds.identity import stored_identity
from cqm.worlds.loading import reload_world

AUDIT = "audit.json"
FEWEST, MOST = 64, 1024  # families replayed by default, one per block within these limits
BLOCK_STEPS = 2**16  # steps to simulate for the blocks that are collected again
FEWEST_BLOCKS, MOST_BLOCKS = 2, 8


def audit(
    branches: Branches | str | Path,
    world: World | None = None,
    *,
    policy: Policy | None = None,
    families: int | None = None,
    seed: int = 0,
) -> Report:
    """Check a set of branches; for a set on disk, the report is saved next to the manifest.

    The audit checks that every state is accounted for. It draws every family's arms, later actions,
    noise and nuisance again from the seed and compares them. What the simulator computed (outcome,
    first and step features, observation) is replayed for k families, one from each of k equal
    stretches of the set. Changes to a share p of the families are found with probability 1 − (1 −
    p)^k if they are scattered. If they are contiguous, they are always found for p ≥ 2/k, and with
    probability about p·k for p < 1/k. The states themselves are checked only in 2 to 8 blocks that
    are collected again from the seed (about 65,000 steps in all). Half of the blocks are
    chosen among those with dropped families, if there are enough of them.

    Args:
        branches: The set to audit, or its directory.
        world: The world it was collected from; by default it is loaded by its name.
        policy: The policy of a state-dependent continuation.
        families: Number of families to replay, at least 2; by default one per block of 256 states,
            at least 64 and at most 1,024.
        seed: Random seed for choosing families and for the fresh noise used in the comparisons.

    >>> import cqm
    >>> branches = cqm.collect(cqm.load_world("cartpole-swingup"), states=8, horizon=3)
    >>> print(audit(branches, families=4))  # doctest: +ELLIPSIS
    Branches(cartpole-swingup, ...), 4 families replayed
      ok    checksums  ...
    """
    whole_number_or_none("families", families, least=2)
    whole_number("seed", seed, least=0)
    branches = as_branches("branches", branches)
    if world is not None:
        instance("world", world, World, "the world that the branches were collected from, or None")
    if policy is not None:
        instance("policy", policy, Policy, "the Policy of the continuation, or None")
    if len(branches.seeds) > 1 or len(branches.shards) != branches.manifest["num_shards"]:
        raise ValueError(
            f"the set combines collections with seeds {branches.seeds}; "
            "audit each collection separately"
        )
    if len(branches) == 0:
        raise ValueError("the set has no families; all were dropped or none was collected")
    try:
        branches.verify()
    except DamagedFileError as error:
        return _report(branches, 0, [Check("checksums", False, str(error))])
    world = reload_world(branches.world) if world is None else world
    plan = _plan_of(branches, world, policy)
    checks = [
        Check("checksums", True, f"{counted(len(branches), 'family')} intact"),
        _manifest(plan, branches),
    ]
    checks += census(plan, branches.shards) if checks[-1].passed else []
    if not all(check.passed for check in checks[:3]):  # what is missing cannot be replayed
        return _report(branches, 0, checks)
    rng = np.random.default_rng(seed)
    num_blocks = len({block for _, block, _ in blocks_of(branches.shards)})
    sample = _sample(branches, families or int(np.clip(num_blocks, FEWEST, MOST)), rng)
    checks += [
        _replay(plan, sample),
        _collected_again(plan, branches, rng),
        _duplicate_arm(plan, sample, rng),
        _permuted_arms(plan, sample, rng),
        common_signal(sample, rng),
        *nuisance_variance(plan, sample, rng),
        *continuation_variance(plan, sample, rng),
    ]
    return _report(branches, len(sample), checks)


def _report(branches: Branches, num_replayed: int, checks: list[Check]) -> Report:
    """The report, saved if the set has a directory that can be written to."""
    report = Report(f"{branches}, {counted(num_replayed, 'family')} replayed", tuple(checks))
    if branches.directory is not None:
        content = {"passed": report.passed, **asdict(report)}
        try:
            storage.write_json(Path(branches.directory) / AUDIT, content)
        except OSError as error:  # a set to which one may not write can be audited all the same
            reason = error.strerror or type(error).__name__
            return replace(report, title=f"{report.title} (report not saved: {reason})")
    return report


def _plan_of(branches: Branches, world: World, policy: Policy | None) -> Plan:
    """The plan that the set was collected with, according to its manifest."""
    if not isinstance(world, World):
        raise TypeError(f"world must be a World; got {world!r:.80}")
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
    plan = plan_collection(world, recipe)
    stored = branches.manifest
    kind = stored.get("noise_kind", "none")
    return replace(plan, blocks_per_shard=stored["blocks_per_shard"], noise_kind=kind)


def _manifest(plan: Plan, branches: Branches) -> Check:
    """Whether names, actions, mixing and number of shards are those of the world and recipe."""
    fresh = plan.manifest(None)
    names = ("observation_names", "feature_names", "candidate_actions", "num_shards")
    wrong = [name for name in names if branches.manifest[name] != fresh[name]]
    if plan.noise_kind not in ("none", plan.world.native.noise_kind):
        wrong.append("noise_kind")
    stored, mixing = branches.mixing or {}, plan.world.mixing or {}
    if stored.keys() != mixing.keys() or any(
        not np.array_equal(stored[name], mixing[name]) for name in mixing
    ):
        wrong.append("mixing")
    return Check(
        "manifest fits the world", not wrong, "differs in " + ", ".join(wrong) if wrong else ""
    )


def _sample(branches: Branches, families: int, rng: np.random.Generator) -> Branches:
    """One family from each of as many equal stretches of the set."""
    num = min(families, len(branches))
    bounds = np.arange(num + 1) * len(branches) // num
    rows = [branches[row : row + 1] for row in rng.integers(bounds[:-1], bounds[1:]).tolist()]
    names = branches.array_names()
    arrays = {name: np.concatenate([row.array(name) for row in rows]) for name in names}
    return Branches(branches.manifest, [MemoryShard(arrays, {})], mixing=branches.mixing)


def _roll(plan: Plan, sample: Branches, first: np.ndarray, draw: int = 0) -> FamilyRollout:
    """Roll out given first controls `[n, arms, controls]` under a stored draw again."""
    states, noise = plan.world.native.restore(sample.states), stored_noise(sample, draw)
    if plan.policy is None:
        later = sample.array("continuation")[:, draw, 0]
        return roll_open_loop(plan, states, first, later, noise)
    nuisance = None
    if plan.world.nuisance is not None:
        nuisance = sample.array("nuisance")[:, draw, : first.shape[1]]
    uniforms = sample.array("uniforms")[:, draw]
    return roll_closed_loop(plan, states, first, uniforms, noise, nuisance)


def _outcomes(plan: Plan, sample: Branches, first: np.ndarray) -> np.ndarray:
    """Outcomes of given first controls under the first stored draw, `[n, arms, features]`."""
    return plan.recipe.discounted(_roll(plan, sample, first).features)


def _replay(plan: Plan, sample: Branches) -> Check:
    native = plan.world.native
    draws = [_roll(plan, sample, sample.first_controls, draw) for draw in range(plan.recipe.draws)]
    steps = np.stack([draw.features for draw in draws], axis=1)
    again = {
        "observation": native.observe(native.restore(sample.states)),
        "first": steps[..., 0, :],
        "outcome": plan.recipe.discounted(steps),
        "continuation": np.stack([draw.continuation for draw in draws], axis=1),
        **({"steps": steps} if plan.recipe.per_step else {}),
    }
    drew = stored_draws(plan, [draw.drew for draw in draws])
    if drew is not None and "drew" in sample.array_names():
        again["drew"] = drew
    failed = np.any([draw.status != Status.OK for draw in draws], axis=0)
    wrong, names, worst = failed.copy(), ["status"] if failed.any() else [], 0.0
    for name, values in again.items():
        stored = sample.array(name)
        differs = (values != stored).reshape(len(sample), -1).any(axis=1)
        wrong |= differs
        if differs.any():
            names.append(name)
            gap = np.abs(values.astype(float) - stored)[differs & ~failed]
            worst = max(worst, float(gap.max(initial=0)))
    where = ", ".join(str(i) for i in sample.index[wrong][:3])
    detail = f"{wrong.sum()} of {counted(len(sample), 'family')} differ"
    if wrong.any():
        detail += f" in {', '.join(names)}, by up to {worst:.2g}; first states: {where}"
    return Check("stored families replay bit for bit", not wrong.any(), detail)


def _blocks_to_collect(plan: Plan, branches: Branches, rng: np.random.Generator) -> list[int]:
    """Blocks from all over the set, half of them with dropped families if there are such."""
    least, most = plan.recipe.warmup or (0, 0)
    per_state = plan.recipe.draws * plan.num_arms * plan.recipe.horizon + (least + most) // 2
    wanted = int(np.clip(BLOCK_STEPS // (per_state * BLOCK), FEWEST_BLOCKS, MOST_BLOCKS))
    index = np.concatenate([shard_indices(shard) for shard in branches.shards])
    kept = np.bincount(index // BLOCK, minlength=-(-plan.recipe.states // BLOCK))
    gaps = np.array([len(plan.block_states(block)) for block in range(len(kept))]) > kept
    own = np.unique(branches.index // BLOCK)  # of a slice, only its own blocks
    lossy = np.intersect1d(np.flatnonzero(gaps), own)
    chosen = set(_spread(lossy, wanted // 2, rng))
    rest = np.setdiff1d(own, np.array(sorted(chosen), int))
    return sorted(chosen | set(_spread(rest, wanted - len(chosen), rng)))


def _spread(values: np.ndarray, num: int, rng: np.random.Generator) -> list[int]:
    """One value from each of `num` equal stretches of an array."""
    num = min(num, len(values))
    bounds = np.arange(num + 1) * len(values) // max(num, 1)
    return values[rng.integers(bounds[:-1], bounds[1:])].tolist() if num else []


def _collected_again(plan: Plan, branches: Branches, rng: np.random.Generator) -> Check:
    """Whether blocks that are collected again have the same families and dropped the same."""
    problems, blocks = [], _blocks_to_collect(plan, branches, rng)
    places = {block: (number, rows) for number, block, rows in blocks_of(branches.shards)}
    dropped: dict[int, Counter[str]] = {}
    for block in blocks:
        fresh = simulate_block(plan, block)
        number, rows = places[block]
        shard = branches.shards[number]
        dropped.setdefault(number, Counter()).update(fresh.dropped)
        if set(shard.names()) != set(fresh.arrays):
            odd = sorted(set(shard.names()) ^ set(fresh.arrays))
            problems.append(f"block {block} has missing or unexpected arrays: {', '.join(odd)}")
            continue
        wrong = sorted(
            name
            for name, values in fresh.arrays.items()
            if not np.array_equal(shard.read(name, rows), values)
        )
        if wrong:
            problems.append(f"block {block} differs in {', '.join(wrong)}")
    for number, counts in dropped.items():
        whole = set(plan.blocks(number)) <= set(blocks)
        stored = Counter(branches.shards[number].dropped)
        if counts - stored or (whole and counts != stored):
            problems.append(
                f"shard {number} records {dict(stored)} as dropped; collecting again gave "
                f"{dict(counts)}"
            )
    what = f"{len(blocks)} of {counted(-(-plan.recipe.states // BLOCK), 'block')}"
    return Check(
        "blocks collected again from the seed are identical",
        not problems,
        "; ".join([what, *problems]),
    )


def _duplicate_arm(plan: Plan, sample: Branches, rng: np.random.Generator) -> Check:
    # One of the family's own arms: another action may fail.
    chosen = rng.integers(sample.num_arms, size=(len(sample), 1))
    first = np.take_along_axis(sample.first_controls, chosen[..., None], axis=1)
    worst = np.abs(center(_outcomes(plan, sample, np.repeat(first, 2, axis=1)))).max()
    return Check("a duplicated arm has no effect", bool(worst == 0), f"largest effect {worst:.2g}")


def _permuted_arms(plan: Plan, sample: Branches, rng: np.random.Generator) -> Check:
    order = rng.permutation(sample.num_arms)
    permuted = _outcomes(plan, sample, sample.first_controls[:, order])
    wrong = int((permuted != sample.array("outcome")[:, 0][:, order]).any(axis=(1, 2)).sum())
    return Check(
        "permuting the arms permutes the outcomes", wrong == 0, f"{wrong} of {len(sample)} differ"
    )
