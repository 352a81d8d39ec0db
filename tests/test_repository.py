"""What surrounds the package: its command, version, workflows and hooks."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import cqm

ROOT = Path(__file__).parent.parent


def test_every_place_names_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == (cqm.__version__, str(citation["date-released"]))
    assert citation["version"] == cqm.__version__
    assert released[-1][0] == "0.1.0"


@pytest.mark.parametrize("command", [["-m", "cqm"], ["-m", "cqm", "worlds"]], ids=" ".join)
def test_python_dash_m_is_the_command(command):
    done = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {' '.join(command[1:])}")


def test_the_version_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", "cqm", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"cqm {cqm.__version__}\n")


COMPLETE = """
source "$1"
COMP_WORDS=($2) COMP_CWORD=$(($(wc -w <<< "$2") - 1)) COMP_LINE=$2 COMP_POINT=${#2}
_tyro_cqm
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"), [("cqm wor", "worlds"), ("cqm collect --hor", "--horizon")]
)
def test_the_shell_completes_commands_and_options(typed, completed, tmp_path):
    (command,) = re.findall(
        r"cqm --tyro-write-completion bash", (ROOT / "docs" / "installing.md").read_text()
    )
    script = str(tmp_path / "cqm")
    subprocess.run([sys.executable, "-m", *command.split(), script], check=True)
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "", script, typed], capture_output=True, text=True
    )
    assert done.stdout.split() == [completed]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_verbs_that_exist_and_pin_their_actions(path):
    verbs = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    found = steps(yaml.safe_load(path.read_text()))
    assert all(re.fullmatch(r"[\w/-]+@(release/)?v\d+", s["uses"]) for s in found if "uses" in s)
    commands = "\n".join(step.get("run", "") for step in found)
    called = re.findall(r"\bmake (?:-C \S+ )?(\w+)", commands)
    assert called
    assert set(called) <= set(verbs)


def test_the_workflow_of_tests_runs_everything_on_every_supported_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == supported
    assert project["requires-python"] == f">={supported[0]},<3.{int(supported[-1][2:]) + 1}"
    assert [step["run"] for step in steps(workflow) if "run" in step] == ["make check", "make test"]


def test_pre_commit_runs_the_tools_of_the_environment_and_downloads_nothing():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook for repo in repos for hook in repo["hooks"]]
    assert {repo["repo"] for repo in repos} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    assert [hook["entry"].split()[0] for hook in hooks] == [
        f".venv/bin/{tool}" for tool in ("ruff", "ruff", "mypy")
    ]
