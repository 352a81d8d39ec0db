"""Models of logs read their logs in blocks: same effects, little memory, and kills cost nothing."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.kills import killed_at

from cqm import rows
from cqm.logs import shards
from cqm.logs.dataset import Logs
from cqm.logs.shards import LogWriter, ShardedLogs
from cqm.models import log_bases
from cqm.models.hindsight import HindsightModel
from cqm.models.residual import ResidualModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:effects are set to zero"),
    pytest.mark.filterwarnings("ignore:poor coverage"),
    pytest.mark.filterwarnings("ignore:the largest inverse propensity"),
]


def recorded(kind, num=3000, seed=0):
    """Confounded logs of three actions, of one of several kinds."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(num, 3)) @ rng.normal(size=(3, 3)) + 2
    if kind == "cells":
        states = rng.integers(3, size=(num, 2)).astype(float)
    shares = np.exp(0.5 * (states - states.mean(axis=0))[:, :2] @ rng.normal(size=(2, 3)))
    shares /= shares.sum(axis=1, keepdims=True)
    actions = (rng.random(num)[:, None] >= np.cumsum(shares, axis=1)[:, :-1]).sum(axis=1)
    groups = rng.integers(num // 5, size=num) if kind == "episodes" else None
    noise = rng.normal(size=(num, 2)) + (0 if groups is None else groups[:, None] % 3)
    effects = np.stack([np.sin(states[:, 0]) * actions, states[:, 1] * (actions == 1)], axis=1)
    features = (10 + effects + states[:, :2] + noise)[:, None]
    options = {}
    if kind == "steps":
        later = rng.integers(3, size=(num, 2))
        actions = np.column_stack([actions, later])
        moved = 0.3 * np.cumsum(actions[..., None] == [0, 1, 2], axis=1)
        features = states[:, None] + moved + 0.2 * rng.normal(size=(num, 3, 3))
        options = {"continuation": "uniform", "features_are_next_observation": True}
    known = shares if kind == "known" else None
    return Logs.from_arrays(
        states, actions, features, num_actions=3, groups=groups, propensities=known, **options
    )


def write(directory, logs, shard_rows=700):
    with LogWriter(directory, shard_rows=shard_rows) as writer:
        writer.append(logs)
    return directory


KINDS = {
    "estimated": {},
    "known": {"doubly_robust": True},
    "cells": {},
    "episodes": {"doubly_robust": True},
    "steps": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logs_in_shards_give_the_effects_of_logs_in_memory(kind, tmp_path, monkeypatch):
    """To the last bit in memory that is read in the same blocks, and nearly so in one block."""
    logs = recorded(kind, num=1500)
    states, directory = logs.observations[:50], write(tmp_path, logs)
    model = ResidualModel(members=3, **KINDS[kind])
    whole = model.fit(logs).effect(states)
    shards = model.fit(directory).effect(states)
    np.testing.assert_array_equal(shards, whole)
    coverage = ShardedLogs.open(directory).coverage()
    assert coverage.to_json() == logs.coverage().to_json()
    monkeypatch.setattr(rows, "BLOCK_ROWS", 400)
    blocks = model.fit(directory).effect(states)
    assert np.abs(blocks - whole).max() < 1e-8 * np.abs(whole).max()


@pytest.mark.parametrize("tied", [False, True])
def test_regions_of_very_many_decisions_follow_a_sample(tied, monkeypatch):
    from cqm.logs import coverage

    logs = recorded("cells" if tied else "estimated", num=8000)
    monkeypatch.setattr(rows, "BLOCK_ROWS", 1000)
    exact = logs.coverage()
    monkeypatch.setattr(coverage, "_RANKED_ROWS", 4000)
    sampled = logs[:].coverage()  # measured again
    assert exact.region_sizes.tolist() == [400] * 20
    assert sampled.region_sizes.sum() == 8000
    assert np.abs(sampled.region_sizes - 400).max() < 120
    assert np.abs(sampled.regions - exact.regions).max() < 0.15
    np.testing.assert_allclose(
        sampled.effective_sample_sizes, exact.effective_sample_sizes, rtol=0.05
    )


def test_a_fit_that_is_killed_resumes_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK_ROWS", 300)
    monkeypatch.setattr(rows, "_SECONDS_BETWEEN", 0.0)
    logs = write(tmp_path / "logs", recorded("episodes", num=800))
    model = ResidualModel(members=2)

    def fit(name):
        model.fit(logs, directory=tmp_path / name, show_progress=False)
        model.save(tmp_path / f"{name}-model")
        return files(tmp_path / name), files(tmp_path / f"{name}-model")

    written = []
    with monkeypatch.context() as patch:
        reached = rows.Checkpoint.reached
        patch.setattr(rows.Checkpoint, "reached", counted(reached, lambda: written.append(1)))
        expected = fit("undisturbed")
    num = len(written)
    assert expected[0] == {}  # nothing is left
    for point in (3, *range(num // 6, num - 4, num // 6), num - 4):
        name = f"killed-{point}"
        assert killed_at(point, lambda name=name: fit(name), after=bool(point % 2))
        assert len(list((tmp_path / name).iterdir())) >= point // 3
        assert fit(name) == expected
    read = []
    assert killed_at(num - 4, lambda: fit("late"))
    with monkeypatch.context() as patch:
        read_fn = counted(shards.FileShard.read, lambda: read.append(1))
        patch.setattr(shards.FileShard, "read", read_fn)
        fit("late")
        again = len(read)
        fit("undisturbed")
    assert again < (len(read) - again) / 2  # what is finished is not read again


def counted(function, note_fn):
    def call(*args):
        note_fn()
        return function(*args)

    return call


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_checkpoints_belong_to_one_model_and_one_set_of_logs(tmp_path):
    logs = recorded("known", num=400)
    assert killed_at(10, lambda: ResidualModel(members=2).fit(logs, directory=tmp_path))
    with pytest.raises(ValueError, match="different settings or data"):
        ResidualModel(members=3).fit(logs, directory=tmp_path)
    with pytest.raises(ValueError, match="different settings or data"):
        ResidualModel(members=2).fit(recorded("known", num=400, seed=1), directory=tmp_path)
    ResidualModel(members=2).fit(logs, directory=tmp_path)
    ResidualModel(members=3).fit(logs, directory=tmp_path)


FIT = """
import json, resource, sys
from cqm import rows
from cqm.models import HindsightModel, ResidualModel
rows.BLOCK_ROWS = 1024
eval(sys.argv[2]).fit(sys.argv[1], show_progress=False)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
"""


@pytest.mark.parametrize(
    ("model", "growth"),
    [
        ("ResidualModel(members=2)", 1.02),
        ("HindsightModel(members=2, width=16, updates=500, memory_gb=4e-4)", 1.03),
    ],
)
def test_memory_does_not_grow_with_the_number_of_decisions(model, growth, tmp_path):
    peaks = []
    for num in (4_000, 16_000):
        rng = np.random.default_rng(0)
        directory = tmp_path / str(num)
        with LogWriter(directory, shard_rows=4_000) as writer:
            for _ in range(num // 4_000):
                states, actions = rng.normal(size=(4_000, 60)), rng.integers(2, size=4_000)
                outcomes = states[:, 0] * (1 + actions) + rng.normal(size=4_000)
                writer.append(
                    Logs.from_arrays(
                        states, actions, outcomes[:, None, None], propensities=[0.5, 0.5]
                    )
                )
        command = [sys.executable, "-c", FIT, str(directory), model]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks.append(json.loads(ended.stdout))
    rows_megabytes = 12_000 * 60 * 8 / 2**20
    assert peaks[1] - peaks[0] < rows_megabytes  # a design has three times as many columns
    assert peaks[1] < growth * peaks[0]


def test_methods_that_need_all_rows_refuse_large_logs(tmp_path, monkeypatch):
    directory = write(tmp_path, recorded("cells", num=600))
    opened = Logs.open(directory)
    table = ResidualModel(method="tabular")
    expected = table.fit(opened.load()).effect(opened.load().observations[:5])
    np.testing.assert_array_equal(
        table.fit(directory).effect(opened.load().observations[:5]), expected
    )
    assert ResidualModel().average_effect(directory).sizes.tolist() == [600]
    monkeypatch.setattr(shards, "_LOADED", 1000)
    asked = {
        "method='tabular' needs": lambda: table.fit(opened),
        "method='tabular' needs ": lambda: HindsightModel(method="tabular").fit(opened),
        "an average effect needs": lambda: ResidualModel().average_effect(opened),
        "a projected effect needs": lambda: ResidualModel().projected_effect(opened),
    }
    for message, ask in asked.items():
        with pytest.raises(ValueError, match=f"{message.strip()} all trajectories in memory"):
            ask()
    assert ResidualModel().fit(opened).num_examples_ == 600
    assert log_bases.repeated_cells(opened.rows()) is not None
