"""Simulation of shards on a Ray cluster, with one idempotent task per shard."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from cqm.branches.simulate import Block, Plan, simulate_blocks
from cqm.display import counted
from cqm.progress import Advance

_RETRIES = 3


def connected(address: str, what: str) -> Any:
    """Ray, connected to a cluster, unless this process is connected to one already.

    Args:
        address: Address of the cluster, or `auto` for the one that runs on this machine.
        what: What the cluster is for, in messages.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"{what} on a cluster needs Ray; install cqm[cluster]") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address)
        except (ConnectionError, ValueError) as error:
            raise ValueError(
                f"no Ray cluster was found at {address!r} ({_last_line(error)}); pass the address "
                "of a running cluster such as 10.0.0.1:6379, or auto on one of its machines"
            ) from error
    return ray


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")


def simulate_on_cluster(
    plan: Plan, indices: Sequence[int], address: str, advance: Advance
) -> Generator[tuple[int, list[Block]], None, None]:
    """Simulate shards in the order in which they finish.

    A task whose node dies or whose code raises is retried a few times. A shard that keeps failing
    does not stop the others; it is reported at the end.
    """
    ray = connected(address, "collecting")
    task = ray.remote(max_retries=_RETRIES, retry_exceptions=True)(simulate_blocks)
    shared = ray.put(plan)
    upcoming = iter(indices)
    ahead = 2 * int(ray.cluster_resources().get("CPU", 1))
    running: dict = {}
    failed: dict[int, str] = {}
    while True:
        while len(running) < ahead and (index := next(upcoming, None)) is not None:
            running[task.remote(shared, plan.blocks(index))] = index
        if not running:
            break
        finished, _ = ray.wait(list(running))
        index = running.pop(finished[0])
        try:
            yield index, ray.get(finished[0])
            advance(plan.num_states(plan.blocks(index)))
        except ray.exceptions.RayError as error:
            failed[index] = _last_line(error)
    if failed:
        lines = "\n".join(f"  shard {index}: {why}" for index, why in sorted(failed.items()))
        raise RuntimeError(
            f"{counted(len(failed), 'shard')} failed after {_RETRIES} retries; the others were "
            f"written; rerun the command to retry only these:\n{lines}"
        )
