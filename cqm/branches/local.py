"""Simulation of shards on this machine, on threads or on worker processes.

Threads share the work of a world that computes outside Python's interpreter lock, as native
rollouts and vectorised functions do. If a world runs Python code for every state, threads only wait
for each other, so long collections run on worker processes. A block depends on its number alone, so
the results are the same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import numpy as np

from cqm.branches.simulate import Block, Plan, simulate_blocks
from cqm.progress import Advance, say

_WORTH_PROCESSES = 8.0  # processes pay off if simulation on one core would take longer, in seconds
_SLOW = (
    0.5  # worlds whose blocks take longer, in seconds, are assumed to run Python for every state
)
_AHEAD = 8  # tasks per worker that are simulated ahead of the consumer

Task = tuple[int, range]  # a shard and some of its blocks


def available_cores() -> list[int]:
    """Cores that this process may use; all cores on systems without processor affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def simulate_locally(
    plan: Plan,
    indices: Sequence[int],
    workers: int | None,
    blocks_per_task: int,
    advance: Advance,
    show_progress: bool | None = None,
) -> Generator[tuple[int, list[Block]], None, None]:
    """Simulate shards in order, at most a few blocks ahead of the consumer.

    Close the iterator, unless it is exhausted, to end the workers.

    Args:
        plan: What to simulate.
        indices: Numbers of the shards.
        workers: Number of threads or processes; one per core by default.
        blocks_per_task: Number of blocks that a worker takes at a time.
        advance: Called with the number of states that have been simulated.
        show_progress: See `cqm.progress.progress`.
    """
    tasks = _Tasks(plan, indices, blocks_per_task)
    workers = len(available_cores()) if workers is None else workers
    waiting: deque[tuple[Task, Future[list[Block]]]] = deque()
    pool: Executor | None = None
    runs_python = plan.world.native.runs_python
    if workers > 1 and runs_python is not False:
        for _ in range(2):  # the first block may compile something
            seconds = 0.0
            if (task := tasks.next(1)) is not None:
                started = time.monotonic()
                waiting.append((task, _done(simulate_blocks(plan, task[1]))))
                seconds = time.monotonic() - started
            if runs_python or seconds <= _SLOW:
                break
        expected = seconds * tasks.num_left
        if (runs_python or seconds > _SLOW) and expected > _WORTH_PROCESSES:
            pool = _processes(plan, min(workers, tasks.num_left), show_progress)
    simulate_fn: Callable[[range], list[Block]] = _simulate_received
    if pool is None:
        pool = ThreadPoolExecutor(1 if runs_python else workers)
        simulate_fn = lambda blocks: simulate_blocks(plan, blocks)
    done: list[Block] = []
    finished = False
    try:
        while True:
            while len(waiting) < _AHEAD * workers and (task := tasks.next()) is not None:
                waiting.append((task, pool.submit(simulate_fn, task[1])))
            if not waiting:
                break
            (index, blocks), future = waiting[0]
            done += future.result()
            waiting.popleft()
            advance(plan.num_states(blocks))
            if blocks[-1] == plan.blocks(index)[-1]:
                yield index, done
                done = []
        finished = True
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process ended while it simulated {plan.world.name!r}, perhaps for lack of "
            "memory; rerun with threads=1 to simulate in this process"
        ) from error
    finally:
        if isinstance(pool, ThreadPoolExecutor):
            pool.shutdown(wait=True, cancel_futures=True)
        else:
            pool.shutdown(wait=True, kill_workers=not finished)  # type: ignore[call-arg]


class _Tasks:
    """The blocks to simulate, a few at a time, never from two shards at once."""

    def __init__(self, plan: Plan, indices: Sequence[int], size: int):
        self._blocks = deque((index, plan.blocks(index)) for index in indices)
        self._size = size

    @property
    def num_left(self) -> int:
        """Number of blocks that have not been taken."""
        return sum(len(blocks) for _, blocks in self._blocks)

    def next(self, size: int | None = None) -> Task | None:
        """The next blocks; None if there are none left."""
        if not self._blocks:
            return None
        size = self._size if size is None else size
        index, blocks = self._blocks.popleft()
        if len(blocks) > size:
            self._blocks.appendleft((index, blocks[size:]))
        return index, blocks[:size]


def _done(blocks: list[Block]) -> Future[list[Block]]:
    future: Future[list[Block]] = Future()
    future.set_result(blocks)
    return future


def _processes(plan: Plan, num: int, show_progress: bool | None) -> Executor | None:
    """Worker processes that have received the plan; None if they cannot carry it out."""
    import loky

    pool = None
    try:
        pool = loky.ProcessPoolExecutor(num, initializer=_receive, initargs=(plan, os.getpid()))
        if not _same(pool.submit(_simulate_one, None).result(), _simulate_one(plan)):
            raise ValueError("it does not give the same results there")
    except BaseException as error:
        if pool is not None:
            pool.shutdown(kill_workers=True)
        if not isinstance(error, Exception):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        say(f"The world or its policy cannot be used in another process: {reason}", show_progress)
        return None
    return pool


def _simulate_one(plan: Plan | None) -> Block:
    """One state of a plan; in a worker process, of the plan that it has received."""
    plan = _received if plan is None else plan
    [block] = simulate_blocks(replace(plan, recipe=replace(plan.recipe, states=1)), [0])
    return block


def _same(one: Block, other: Block) -> bool:
    if (one.dropped, one.error, set(one.arrays)) != (other.dropped, other.error, set(other.arrays)):
        return False
    return all(np.array_equal(one.arrays[k], other.arrays[k], equal_nan=True) for k in one.arrays)


_received: Plan  # in a worker process


def _receive(plan: Plan, parent: int) -> None:
    """Set up a worker: ignore interrupts, which the parent handles, and exit when it does."""
    global _received
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _received = plan


def _end_with(parent: int) -> None:
    while os.getppid() == parent:  # an orphan gets a new parent
        time.sleep(1)
    os._exit(1)


def _simulate_received(blocks: Sequence[int]) -> list[Block]:
    try:
        return simulate_blocks(_received, blocks)
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        # An exception of the world's own may not survive the way to the parent.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
