"""Faults at exact points of writing: the n-th write, flush, rename, … of a process."""

import builtins
import errno
import functools
import os
import signal

from cqm import storage

POINTS = ("write", "fsync", "replace", "mkdir", "unlink", "link", "open")


class Faults:
    """Counts the points at which the storage module touches the disk; acts at one of them.

    Args:
        at: The number of the point, from 1.
        act: What happens there.
        after: Whether there are points after calls too, and not only before and within them.
    """

    def __init__(self, at=None, act=None, *, after=True):
        self.at, self.act, self.after, self.count = at, act, after, 0

    def point(self):
        """Pass a point; whether it is the chosen one."""
        self.count += 1
        return self.count == self.at

    def install(self):
        """Let the storage module of this process pass its points."""
        storage.os = _System(self)
        storage.open = functools.partial(_File, self)
        return self


class _System:
    """The module `os` with faults before and after the calls that change files."""

    def __init__(self, faults):
        self._faults = faults

    def __getattr__(self, name):
        original = getattr(os, name)
        if name not in POINTS:
            return original

        def call(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return original(*args, **kwargs)
            if self._faults.point():
                self._faults.act()
            value = original(*args, **kwargs)
            if self._faults.after and self._faults.point():
                self._faults.act()
            return value

        return call


class _File:
    """An open file with a fault in the middle of a write."""

    def __init__(self, faults, *args, **kwargs):
        self._faults, self._file = faults, builtins.open(*args, **kwargs)  # noqa: SIM115

    def write(self, content):
        if self._faults.point():
            self._file.write(bytes(content)[: len(content) // 2])
            self._file.flush()
            self._faults.act()
        return self._file.write(content)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *args):
        return self._file.__exit__(*args)

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)


def kill_self():
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all():
    """End this process and those it works with."""
    os.killpg(0, signal.SIGKILL)


def disk_full():
    """What the system raises when the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
