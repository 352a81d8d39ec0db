"""How collecting and the benchmark scale with the nodes of a cluster, and a plan for large sets.

Every cluster is local: its nodes are processes of this machine, with one processor each, so more
nodes than cores gain nothing. The first row is this machine without a cluster. All runs must write
the same bytes.

The plan is arithmetic: bytes per family are those on disk, rates those in `branching.csv` and
`training.csv`, measured on two cores and on one.

    python -m benchmarks.scaling --nodes 1 2 4
    python -m benchmarks.scaling --only-plan
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import read_csv, write_csv
from cqm.branches.collect import SHARD_BYTES
from cqm.branches.local import available_cores
from cqm.branches.recipe import BLOCK
from cqm.experiments.protocol import DOMAINS, Protocol, Stage, preset
from cqm.experiments.runner import run_study
from cqm.experiments.studies.benchmark import Benchmark
from cqm.models.training import Training

RESULTS = Path("benchmarks/results")
LARGE = 100_000_000  # states of the plan
CORES = 64  # of the plan's cluster
MEMORY_GB = 2.0  # for the rows of a training run, as by default; a window takes a quarter
_SAMPLE = 256  # draws whose bytes are measured
_MOST_BLOCKS = 16  # per shard
_OBJECT_STORE = 200_000_000


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    nodes: tuple[int, ...] = (1, 2)
    """Numbers of nodes, with one processor each."""
    world: str = "Acrobot-v1"
    """World to collect; clusters are for worlds that run Python code."""
    states: int = 20_000
    """Number of states to collect."""
    domain: str = "cheetah-run"
    """Domain of the benchmark to run."""
    methods: tuple[str, ...] = ("cqm", "world", "direct", "paired-sf", "ridge", "one-step-fb")
    """Methods to run."""
    job_states: int = 4_000
    """Number of training states per job."""
    updates: int = 1_000
    """Number of updates per job."""
    only_plan: bool = False
    """Write the plan alone."""
    out: Path = RESULTS
    """Directory for `scaling.csv` and `scaling_plan.csv`."""


def main(settings: Settings) -> None:
    write_csv(settings.out / "scaling_plan.csv", [plan(domain) for domain in DOMAINS])
    if settings.only_plan:
        return
    rows, digests = [], dict[str, set[str]]()
    for num in (0, *settings.nodes):
        with cluster_of(num) as address, tempfile.TemporaryDirectory() as out:
            for task, run in (("collect", collect), ("reproduce", reproduce)):
                started = time.monotonic()
                digest = run(settings, Path(out, task), address)
                seconds = time.monotonic() - started
                digests.setdefault(task, set()).add(digest)
                cores = num or len(available_cores())
                rows.append({"task": task, "nodes": num, "cores": cores, "seconds": seconds})
                print(f"{task:<12}{num:>3} nodes{seconds:>9.1f} s", flush=True)
    if different := [task for task, found in digests.items() if len(found) > 1]:
        raise RuntimeError(f"{different} did not write the same bytes everywhere")
    write_csv(settings.out / "scaling.csv", rows)


@contextmanager
def cluster_of(num: int) -> Iterator[str | None]:
    """The address of a local cluster with this many nodes; None without nodes."""
    if num == 0:
        yield None
        return
    import ray
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="ray-")  # its sockets need a short path
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": directory}
    node = {
        "num_cpus": 1,
        "object_store_memory": _OBJECT_STORE,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(num - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield "auto"
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def collect(settings: Settings, out: Path, address: str | None) -> str:
    """Collect a set; returns a digest of its files."""
    world = cqm.load_world(settings.world)
    cqm.collect(
        world, states=settings.states, seed=0, out=out, cluster=address, show_progress=False
    )
    return digest(out, "shard-*")


def reproduce(settings: Settings, out: Path, address: str | None) -> str:
    """Run jobs of the benchmark; returns a digest of their tables."""
    outcome = run_study(Benchmark(protocol(settings)), out, cluster=address, show_progress=False)
    if outcome.problems:
        raise RuntimeError(f"jobs failed: {outcome.problems}")
    return digest(out, "*.csv")


def protocol(settings: Settings) -> Protocol:
    """The benchmark's protocol, shortened."""
    return replace(
        preset("quick"),
        domains=(settings.domain,),
        stages=(Stage(settings.methods, (7,)),),
        states=settings.job_states,
        test_states=max(1, settings.job_states // 4),
        ceiling_states=16,
        ceiling_draws=16,
        training=Training(updates=settings.updates),
    )


def digest(directory: Path, pattern: str) -> str:
    """A digest of the files of a directory, by name."""
    whole = hashlib.sha256()
    for path in sorted(directory.glob(pattern)):
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()


def plan(domain: str) -> dict[str, Any]:
    """What a set of 100 million states of a domain takes, with the paper's nuisance."""
    paper = preset("paper")
    world = cqm.load_world(domain, nuisance=paper.nuisance, seed=7)
    families: dict[str, tuple[float, int]] = {}  # bytes of a family, and number of families
    for name, recipe in paper.branch_sets(7).items():
        sample = {**recipe, "states": _SAMPLE // recipe.get("draws", 1)}
        with tempfile.TemporaryDirectory() as out:
            branches = cqm.collect(world, out=Path(out, "set"), show_progress=False, **sample)
            stored = sum(path.stat().st_size for path in Path(out, "set").glob("shard-*"))
            families[name] = stored / len(branches), recipe["states"]
    per_family, with_steps = families["test"][0], families["training"][0]
    blocks = np.clip(SHARD_BYTES // (per_family * BLOCK), 1, _MOST_BLOCKS)
    steps = branches.num_actions * paper.horizon
    (rate,) = (
        float(row["cqm_steps_per_second"]) / steps
        for row in read_csv(RESULTS / "branching.csv")
        if (row["world"], row["stage"]) == (domain, "everything")
    )
    (update,) = (
        float(row["cqm_milliseconds"]) / 1_000
        for row in read_csv(RESULTS / "training.csv")
        if row["threads"] == "1"
    )
    row_bytes = 4 * (
        len(branches.observation_names) + branches.num_actions * len(branches.feature_names)
    )
    window = int(MEMORY_GB * 1e9 / 4 / row_bytes)
    chunks = LARGE / (window / 4)
    chunk_seconds = Training().chunk * update
    core_hours = LARGE / rate * 2 / 3600
    return {
        "world": domain,
        "states": LARGE,
        "bytes_per_family": round(per_family),
        "bytes_per_family_with_steps": round(with_steps),
        "terabytes": round(LARGE * per_family / 1e12, 2),
        "terabytes_with_steps": round(LARGE * with_steps / 1e12, 2),
        "shards": math.ceil(LARGE / (blocks * BLOCK)),
        "states_per_core_second": round(rate / 2, 1),
        "core_hours": round(core_hours, 1),
        "cores": CORES,
        "hours": round(core_hours / CORES, 2),
        "window_families": window,
        "chunks_per_pass": round(chunks),
        "training_hours_per_pass": round(chunks * chunk_seconds / 3600, 2),
        "read_megabytes_per_second": round(window / 4 * per_family / chunk_seconds / 1e6),
        "job_megabytes": round(sum(size * num for size, num in families.values()) / 1e6),
    }


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
