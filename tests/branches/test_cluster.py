import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import cqm
from cqm.branches import collect as collection
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

SETTINGS = dict(states=7 * 256 + 88, horizon=3, draws=2, warmup=(0, 2), seed=6)  # 8 shards


def make_world(directory):
    """A world that leaves a file for every block it begins, and fails or hangs on request.

    Its functions are defined in here, so that they are sent to the workers by value.
    """

    def node():
        ray = sys.modules.get("ray")
        return ray.get_runtime_context().get_node_id() if ray and ray.is_initialized() else "here"

    def doomed_node():
        with contextlib.suppress(FileNotFoundError):
            return (directory / "doomed").read_text()

    def initial(num, rng):
        descriptor, _ = tempfile.mkstemp(dir=directory, prefix=f"begun-{node()}-")
        os.close(descriptor)
        if num == 88 and (directory / "fail").exists():  # the last block
            raise ValueError("no states today")
        # A doomed node hangs, and the others wait until it does.
        deadline = time.monotonic() + 60
        while (doomed := doomed_node()) and (
            doomed == node() or not any(directory.glob(f"begun-{doomed}-*"))
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return rng.standard_normal((num, 2))

    native = FunctionWorld(
        step=lambda x, u, e: 0.9 * x + u + 0.1 * e,
        initial=initial,
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        candidate_actions=[[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],
        name="plane",
    )
    return NuisanceWorld(native, Nuisance(dimension=3))


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def begun(directory, node="*"):
    return len(list(directory.glob(f"begun-{node}-*")))


@pytest.fixture
def small_shards(monkeypatch):
    """One block per shard."""
    monkeypatch.setattr(collection, "SHARD_BYTES", 0)


OPTIONS = dict(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of one processor on this machine, to which tests add nodes."""
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


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_writes_the_bytes_of_a_local_run(
    tmp_path, cluster, small_shards
):
    world = make_world(tmp_path)
    cqm.collect(world, out=tmp_path / "local", threads=1, **SETTINGS)
    whole = contents(tmp_path / "local")
    assert len(whole) == 2 + 2 * 8

    head = node_ids()
    node = cluster.add_node(**OPTIONS)
    cluster.wait_for_nodes()
    (doomed,) = node_ids() - head
    (tmp_path / "doomed").write_text(doomed)
    before, out, written_at_loss = begun(tmp_path), tmp_path / "remote", []

    def lose_the_node():
        deadline = time.monotonic() + 60
        written = lambda: len(list(out.glob("shard-*.json")))
        while time.monotonic() < deadline and (written() < 2 or not begun(tmp_path, doomed)):
            time.sleep(0.01)
        written_at_loss.append(written())
        cluster.remove_node(node, allow_graceful=False)
        (tmp_path / "doomed").unlink()

    thread = threading.Thread(target=lose_the_node)
    thread.start()
    try:
        branches = cqm.collect(world, out=out, cluster="auto", **SETTINGS)
    finally:
        thread.join()
    assert 2 <= written_at_loss[0] < 8
    assert begun(tmp_path, doomed) == 1
    assert begun(tmp_path) == before + 8 + 1  # what the node had begun was done again
    assert contents(out) == whole
    assert len(branches) == 7 * 256 + 88


def test_a_shard_that_keeps_failing_is_reported_at_the_end(tmp_path, cluster, small_shards):
    world = make_world(tmp_path)
    cqm.collect(world, out=tmp_path / "local", threads=1, **SETTINGS)
    whole = contents(tmp_path / "local")

    (tmp_path / "fail").touch()
    before, out = begun(tmp_path), tmp_path / "remote"
    with pytest.raises(RuntimeError) as caught:
        cqm.collect(world, out=out, cluster="auto", **SETTINGS)
    message = str(caught.value)
    assert message.startswith("1 shard failed after 3 retries; the others were written; rerun the")
    assert "shard 7: ValueError: no states today" in message
    assert begun(tmp_path) == before + 7 + 4
    written = contents(out)
    assert set(whole) - set(written) == {"shard-00007.safetensors", "shard-00007.json"}
    assert written.items() < whole.items()

    (tmp_path / "fail").unlink()
    before = begun(tmp_path)
    cqm.collect(world, out=out, cluster="auto", **SETTINGS)
    assert begun(tmp_path) == before + 1
    assert contents(out) == whole


def test_local_and_cluster_runs_continue_each_other(tmp_path, cluster, small_shards):
    world = make_world(tmp_path)
    cqm.collect(world, out=tmp_path / "set", threads=1, **SETTINGS)
    whole = contents(tmp_path / "set")
    for name in ("shard-00002.safetensors", "shard-00005.json"):
        (tmp_path / "set" / name).unlink()
    before = begun(tmp_path)
    cqm.collect(world, out=tmp_path / "set", cluster="auto", **SETTINGS)
    assert begun(tmp_path) == before + 2
    assert contents(tmp_path / "set") == whole


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"a cluster needs Ray; install cqm\[cluster\]"):
        cqm.collect(make_world(tmp_path), out=tmp_path / "set", cluster="auto", states=5)


def test_a_cluster_needs_a_directory(tmp_path):
    with pytest.raises(ValueError, match="a cluster needs a directory to write to; pass out="):
        cqm.collect(make_world(tmp_path), cluster="auto", states=5)


def test_worlds_travel_by_value(tmp_path):
    """What a worker gets simulates the same bits."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    world = make_world(tmp_path)
    copy = cloudpickle.loads(cloudpickle.dumps(world))
    one, other = (cqm.collect(w, threads=1, states=300, horizon=3) for w in (world, copy))
    assert one.manifest == other.manifest
    np.testing.assert_array_equal(one.outcomes, other.outcomes)
    np.testing.assert_array_equal(one.observations, other.observations)
