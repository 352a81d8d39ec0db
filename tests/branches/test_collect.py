import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.worlds import SeedWorld
from support.wrong_worlds import reseal, reseal_manifest

import cqm
from cqm.branches import collect as collection, local
from cqm.branches.collect import DroppedWarning
from cqm.branches.simulate import stream
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

ACTIONS = [[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]]


def plane_world(**changes):
    arguments = {
        "step": lambda x, u, e: 0.9 * x + u + 0.1 * e,
        "initial": lambda num, rng: rng.standard_normal((num, 2)),
        "exogenous": lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        "candidate_actions": ACTIONS,
        "name": "plane",
    }
    return FunctionWorld(**(arguments | changes))


def mixed_world(**changes):
    return NuisanceWorld(plane_world(**changes), Nuisance(dimension=3))


def swingup_world():
    return cqm.load_world("cartpole-swingup", nuisance=6, seed=2)


@pytest.fixture
def small_shards(monkeypatch):
    """One block per shard."""
    monkeypatch.setattr(collection, "SHARD_BYTES", 0)


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def collect(world, out=None, **settings):
    return cqm.collect(world, out=out, **({"threads": 1, "states": 600, "horizon": 3} | settings))


def test_collecting_where_the_system_does_not_say_which_cores_are_ours(monkeypatch):
    """As on macOS and Windows."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert local.available_cores() == list(range(os.cpu_count()))
    assert len(collect(plane_world(), states=5, threads=None)) == 5


def fragile_step(x, u, e):
    """Raises for one row in ten, whichever rows it is given together with."""
    if (x[:, 0] > 1.28).any():
        raise RuntimeError("the shelf broke")
    return x


def still_states(num, rng):
    return np.clip(rng.standard_normal((num, 2)), -9.0, 1.0 if num == 3 else 9.0)


def test_many_dropped_families_are_told_with_their_reasons(tmp_path):
    world = plane_world(step=fragile_step, initial=still_states)
    lost = int((still_states(256, stream(0, 0, 0))[:, 0] > 1.28).sum())
    message = f"{lost} of 256 families of 'plane' were dropped: {lost} raised an exception"
    raised = ", for example RuntimeError('the shelf broke')"
    for out in (None, tmp_path):
        with pytest.warns(DroppedWarning) as caught:
            collect(world, out, states=256, warmup=(0, 2))
        assert [str(warning.message) for warning in caught] == [message + raised]
        assert caught[0].filename == __file__
    with pytest.warns(DroppedWarning) as caught:
        collect(world, tmp_path, states=256, warmup=(0, 2))  # which is there already
    assert [str(warning.message) for warning in caught] == [message]


def test_few_dropped_families_are_only_counted(monkeypatch):
    world = plane_world(step=fragile_step, initial=still_states)
    monkeypatch.setattr(collection, "MANY_DROPPED", 0.3)
    branches = collect(world, states=256)  # warnings are errors
    assert 0 < branches.dropped["raised"] < 0.3 * 256


@pytest.mark.parametrize("make_world", [mixed_world, swingup_world], ids=lambda fn: fn.__name__)
def test_bytes_do_not_depend_on_threads_or_tasks(tmp_path, monkeypatch, make_world):
    world, settings = make_world(), dict(states=1500, horizon=4, draws=2, warmup=(0, 4), seed=5)
    floats = 2 * 3 * 2 * len(world.native.feature_names) + 4 * world.nuisance.dimension
    monkeypatch.setattr(collection, "SHARD_BYTES", 4 * 256 * 8 * floats)
    for threads, blocks_per_task in ((1, 1), (2, 1), (1, 3), (2, 3)):
        out = tmp_path / f"{threads}-{blocks_per_task}"
        collect(world, out, threads=threads, blocks_per_task=blocks_per_task, **settings)
        assert contents(out) == contents(tmp_path / "1-1")
    branches = cqm.Branches.open(tmp_path / "1-1")
    assert branches.manifest["blocks_per_shard"] == 4  # of 6 blocks in all
    assert branches.manifest["num_shards"] == 2
    assert branches.index.tolist() == list(range(1500))

    in_memory = collect(world, threads=2, blocks_per_task=3, **settings)
    assert in_memory.array_names() == branches.array_names()
    for name in branches.array_names():
        np.testing.assert_array_equal(in_memory.array(name), branches.array(name))
    np.testing.assert_array_equal(in_memory.outcomes, branches.outcomes)
    np.testing.assert_array_equal(in_memory.observations, branches.observations)


def run(command, **options):
    """What a command prints, where it succeeds."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_bytes_do_not_depend_on_the_process(tmp_path, small_shards):
    """Hash seeds, addresses and the order of imports differ from one process to the next."""
    code = """
import sys
import cqm
from cqm.branches import collect as collection
from cqm.branches.collect import DroppedWarning
from cqm.branches.simulate import stream
collection.SHARD_BYTES = 0
world = cqm.load_world("cartpole-swingup", nuisance=6, seed=2)
cqm.collect(world, states=600, horizon=3, out=sys.argv[1], threads=2)
"""
    collect(swingup_world(), tmp_path / "here")
    run([sys.executable, "-c", code, tmp_path / "there"])
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_bytes_do_not_depend_on_the_threads_of_the_linear_algebra(tmp_path):
    code = """
import sys
import cqm
world = cqm.load_world("cartpole-swingup", nuisance=300, seed=2)
cqm.collect(world, states=5, horizon=3, out=sys.argv[1], threads=1)
"""
    for threads in ("1", "2"):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, threads)}
        run([sys.executable, "-c", code, tmp_path / threads], env=environment)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_finished_set_is_not_touched(tmp_path, small_shards):
    for world in (plane_world(), mixed_world()):
        out = tmp_path / world.observation_names[0]
        collect(world, out)
        before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
        branches = collect(world, out)
        assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
        assert len(branches) == 600


