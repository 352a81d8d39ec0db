"""A sample of the experiments; `make chaos` runs all of them at full size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.report import NUMBERS, PAGE, with_table

TESTS = Path(__file__).parents[1]
SAMPLED = ("kills", "damage", "api", "commands", "malicious", "rivals", "full_disk", "wrong")
SAMPLED += ("unusual",)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Results of the sampled experiments, and what was printed."""
    out = tmp_path_factory.mktemp("chaos")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    # A process of its own, because it forks and must not have threads.
    done = subprocess.run(
        [sys.executable, "-m", "chaos", "--sample", "--out", str(out), "--only", *SAMPLED],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return out / "results"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_no_promise_is_broken(name, sample):
    (path,) = sample.glob(f"{name}-*.jsonl")
    trials = [json.loads(line) for line in path.read_text().splitlines()]
    assert trials
    assert [trial for trial in trials if trial["failure"]] == []


def test_the_table_shows_the_numbers_of_the_committed_run():
    if NUMBERS.exists():
        text = PAGE.read_text()
        assert with_table(text, json.loads(NUMBERS.read_text())) == text
