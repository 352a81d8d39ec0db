"""Jobs side by side: all are done, and one that fails leaves the others alone."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cqm import storage
from cqm.branches.local import available_cores
from cqm.experiments.workers import run_side_by_side


def touch(task):
    directory, name = task
    if name == "bad":
        raise ValueError("this one does not work")
    if name == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    (Path(directory) / name).write_text(str(sorted(os.sched_getaffinity(0))))


def hang(task):
    Path(task).write_text(str(os.getpid()))
    time.sleep(600)


def write_display(task):
    Path(task).write_text(os.environ.get("MUJOCO_GL", "unset"))


def touch_or_hang(task):
    directory, name = task
    if name == "slow":
        hang(Path(directory) / name)
    touch(task)


def wait_for_pid(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(path.read_text())


def has_ended(pid, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_task_is_done_once(tmp_path, num_workers):
    tasks = [(str(tmp_path), f"task-{i}") for i in range(4)]
    cores = [available_cores()[0]] * num_workers
    started = []
    finished = dict(run_side_by_side(touch, tasks, cores, started.append))
    assert started == tasks
    assert finished == dict.fromkeys(tasks)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_worker_sees_its_core_only(tmp_path):
    core = available_cores()[-1]
    assert list(run_side_by_side(touch, [(str(tmp_path), "one")], [core])) == [
        ((str(tmp_path), "one"), None)
    ]
    assert (tmp_path / "one").read_text() == str([core])
    assert len(os.sched_getaffinity(0)) == len(available_cores())


def test_failed_and_dead_jobs_do_not_stop_the_others(tmp_path):
    names = ["first", "bad", "dead", "dead", "second", "dead"]
    tasks = [(str(tmp_path), name) for name in names]
    problems = [problem for _, problem in run_side_by_side(touch, tasks, available_cores()[:1])]
    assert problems[0] is None
    assert problems[1] == "ValueError: this one does not work"
    assert problems[2:4] == ["its process ended with exit code -9"] * 2
    assert problems[4] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_processes_that_die_before_they_read_their_task_are_failures(tmp_path, monkeypatch):
    (tmp_path / "stillborn.py").write_text(
        "import multiprocessing, os\n"
        "if multiprocessing.current_process().name != 'MainProcess':\n"
        "    os._exit(3)\n"
        "def work(task):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("stillborn").work
    found = dict(run_side_by_side(work, [1, 2, 3], available_cores()[:1]))
    assert found == dict.fromkeys([1, 2, 3], "its process ended with exit code 3")


def test_workers_do_not_look_for_a_display(tmp_path, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    list(run_side_by_side(write_display, [str(tmp_path / "one")], available_cores()[:1]))
    assert (tmp_path / "one").read_text() == "disable"


def test_nothing_to_do():
    assert list(run_side_by_side(touch, [], available_cores())) == []


def test_stopping_early_ends_the_processes(tmp_path):
    quick, slow = (str(tmp_path), "quick"), (str(tmp_path), "slow")
    finished = run_side_by_side(touch_or_hang, [quick, slow], available_cores()[:1])
    assert next(finished) == (quick, None)
    child = wait_for_pid(tmp_path / "slow")
    finished.close()
    assert has_ended(child)


def test_workers_end_when_their_parent_is_killed(tmp_path):
    """Nothing may write into a run that another command may be resuming."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from cqm.branches.local import available_cores\n"
        "from cqm.experiments.workers import run_side_by_side\n"
        "def hang(task):\n"
        "    Path(task).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    list(run_side_by_side(hang, sys.argv[1:], available_cores()[:1]))\n"
    )
    script, mark = tmp_path / "parent.py", tmp_path / "mark"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(mark)])
    child = wait_for_pid(mark)
    parent.kill()
    parent.wait()
    assert has_ended(child)


def test_workers_keep_what_they_inherit(tmp_path):
    """A lock is held until the last worker has ended, even if the parent is killed before."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from cqm import storage\n"
        "from cqm.branches.local import available_cores\n"
        "from cqm.experiments import workers\n"
        "def hang(task):\n"
        "    workers.os._exit = time.sleep  # it does not notice that its parent is gone\n"
        "    Path(task).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    with storage.exclusive(sys.argv[1]) as lock:\n"
        "        mark = sys.argv[1] + '/mark'\n"
        "        cores = available_cores()[:1]\n"
        "        list(workers.run_side_by_side(hang, [mark], cores, inherited=[lock]))\n"
    )
    script, run = tmp_path / "parent.py", tmp_path / "run"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(run)])
    child = wait_for_pid(run / "mark")
    message = rf"run is in use by process {parent.pid} on "
    with pytest.raises(ValueError, match=message), storage.exclusive(run):
        pass  # the parent lives
    parent.kill()
    parent.wait()
    with pytest.raises(ValueError, match=message), storage.exclusive(run, patience_seconds=0.2):
        pass  # its worker lives
    os.kill(child, signal.SIGKILL)
    with storage.exclusive(run):
        assert (run / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (run / ".lock").exists()