# Runs collections in forked copies of one process, so that each does without the imports, and
# kills them: at random instants, and while a file is being written.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import cqm
from cqm.branches import collect as collection
from cqm.branches.collect import DroppedWarning
from cqm.branches.simulate import stream

collection.SHARD_BYTES = 0
directory, kills_wanted = Path(sys.argv[1]), int(sys.argv[2])
world = cqm.load_world("cartpole-swingup", nuisance=16, seed=3)
recipe = dict(states=12 * 256 + 100, horizon=12, per_step=True, warmup=(0, 4), seed=9)


def start(out):
    pid = os.fork()
    if pid == 0:
        try:
            cqm.collect(world, out=out, threads=2, **recipe)
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return pid


def finish(pid):
    assert os.waitpid(pid, 0)[1] == 0


def kill(out, delay, amid_writing):
    pid, due = start(out), time.monotonic() + delay
    while True:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            assert code == 0
            return False
        if time.monotonic() < due:
            time.sleep(0.0005)
        elif not amid_writing or any(out.glob(".*.partial")):
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1] != 0


began = time.monotonic()
finish(start(directory / "whole"))
duration = time.monotonic() - began
rng, kills, rounds = random.Random(0), [], 0
while len(kills) < kills_wanted:
    out = directory / f"round-{rounds}"
    rounds += 1
    while len(kills) < kills_wanted and kill(out, rng.uniform(0, duration / 2), len(kills) % 2):
        patterns = ("shard-*.safetensors", "shard-*.json", ".*.partial")
        kills.append([sum(1 for _ in out.glob(pattern)) for pattern in patterns])
    finish(start(out))
print(json.dumps({"kills": kills, "rounds": rounds, "duration": duration}))
"""


@pytest.mark.slow
def test_a_killed_collection_continues_where_it_was(tmp_path):
    command = [sys.executable, "-c", KILLER, tmp_path, "24"]
    report = json.loads(run(command))
    kills = report["kills"]
    assert len(kills) == 24
    whole = contents(tmp_path / "whole")
    assert len(whole) == 2 + 2 * 13
    for number in range(report["rounds"]):
        assert contents(tmp_path / f"round-{number}") == whole
    # They struck in many places: with little and with much done, between files and amid them.
    assert len({shards for shards, _, _ in kills}) >= 5
    assert sum(partial > 0 for *_, partial in kills) >= 5
    assert sum(partial == 0 for *_, partial in kills) >= 5


# Ends runs by a signal before each operation that changes the directory, from the first to the
# last, and lets the next run finish.
CRASHER = """
import itertools, os, signal, sys
from pathlib import Path
import numpy as np
import cqm
from cqm.branches import collect as collection
from cqm.branches.collect import DroppedWarning
from cqm.branches.simulate import stream
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

collection.SHARD_BYTES = 0
directory, how = Path(sys.argv[1]), signal.Signals[sys.argv[2]]
native = FunctionWorld(
    step=lambda x, u, e: 0.9 * x + u,
    initial=lambda num, rng: rng.standard_normal((num, 2)),
    candidate_actions=[[0.0], [1.0]],
)
world = NuisanceWorld(native, Nuisance(dimension=3))


