"""Speed of branching against two peers in the same run.

The *limit* is MuJoCo's native rollout of the same physics steps and nothing else: no initial
states, no observations, no sums, no files. The *loop* is the straightforward program: dm_control's
`env.step` for every branch, with the state correctly restored at the start of each. `cqm.collect`
is measured as a user calls it, including writing to disk.

Two stages are measured. *Branching* starts from ready states. *Everything* also draws the initial
states, which for the cheetah takes 200 physics steps of settling before 60 of branching, and warms
them up.

    python -m benchmarks.branching
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "disable")

import mujoco
import numpy as np
import tyro
from dm_control import suite
from mujoco.rollout import Rollout

import cqm
from benchmarks import write_csv
from cqm.worlds.contract import num_states, take
from cqm.worlds.nuisance import Nuisance, NuisanceWorld
from cqm.worlds.suite import SuiteWorld

HORIZON, DISCOUNT, MEAN_WARMUP = 12, 0.95, 10
LOOP_STATES = 100  # enough for a stable rate of the slow loop
STATES = {
    "cartpole-swingup": 20_480,
    "reacher-easy": 40_960,
    "cheetah-run": 6_144,
    "walker-walk": 2_048,
}


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    rounds: int = 3
    """Runs per peer; the fastest counts."""
    threads: int = len(os.sched_getaffinity(0))
    """Number of threads for the collection and for the limit."""
    nuisance: int = 64
    """Dimension of the nuisance."""
    memory: bool = True
    """Whether to measure peak memory as well."""
    out: Path = Path("benchmarks/results/branching.csv")
    """Where to write the results."""


class ReadyWorld(cqm.World):
    """A world that draws its initial states from ready ones, so that only branching is measured."""

    def __init__(self, world: SuiteWorld, states: dict[str, np.ndarray]):
        self.world, self.states = world, states
        for name in cqm.World.__annotations__:
            setattr(self, name, getattr(world, name))
        self.observe, self.rollout, self.identity = world.observe, world.rollout, world.identity

    def reset(self, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return take(self.states, rng.integers(num_states(self.states), size=num))

    observe = rollout = identity = None  # set above to those of the wrapped world


def main(settings: Settings) -> None:
    rows = [row for name in STATES for row in measure(name, settings)]
    print_table(rows)
    if settings.memory:
        peaks = {states: peak_memory(states) for states in (10_000, 100_000)}
        ratio = peaks[100_000] / peaks[10_000]
        print(
            f"\npeak memory, reacher-easy: {peaks[10_000]:.0f} MiB for 10,000 states, "
            f"{peaks[100_000]:.0f} MiB for 100,000: {ratio:.2f} times"
        )
        rows += [
            {"world": "reacher-easy", "states": states, "peak_memory_mib": round(peak)}
            for states, peak in peaks.items()
        ]
    versions = {name: version(name) for name in ("mujoco", "dm_control", "numpy")}
    write_csv(settings.out, [{**row, "threads": settings.threads, **versions} for row in rows])
    print(f"\nwritten to {settings.out}")


def measure(name: str, settings: Settings) -> list[dict]:
    """Branch steps per second of the collection, the limit and the loop, for both stages."""
    native = cqm.load_world(name)
    num, threads = STATES[name], settings.threads
    ready = cqm.collect(native, states=1024, seed=1).states
    nuisance = Nuisance(dimension=settings.nuisance)
    branching = NuisanceWorld(ReadyWorld(native, ready), nuisance)
    everything = NuisanceWorld(native, nuisance)
    limit = NativeLimit(native, ready, num, threads)
    times: dict[tuple[str, str], list[float]] = {}

    def note(stage: str, peer: str, elapsed: float) -> None:
        times.setdefault((stage, peer), []).append(elapsed)

    for _ in range(settings.rounds):
        # Alternating, so that other load on the machine affects all of them.
        note("branching", "cqm", seconds(lambda: collect(branching, num, threads, warmup=0)))
        note("branching", "limit", branch_limit := seconds(limit.branches))
        note("everything", "cqm", seconds(lambda: collect(everything, num, threads)))
        note("everything", "limit", branch_limit + seconds(limit.initial_states))
        loop_branches, loop_all = dm_control_loop(native, nuisance, LOOP_STATES)
        note("branching", "loop", loop_branches * num / LOOP_STATES)
        note("everything", "loop", loop_all * num / LOOP_STATES)
    rows = []
    for stage in ("branching", "everything"):
        steps = num * len(native.candidate_actions) * HORIZON
        cqm_rate, limit_rate, loop_rate = (
            steps / min(times[stage, peer]) for peer in ("cqm", "limit", "loop")
        )
        rows.append(
            {
                "world": name,
                "stage": stage,
                "states": num,
                "cqm_steps_per_second": round(cqm_rate),
                "limit_steps_per_second": round(limit_rate),
                "loop_steps_per_second": round(loop_rate),
                "share_of_limit": round(cqm_rate / limit_rate, 3),
                "times_the_loop": round(cqm_rate / loop_rate, 1),
            }
        )
    return rows


def collect(world: cqm.World, states: int, threads: int, warmup: int = 2 * MEAN_WARMUP) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cqm.collect(
            world,
            out=directory,
            threads=threads,
            show_progress=False,
            states=states,
            horizon=HORIZON,
            discount=DISCOUNT,
            warmup=(0, warmup),
        )


class NativeLimit:
    """The physics steps of a collection, on MuJoCo's own thread pool, from ready-made inputs."""

    def __init__(self, world: SuiteWorld, ready: dict[str, np.ndarray], states: int, threads: int):
        self.world, self.rng = world, np.random.default_rng(0)
        environment = suite.load(*world.name.split("-", 1), task_kwargs={"random": 0})
        self.model = environment.physics.model.ptr  # as the suite has it
        self.threads, self.pool = threads, Rollout(nthread=threads)
        self.datas = [mujoco.MjData(self.model) for _ in range(threads)]
        start, warm = ready["physics"], ready["warmstart"]
        num_branches = states * len(world.candidate_actions)
        self.branches = self._rollouts(start, warm, num_branches, HORIZON * world.substeps)
        self._warmup = self._rollouts(start, warm, states, MEAN_WARMUP * world.substeps)
        if world.settle_steps:
            qpos, qvel, _ = world._initial(1024, self.rng)
            poses = np.concatenate([np.zeros((1024, 1)), qpos, qvel], axis=1)
            self._settling = self._rollouts(poses, 0 * warm, states, world.settle_steps)

    def initial_states(self) -> None:
        self._warmup()
        if self.world.settle_steps:
            self._settling()

    def _rollouts(
        self, physics: np.ndarray, warm: np.ndarray, total: int, steps: int
    ) -> Callable[[], None]:
        """A function that does `total` rollouts of `steps` physics steps, one buffer at a time."""
        num, substeps = min(1024, total), self.world.substeps
        physics, warm = (np.resize(values, (num, values.shape[1])) for values in (physics, warm))
        actions = self.world.candidate_actions
        drawn = actions[self.rng.integers(len(actions), size=(num, -(-steps // substeps)))]
        controls = np.ascontiguousarray(np.repeat(drawn, substeps, axis=1)[:, :steps])
        out, models = np.empty((num, steps, physics.shape[1])), [self.model] * num

        def run() -> None:
            for first in range(0, total, num):
                n = min(num, total - first)
                self.pool.rollout(
                    models[:n],
                    self.datas,
                    physics[:n],
                    controls[:n],
                    skip_checks=True,
                    nstep=steps,
                    initial_warmstart=warm[:n],
                    state=out[:n],
                    chunk_size=max(1, n // (self.threads * 10)),
                )

        return run


def dm_control_loop(world: SuiteWorld, nuisance: Nuisance, num: int) -> tuple[float, float]:
    """Seconds that `env.step` takes for the branches, and for everything."""
    environment = suite.load(*world.name.split("-", 1), task_kwargs={"random": 0})
    rng, actions = np.random.default_rng(0), world.candidate_actions
    spec = mujoco.mjtState.mjSTATE_INTEGRATION.value
    mixing = nuisance.mixing(len(world.observation_names))
    branch_seconds, started = 0.0, time.perf_counter()
    for _ in range(num):
        environment.reset()
        for _ in range(MEAN_WARMUP):
            environment.step(rng.uniform(world.control_low, world.control_high))
        model, data = environment.physics.model.ptr, environment.physics.data.ptr
        saved = np.empty(mujoco.mj_stateSize(model, spec))
        mujoco.mj_getState(model, data, saved, spec)
        branches_started = time.perf_counter()
        continuation = actions[rng.integers(len(actions), size=HORIZON - 1)]
        common = nuisance.path(nuisance.start(1, rng), nuisance.noise((1, HORIZON), rng))[0]
        for action in actions:
            mujoco.mj_setState(model, data, saved, spec)
            mujoco.mj_forward(model, data)
            outcome = 0.0
            for k, control in enumerate([action, *continuation]):
                observation = environment.step(control).observation
                native = [np.ravel(value) for value in observation.values()]
                seen = mixing @ np.concatenate([nuisance.amplitude * common[k], *native])
                outcome = outcome + DISCOUNT**k * seen
        branch_seconds += time.perf_counter() - branches_started
    return branch_seconds, time.perf_counter() - started


def peak_memory(states: int) -> float:
    """Peak resident memory, in MiB, of a process that collects this many reacher states."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "cqm", "collect", "reacher-easy", "--nuisance", "64"]
        command += ["--states", str(states), "--out", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise RuntimeError(f"collecting {states} states failed with status {status}")
        return usage.ru_maxrss / 1024


def seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def print_table(rows: list[dict]) -> None:
    print(f"{'branch steps per second':<32}{'cqm':>10}{'limit':>11}{'loop':>9}", end="")
    print(f"{'of limit':>10}{'x loop':>8}")
    for row in rows:
        print(
            f"{row['world']:<20}{row['stage']:<12}{row['cqm_steps_per_second']:>10,}"
            f"{row['limit_steps_per_second']:>11,}{row['loop_steps_per_second']:>9,}"
            f"{row['share_of_limit']:>10.2f}{row['times_the_loop']:>8.1f}"
        )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
