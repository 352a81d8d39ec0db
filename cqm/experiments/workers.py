"""Worker processes that run tasks side by side, one core each.

A task that raises, or whose process dies, does not stop the others. Every process is pinned to one
core, because training is repeatable bit for bit only with the same number of threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

T = TypeVar("T")


def run_side_by_side(
    work_fn: Callable[[Any], None],
    tasks: Sequence[T],
    cores: Sequence[int],
    started_fn: Callable[[T], None] = lambda task: None,
    inherited: Sequence[int] = (),
) -> Iterator[tuple[T, str | None]]:
    """Run all tasks, as many at a time as there are cores.

    Yields each task when it ends, with None if it succeeded or a description of what went wrong.

    Args:
        work_fn: Does one task; it must be importable by name, because new processes import it.
        tasks: The tasks, in the order in which they start.
        cores: The cores to use; one process runs on each.
        started_fn: Called with each task when it starts.
        inherited: File descriptors that the processes keep open, such as that of a lock, which is
            then held for as long as any of them runs.
    """
    waiting = list(reversed(tasks))
    workers: dict[Connection, _Worker] = {}

    def begin(worker: _Worker) -> None:
        started_fn(waiting[-1])
        worker.begin(waiting.pop())

    try:
        for core in cores[: len(tasks)]:
            worker = _Worker(work_fn, core, inherited)
            workers[worker.connection] = worker
            begin(worker)
        while workers:
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                task, problem = worker.task, worker.result()
                if problem is not None and not worker.process.is_alive():
                    del workers[ready]
                    if waiting:
                        worker = _Worker(work_fn, worker.core, inherited)
                        workers[worker.connection] = worker
                if waiting:
                    begin(worker)
                else:
                    workers.pop(worker.connection, None)
                    worker.stop()
                yield task, problem
    finally:
        for worker in workers.values():
            worker.stop()


class _Worker:
    """A process and its current task."""

    def __init__(self, work_fn: Callable[[Any], None], core: int, inherited: Sequence[int]):
        context = multiprocessing.get_context("spawn")
        self.core = core
        self.task: Any = None
        self.connection, theirs = context.Pipe()
        kept = [_Descriptor(descriptor) for descriptor in inherited]
        self.process = context.Process(target=_serve, args=(work_fn, theirs, kept), daemon=True)
        # The child must be pinned before it imports anything that counts cores, and must not see
        # an interrupt, which is left to this process, before it can ignore it.
        before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        if before is not None:
            os.sched_setaffinity(0, {core})
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            if before is not None:
                os.sched_setaffinity(0, before)
        theirs.close()

    def begin(self, task: Any) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # the process has died, and `result` will say so
            self.connection.send(task)

    def result(self) -> str | None:
        """What went wrong with the task; None if nothing did."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # it died, perhaps before reading the task
            self.process.join()
            return f"its process ended with exit code {self.process.exitcode}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


class _Descriptor:
    """A file descriptor that is duplicated for a process when it is sent to it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _serve(
    work_fn: Callable[[Any], None], connection: Connection, inherited: Sequence[_Descriptor]
) -> None:
    # Interrupts are left to the parent, and the worker must not outlive it.
    os.environ.setdefault("MUJOCO_GL", "disable")  # nothing is rendered; servers have no display
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            work_fn(task)
        except Exception as error:  # whatever it is, the other tasks go on
            connection.send(f"{type(error).__name__}: {error}")
        else:
            connection.send(None)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
