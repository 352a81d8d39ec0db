"""The package as a user first meets it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cqm

ROOT = Path(__file__).parent.parent


def test_every_public_name_resolves():
    for name in cqm.__all__:
        assert getattr(cqm, name) is not None
    assert set(cqm.__all__) <= set(dir(cqm))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'centre'; available: .*'center'"):
        _ = cqm.centre


def test_importing_loads_no_simulator_and_no_compiler():
    heavy = ("jax", "mujoco", "dm_control", "gymnasium", "scipy", "matplotlib")
    code = f"import cqm, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
)
def test_readme_snippets_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})


def test_the_lock_names_versions_and_no_addresses():
    lines = (ROOT / "requirements.lock").read_text().splitlines()[1:]
    assert len(lines) > 50
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