def run(out, crash_at=0):
    pid = os.fork()
    if pid == 0:
        count = itertools.count(1)
        # Background jobs of a shell start with interrupts ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def hook(event, args):
            writes = event == "open" and set("wx+") & set(str(args[1])) and str(out) in str(args[0])
            changes = event in ("os.rename", "os.mkdir", "os.remove")
            if (writes or changes) and next(count) == crash_at:
                os.kill(os.getpid(), how)

        sys.addaudithook(hook)
        try:
            cqm.collect(world, out=out, states=300, horizon=2, warmup=(0, 0), threads=1)
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(2)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    code = os.waitpid(pid, 0)[1]
    assert os.WEXITSTATUS(code) != 1
    return code != 0


for point in itertools.count(1):
    out = directory / f"point-{point}"
    if not run(out, crash_at=point):
        break
    assert how == signal.SIGKILL or not list(out.glob(".*.partial"))
    assert not run(out)
print(point - 1)
"""


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT"])
def test_a_run_may_end_before_any_of_its_writes(tmp_path, signal_name):
    points = int(run([sys.executable, "-c", CRASHER, tmp_path, signal_name]))
    # Six files are opened and renamed, in a directory that is made.
    assert points >= 13
    whole = contents(tmp_path / f"point-{points + 1}")
    assert len(whole) == 6
    for point in range(1, points + 1):
        assert contents(tmp_path / f"point-{point}") == whole


@pytest.fixture
def disk(tmp_path):
    """A disk of 200 kB, and a function that mounts it again with other options."""

    def mount(*options):
        command = ["mount", *options, str(tmp_path / "disk")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    (tmp_path / "disk").mkdir()
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", "size=200k", "tmpfs"):
        pytest.skip("mounting a disk is not allowed here")
    yield tmp_path / "disk", lambda options: mount("-o", f"remount,{options}")
    subprocess.run(["umount", tmp_path / "disk"], check=True)


@pytest.mark.parametrize("kilobytes", [4, 8, 12, 60, 84, 88, 140])
def test_a_full_disk_is_explained_and_nothing_is_lost(tmp_path, small_shards, disk, kilobytes):
    path, remount = disk
    assert remount(f"size={kilobytes}k")
    collect(mixed_world(), tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    with pytest.raises(
        OSError, match="the disk is full; free some space and rerun the command"
    ) as e:
        collect(mixed_world(), path / "set")
    assert e.value.errno == errno.ENOSPC
    written = contents(path / "set")
    assert written.items() < whole.items()  # whole files, and some are missing
    missing = [name for name in whole if f"cannot write {path / 'set' / name}:" in str(e.value)]
    assert len(missing) == 1
    assert missing[0] not in written
    assert remount("size=4m")
    collect(mixed_world(), path / "set")
    assert contents(path / "set") == whole


def test_a_read_only_disk_is_explained(small_shards, disk):
    path, remount = disk
    assert remount("size=4m")
    for name in ("complete", "incomplete"):
        collect(mixed_world(), path / name)
    (path / "incomplete" / "shard-00001.json").unlink()
    assert remount("ro")
    for name, file in (("new", ""), ("incomplete", "/shard-00001.safetensors")):
        with pytest.raises(OSError, match="the file system is read-only; choose another") as e:
            collect(mixed_world(), path / name)
        assert e.value.errno == errno.EROFS
        assert f"cannot write {path / name}{file}" in str(e.value)
    # Where there is nothing to write, nothing is written.
    cqm.Branches.open(path / "complete").verify()
    assert len(collect(mixed_world(), path / "complete")) == 600
    assert remount("rw")


@pytest.mark.parametrize("where", ["file", "file/set"])
def test_a_file_in_place_of_the_directory_is_explained(tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file; choose another directory") as caught:
        collect(plane_world(), tmp_path / where)
    assert str(tmp_path / "file") in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("world", "settings", "difference"),
    [
        (mixed_world(), {"seed": 5}, "recipe.seed: 0 -> 5"),
        (mixed_world(), {"horizon": 4}, "recipe.horizon: 3 -> 4"),
        (mixed_world(), {"states": 500}, "recipe.states: 600 -> 500"),
        (mixed_world(), {"continuation": (0.5, 0.5, 0.0)}, 'continuation: "uniform" -> [0.5, 0.5'),
        (mixed_world(name="other"), {}, 'world.name: "plane" -> "other"'),
        (mixed_world(candidate_actions=ACTIONS[::-1]), {}, "candidate_actions: [["),
        (plane_world(), {}, "world.nuisance: {"),
        (NuisanceWorld(plane_world(), Nuisance(4)), {}, "world.nuisance.dimension: 3 -> 4"),
        (NuisanceWorld(plane_world(), Nuisance(3, seed=1)), {}, "world.nuisance.seed: 0 -> 1"),
    ],
)
def test_another_configuration_is_refused(tmp_path, small_shards, world, settings, difference):
    out = tmp_path / "set"
    collect(mixed_world(), out)
    before = contents(out)
    with pytest.raises(
        ValueError, match="set holds branches of a different configuration:"
    ) as caught:
        collect(world, out, **settings)
    assert difference in str(caught.value)
    assert "choose another directory, or collect with the configuration" in str(caught.value)
    assert contents(out) == before
    cqm.Branches.open(out).verify()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": 0}, "states must be .*at least 1; got 0"),
        ({"discount": 2}, r"discount must be a number in \[0, 1\]; got 2"),
        ({"warmup": (5, 1)}, r"0 <= minimum <= maximum; got \(5, 1\)"),
        ({"warmup": None}, r"warmup must be \(minimum, maximum\).*got None"),
        ({"warmup": 5}, r"warmup must be \(minimum, maximum\).*got 5"),
        ({"arms": 1}, r"arms must be a whole number of at least 2; got 1"),
        ({"arms": 4}, r"arms must be a whole number in \[2, 3\]; got 4"),
        ({"arms": 2.5}, "arms must be .*got 2.5"),
        ({"arms": []}, r"arms must be a number, or subsets of the actions; got \(\)"),
        ({"arms": [(0,), (1,)]}, r"arms must be subsets .*got \(\(0,\), \(1,\)\)"),
        ({"arms": [(0, 1), (0, 1, 2)]}, "arms must be subsets of one size"),
        ({"arms": [(0, 0), (1, 2)]}, "arms must be subsets of one size"),
        ({"arms": [(0, 1), (1, 3)]}, r"actions in 0\.\.2; got \[\(1, 3\)\]"),
        ({"arms": [(0, 1)]}, r"not connected: components \(0, 1\), \(2,?\)"),
        (
            {"continuation": "random"},
            "'random' names a policy.* 'uniform' or 3 probabilities",
        ),
        ({"continuation": (0.5, 0.5)}, r"3 probabilities that sum to 1; got \(0.5, 0.5\)"),
        ({"continuation": (0.5, 0.6, 0.0)}, "3 probabilities that sum to 1; got "),
        ({"continuation": (1.5, -0.5, 0.0)}, "3 probabilities that sum to 1; got "),
        ({"continuation": (float("nan"), 0.5, 0.5)}, "3 probabilities that sum to 1; got "),
        ({"continuation": 3}, "'uniform', 'box', one probability .* or a Policy; got 3"),
        ({"continuation": cqm.Policy("uniform", lambda o, u: u)}, "named 'uniform'"),
        ({"threads": 0}, r"threads must be .*\[1, 4096\], or None; got 0"),
        ({"threads": -1}, r"threads must be .*; got -1"),
        ({"blocks_per_task": 0}, "blocks_per_task must be a whole number of at least 1; got 0"),
        ({"cluster": "auto"}, "a cluster needs a directory to write to; pass out="),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        collect(plane_world(), **settings)


def test_arms_that_leave_actions_apart_are_refused():
    world = plane_world(candidate_actions=[[float(i), 0.0] for i in range(5)])
    message = r"not connected: components \(0, 3\), \(1, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        collect(world, arms=[(0, 3), (1, 2), (4, 2)])
    assert len(collect(world, arms=[(0, 3), (1, 2), (4, 2), (3, 4)])) == 600


def test_numbers_of_numpy_are_numbers():
    plain = collect(plane_world(), states=5, horizon=2, arms=2, discount=0.5, seed=3)
    numpy = collect(
        plane_world(),
        states=np.int64(5),
        horizon=np.int32(2),
        arms=np.int64(2),
        discount=np.float32(0.5),
        seed=np.uint8(3),
        warmup=np.array([0, 20]),
    )
    assert numpy.manifest == plain.manifest
    np.testing.assert_array_equal(numpy.outcomes, plain.outcomes)


def test_an_error_of_the_world_ends_the_collection_and_keeps_what_was_done(tmp_path, small_shards):
    whole, broken, fails = tmp_path / "whole", tmp_path / "broken", []

    def initial(num, rng):
        if num == 600 - 512 and fails:  # the last block
            raise RuntimeError("no states left")
        return rng.standard_normal((num, 2))

    world = plane_world(initial=initial)
    collect(world, whole)
    fails.append(True)
    with pytest.raises(RuntimeError, match="no states left"):
        collect(world, broken)
    assert contents(broken).items() <= contents(whole).items()
    fails.clear()
    collect(world, broken)
    assert contents(broken) == contents(whole)


def test_progress_is_shown_where_it_is_wanted(tmp_path, small_shards, capsys):
    collect(plane_world(), tmp_path / "quiet")
    collect(plane_world(), tmp_path / "silent", show_progress=False)
    assert capsys.readouterr() == ("", "")
    collect(plane_world(), tmp_path / "told", show_progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert [line.split(" states")[0] for line in lines] == [
        "collecting plane: 0/600",
        "collecting plane: 256/600",
        "collecting plane: 512/600",
        "collecting plane: 600/600",
    ]
    assert lines[-1].endswith(" 0 s left")
    # Only what is missing counts.
    (tmp_path / "told" / "shard-00001.json").unlink()
    collect(plane_world(), tmp_path / "told", show_progress=True)
    resumed, first, *_ = capsys.readouterr().err.splitlines()
    assert resumed == "Resuming: 2 of 3 shards complete"
    assert first == "collecting plane: 0/256 states"
    collect(plane_world(), tmp_path / "told", show_progress=True)
    assert capsys.readouterr() == ("", "")
    collect(plane_world(), show_progress=True)  # in memory
    assert "collecting plane: 600/600 states, " in capsys.readouterr().err


MEMORY = """
import sys
import numpy as np
import cqm
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

