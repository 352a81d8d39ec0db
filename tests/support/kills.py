"""Processes that are killed while they write."""

import os
import signal


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
