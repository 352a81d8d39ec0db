"""Collecting branches: in memory or streamed to disk, on this machine or on a cluster.

The states are divided into blocks of 256, and the blocks into shards. The stored bytes depend
neither on the number of workers or machines nor on interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from cqm import storage
from cqm.arguments import (
    choice,
    instance,
    output_directory,
    show_progress as checked_show_progress,
    text,
    whole_number,
    whole_number_or_none,
)
from cqm.branches import shards
from cqm.branches.cluster import simulate_on_cluster
from cqm.branches.dataset import Branches
from cqm.branches.local import simulate_locally
from cqm.branches.recipe import BLOCK, Actions, Continuation, Policy, Recipe
from cqm.branches.simulate import Plan, dropped, first_error
from cqm.capacity import require_disk, require_memory
from cqm.display import counted
from cqm.names import action_indices, checked_action_names
from cqm.progress import progress, say
from cqm.quotient import ComparisonGraph
from cqm.warn import warn_user
from cqm.worlds.contract import NoiseKind, World, concatenate
from cqm.worlds.loading import load_world

SHARD_BYTES = 32 * 2**20  # approximate size of a shard
_MAX_THREADS = 4096
MANY_DROPPED = 0.01  # share of the families above which collecting warns


class DroppedWarning(UserWarning):
    """More than 1% of the families were dropped because at least one of their branches failed."""


def collect(
    world: World | str,
    *,
    states: int = 20_000,
    horizon: int = 12,
    discount: float = 0.95,
    draws: int = 1,
    arms: int | Sequence[Sequence[int | str]] | None = None,
    warmup: tuple[int, int] = (0, 20),
    continuation: str | Sequence[float] | Policy | Continuation = "uniform",
    per_step: bool = False,
    seed: int = 0,
    actions: Actions = "menu",
    out: str | Path | None = None,
    threads: int | None = None,
    cluster: str | None = None,
    show_progress: bool | None = None,
    blocks_per_task: int = 1,
) -> Branches:
    """Collect branches of a world; issues a `DroppedWarning` if many families are dropped.

    Args:
        world: The world to branch, or its name for `load_world`.
        states: Number of states to branch; a state is dropped, and counted, if any of its branches
            fails.
        horizon: Steps per branch, including the first action.
        discount: Discount factor of the outcome.
        draws: Number of times to draw the noise and the later actions in each state.
        arms: Number of candidate actions to branch per state, chosen at random; or a list of
            subsets, one of which is chosen at random per state. All actions by default. With
            `actions="box"`, the number of random controls per state.
        warmup: Minimum and maximum number of random controls applied to a state before it is
            branched.
        continuation: How to draw later actions: `uniform` on the candidate actions, `box` for
            uniform on the control box, one probability per candidate action, or a `Policy`.
        per_step: Keep the features of every step, not only those of the first step and the
            discounted sum.
        seed: Random seed for the collection.
        actions: First actions: the candidate actions (`menu`), or controls spread over the whole
            control box (`box`), from which a model learns the effect of any control.
        out: Directory to stream to; rerun with the same directory to resume an interrupted
            collection. Without a directory the branches stay in memory.
        threads: Number of threads to simulate on; one per core by default. Worlds that run Python
            code for every state use as many processes instead, if the collection is long enough to
            justify starting them.
        cluster: Address of a Ray cluster to simulate on instead, or `auto`.
        show_progress: None shows a bar on a terminal and nothing elsewhere; True also prints plain
            lines elsewhere; False shows nothing.
        blocks_per_task: Number of blocks (of 256 states) that a worker takes at a time.

    >>> collect("cartpole-swingup", states=4, seed=7)
    Branches(cartpole-swingup, 4 families of 3/3 arms, 1 draw, horizon 12, discount 0.95, seed 7)
    """
    world = load_world(world) if isinstance(world, str) else world
    instance("world", world, World, "a World or the name of one, such as 'cartpole-swingup'")
    directory = None if out is None else output_directory("out", out)
    threads = whole_number_or_none("threads", threads, least=1, most=_MAX_THREADS)
    blocks_per_task = whole_number("blocks_per_task", blocks_per_task, least=1)
    checked_show_progress(show_progress)
    law = Continuation.of(continuation)
    names = checked_action_names(world.action_names, len(world.candidate_actions))
    chosen: Any = arms
    if isinstance(arms, Sequence) and not isinstance(arms, str | bytes):
        chosen = [action_indices(subset, names).tolist() for subset in arms]
    recipe = Recipe(states, horizon, discount, draws, chosen, warmup, law, per_step, seed, actions)
    plan, error = plan_collection(world, recipe), ""
    if cluster is not None and directory is None:
        raise ValueError("collecting on a cluster needs a directory to write to; pass out=")
    if cluster is not None:
        text("cluster", cluster)
    _check_size(plan, directory)
    what = f"collecting {world.name}"
    if directory is None:
        memory, indices = [], range(plan.num_shards)
        with progress(what, states, unit="states", show=show_progress) as advance:
            local = (threads, blocks_per_task, advance, show_progress)
            with contextlib.closing(simulate_locally(plan, indices, *local)) as simulated:
                for _, blocks in simulated:
                    arrays = concatenate([block.arrays for block in blocks])
                    memory.append(shards.MemoryShard(arrays, dropped(blocks)))
                    error = error or first_error(blocks)
        return _warned(Branches(plan.manifest(None), memory, mixing=world.mixing), error)

    plan = _as_stored(directory, plan)
    digest = _prepare(directory, plan)
    missing = [i for i in range(plan.num_shards) if not _is_complete(directory, i, digest)]
    planned = sum(plan.num_states(plan.blocks(index)) for index in missing)
    if missing and len(missing) < plan.num_shards:
        complete = plan.num_shards - len(missing)
        num = counted(plan.num_shards, "shard")
        say(f"Resuming: {complete} of {num} complete", show_progress)
    with progress(what, planned, unit="states", show=show_progress) as advance:
        local = (threads, blocks_per_task, advance, show_progress)
        simulated = (
            simulate_locally(plan, missing, *local)
            if cluster is None
            else simulate_on_cluster(plan, missing, cluster, advance)
        )
        with contextlib.closing(simulated):
            for index, blocks in simulated:
                error = error or first_error(blocks)
                batches = [block.arrays for block in blocks]
                shards.write_shard(directory, index, digest, batches, dropped(blocks))
    return _warned(Branches.open(directory), error)


def _warned(branches: Branches, error: str) -> Branches:
    """The branches, after a warning if many families were dropped."""
    lost = sum(branches.dropped.values())
    total = lost + len(branches)
    if lost > MANY_DROPPED * total:
        example = f", for example {textwrap.shorten(error, 300)}" if error else ""
        warn_user(
            f"{lost:,} of {total:,} families of {branches.world['name']!r} were dropped: "
            f"{branches.why_dropped}{example}",
            DroppedWarning,
        )
    return branches


def plan_collection(world: World, recipe: Recipe) -> Plan:
    """Check a recipe against a world, and divide the work into shards."""
    num_actions, continuation = len(world.candidate_actions), recipe.continuation
    choice("noise_kind", world.native.noise_kind, get_args(NoiseKind))
    if recipe.warmup is None:
        raise ValueError("warmup must be (minimum, maximum) to collect branches; got None")
    if recipe.actions == "box" or continuation.on_box:
        _check_box(world)
    if continuation.policy is None and not continuation.on_box:
        continuation.probabilities(num_actions)  # raises for a law that cannot be drawn from
    if recipe.actions == "box":
        subsets, num_arms = None, recipe.arms if isinstance(recipe.arms, int) else num_actions
    else:
        subsets, num_arms = _check_arms(recipe.arms, num_actions)
    # Shards have similar sizes whatever the size of a family, so that memory does not grow with it.
    numbers = recipe.draws * num_arms * len(world.native.feature_names)
    numbers *= 2 + (recipe.horizon if recipe.per_step else 0)
    if world.nuisance is not None:
        numbers += recipe.draws * recipe.horizon * world.nuisance.dimension // 2
    blocks_per_shard = int(np.clip(SHARD_BYTES // (8 * numbers * BLOCK), 1, 16))
    return Plan(world, recipe, subsets, num_arms, blocks_per_shard, world.native.noise_kind)


def _check_box(world: World) -> None:
    """Refuse a world whose controls cannot be drawn from a box."""
    low, high = world.control_low, world.control_high
    if not world.continuous:
        raise ValueError(
            f"controls can be drawn from a box only if they are continuous; {world.name} has "
            "discrete actions; use actions='menu' and another continuation"
        )
    if not np.isfinite([low, high]).all() or not np.all(low < high):
        raise ValueError(
            "controls can be drawn only from a bounded box; the bounds of "
            f"{world.name} are {low.tolist()} and {high.tolist()}"
        )


def _check_arms(
    arms: int | Sequence[Sequence[int]] | None, num_actions: int
) -> tuple[np.ndarray | None, int]:
    """Subsets to draw arms from, None for all subsets of one size, and that size."""
    if arms is None:
        return np.arange(num_actions)[None], num_actions
    if isinstance(arms, int):
        return None, whole_number("arms", arms, least=2, most=num_actions)
    sizes = {len(set(subset)) for subset in arms} | {len(subset) for subset in arms}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(f"arms must be subsets of one size, at least 2; got {arms}")
    ComparisonGraph.from_families(num_actions, arms).check_connected()
    return np.array(arms), sizes.pop()


def _check_size(plan: Plan, directory: Path | None) -> None:
    """Refuse a collection that needs more memory or disk space than there is."""
    recipe, arms, per_family = plan.recipe, plan.num_arms, stored_bytes(plan)
    # While a block is simulated, the controls and the features of every step are in memory.
    num_features, num_controls = len(plan.world.native.feature_names), len(plan.world.control_low)
    steps = recipe.draws * recipe.horizon * 8 * (1 + arms * num_features)
    steps += arms * recipe.horizon * num_controls * 8
    rows = min(BLOCK, recipe.states)
    what = f"simulating {rows} states with {counted(recipe.draws, 'draw')} of "
    what += f"{counted(recipe.horizon, 'step')}"
    advice = "collect fewer draws or a shorter horizon"
    require_memory(
        what, rows * (steps + per_family) + 8 * rows * max(recipe.warmup or (0,)), advice
    )
    what = f"a set of {counted(recipe.states, 'state')}"
    if directory is None:
        advice = "collect fewer states, or pass out= to write them to disk"
        require_memory(what, recipe.states * per_family, advice)
    else:
        require_disk(what, recipe.states * per_family, directory, "collect fewer states")


def stored_bytes(plan: Plan) -> int:
    """Bytes per family, of the arrays that grow with the settings."""
    recipe, native, nuisance = plan.recipe, plan.world.native, plan.world.nuisance
    numbers = 2 + (recipe.horizon if recipe.per_step else 0)
    size = 8 * recipe.draws * plan.num_arms * len(native.feature_names) * numbers
    size += 2 * recipe.draws * (recipe.horizon - 1) + 8 * len(native.observation_names)
    if nuisance is not None:
        size += 4 * recipe.draws * recipe.horizon * nuisance.dimension
    return size


def _as_stored(directory: Path, plan: Plan) -> Plan:
    """The plan; without the kind of noise if the set in the directory was begun without it."""
    try:
        stored = shards.read_manifest(directory)
    except (FileNotFoundError, ValueError):  # there is none, or `_prepare` reports it
        return plan
    return plan if "noise_kind" in stored else replace(plan, noise_kind="none")


def _prepare(directory: Path, plan: Plan) -> str:
    """Write or check the manifest of a directory, and return its digest."""
    storage.remove_partial(directory)
    files, entry = {}, None
    if plan.world.mixing is not None:
        files[shards.MIXING] = content = b"".join(storage.encode_arrays([plan.world.mixing], {}))
        entry = {"file": shards.MIXING, "sha256": hashlib.sha256(content).hexdigest()}
    wanted = plan.manifest(entry)
    files[shards.MANIFEST] = content = storage.encode_json(wanted)
    digest = hashlib.sha256(content).hexdigest()
    _check_manifest(directory, wanted, digest)
    outdated = [name for name, content in files.items() if not _holds(directory / name, content)]
    if outdated:
        # Of two processes that begin with different configurations, only one may write its own.
        with storage.exclusive(directory, wait=True):
            _check_manifest(directory, wanted, digest)
            for name in outdated:
                storage.write_pieces(directory / name, [files[name]])
    return digest


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and storage.sha256(path) == hashlib.sha256(content).hexdigest()


def _check_manifest(directory: Path, wanted: Mapping[str, Any], digest: str) -> None:
    """Raise `ValueError` if a directory holds branches of another configuration."""
    try:
        changes = storage.differences(shards.read_manifest(directory), wanted)
    except (FileNotFoundError, storage.DamagedFileError) as error:
        # A lost manifest is written again if all shards say that they belong to it.
        if shards.shard_manifests(directory) - {digest}:
            raise ValueError(
                f"{error}, and the shards in {directory} are damaged or belong to another "
                "configuration; choose another directory"
            ) from error
        changes = ""
    if changes:
        raise ValueError(
            f"{directory} holds branches of a different configuration:\n{changes}\n"
            "choose another directory, or collect with the configuration stored there"
        )


def _is_complete(directory: Path, index: int, digest: str) -> bool:
    """Whether a shard exists and is undamaged; other shards are collected again."""
    try:
        shards.open_shard(directory, index, digest).verify()
    except storage.DamagedFileError:
        return False
    return True
