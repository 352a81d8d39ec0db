"""The part of the audit that looks at every family: is every state there, do inputs fit the seed?

Nothing is simulated, so this costs no more than reading the set and drawing its random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError

from cqm.branches.recipe import BLOCK
from cqm.branches.shards import Shard
from cqm.branches.simulate import Plan, as_stored, draw_inputs
from cqm.display import counted
from cqm.worlds.check import Check
from cqm.worlds.contract import Status

REASONS = {status.name.lower().replace("_", " ") for status in Status if status != Status.OK}
_SHOWN = 3  # problems in a detail; the others are counted


def census(plan: Plan, shards: tuple[Shard, ...]) -> list[Check]:
    """Check the states, the inputs and the sums of every family of a set."""
    checks = [_states(plan, shards)]
    # Rows that do not belong to their block have no inputs to compare with.
    return [*checks, _inputs(plan, shards), *_sums(plan, shards)] if checks[0].passed else checks


def shard_indices(shard: Shard) -> np.ndarray:
    """Indices of the states of a shard, `[families]`."""
    return shard.read("index", slice(0, shard.num_families))


def _states(plan: Plan, shards: tuple[Shard, ...]) -> Check:
    """Whether every state is one family, or counted as dropped."""
    problems: list[str] = []
    families, dropped, needed = 0, 0, _needed(plan, shards)
    for number, shard in enumerate(shards):
        index, blocks = shard_indices(shard), plan.blocks(number)
        first, num = blocks[0] * BLOCK, plan.num_states(blocks)
        where = f"shard {number}"
        outside = (index < first) | (index >= first + num)
        values, counts = np.unique(index, return_counts=True)
        if outside.any():
            problems.append(f"{where} has state {index[outside][0]}, which is not one of its own")
        if (counts > 1).any():
            problems.append(f"{where} has state {values[counts > 1][0]} more than once")
        elif np.any(np.diff(index) <= 0):
            problems.append(f"{where} is not sorted by state")
        wrong = {why: n for why, n in shard.dropped.items() if why not in REASONS or not _count(n)}
        lost = 0 if wrong else sum(shard.dropped.values())
        if wrong:
            problems.append(f"{where} counts {wrong} as dropped; known reasons: {sorted(REASONS)}")
        elif len(index) + lost != num:
            counts_as = f"{counted(len(index), 'family')} and {lost:,} dropped states"
            problems.append(f"{where} has {num:,} states, but {counts_as}")
        problems += [f"{where} {problem}" for problem in _incomplete(shard, needed)]
        families, dropped = families + len(index), dropped + lost
    found = f"{plan.recipe.states:,} states: {counted(families, 'family')}, {dropped:,} dropped"
    return _check("every state has one family or is counted as dropped", problems, found)


def _needed(plan: Plan, shards: tuple[Shard, ...]) -> set[str]:
    """Names of the arrays that a set must have, next to the states."""
    computed = {"observation", "outcome", "first", "continuation"}
    if any("drew" in shard.names() for shard in shards):  # not every world reports its draws
        computed.add("drew")
    return {*expected_inputs(plan, 0), *computed, *(["steps"] if plan.recipe.per_step else [])}


def _incomplete(shard: Shard, needed: set[str]) -> list[str]:
    """What is missing from a shard's arrays."""
    names, last = shard.names(), slice(max(0, shard.num_families - 1), shard.num_families)
    if needed - set(names):
        return [f"lacks {', '.join(sorted(needed - set(names)))}"]
    try:
        short = [name for name in names if len(shard.read(name, last)) != last.stop - last.start]
    except SafetensorError as error:
        return [str(error)]
    return [f"has too few rows of {', '.join(short)}"] if short else []


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _inputs(plan: Plan, shards: tuple[Shard, ...]) -> Check:
    """Whether arms, later actions, noise and nuisance of every family follow from the seed."""
    problems, names = [], set[str]()
    for number, block, rows in blocks_of(shards):
        fresh = expected_inputs(plan, block)
        kept = shards[number].read("index", rows) - plan.block_states(block)[0]
        stored = {name: shards[number].read(name, rows) for name in fresh}
        wrong = [name for name in fresh if not np.array_equal(stored[name], fresh[name][kept])]
        if wrong:
            problems.append(f"block {block} in shard {number} differs in {', '.join(wrong)}")
        names |= set(fresh)
    return _check("inputs of every family follow from the seed", problems, ", ".join(sorted(names)))


def expected_inputs(plan: Plan, block: int) -> dict[str, np.ndarray]:
    """The stored arrays of a block that need no simulation."""
    inputs = draw_inputs(plan, block)
    uniforms = inputs.pop("uniforms")
    if not inputs["noise"].size:
        del inputs["noise"]
    if plan.policy is not None:
        return {**inputs, "uniforms": uniforms}
    return {**inputs, "continuation": as_stored(plan.later_actions(uniforms)[:, :, None])}


def _sums(plan: Plan, shards: tuple[Shard, ...]) -> list[Check]:
    """Whether outcome and first features of every family agree with its stored steps."""
    problems = []
    for number, block, rows in blocks_of(shards):
        shard = shards[number]
        outcome, first = shard.read("outcome", rows), shard.read("first", rows)
        values: Mapping[str, np.ndarray] = {"observation": shard.read("observation", rows)}
        where = f"block {block} in shard {number}"
        if plan.recipe.per_step:
            steps = shard.read("steps", rows)
            if not np.array_equal(first, steps[..., 0, :]):
                problems.append(f"the first features of {where} are not those of the first step")
            if not np.array_equal(outcome, plan.recipe.discounted(steps)):
                problems.append(f"the outcome of {where} is not the discounted sum of the steps")
        elif plan.recipe.horizon == 1 and not np.array_equal(outcome, first):
            problems.append(f"the outcome of {where} differs from the features of its only step")
        values = {**values, "outcome": outcome, "first": first}
        bad = [name for name, each in values.items() if not np.isfinite(each).all()]
        if bad:
            problems.append(f"{where} has values that are not finite in {', '.join(bad)}")
    what = (
        "outcome and first features agree with the steps"
        if plan.recipe.per_step
        else "all values are finite"
    )
    return [_check("stored values fit together", problems, what)]


def blocks_of(shards: tuple[Shard, ...]) -> Iterator[tuple[int, int, slice]]:
    """Shard, block and rows within the shard of every block that has families."""
    for number, shard in enumerate(shards):
        blocks = shard_indices(shard) // BLOCK
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True):
            yield number, int(blocks[start]), slice(int(start), int(stop))


def _check(name: str, problems: list[str], found: str) -> Check:
    """The check, failed if there are problems, of which some are shown."""
    if not problems:
        return Check(name, True, found)
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return Check(name, False, "; ".join(problems[:_SHOWN]) + more)
