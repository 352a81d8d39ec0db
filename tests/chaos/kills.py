"""Kills: a process ends at a random time or at an exact write, and the command is run again."""

import functools
import json
import signal
from pathlib import Path

import cqm

from . import materials as made
from .children import in_child
from .faults import Faults, kill_all, kill_self
from .materials import contents
from .trials import Experiment, Result, one_by_one

# How often each operation is killed, out of 20 trials.
SHARES = {"collect": 9, "save logs": 3, "replace logs": 3, "replace a model": 2, "fit": 2}
SHARES |= {"reproduce": 1}


def _collect(materials, directory):
    made.collect_pendulum(directory)


def _fit(materials, directory):
    made.fit_pendulum(materials, directory)


def _save_logs(materials, directory):
    made.logs_of(materials.path("set")).save(directory)


def _save_model(materials, directory):
    cqm.load_model(materials.path("model")).save(directory)


def _reproduce(materials, directory):
    outcome = made.reproduce(directory)
    return outcome.problems


OPERATIONS = {
    "collect": _collect,
    "fit": _fit,
    "save logs": _save_logs,
    "replace logs": _save_logs,
    "replace a model": _save_model,
    "reproduce": _reproduce,
}
BEFORE = {"replace logs": "other-logs", "replace a model": "other-model"}
NEEDED = {"fit": ["pendulum"], "replace a model": ["model", "other-model"]}
NEEDED |= {"save logs": ["set"], "replace logs": ["set", "other-logs"]}


@functools.cache
def reference(materials, name, *, after=True):
    """Files of an undisturbed operation, the number of its write points and its duration."""

    def run(directory):
        faults = Faults(after=after).install()
        prepare(materials, name, directory)
        problems = OPERATIONS[name](materials, directory)
        if problems:
            raise RuntimeError("; ".join(problems))
        return faults.count

    for need in NEEDED.get(name, []):
        materials.path(need)
    with materials.scratch() as directory:
        run_once = in_child(run, directory, limit=600)
        if run_once.raised or run_once.crash:
            raise RuntimeError(f"{name}: {run_once.raised or run_once.crash}")
        return files(directory), run_once.value, run_once.seconds


def prepare(materials, name, directory):
    if name in BEFORE:
        materials.copy(BEFORE[name], directory)


def files(directory):
    """Checksums of all files, without the times that a run took."""
    found = contents(directory)
    for name in found:
        if Path(name).name == "record.json":
            record = json.loads((directory / name).read_text())
            found[name] = json.dumps({k: record[k] for k in record if k not in ("seconds", "seal")})
    return {name: checksum for name, checksum in found.items() if name != "times.json"}


def _trial(materials, rng, directory):
    name = rng.permutation([n for n, share in SHARES.items() for _ in range(share)])[0]
    wanted, num_points, seconds = reference(materials, name)
    prepare(materials, name, directory)
    kills, problem = [], ""
    for _ in range(1 + int(rng.random() < 0.25)):
        if rng.random() < 0.7:
            point = int(rng.integers(1, num_points + 1))
            act = kill_self if name != "reproduce" or rng.random() < 0.5 else kill_all
            ended = in_child(faulty, OPERATIONS[name], materials, directory, point, act, limit=600)
            kills.append(f"write point {point}/{num_points} ({act.__name__})")
        else:
            after = float(rng.uniform(0, seconds))
            ended = in_child(OPERATIONS[name], materials, directory, kill_after=after)
            kills.append(f"{after:.3f} s")
        if ended.signal not in (0, signal.SIGKILL) or ended.raised:
            problem = problem or f"after {len(kills)} kills: {ended.raised or ended.crash}"
        problem = problem or half_written(name, materials, directory)
    again = in_child(OPERATIONS[name], materials, directory, limit=600)
    if again.raised or again.crash or again.value:
        failed = again.value if isinstance(again.value, list) else ""
        problem = problem or f"rerun: {again.raised or again.crash or failed}"
    what = f"{name}, killed at {', then '.join(kills)}"
    return Result(what, name, problem or differences(wanted, files(directory)))


def faulty(operation, materials, directory, point, act, after=True):
    """Run an operation in which something happens at a write point."""
    Faults(point, act, after=after).install()
    operation(materials, directory)


def half_written(name, materials, directory):
    """Why what a kill left behind would be read as something else; empty if it would not."""
    if name not in BEFORE:
        return ""
    read = in_child(_read, name, directory)
    if read.raised or read.crash:
        return "" if read.raised and read.raised.explained else str(read.raised or read.crash)
    known = read.value in _old_and_new(name, materials)
    return "" if known else "what was read is neither the old nor the new"


@functools.cache
def _old_and_new(name, materials):
    old = in_child(_read, name, materials.path(BEFORE[name]))
    return old.value, in_child(_read_new, name, materials).value


def _read(name, directory):
    if name == "replace logs":
        return str(cqm.Logs.load(directory).actions.tolist())
    return str(cqm.Scorer.load(directory).effect([[0.1] * 9]).tolist())


def _read_new(name, materials):
    if name == "replace logs":
        return str(made.logs_of(materials.path("set")).actions.tolist())
    return _read(name, materials.path("model"))


def differences(wanted, got):
    """How a directory differs from the undisturbed one; empty if it does not."""
    lost, stray = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
    changed = sorted(n for n in set(wanted) & set(got) if wanted[n] != got[n])
    found = {"lost": lost, "stray": stray, "changed": changed}
    return "; ".join(f"{key}: {', '.join(names)}" for key, names in found.items() if names)


EXPERIMENT = Experiment(
    "kills", "A process is killed while it writes, and run again", 1_000, 8, one_by_one(_trial)
)
