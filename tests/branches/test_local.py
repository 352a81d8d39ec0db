"""Simulation on this machine: when worker processes are used, and that they change no byte."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import cqm
from cqm.branches import collect as collection, local
from cqm.branches.collect import plan_collection
from cqm.branches.recipe import BLOCK, Continuation, Recipe
from cqm.branches.simulate import simulate_blocks
from cqm.worlds.function import FunctionWorld

SETTINGS = {"states": 4 * BLOCK + 20, "horizon": 2, "warmup": (0, 2), "seed": 3}


def plane_world(step=lambda x, u, e: 0.9 * x + u, **changes):
    settings = {
        "initial": lambda num, rng: rng.standard_normal((num, 1)),
        "candidate_actions": [[0.0], [1.0]],
        "name": "plane",
    }
    return FunctionWorld(step, **{**settings, **changes})


@pytest.fixture
def eager(monkeypatch):
    """Processes are used for any world that is not known to be compiled."""
    monkeypatch.setattr(local, "_WORTH_PROCESSES", 0.0)
    monkeypatch.setattr(local, "_SLOW", 0.0)


@pytest.fixture
def pools(monkeypatch):
    """The kinds of pools that are used, with their sizes."""
    used = []
    threads, processes = local.ThreadPoolExecutor, local._processes

    class Threads(threads):
        def __init__(self, num):
            used.append(("threads", num))
            super().__init__(num)

    def noted(plan, num, show_progress):
        pool = processes(plan, num, show_progress)
        used.append(("processes" if pool else "none", num))
        return pool

    monkeypatch.setattr(local, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(local, "_processes", noted)
    return used


def test_worlds_say_whether_they_run_python_for_every_state():
    assert cqm.load_world("reacher-easy").runs_python is False
    assert cqm.load_world("pendulum-swingup").runs_python is False
    assert cqm.load_world("swimmer-swimmer6").runs_python is True
    assert cqm.load_world("CartPole-v1").runs_python is True
    assert plane_world().runs_python is None
    expanded = cqm.load_world("swimmer-swimmer6", features=cqm.worlds.features.Squares())
    assert expanded.runs_python is True


@pytest.mark.parametrize("name", ["swimmer-swimmer6", "CartPole-v1"])
def test_processes_store_the_same_bytes_as_one_thread(name, tmp_path, eager, pools):
    world = cqm.load_world(name, nuisance=2)
    for threads in (1, 2):
        cqm.collect(world, out=tmp_path / str(threads), threads=threads, **SETTINGS)
    assert pools == [("threads", 1), ("processes", 2)]
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("1", "2")]
    assert files[0] == files[1]


def test_a_slow_step_function_runs_on_processes_even_if_it_is_a_lambda(eager, pools):
    one, two = (cqm.collect(plane_world(), threads=num, **SETTINGS) for num in (1, 2))
    assert pools == [("threads", 1), ("processes", 2)]
    np.testing.assert_array_equal(one.outcomes, two.outcomes)


def test_a_vectorised_step_function_stays_on_threads(pools):
    cqm.collect(plane_world(), threads=2, **SETTINGS)
    assert pools == [("threads", 2)]


def test_a_short_collection_in_python_uses_one_thread(pools):
    cqm.collect("CartPole-v1", threads=2, **SETTINGS)
    assert pools == [("threads", 1)]


@pytest.mark.parametrize("name", ["cartpole-swingup", "pendulum-swingup"])
def test_compiled_worlds_use_threads_without_waiting_for_the_first_block(name, eager, pools):
    two, one = (cqm.collect(name, threads=num, **SETTINGS) for num in (2, 1))
    assert pools == [("threads", 2), ("threads", 1)]
    np.testing.assert_array_equal(two.outcomes, one.outcomes)


def test_no_more_processes_are_started_than_there_is_work(eager, pools):
    cqm.collect("CartPole-v1", threads=64, **{**SETTINGS, "states": 3 * BLOCK})
    assert pools == [("processes", 2)]  # the first block is simulated here


def test_a_step_that_compiles_first_is_not_slow(monkeypatch, pools):
    monkeypatch.setattr(local, "_WORTH_PROCESSES", 0.0)
    monkeypatch.setattr(local, "_SLOW", 0.2)
    called = []

    def step(x, u, e):
        if not called:
            time.sleep(0.3)
        called.append(True)
        return 0.9 * x + u

    cqm.collect(plane_world(step), threads=2, **SETTINGS)
    assert pools == [("threads", 2)]


def test_a_world_that_cannot_be_sent_is_simulated_here(eager, pools, capsys):
    lock = threading.Lock()

    def step(x, u, e):
        with lock:
            return 0.9 * x + u

    branches = cqm.collect(plane_world(step), threads=2, show_progress=True, **SETTINGS)
    assert pools == [("none", 2), ("threads", 2)]
    expected = cqm.collect(plane_world(), threads=1, **SETTINGS)
    np.testing.assert_array_equal(branches.outcomes, expected.outcomes)
    said = "The world or its policy cannot be used in another process: "
    assert said in capsys.readouterr().err


def fails_elsewhere(kind, message):
    here = os.getpid()

    def fail(*arguments):
        if os.getpid() != here:
            raise kind(message)

    return fail


def test_worlds_and_policies_that_fail_in_another_process_are_simulated_here(eager, pools):
    """Such as an environment that only the user's script has registered."""
    fail = fails_elsewhere(LookupError, "not registered")

    def initial(num, rng):
        fail()
        return rng.standard_normal((num, 1))

    def step(x, u, e):
        fail()
        return 0.9 * x + u

    def act(observations, uniforms):
        fail()
        return np.zeros(len(uniforms), int)

    for world, continuation in (
        (plane_world(initial=initial), "uniform"),
        (plane_world(step), "uniform"),
        (plane_world(), cqm.Policy("mine", act)),
    ):
        branches = cqm.collect(world, threads=2, continuation=continuation, **SETTINGS)
        assert len(branches) == SETTINGS["states"]
    assert pools == [("none", 2), ("threads", 2)] * 3