native = FunctionWorld(
    step=lambda x, u, e: 0.9 * x + u,
    initial=lambda num, rng: rng.standard_normal((num, 8)),
    candidate_actions=np.eye(8)[:3],
)
world = NuisanceWorld(native, Nuisance(dimension=16))
branches = cqm.collect(world, states=int(sys.argv[1]), warmup=(0, 0), threads=2, out=sys.argv[2])
total = sum(np.abs(batch.effects()).sum() for batch in branches.batches())
assert np.isfinite(total)
with open("/proc/self/status") as file:
    peak = next(line for line in file if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_states(tmp_path):
    peaks = [
        float(run([sys.executable, "-c", MEMORY, str(states), tmp_path / str(states)]))
        for states in (10_000, 100_000)
    ]
    size = sum(map(len, contents(tmp_path / "100000").values())) / 2**20
    assert size > peaks[0]  # it would not have fitted
    assert peaks[1] < 1.2 * peaks[0], peaks


def test_a_set_begun_before_the_kind_of_noise_was_stored_is_continued(tmp_path, small_shards):
    world, settings = SeedWorld(), {"seed": 3, "horizon": 2}
    collect(world, tmp_path / "set", **settings)
    reseal_manifest(tmp_path / "set", lambda manifest: manifest.pop("noise_kind"))
    for index in range(3):
        reseal(
            tmp_path / "set", index, lambda arrays: {k: arrays[k] for k in arrays if k != "drew"}
        )
    before = contents(tmp_path / "set")
    for name in ("shard-00001.safetensors", "shard-00001.json"):
        (tmp_path / "set" / name).unlink()
    branches = collect(world, tmp_path / "set", **settings)
    assert contents(tmp_path / "set") == before
    assert branches.noise_kind == "seeds"
    assert cqm.audit(branches, world)


def test_another_kind_of_noise_is_another_configuration(tmp_path):
    collect(SeedWorld(), tmp_path, states=8)
    other = type("Other", (SeedWorld,), {"noise_kind": "signal"})()
    with pytest.raises(ValueError, match='noise_kind: "seeds" -> "signal"'):
        collect(other, tmp_path, states=8)


def test_of_two_that_begin_together_with_different_settings_one_is_refused(tmp_path, monkeypatch):
    """The other's manifest appears after the directory was found empty."""
    world, out = plane_world(), tmp_path / "set"
    exclusive = collection.storage.exclusive

    @contextlib.contextmanager
    def after_the_other(directory, **settings):
        monkeypatch.undo()
        collect(world, out, states=20)
        with exclusive(directory, **settings) as lock:
            yield lock

    monkeypatch.setattr(collection.storage, "exclusive", after_the_other)
    with pytest.raises(ValueError, match="holds branches of a different configuration"):
        collect(world, out, states=30)
    assert len(cqm.Branches.open(out)) == 20
