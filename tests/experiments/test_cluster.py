"""Jobs on a cluster: the same bytes as on this machine, whatever happens to the nodes."""

import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cqm import storage
from cqm.experiments import cluster as on_cluster, runner
from cqm.experiments.protocol import preset
from cqm.experiments.runner import run_study
from cqm.experiments.studies.benchmark import Benchmark

DOMAIN = "cartpole-swingup"
SMALL = preset("smoke").restricted([DOMAIN], None, ["cqm", "ridge", "zero"])
OPTIONS = dict(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)


def tables(directory):
    return {path.name: path.read_bytes() for path in Path(directory).glob("*.csv")}


def records(directory):
    return sorted(Path(directory).glob("jobs/*/*/*/record.json"))


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    directory = tmp_path_factory.mktemp("local")
    assert run_study(Benchmark(SMALL), directory, show_progress=False).problems == []
    return directory


@pytest.fixture
def cluster():
    """A Ray cluster of one processor on this machine, to which a test adds a node."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="ray-")  # its sockets need a short path
    quick = {"health_check_period_ms": 200, "health_check_failure_threshold": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", directory)
        cluster = Cluster(initialize_head=True, head_node_args={**OPTIONS, "_system_config": quick})
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


def node_ids():
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def noted(directory, original):
    """A task that leaves a file for every job it begins, and hangs on the node to be lost."""

    def do_on_node(*arguments):
        ray = sys.modules["ray"]
        node = ray.get_runtime_context().get_node_id()
        descriptor, _ = tempfile.mkstemp(dir=directory, prefix=f"begun-{node}-")
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            if (directory / "doomed").read_text() == node:
                time.sleep(600)
        return original(*arguments)

    return do_on_node


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_writes_the_tables_of_a_local_run(
    tmp_path, cluster, local, monkeypatch
):
    head = node_ids()
    node = cluster.add_node(**OPTIONS)
    cluster.wait_for_nodes()
    (doomed,) = node_ids() - head
    (tmp_path / "doomed").write_text(doomed)
    task = noted(tmp_path, on_cluster.do_on_node)
    monkeypatch.setattr(on_cluster, "do_on_node", task)
    begun = lambda node="*": len(list(tmp_path.glob(f"begun-{node}-*")))
    out, done_at_loss = tmp_path / "remote", []

    def lose_the_node():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (records(out) and begun(doomed)):
            time.sleep(0.05)
        done_at_loss.append(len(records(out)))
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=lose_the_node)
    thread.start()
    try:
        outcome = run_study(Benchmark(SMALL), out, cluster="auto", show_progress=False)
    finally:
        thread.join()
    assert outcome.problems == []
    assert 1 <= done_at_loss[0] < len(SMALL.jobs())
    assert begun(doomed) == 1
    assert begun() == len(SMALL.jobs()) + 1  # what the node had begun was done again
    assert tables(out) == tables(local)
    assert not list(out.glob("jobs/*/*/*/*.safetensors"))  # what a job needs only while it runs


def ray_here(cpus=2):
    """A stand-in for Ray that does each task when its result is asked for."""
    stored, most = [], []

    def put(value):
        stored.append(value)
        return value

    def remote(**options):
        assert options["num_cpus"] == 1
        return lambda fn: SimpleNamespace(remote=lambda *given: functools.partial(fn, *given))

    def wait(running):
        most.append(len(running))
        return running[:1], running[1:]

    return SimpleNamespace(
        remote=remote,
        put=put,
        get=lambda task: task(),
        wait=wait,
        cancel=lambda task, force: None,
        cluster_resources=lambda: {"CPU": float(cpus)},
        exceptions=SimpleNamespace(RayError=ConnectionError),
        stored=stored,
        most=most,
    )


def copy_of(local, directory, *lost):
    """A run of which some jobs have still to be done, and those jobs as tasks."""
    shutil.copytree(local, directory)
    run = storage.read_json(directory / "run.json")
    settings = {name: run[name] for name in ("protocol", "versions")}
    study, tasks = Benchmark(SMALL), []
    for method in lost:
        job = {"domain": DOMAIN, "seed": 7, "method": method}
        study.record_file(directory, job).unlink()
        tasks.append((study, str(directory), job, settings))
    return tasks


def write_note(task):
    """Stands for the work of a job: it lists what the job was given."""
    study, directory, job, _ = task
    if job["method"] == "ridge":
        raise ValueError("not today")
    names = sorted(path.name for path in Path(directory).glob("branches/*/*/*"))
    content = {"code": study.code(job), "given": names, "cores": len(os.sched_getaffinity(0))}
    storage.write_json(study.record_file(Path(directory), job), content)


def test_jobs_get_what_they_read_and_their_records_come_back(local, tmp_path):
    tasks = copy_of(local, tmp_path / "run", "cqm", "ridge", "zero")
    ray, started = ray_here(), []
    ended = on_cluster.run_on_cluster(write_note, tasks, ray, started.append)
    problems = {task[2]["method"]: problem for task, problem in ended}
    assert problems == {"cqm": None, "ridge": "ValueError: not today", "zero": None}
    assert started == tasks
    assert max(ray.most) == 2  # as many as the cluster has processors
    assert len(ray.stored) == 1  # the branches, once for the three jobs
    record = storage.read_json(tasks[0][0].record_file(tmp_path / "run", tasks[0][2]))
    assert record["given"] == ["ceiling", "test", "training"]
    assert record["cores"] == 1
    assert not tasks[1][0].record_file(tmp_path / "run", tasks[1][2]).exists()


def test_a_node_that_keeps_failing_fails_its_jobs_only(local, tmp_path):
    tasks, ray = copy_of(local, tmp_path / "run", "cqm", "zero"), ray_here()

    def get(task):
        if task.args[1][2]["method"] == "cqm":
            raise ConnectionError("the node died\nits memory was full")
        return task()

    ray.get = get
    ended = on_cluster.run_on_cluster(write_note, tasks, ray)
    problems = {task[2]["method"]: problem for task, problem in ended}
    assert problems == {"cqm": "ConnectionError: its memory was full", "zero": None}


def test_records_of_other_code_are_refused(local, tmp_path):
    (task,) = copy_of(local, tmp_path / "run", "zero")
    ray = ray_here()
    ray.get = lambda task: (None, b'{"code": "other"}')
    ((_, problem),) = on_cluster.run_on_cluster(write_note, [task], ray)
    assert problem.startswith("it ran with different code; install the same version of cqm")
    assert not task[0].record_file(tmp_path / "run", task[2]).exists()


def test_other_versions_on_a_node_are_refused(tmp_path, monkeypatch):
    """The run says which versions made its results, so a node must have them."""
    versions = {**runner.installed_versions(), "jax": "0.0"}
    monkeypatch.setattr(runner, "installed_versions", lambda: versions)  # not in the processes
    outcome = run_study(Benchmark(SMALL), tmp_path / "run", show_progress=False)
    assert len(outcome.failed) == len(SMALL.jobs())
    assert 'has other versions than the run:\n  jax: "0.0" -> "' in outcome.problems[0]


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"experiments on a cluster needs Ray; install cqm\[cl"):
        run_study(Benchmark(SMALL), tmp_path, cluster="auto")


def test_an_address_without_a_cluster_is_explained(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"no Ray cluster was found at 'auto' .*pass the address"):
        run_study(Benchmark(SMALL), tmp_path, cluster="auto")