def failing_later(kind, *arguments):
    """An initial sampler that works for one state, and fails for a block in another process."""
    here = os.getpid()

    def initial(num, rng):
        if os.getpid() != here and num > 1:
            raise kind(*arguments)
        return rng.standard_normal((num, 1))

    return initial


def test_an_error_of_the_world_is_the_same_in_a_process(eager, capfd):
    """Also with more tasks waiting than the processes can take."""
    world = plane_world(initial=failing_later(ZeroDivisionError, "a defect"))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        cqm.collect(world, threads=2, **{**SETTINGS, "states": 30 * BLOCK})
    assert capfd.readouterr() == ("", "")


def test_an_exception_of_the_worlds_own_keeps_its_message(eager):
    class OddError(Exception):
        def __init__(self, code, what):
            super().__init__(f"{what} ({code})")

    world = plane_world(initial=failing_later(OddError, 7, "the real reason"))
    with pytest.raises(RuntimeError, match=r"OddError: the real reason \(7\)"):
        cqm.collect(world, threads=2, **SETTINGS)


def test_the_end_of_a_process_is_explained(eager):
    here = os.getpid()

    def initial(num, rng):
        if os.getpid() != here and num > 1:
            os._exit(1)
        return rng.standard_normal((num, 1))

    with pytest.raises(RuntimeError, match="a worker process ended while it simulated 'plane'"):
        cqm.collect(plane_world(initial=initial), threads=2, **SETTINGS)


def test_shards_come_in_order_and_an_abandoned_simulation_ends(eager, monkeypatch, pools):
    monkeypatch.setattr(collection, "SHARD_BYTES", 0)  # one block per shard
    recipe = Recipe(8 * BLOCK, 2, 0.95, 1, None, (0, 0), Continuation.of("uniform"), False, 0)
    plan = plan_collection(cqm.load_world("swimmer-swimmer6"), recipe)
    done = []
    shards = local.simulate_locally(plan, range(plan.num_shards), 2, 1, done.append)
    for number in range(2):
        index, [block] = next(shards)
        [expected] = simulate_blocks(plan, [number])
        assert index == number
        for name, values in expected.arrays.items():
            np.testing.assert_array_equal(block.arrays[name], values)
    assert pools == [("processes", 2)]
    assert done == [BLOCK, BLOCK]
    children = _children()
    assert len(children) >= 2
    shards.close()
    _within(20, lambda: not any(map(_is_running, children)))


def test_a_failing_consumer_ends_the_processes(eager, tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "SHARD_BYTES", 0)
    seen = []

    def full(*arguments):
        seen.extend(_children())
        raise OSError("no space left")

    monkeypatch.setattr(collection.shards, "write_shard", full)
    with pytest.raises(OSError, match="no space left"):
        cqm.collect("swimmer-swimmer6", out=tmp_path, threads=2, **SETTINGS)
    assert len(seen) >= 2
    _within(20, lambda: not any(map(_is_running, seen)))


def _children():
    """Worker processes of this process."""
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True
    )
    lines = found.stdout.decode().splitlines()
    return [line.split()[0] for line in lines if "loky.backend.popen" in line]


KILLED = """
import os, sys, time
import cqm
from cqm.branches import local
from cqm.worlds.function import FunctionWorld

local._WORTH_PROCESSES = local._SLOW = 0.0
here, file = os.getpid(), sys.argv[1]


def step(x, u, e):
    if os.getpid() != here and len(x) > 1:
        with open(file, "a") as notes:
            print(os.getpid(), file=notes)
        time.sleep(0.2)
    return 0.9 * x + u


world = FunctionWorld(
    step, lambda num, rng: rng.standard_normal((num, 1)), candidate_actions=[[0.0], [1.0]], name="w"
)
cqm.collect(world, states=256 * 200, horizon=2, threads=2, show_progress=False)
"""


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(sent, tmp_path):
    notes = tmp_path / "notes"
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, notes],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _within(120, lambda: notes.exists() and len(set(notes.read_text().split())) == 2)
        # A terminal interrupts all processes of a command.
        (os.killpg if sent == signal.SIGINT else os.kill)(run.pid, sent)
        said = run.communicate(timeout=60)[1]
        assert said.count("Traceback") == (sent == signal.SIGINT)
        workers = set(notes.read_text().split())
        _within(60, lambda: not any(map(_is_running, workers)))
    finally:
        run.kill()
