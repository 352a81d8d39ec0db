"""Shards as idempotent tasks on a Ray cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cqm.branches.shards import encode_shard
from cqm.branches.simulate import Plan, dropped, first_error, simulate_block

_RETRIES = 3


@dataclass(frozen=True)
class EncodedShard:
    """A shard as the bytes that a local run would write."""

    content: bytes
    num_families: int
    dropped: Counter[str]
    error: str


def encoded_shards(
    plan: Plan, indices: Sequence[int], manifest_digest: str, address: str
) -> Iterator[tuple[int, EncodedShard]]:
    """Shards in the order they are finished.

    A task whose node dies or whose code raises is tried again a few times. A shard that keeps
    failing does not stop the others; it is reported at the end.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("collecting on a cluster needs Ray; install cqm[cluster]") from error
    if not ray.is_initialized():
        ray.init(address=address)
    task = ray.remote(max_retries=_RETRIES, retry_exceptions=True)(_encoded_shard)
    shared = ray.put(plan)
    upcoming = iter(indices)
    ahead = 2 * int(ray.cluster_resources().get("CPU", 1))
    running: dict = {}
    failed: dict[int, str] = {}
    while True:
        while len(running) < ahead and (index := next(upcoming, None)) is not None:
            running[task.remote(shared, index, manifest_digest)] = index
        if not running:
            break
        finished, _ = ray.wait(list(running))
        index = running.pop(finished[0])
        try:
            yield index, ray.get(finished[0])
        except ray.exceptions.RayError as error:
            failed[index] = str(error).strip().splitlines()[-1]
    if failed:
        lines = "\n".join(f"  shard {index}: {why}" for index, why in sorted(failed.items()))
        raise RuntimeError(
            f"{len(failed)} shards failed after {_RETRIES} retries, the others are written; "
            f"run the same command again to try only these:\n{lines}"
        )


def _encoded_shard(plan: Plan, index: int, manifest_digest: str) -> EncodedShard:
    blocks = [simulate_block(plan, block) for block in plan.blocks(index)]
    arrays, lost = [block.arrays for block in blocks], dropped(blocks)
    content = b"".join(encode_shard(arrays, index, manifest_digest, lost))
    return EncodedShard(content, sum(map(len, blocks)), lost, first_error(blocks))
