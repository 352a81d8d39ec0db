"""Functions in child processes, which may be killed, hang, crash or run out of memory.

A child is forked from a process that has imported everything but computed nothing with JAX, so it
starts in milliseconds and has no threads that a fork would lose.
"""

import ast
import functools
import os
import pickle
import resource
import select
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cqm

PACKAGE = str(Path(cqm.__file__).parent) + os.sep


@dataclass(frozen=True)
class Raised:
    """An exception in a child."""

    kind: str
    message: str
    where: str  # file and line
    ours: bool  # whether a `raise` statement of the library raised it
    explained: bool  # whether it is ours, and of a type that stands for a user's mistake
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        file, line = "", 0
        for frame, number in traceback.walk_tb(error.__traceback__):
            file, line = frame.f_code.co_filename, number
        ours = file.startswith(PACKAGE) and _raises(file, line)
        return cls(
            type(error).__name__,
            str(error),
            f"{file.removeprefix(PACKAGE)}:{line}",
            ours,
            ours and isinstance(error, ValueError | TypeError | FileNotFoundError),
            "".join(traceback.format_exception(error)),
        )

    def __str__(self):
        return f"{self.kind} at {self.where}: {self.message[:300]}"


@functools.cache
def _raise_lines(file):
    tree = ast.parse(Path(file).read_text())
    return [(n.lineno, n.end_lineno) for n in ast.walk(tree) if isinstance(n, ast.Raise)]


def read_sources():
    """Read the library's files now; they may be edited while trials run."""
    for path in Path(PACKAGE).rglob("*.py"):
        _raise_lines(str(path))


def _raises(file, line):
    return any(first <= line <= last for first, last in _raise_lines(file))


@dataclass(frozen=True)
class Ended:
    """How a child ended: with a value, an exception or a signal, or by being too slow."""

    value: Any = None
    raised: Raised | None = None
    signal: int = 0
    too_slow: bool = False
    seconds: float = 0.0
    output: str = ""

    @property
    def crash(self):
        """What went wrong other than by an exception; empty if nothing did."""
        if self.too_slow:
            return f"hung for more than {self.seconds:.0f} s"
        return f"ended by signal {self.signal}" if self.signal else ""


def in_child(function, *args, limit=120.0, kill_after=None, memory_gb=None) -> Ended:
    """Run a function in a child process.

    Args:
        function: What to run; its value is sent back.
        *args: Its arguments.
        limit: Seconds until the child counts as hanging, and is killed.
        kill_after: Seconds until the child is killed on purpose, with all its processes.
        memory_gb: Limit on the address space.
    """
    return Child(function, *args, memory_gb=memory_gb).ended(limit, kill_after)


class Child:
    """A running child process."""

    def __init__(self, function, *args, memory_gb=None):
        self._directory = tempfile.TemporaryDirectory(prefix="chaos-")
        self._result, self._output = (Path(self._directory.name) / n for n in ("result", "output"))
        self._started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, args, memory_gb)

    def _run(self, function, args, memory_gb):
        status = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            if memory_gb is not None:
                size = int(memory_gb * 2**30)
                resource.setrlimit(resource.RLIMIT_AS, (size, size))
            try:
                ended = Ended(function(*args))
            except BaseException as error:
                ended = Ended(raised=Raised.of(error))
            self._result.write_bytes(pickle.dumps(ended))
            status = 0
        finally:
            os._exit(status)

    def ended(self, limit=120.0, kill_after=None) -> Ended:
        """Wait for the child; kill it, and the processes it started, when its time is over."""
        wait = limit if kill_after is None else kill_after
        descriptor = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            in_time = bool(poll.poll(1000 * max(0.0, self._started + wait - time.monotonic())))
        finally:
            os.close(descriptor)
        self.kill()
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self._started
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        content = self._result.read_bytes() if self._result.exists() else b""
        self._directory.cleanup()
        if (in_time or kill_after is not None) and os.WIFEXITED(status) and content:
            ended = pickle.loads(content)
            return Ended(ended.value, ended.raised, seconds=seconds, output=output)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1
        too_slow = not in_time and kill_after is None
        return Ended(signal=number, too_slow=too_slow, seconds=seconds, output=output)

    def kill(self):
        """Kill the child and all processes it started."""
        for kill in (os.killpg, os.kill):  # before it has its own group, only the child itself
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            else:
                return
