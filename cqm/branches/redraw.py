"""Redrawing: more draws of families that were collected before, from the same states.

The seed and the index of a family determine its state, whatever the number of draws, so only the
blocks that hold the families are simulated again.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from cqm import storage
from cqm.arguments import instance, whole_number
from cqm.branches.collect import plan_collection
from cqm.branches.dataset import Branches
from cqm.branches.local import simulate_locally
from cqm.branches.recipe import BLOCK
from cqm.branches.shards import MemoryShard
from cqm.branches.simulate import dropped
from cqm.progress import progress
from cqm.worlds.contract import World, concatenate
from cqm.worlds.identity import stored_identity


def redraw(
    branches: Branches, world: World, *, draws: int, show_progress: bool | None = None
) -> Branches:
    """The same families with new draws and all arms, in memory.

    Args:
        branches: Families of one collection; its later actions must not follow a policy.
        world: The world that they were collected from.
        draws: Number of draws per state.
        show_progress: See `cqm.progress.progress`.

    >>> import cqm
    >>> world = cqm.load_world("cartpole-swingup")
    >>> few = cqm.collect(world, states=300, horizon=3, seed=1)[280:]
    >>> many = redraw(few, world, draws=4)
    >>> many.effects().shape, bool((many.observations == few.observations).all())
    ((20, 4, 3, 5), True)
    """
    instance("world", world, World, "the World that the branches were collected from")
    whole_number("draws", draws, least=1)
    if changes := storage.differences(branches.world, stored_identity(world)):
        raise ValueError(f"the branches come from another world:\n{changes}")
    recipe = branches.recipe
    if len(branches.seeds) > 1:
        raise ValueError(
            f"only families of one collection can be drawn again; these have seeds {branches.seeds}"
        )
    if not recipe.continuation.open_loop:
        raise ValueError(
            f"the later actions follow the policy {recipe.continuation.law!r}, which is not stored "
            "with branches, so they cannot be drawn again"
        )
    arms = None if branches.has_menu else recipe.arms
    again = replace(recipe, draws=draws, arms=arms)
    plan = replace(plan_collection(world, again), blocks_per_shard=1)
    wanted = branches.index
    blocks = np.unique(wanted // BLOCK).tolist()
    found, total = [], plan.num_states(blocks)
    with (
        progress(f"redrawing {world.name}", total, unit="states", show=show_progress) as made,
        contextlib.closing(
            simulate_locally(plan, blocks, None, 1, made, show_progress)
        ) as simulated,
    ):
        for _, parts in simulated:
            found += parts
    arrays = concatenate([block.arrays for block in found])
    chosen = np.isin(arrays["index"], wanted)
    arrays = {name: values[chosen] for name, values in arrays.items()}
    kept = np.flatnonzero(np.isin(wanted, arrays["index"]))
    kept = kept[np.argsort(wanted[kept])]
    if not np.array_equal(branches.array("observation")[kept], arrays["observation"]):
        raise ValueError(
            f"{world.name!r} does not reproduce the states of the branches; check it with "
            "cqm.worlds.check_world"
        )
    shard = MemoryShard(arrays, dropped(found))
    return Branches(plan.manifest(None), [shard], mixing=world.mixing)
