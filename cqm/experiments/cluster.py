"""Jobs of a study on a Ray cluster, with one idempotent task per job.

No file system is shared. What a job reads travels through the object store, once per node for all
jobs that run there at the same time; its record comes back the same way and is written by the
machine that runs the study. A task works in a temporary directory, in a process of its own that is
pinned to one core as local workers are, so results are the same bit for bit on machines that round
in the same way. A lost node costs its running jobs, which start again elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cqm import storage
from cqm.branches.local import available_cores
from cqm.experiments.workers import run_side_by_side

if TYPE_CHECKING:
    from cqm.experiments.records import JobKey
    from cqm.experiments.runner import Study

    Task = tuple[Study, str, JobKey, dict[str, Any]]  # study, directory, job, settings

_RETRIES = 3  # after the loss of a node


def run_on_cluster(
    work_fn: Callable[[Any], None],
    tasks: Sequence[Task],
    ray: Any,
    started_fn: Callable[[Any], None] = lambda task: None,
) -> Iterator[tuple[Task, str | None]]:
    """Run all tasks, as many at a time as the cluster has processors.

    Yields each task when it ends, with None if its record was written or a description of what went
    wrong, as `run_side_by_side` does.

    Args:
        work_fn: Does one task in the directory that the task names; importable by name.
        tasks: The tasks, in the order in which they start.
        ray: Ray, connected to the cluster.
        started_fn: Called with each task when it is sent to the cluster.
    """
    remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(do_on_node)
    waiting, running = list(reversed(tasks)), dict[Any, Any]()
    sent = dict[Path, Any]()  # directories in the object store, while a running job reads them
    try:
        while waiting or running:
            while waiting and len(running) < num_cpus(ray):
                task = waiting.pop()
                needed = _needed(task)
                for path in needed:
                    if path not in sent:
                        sent[path] = ray.put(_contents(path))
                started_fn(task)
                names = [str(path.relative_to(task[1])) for path in needed]
                given = [sent[path] for path in needed]
                running[remote.remote(work_fn, task, names, *given)] = task
            (ended, *_), _ = ray.wait(list(running))
            task = running.pop(ended)
            still_read = {path for other in running.values() for path in _needed(other)}
            sent = {path: stored for path, stored in sent.items() if path in still_read}
            yield task, _kept(ray, ended, task)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def num_cpus(ray: Any) -> int:
    """Number of processors of the cluster, at least 1; it changes as nodes come and go."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _needed(task: Task) -> list[Path]:
    study, directory, job, _ = task
    return study.inputs(Path(directory), job)


def _contents(directory: Path) -> dict[str, np.ndarray]:
    """All files below a directory by their relative names, as bytes that nodes can share."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): np.fromfile(path, np.uint8) for path in files}


def _kept(ray: Any, ended: Any, task: Task) -> str | None:
    """Write the record that a task brought back; returns what went wrong, if anything did."""
    study, directory, job, _ = task
    try:
        problem, record = ray.get(ended)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
    if problem is not None:
        return str(problem)
    if json.loads(record)["code"] != (study.code(job) or ""):
        return "it ran with different code; install the same version of cqm on every machine"
    storage.write_pieces(study.record_file(Path(directory), job), [record])
    return None


def do_on_node(
    work_fn: Callable[[Any], None],
    task: Task,
    names: Sequence[str],
    *inputs: Mapping[str, np.ndarray],
) -> tuple[str | None, bytes]:
    """Do a task in a temporary directory of this node; returns what went wrong, and its record."""
    study, _, job, settings = task
    with tempfile.TemporaryDirectory(prefix="cqm-job-") as directory:
        for name, files in zip(names, inputs, strict=True):
            for file, content in files.items():
                path = Path(directory, name, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                storage.write_pieces(path, [content.tobytes()])
        own = (study, directory, job, settings)
        with _free_core() as (core, inherited):
            ((_, problem),) = run_side_by_side(work_fn, [own], [core], inherited=inherited)
        if problem is not None:
            return problem, b""
        return None, study.record_file(Path(directory), job).read_bytes()


@contextlib.contextmanager
def _free_core() -> Iterator[tuple[int, list[int]]]:
    """A core of this machine that no other task holds, and the descriptor of its lock.

    If all are held, because the node was given more processors than it has, one is shared.
    """
    cores = available_cores()
    for core in cores:
        with contextlib.ExitStack() as held:
            place = Path(tempfile.gettempdir(), f"cqm-cores-{os.getuid()}", str(core))
            try:
                lock = held.enter_context(storage.exclusive(place, patience_seconds=0))
            except ValueError:
                continue
            yield core, [lock]
            return
    yield cores[os.getpid() % len(cores)], []
