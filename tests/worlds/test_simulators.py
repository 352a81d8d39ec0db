import logging
import os
import pkgutil
import subprocess
import sys
import threading

import pytest

import cqm.worlds
from cqm.worlds.simulators import quiet_dm_control, sim_extra

PREAMBLE = """
import logging, os, sys

def process():
    loggers = [logging.getLogger(name) for name in (None, "absl")]
    return dict(os.environ), [(l.level, l.handlers[:], l.filters[:]) for l in loggers]
"""


def run(code, **variables):
    """What a program prints on a machine without a display."""
    kept = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH")  # simulators set other variables
    environment = {name: os.environ[name] for name in kept if name in os.environ} | variables
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == ""
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["cqm.worlds"] + [f"cqm.worlds.{m.name}" for m in pkgutil.iter_modules(cqm.worlds.__path__)],
)
def test_importing_leaves_the_environment_and_the_loggers_alone(module):
    assert run(f"before = process(); import {module}; print(process() == before)") == "True"


def test_no_submodule_is_left_out():
    names = {module.name for module in pkgutil.iter_modules(cqm.worlds.__path__)}
    assert {"cloning", "contract", "gym", "loading", "mujoco", "suite"} <= names


def test_the_parts_without_a_simulator_import_none():
    code = """
for name in ("mujoco", "dm_control", "gymnasium", "absl"):
    sys.modules[name] = None
import cqm.worlds.actions, cqm.worlds.check, cqm.worlds.contract, cqm.worlds.features
import cqm.worlds.function, cqm.worlds.identity, cqm.worlds.loading, cqm.worlds.nuisance
print(cqm.worlds.FunctionWorld.__name__)
"""
    assert run(code) == "FunctionWorld"


@pytest.mark.parametrize("name", ["CartPole-v1", "Hopper-v5"])
def test_loading_a_gymnasium_id_leaves_dm_control_out(name):
    code = f"import cqm; cqm.load_world({name!r}); print('dm_control' in sys.modules)"
    assert run(code) == "False"


@pytest.mark.parametrize(
    ("missing", "world"),
    [
        ("dm_control", "reacher-easy"),
        ("mujoco", "reacher-easy"),
        ("mujoco", "CartPole-v1"),
        ("gymnasium", "CartPole-v1"),
    ],
)
def test_a_missing_simulator_names_the_extra(missing, world):
    code = f"""
sys.modules[{missing!r}] = None
import cqm
try:
    cqm.load_world({world!r})
except ImportError as error:
    print(error)
"""
    assert run(code) == f"{missing} is not installed; simulators need pip install 'cqm[sim]'"


@pytest.mark.parametrize(
    ("missing", "use"),
    [
        ("mujoco", "cqm.MujocoWorld"),
        ("mujoco", "cqm.worlds.suite"),
        ("gymnasium", "cqm.GymWorld('CartPole-v1')"),
        ("gymnasium", "cqm.worlds.reload_world({'kind': 'gymnasium', 'name': 'CartPole-v1'})"),
    ],
)
def test_so_does_the_world_class(missing, use):
    code = f"""
sys.modules[{missing!r}] = None
import cqm
try:
    {use}
except ImportError as error:
    print(error)
"""
    assert run(code) == f"{missing} is not installed; simulators need pip install 'cqm[sim]'"


def test_other_errors_pass():
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing'"), sim_extra():
        from cqm.worlds import nothing  # noqa: F401


def test_suite_tasks_load_without_a_display_in_every_thread():
    code = """
import threading
import cqm

before, failures = process(), []
threading.excepthook = failures.append

def load(name):
    world = cqm.load_world(name)
    cqm.check_world(world, num=2, horizon=2)

names = ("reacher-easy", "cheetah-run", "finger-spin", "reacher-easy")
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
from dm_control import _render
print(failures, process() == before, _render.BACKEND)
"""
    assert run(code) == "[] True off"


def test_a_renderer_chosen_by_the_user_is_kept():
    code = """
import cqm
cqm.load_world("reacher-easy")
from dm_control import _render
print(os.environ["MUJOCO_GL"], _render.BACKEND)
"""
    assert run(code, MUJOCO_GL="off") == "off off"


def test_rendering_is_only_disabled_without_a_display():
    code = """
from cqm.worlds.simulators import quiet_dm_control
with quiet_dm_control():
    print(os.environ.get("MUJOCO_GL"), end=" ")
print(os.environ.get("MUJOCO_GL"))
"""
    assert run(code) == "disable None"
    assert run(code, MUJOCO_GL="egl") == "egl egl"
    assert run(code, DISPLAY=":0") == "None None"
    assert run(code, WAYLAND_DISPLAY="wayland-0") == "None None"


def test_only_the_message_about_model_files_is_hidden_and_only_while_loading(caplog):
    logger = logging.getLogger("absl")
    with quiet_dm_control():
        logger.warning("settotalmass is deprecated")
        logger.warning("unstable")
    logger.warning("settotalmass again")
    assert caplog.messages == ["unstable", "settotalmass again"]


def test_an_error_within_restores_the_loggers_too():
    root, absl = logging.getLogger(), logging.getLogger("absl")
    before = root.handlers[:], absl.filters[:]
    with pytest.raises(RuntimeError, match="broken"), quiet_dm_control():
        raise RuntimeError("broken")
    assert (root.handlers, absl.filters) == before


def test_one_thread_leaving_does_not_end_the_silence_of_another(caplog):
    logger, entered, left = logging.getLogger("absl"), threading.Event(), threading.Event()

    def other():
        with quiet_dm_control():
            entered.set()
            left.wait(60)
            logger.warning("settotalmass in the other thread")

    thread = threading.Thread(target=other)
    with quiet_dm_control():
        thread.start()
        entered.wait(60)
    left.set()
    thread.join()
    assert caplog.messages == []
