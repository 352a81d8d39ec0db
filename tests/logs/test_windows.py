"""Windows of episodes: where they are, the same ones in shards, and calls that are killed."""

import numpy as np
import pytest
from support.kills import killed_at

from cqm.logs.dataset import Logs
from cqm.logs.shards import ShardedLogs
from cqm.logs.windows import Piece, gathered


def episode(steps, start=0, **more):
    places = start + np.arange(float(steps))
    return {
        "observations": places[:, None],
        "actions": np.arange(steps) % 2,
        "features": np.stack([places + 1, -places], axis=1),
        **more,
    }


def episodes(num=40):
    rng = np.random.default_rng(0)
    for i in range(num):
        yield episode(int(rng.integers(1, 30)), start=100 * i)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_window_lies_within_an_episode():
    logs = Logs.from_episodes([episode(5), episode(2), episode(4, start=50)], horizon=3, stride=2)
    assert logs.observations.ravel().tolist() == [0.0, 2.0, 50.0]
    assert logs.actions.tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert logs.features[1].tolist() == [[3.0, -2.0], [4.0, -3.0], [5.0, -4.0]]
    assert logs.groups.tolist() == [0, 0, 2]
    assert logs.propensities is None
    whole = Logs.from_episodes([episode(7)], horizon=3)  # one after the other
    assert whole.observations.ravel().tolist() == [0.0, 3.0]


def test_propensities_are_those_of_the_decisions():
    known = np.linspace(0.1, 0.9, 5)
    both = episode(5, propensities=np.stack([known, 1 - known], axis=1))
    logs = Logs.from_episodes([both], horizon=2, stride=2)
    np.testing.assert_allclose(logs.propensities, [[0.1, 0.9], [0.5, 0.5]])
    with pytest.raises(ValueError, match="either all episodes must have propensities or none"):
        Logs.from_episodes([both, episode(5)], horizon=2)


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_shards_hold_the_same_windows_in_parts_of_any_size(part, tmp_path, monkeypatch):
    monkeypatch.setattr("cqm.logs.windows._MOST_ROWS", part)
    logs = Logs.from_episodes(episodes(), horizon=3, stride=1)
    stored = Logs.from_episodes(episodes(), horizon=3, stride=1, num_actions=2, out=tmp_path)
    assert isinstance(stored, ShardedLogs)
    assert len(stored) == len(logs) > 300
    for name, values in logs.row_arrays().items():
        np.testing.assert_array_equal(stored.read(name, 0, len(stored)), values)


def small(out, num=40):
    pieces = (
        Piece(np.full((4, 1), i), np.full((4, 1), i % 2), np.full((4, 1, 1), i), None, i)
        for i in range(num)
    )
    return gathered(pieces, make, out, shard_rows=32)


def make(**arrays):
    return Logs.from_arrays(**arrays, num_actions=2)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_a_rerun_ends_with_the_same_bytes(after, tmp_path):
    small(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for point in range(1, 12):  # the manifest, and then five shards and the manifest
        directory = tmp_path / str(point)
        assert killed_at(point, lambda to=directory: small(to), after=after)
        assert len(small(directory)) == 160
        assert contents(directory) == expected
    assert not killed_at(12, lambda: small(tmp_path / "12"))
    small(tmp_path / "whole")  # nothing is left to do
    assert contents(tmp_path / "whole") == expected


def test_the_windows_of_other_episodes_are_refused(tmp_path):
    Logs.from_episodes(episodes(), horizon=3, num_actions=2, out=tmp_path)
    before = contents(tmp_path)
    moved = ({**each, "features": each["features"] + 1} for each in episodes())
    with pytest.raises(ValueError, match="the windows of other episodes: their features differ"):
        Logs.from_episodes(moved, horizon=3, num_actions=2, out=tmp_path)
    with pytest.raises(ValueError, match=r"contains \d+ windows, but these episodes have 8;"):
        Logs.from_episodes(episodes(1), horizon=3, num_actions=2, out=tmp_path)
    assert contents(tmp_path) == before


def test_mistakes_are_explained(tmp_path):
    for given, message in (
        ([episode(3), {"actions": [0]}], r"episode 1 lacks \['observations', 'features'\]"),
        ([episode(3, reward=1.0)], r"episode 0 has unknown entries \['reward'\]"),
        ([{**episode(3), "actions": [0, 1]}], "actions of episode 0 must have 1 axes and one"),
        ([episode(3)], "no episode has a window of 4 steps"),
        ([{**episode(5), "actions": np.zeros((5, 2))}], "do not identify the effects of continuou"),
        ([{**episode(5), "actions": np.full(5, 0.5)}], "do not identify the effects of continuous"),
    ):
        with pytest.raises(ValueError, match=message):
            Logs.from_episodes(given, horizon=4)
    with pytest.raises(ValueError, match="pass num_actions, candidate_actions or action_names"):
        Logs.from_episodes(episodes(), horizon=4, out=tmp_path)
    with pytest.raises(ValueError, match="horizon must be a whole number"):
        Logs.from_episodes(episodes(), horizon=0)
