"""What the experiments break: small sets, logs, models, checkpoints and runs, made when needed."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from support.worlds import pendulum_world

import cqm
from cqm import storage
from cqm.branches import collect as collecting
from cqm.experiments.protocol import Protocol, Stage
from cqm.experiments.runner import run_study
from cqm.experiments.studies.benchmark import Benchmark
from cqm.experiments.studies.logs import LogsProtocol, LogsStudy

from .children import in_child

WORLD, NUISANCE = "cartpole-swingup", 4
TRAINING = cqm.Training(updates=4, batch_size=8, chunk=1)
TINY = Protocol(
    "chaos",
    (Stage(("ceilings", "oracle", "zero", "cqm"), (7,)),),
    domains=(WORLD,),
    states=16,
    test_states=8,
    ceiling_states=4,
    ceiling_draws=16,
    horizon=2,
    nuisance=NUISANCE,
    training=dataclasses.replace(TRAINING, updates=2),
)
TINY_LOGS = LogsProtocol(
    trajectories=(40,),
    test_states=4,
    test_draws=4,
    settings=((0, "uniform"),),
    training=TRAINING,
    classifier=TRAINING,
)


class Materials:
    """A directory of materials and scratch space; each material is made by its function below."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def path(self, name) -> Path:
        """The directory of a material, made by a child process if it does not exist."""
        path = self.directory / "materials" / name
        if not path.exists():
            with self.scratch() as made:
                ended = in_child(MAKERS[name], self, made, limit=600)
                if ended.raised or ended.crash:
                    raise RuntimeError(f"cannot make {name}: {ended.raised or ended.crash}")
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(made, path)
                made.mkdir()
        return path

    def copy(self, name, directory) -> Path:
        """A copy of a material that may be broken."""
        shutil.copytree(self.path(name), directory, dirs_exist_ok=True)
        return Path(directory)

    @contextlib.contextmanager
    def scratch(self):
        """An empty directory that is removed afterwards."""
        (self.directory / "scratch").mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self.directory / "scratch"))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def collect(directory, *, states=600, seed=0, world=None, nuisance=NUISANCE, **recipe):
    """Collect a small set in shards of one block."""
    collecting.SHARD_BYTES = 1
    world = world or cqm.load_world(WORLD, nuisance=nuisance, seed=3)
    settings = {"horizon": 2, "states": states, "seed": seed, "out": directory, **recipe}
    return cqm.collect(world, show_progress=False, threads=1, **settings)


def collect_pendulum(directory, *, states=1100, seed=0):
    """Collect five shards of a world that is simulated quickly."""
    world = pendulum_world()
    return collect(directory, world=world, states=states, seed=seed, per_step=True)


def effect_model(**settings):
    """An untrained model that compiles quickly."""
    tiny = {"candidates": "direct", "width": 4, "decoder_rank": 2, "validation": 0.0}
    return cqm.EffectModel(**{**tiny, "training": TRAINING, **settings})


def logs_of(directory, *, seed=0):
    """Logs from a stored set."""
    return cqm.Logs.from_branches(cqm.Branches.open(directory), rng=np.random.default_rng(seed))


def reproduce(directory):
    """A tiny run of the paper's benchmark, with worker processes that are forked."""
    # One worker, so that the order of its writes is always the same.
    os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})
    original = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: original("fork")
    try:
        return run_study(Benchmark(TINY), directory, command="cqm reproduce", show_progress=False)
    finally:
        multiprocessing.get_context = original


def _set(materials, directory):
    collect(directory, per_step=True)


def _held_out(materials, directory):
    collect(directory, states=24, draws=16, seed=1)


def _logs(materials, directory, seed=0):
    logs = logs_of(materials.path("set"), seed=seed)
    dataclasses.replace(logs, groups=np.arange(len(logs)) // 3).save(directory)


def _model(materials, directory, **settings):
    model = effect_model(**settings).fit(cqm.Branches.open(materials.path("set")))
    model.calibrate(cqm.Branches.open(materials.path("held-out"))).save(directory)


def _zipped(materials, directory):
    with zipfile.ZipFile(directory / "model.zip", "w") as archive:
        for path in sorted(materials.path("model").iterdir()):
            archive.write(path, path.name)


def _residual(materials, directory, **settings):
    cqm.ResidualModel(**settings).fit(cqm.Logs.load(materials.path("logs"))).save(directory)


def _hindsight(materials, directory):
    model = cqm.HindsightModel(width=4, training=TRAINING)
    model.fit(cqm.Logs.load(materials.path("logs"))).save(directory)


def _checkpoint(materials, directory):
    """A training run that was killed half way."""

    def fit():
        files, replace = [], os.replace

        def replacing(*args):
            replace(*args)
            files.append("checkpoint" in str(args[1]))
            if sum(files) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replacing
        fit_pendulum(materials, directory)

    if in_child(fit).signal != signal.SIGKILL:
        raise RuntimeError("the training run was not killed")


def fit_pendulum(materials, directory):
    """Fit a model with checkpoints, and save it in the same directory."""
    model = effect_model().fit(
        cqm.Branches.open(materials.path("pendulum")), directory=directory, show_progress=False
    )
    model.save(directory)
    return model


def _pendulum(materials, directory):
    collect_pendulum(directory)


def _run(materials, directory):
    outcome = reproduce(directory)
    if outcome.failed:
        raise RuntimeError("; ".join(outcome.problems))


def _logs_run(materials, directory):
    run_study_of_logs(directory)


def run_study_of_logs(directory):
    """A tiny run of the study of logs."""
    original = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: original("fork")
    try:
        study = LogsStudy(TINY_LOGS, (WORLD,))
        return run_study(
            study, directory, command="cqm reproduce --study logs", show_progress=False
        )
    finally:
        multiprocessing.get_context = original


MAKERS = {
    "set": _set,
    "held-out": _held_out,
    "pendulum": _pendulum,
    "logs": _logs,
    "other-logs": functools.partial(_logs, seed=1),
    "model": _model,
    "other-model": functools.partial(_model, seed=1),
    "zipped": _zipped,
    "residual": _residual,
    "hindsight": _hindsight,
    "checkpoint": _checkpoint,
    "run": _run,
    "logs-run": _logs_run,
}


def contents(directory) -> dict[str, str]:
    """Checksums of all files below a directory, by name."""
    directory = Path(directory)
    return {
        str(path.relative_to(directory)): storage.sha256(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
