"""Processes that are killed, and calls that are stopped, while they write."""

import os
import signal

import pytest


class StoppedError(BaseException):
    """Nothing may catch it."""


def stopped_at(point, run):
    """Run something that is stopped when it renames its n-th file into place.

    For code that a forked child could not run, such as JAX's. Returns whether it was stopped.
    """
    rename, count = os.replace, 0

    def replace(source, target):
        nonlocal count
        count += 1
        if count == point:
            raise StoppedError
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            run()
        except StoppedError:
            return True
    return False


def killed_at(point, run, *, after=False):
    """Run something in a child that is killed when it renames its n-th file into place.

    Returns whether it was killed, because it may have written fewer files.
    """
    child = os.fork()
    if child == 0:
        rename, count = os.replace, 0

        def replace(source, target):
            nonlocal count
            count += 1
            if count == point and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            os.replace = replace
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("the child failed")
    return os.WIFSIGNALED(status)
