"""A full disk: the n-th write fails; nothing half-written stays, and a rerun completes."""

from . import kills
from .children import in_child
from .faults import disk_full
from .trials import Experiment, Result, one_by_one

NAMES = ["collect"] * 5 + ["save logs"] * 3 + ["replace logs"] * 2 + ["replace a model"] * 2
NAMES += ["fit", "reproduce"]


def _trial(materials, rng, directory):
    name = NAMES[rng.integers(len(NAMES))]
    wanted, num_points, _ = kills.reference(materials, name, after=False)
    kills.prepare(materials, name, directory)
    point = int(rng.integers(1, num_points + 1))
    what = f"{name}, disk full at write point {point}/{num_points}"
    operation = kills.OPERATIONS[name]
    arguments = (operation, materials, directory, point, disk_full, False)
    ended = in_child(kills.faulty, *arguments, limit=600)
    if ended.crash:
        return Result(what, name, ended.crash)
    message = str(ended.raised.message if ended.raised else ended.value or "")
    if ended.raised and (ended.raised.kind != "OSError" or "disk is full" not in message):
        return Result(what, name, f"not explained: {ended.raised}")
    stray = [str(path) for path in directory.rglob("*.partial")]
    if stray:
        return Result(what, name, f"left behind: {stray}")
    problem = kills.half_written(name, materials, directory)
    again = in_child(operation, materials, directory, limit=600)
    if again.raised or again.crash or again.value:
        problem = problem or f"rerun: {again.raised or again.crash or again.value}"
    return Result(what, name, problem or kills.differences(wanted, kills.files(directory)))


EXPERIMENT = Experiment(
    "full_disk", "The disk is full while something is saved", 200, 6, one_by_one(_trial)
)
