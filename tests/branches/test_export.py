"""Branches, logs and verdicts as tables for other tools."""

import sys

import numpy as np
import pandas
import pytest
from pyarrow import parquet
from support.worlds import pendulum_world

import cqm

NAMES = ("left", "wait", "right")


@pytest.fixture(scope="module")
def branches():
    world = pendulum_world(action_names=NAMES)
    return cqm.collect(
        world, states=300, draws=2, arms=2, horizon=3, warmup=(0, 0), per_step=True, seed=1
    )


def test_a_row_per_branch(branches):
    table = branches.to_pandas()
    assert len(table) == 300 * 2 * 2
    row = table.iloc[7]  # state 1, draw 1, second arm
    assert (row["state"], row["draw"], row["action"]) == (1, 1, branches.arms[1, 1])
    assert row["action_name"] == NAMES[branches.arms[1, 1]]
    assert row["observation.speed"] == branches.observations[1, 1]
    assert row["outcome.angle"] == branches.outcomes[1, 1, 1, 0]


def test_a_parquet_file_holds_the_same_table(branches, tmp_path):
    branches.to_parquet(tmp_path / "branches.parquet")
    table = parquet.read_table(tmp_path / "branches.parquet").to_pandas()
    pandas.testing.assert_frame_equal(table, branches.to_pandas(), check_dtype=False)
    branches[:0].to_parquet(tmp_path / "none.parquet")
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0
    assert {path.name for path in tmp_path.iterdir()} == {"branches.parquet", "none.parquet"}


def test_logs_and_verdicts_are_tables_too():
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(50, 1)), rng.integers(2, size=50)
    logs = cqm.Logs.from_arrays(
        states, actions, states[:, None], feature_names=["x"], action_names=["off", "on"]
    )
    table = logs.to_pandas()
    assert list(table.columns) == ["action", "action_name", "observation.obs_0", "outcome.x"]
    assert table["action_name"].tolist() == [("off", "on")[action] for action in actions]


def test_without_pandas_the_way_out_is_named(branches, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas; install it with"):
        branches.to_pandas()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'cqm\[parquet\]'"):
        branches.to_parquet(tmp_path / "x.parquet")
