"""Processes that do jobs side by side, one core each.

A job that raises, or whose process dies, does not stop the others. Every process is held to one
core, because training is only repeatable bit for bit with the same number of threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")


def run_side_by_side(
    work_fn: Callable[[Any], None], tasks: Sequence[Task], cores: Sequence[int]
) -> Iterator[tuple[Task, str | None]]:
    """Do all tasks, as many at a time as there are cores.

    Yields every task when it is over, with None or with what went wrong.

    Args:
        work_fn: Does one task; importable by its name, because processes are started afresh.
        tasks: What is to be done, in the order in which it is begun.
        cores: One process runs on each.
    """
    waiting = list(reversed(tasks))
    workers: dict[Connection, _Worker] = {}
    try:
        for core in cores[: len(tasks)]:
            worker = _Worker(work_fn, core)
            workers[worker.connection] = worker
            worker.begin(waiting.pop())
        while workers:
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                task, problem = worker.task, worker.result()
                if problem is not None and not worker.process.is_alive():
                    del workers[ready]
                    if waiting:
                        worker = _Worker(work_fn, worker.core)
                        workers[worker.connection] = worker
                if waiting:
                    worker.begin(waiting.pop())
                else:
                    workers.pop(worker.connection, None)
                    worker.stop()
                yield task, problem
    finally:
        for worker in workers.values():
            worker.stop()


class _Worker:
    """A process and the task it is at."""

    def __init__(self, work_fn: Callable[[Any], None], core: int):
        context = multiprocessing.get_context("spawn")
        self.core = core
        self.task: Any = None
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(work_fn, theirs), daemon=True)
        # The child must be held to its core before it imports anything that counts them.
        before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        if before is not None:
            os.sched_setaffinity(0, {core})
        try:
            self.process.start()
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)
        theirs.close()

    def begin(self, task: Any) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # of a process that has died, which `result` tells
            self.connection.send(task)

    def result(self) -> str | None:
        """What went wrong with the task, if anything."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # it died, perhaps before it read the task
            self.process.join()
            return f"its process ended with exit code {self.process.exitcode}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _serve(work_fn: Callable[[Any], None], connection: Connection) -> None:
    # The parent decides what an interrupt means, and nothing goes on without it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            work_fn(task)
        except Exception as error:  # whatever it is, the other jobs go on
            connection.send(f"{type(error).__name__}: {error}")
        else:
            connection.send(None)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
