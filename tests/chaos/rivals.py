"""Two processes in one directory: one is refused, or both agree on every byte."""

import functools
import time

import cqm

from . import kills, materials as made
from .children import Child, in_child
from .trials import Experiment, Result, one_by_one


def _other_logs(materials, directory):
    cqm.Logs.load(materials.path("other-logs")).save(directory)


def _logs(materials, directory):
    cqm.Logs.load(materials.path("logs")).save(directory)


def _model(materials, directory):
    cqm.load_model(materials.path("model")).save(directory)


def _other_model(materials, directory):
    cqm.load_model(materials.path("other-model")).save(directory)


def _other_collect(materials, directory):
    made.collect_pendulum(directory, seed=1)


# Two operations in one directory, and how often out of 20 trials. If they are the same, their files
# must be those of one alone; if not, what is read afterwards must be one of the two, or refused.
PAIRS = {
    "collect twice": (kills.OPERATIONS["collect"], kills.OPERATIONS["collect"], 8),
    "collect with two seeds": (kills.OPERATIONS["collect"], _other_collect, 3),
    "save two sets of logs": (_logs, _other_logs, 3),
    "save two models": (_model, _other_model, 3),
    "fit twice": (kills.OPERATIONS["fit"], kills.OPERATIONS["fit"], 2),
    "reproduce twice": (kills.OPERATIONS["reproduce"], kills.OPERATIONS["reproduce"], 1),
}
NEEDED = ("pendulum", "logs", "other-logs", "model", "other-model")


@functools.cache
def _alone(materials, operation):
    for name in NEEDED:
        materials.path(name)
    with materials.scratch() as directory:
        ended = in_child(operation, materials, directory, limit=600)
        if ended.raised or ended.crash:
            raise RuntimeError(str(ended.raised or ended.crash))
        return kills.files(directory), ended.seconds


def _trial(materials, rng, directory):
    pool = [name for name, (_, _, share) in PAIRS.items() for _ in range(share)]
    name = pool[rng.integers(len(pool))]
    one, two, _ = PAIRS[name]
    (files_one, seconds), (files_two, _) = _alone(materials, one), _alone(materials, two)
    delay = float(rng.choice([0, 0, rng.uniform(0, seconds)]))
    killed = rng.random() < 0.2 and one is two
    what = f"{name}, {delay:.3f} s apart{', the first killed' if killed else ''}"
    first = Child(one, materials, directory)
    second = Child(_later, two, materials, directory, delay)
    ended = [
        first.ended(600, float(rng.uniform(0, seconds)) if killed else None),
        second.ended(600),
    ]
    refused = 0
    for i, end in enumerate(ended):
        if (end.crash and not (killed and i == 0)) or (end.raised and not end.raised.explained):
            return Result(what, name, f"process {i + 1}: {end.raised or end.crash}")
        refused += end.raised is not None
    if refused == 2:
        return Result(what, name, f"both were refused: {ended[0].raised}; {ended[1].raised}")
    problem = ""
    if one is two:
        again = in_child(one, materials, directory, limit=600)
        if again.raised or again.crash or again.value:
            problem = f"rerun: {again.raised or again.crash or again.value}"
        problem = problem or kills.differences(files_one, kills.files(directory))
    else:
        problem = _mixed(materials, directory, files_one, files_two)
    return Result(what, name, problem)


def _mixed(materials, directory, *alone):
    """Why what two different operations left is neither the one nor the other."""
    left = kills.files(directory)
    if left in alone:
        return ""
    read = in_child(_read, directory)
    if read.raised and read.raised.explained:
        return ""
    strays = set(left) - set(alone[0])
    return f"mixed files are read, or strays: {sorted(strays)} {read.raised or read.crash}"


def _read(directory):
    if (directory / "model.json").exists():
        cqm.load_model(directory)
    elif (directory / "logs.json").exists():
        cqm.Logs.load(directory)
    else:
        cqm.Branches.open(directory).verify()


def _later(operation, materials, directory, delay):
    time.sleep(delay)
    return operation(materials, directory)


EXPERIMENT = Experiment("rivals", "Two processes use one directory", 200, 4, one_by_one(_trial))
