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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from cqm.branches.simulate import Block, Plan, simulate_blocks
from cqm.progress import Advance, say

_WORTH_PROCESSES = 8.0  # expected seconds of simulation from which worker processes pay off
_SLOW = 0.5  # a block that takes longer, in seconds, is not made of a few vectorised operations
_AHEAD = 8  # tasks per worker that are simulated ahead of the consumer


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
) -> Iterator[tuple[int, list[Block]]]:
    """Simulate shards in order, at most a few blocks ahead of the consumer.

    Args:
        plan: What to simulate.
        indices: Numbers of the shards.
        workers: Number of threads or processes; one per core by default.
        blocks_per_task: Number of blocks that a worker takes at a time.
        advance: Called with the number of states that have been simulated.
        show_progress: See `cqm.progress.progress`.
    """
    tasks = (
        (index, plan.blocks(index)[start : start + blocks_per_task])
        for index in indices
        for start in range(0, len(plan.blocks(index)), blocks_per_task)
    )
    num_blocks = sum(len(plan.blocks(index)) for index in indices)
    workers = len(available_cores()) if workers is None else workers
    waiting: deque[tuple[tuple[int, range], Future[list[Block]]]] = deque()
    pool: Executor | None = None
    simulate_fn: Callable[..., list[Block]] = _simulate_received
    in_python = plan.world.native.runs_python
    if workers > 1 and in_python is not False and (task := next(tasks, None)) is not None:
        # The first task shows how long the others will take.
        started = time.monotonic()
        waiting.append((task, _done(simulate_blocks(plan, task[1]))))
        seconds = (time.monotonic() - started) / len(task[1])
        in_python = in_python or seconds > _SLOW
        if in_python and seconds * (num_blocks - len(task[1])) > _WORTH_PROCESSES:
            pool = _processes(plan, workers, show_progress)
    if pool is None:
        pool = ThreadPoolExecutor(1 if in_python else workers)
        simulate_fn = lambda blocks: simulate_blocks(plan, blocks)
    done: list[Block] = []
    try:
        while True:
            while len(waiting) < _AHEAD * workers and (task := next(tasks, None)):
                waiting.append((task, pool.submit(simulate_fn, task[1])))
            if not waiting:
                break
            (index, blocks), future = waiting.popleft()
            done += future.result()
            advance(plan.num_states(blocks))
            if blocks[-1] == plan.blocks(index)[-1]:
                yield index, done
                done = []
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process ended while it simulated {plan.world.name!r}, perhaps for lack of "
            "memory; rerun with threads=1 to simulate in this process"
        ) from error
    finally:
        _end(pool, waiting)


def _done(blocks: list[Block]) -> Future[list[Block]]:
    future: Future[list[Block]] = Future()
    future.set_result(blocks)
    return future


def _processes(plan: Plan, num: int, show_progress: bool | None) -> Executor | None:
    """Worker processes that have received the plan; None if its world cannot be sent to them."""
    import loky

    pool = loky.ProcessPoolExecutor(num, initializer=_receive, initargs=(plan, os.getpid()))
    try:
        pool.submit(_try_world).result()
    except Exception as error:  # a user's world may fail to travel in any way
        pool.shutdown(kill_workers=True)
        say(
            f"Simulating on one core: other processes cannot load the world ({error})",
            show_progress,
        )
        return None
    return pool


def _end(pool: Executor, waiting: Sequence[Any]) -> None:
    """Shut down a pool; what is still waiting, after an error or an interrupt, is given up."""
    for _, future in waiting:
        future.cancel()
    if isinstance(pool, ThreadPoolExecutor) or not waiting:
        pool.shutdown(wait=True)
    else:
        pool.shutdown(wait=True, kill_workers=True)  # type: ignore[call-arg]


_received: Plan  # in a worker process


def _receive(plan: Plan, parent: int) -> None:
    """Prepare a worker process that ends with its parent, to which interrupts are left."""
    global _received
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _received = plan


def _end_with(parent: int) -> None:
    while os.getppid() == parent:  # that of an orphan is another one
        time.sleep(1)
    os._exit(1)


def _try_world() -> None:
    """Raise an exception if the world does not work in this process."""
    _received.world.reset(1, np.random.default_rng(0))


def _simulate_received(blocks: Sequence[int]) -> list[Block]:
    return simulate_blocks(_received, blocks)
