"""Logs in shards: appends that survive kills, damage that is named, windows and combinations."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.kills import killed_at
from support.logs import arrays

from cqm.logs import shards
from cqm.logs.dataset import Logs
from cqm.logs.shards import LogWriter, ShardedLogs, in_memory
from cqm.storage import DamagedFileError


def recorded(num=100, seed=0, **options):
    return Logs.from_arrays(
        **arrays(num=num, seed=seed), num_actions=2, propensities=[0.4, 0.6], **options
    )


def write(directory, logs, *, part=30, shard_rows=40):
    """Write logs part by part, from where an earlier writer stopped."""
    with LogWriter(directory, shard_rows=shard_rows) as writer:
        for start in range(len(writer), len(logs), part):
            writer.append(logs[start : start + part])


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_same(one, other):
    assert (one.recipe.horizon, one.feature_names) == (other.recipe.horizon, other.feature_names)
    for name, values in other.row_arrays().items():
        np.testing.assert_array_equal(one.row_arrays()[name], values)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine") / "logs"
    write(directory, recorded(groups=np.arange(100) // 4))
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "logs")


def test_what_is_read_is_what_was_written(pristine):
    logs, opened = recorded(groups=np.arange(100) // 4), Logs.open(pristine)
    assert sorted(contents(pristine)) == [
        "log-shards.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "shard-00002.safetensors",
    ]
    assert repr(opened) == repr(logs).replace("Logs(", "ShardedLogs(")
    opened.verify()
    assert_same(Logs.load(pristine), logs)
    assert_same(opened[35:85].load(), logs[35:85])
    assert_same(opened[35:85][5:45].load(), logs[40:80])
    block = next(opened[78:].rows().blocks())
    np.testing.assert_array_equal(block["outcomes"], logs.outcomes[78:])
    assert opened.rows().num_groups == 25


def test_finished_logs_can_be_added_to(directory):
    with LogWriter(directory, shard_rows=40) as writer:
        assert len(writer) == 100
        writer.append(recorded(50, seed=1, groups=100 + np.arange(50)))
    opened = Logs.open(directory)
    assert len(opened) == 150
    assert_same(opened[100:].load(), recorded(50, seed=1, groups=100 + np.arange(50)))


def test_only_what_fits_is_added(directory, tmp_path):
    before = contents(directory)
    other = recorded(groups=np.arange(100), feature_names=["x", "y"])
    with LogWriter(directory) as writer:
        with pytest.raises(ValueError, match=r"differ from those in .*\n +feature_names"):
            writer.append(other)
        with pytest.raises(ValueError, match=r"arrays.groups"):
            writer.append(recorded())
    with LogWriter(directory), pytest.raises(ValueError, match="is in use by"):
        LogWriter(directory)
    with pytest.raises(ValueError, match="contains logs in shards; choose another"):
        recorded().save(directory)
    assert contents(directory) == before
    recorded().save(tmp_path / "plain")
    with pytest.raises(ValueError, match="contains logs that are not in shards"):
        LogWriter(tmp_path / "plain")
    with LogWriter(tmp_path / "begun") as writer:
        writer.append(recorded(5))
        with pytest.raises(ValueError, match="contains no trajectories yet"):
            Logs.open(tmp_path / "begun")


def test_an_exception_keeps_whole_shards_only(tmp_path):
    def parts():
        yield recorded(90)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LogWriter(tmp_path / "logs", shard_rows=40) as writer:
        any(map(writer.append, parts()))
    assert len(Logs.open(tmp_path / "logs")) == 80


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_a_writer_goes_on_and_ends_with_the_same_bytes(
    pristine, tmp_path, after
):
    logs = recorded(groups=np.arange(100) // 4)
    for point in range(1, 8):  # the manifest, and then each shard and the manifest
        directory = tmp_path / str(point)
        assert killed_at(point, lambda to=directory: write(to, logs), after=after)
        if (directory / shards.MANIFEST).exists() and point > 3:
            assert_same(Logs.open(directory).load(), logs[: 40 * ((point - 2 + after) // 2)])
        write(directory, logs)
        assert contents(directory) == contents(pristine)
    assert not killed_at(8, lambda: write(tmp_path / "8", logs))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def shard(directory, number):
    return directory / f"shard-{number:05d}.safetensors"


def swap(directory):
    os.rename(shard(directory, 0), directory / "other")
    os.rename(shard(directory, 1), shard(directory, 0))
    os.rename(directory / "other", shard(directory, 1))


def mix(directory):
    write(directory.parent / "foreign", recorded(seed=5, groups=np.arange(100) // 4))
    shutil.copy(shard(directory.parent / "foreign", 1), shard(directory, 1))


DAMAGE = {
    "missing": (lambda d: shard(d, 1).unlink(), r"shard-00001.safetensors is missing"),
    "truncated": (lambda d: os.truncate(shard(d, 1), 900), r"shard-00001.* has 900 bytes instead"),
    "flipped": (lambda d: flip(shard(d, 1)), r"shard-00001.* is damaged or belongs to other logs"),
    "swapped": (swap, r"shard-00000.* is not shard 0 but a copy of shard 1"),
    "mixed": (mix, r"shard-00001.* is damaged or belongs to other logs"),
    "extra": (
        lambda d: shutil.copy(shard(d, 0), shard(d, 7)),
        r"does not list: \['shard-00007.safetensors'\]",
    ),
    "edited": (
        lambda d: (d / shards.MANIFEST).write_text(
            (d / shards.MANIFEST).read_text().replace('"rows": 40', '"rows": 39', 1)
        ),
        r"log-shards.json was changed",
    ),
    "no manifest": (lambda d: (d / shards.MANIFEST).unlink(), "contains no logs"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind, directory):
    spoil, message = DAMAGE[kind]
    spoil(directory)
    error = FileNotFoundError if kind == "no manifest" else DamagedFileError
    with pytest.raises(error, match=message):
        Logs.open(directory).verify()
    with pytest.raises(error, match=message):
        Logs.load(directory)


def test_logs_of_several_recorders_are_combined(pristine, tmp_path):
    one, other = recorded(groups=np.arange(100) // 4), recorded(60, seed=3, groups=np.arange(60))
    write(tmp_path / "other", other)
    both = ShardedLogs.combine([pristine, tmp_path / "other", other[:10]])
    assert len(both) == 170
    np.testing.assert_array_equal(
        both.load().observations,
        np.concatenate([one.observations, other.observations, other.observations[:10]]),
    )
    assert both.rows().num_groups == 25 + 60 + 10
    window = both[90:165]
    assert window.load().groups.tolist() == both.load().groups[90:165].tolist()
    assert window.digest() != both.digest() == ShardedLogs.combine([both]).digest()
    with pytest.raises(ValueError, match="share shards"):
        ShardedLogs.combine([pristine, pristine])
    with pytest.raises(ValueError, match=r"different kinds cannot be combined:\n +recipe.discount"):
        ShardedLogs.combine([pristine, replace_discount(one)])
    with pytest.raises(ValueError, match=r"arrays"):
        ShardedLogs.combine([pristine, recorded()])
    with pytest.raises(ValueError, match="at least one"):
        ShardedLogs.combine([])


def replace_discount(logs):
    return replace(logs, recipe=replace(logs.recipe, discount=0.5))


def test_families_are_remembered(tmp_path):
    families = np.stack([np.full(100, 7), np.arange(100)], axis=1)
    logs = replace(recorded(), families=families)
    write(tmp_path / "logs", logs)
    assert Logs.open(tmp_path / "logs").known_families.runs.tolist() == [[7, 0, 99]]
    with pytest.raises(ValueError, match="share"):
        ShardedLogs.combine([logs, tmp_path / "logs"])


def test_only_windows_can_be_selected(pristine):
    opened = Logs.open(pristine)
    for rows in (slice(0, 0), slice(None, None, 2), slice(200, 300)):
        with pytest.raises(ValueError, match="some consecutive rows of 100"):
            opened[rows]
    with pytest.raises(ValueError, match="can only be sliced; got 3"):
        opened[3]


def test_what_needs_all_rows_loads_small_logs_and_refuses_large_ones(pristine, monkeypatch):
    opened = Logs.open(pristine)
    assert_same(in_memory(opened, "this"), opened.load())
    monkeypatch.setattr(shards, "_LOADED", 1000)
    with pytest.raises(ValueError, match=r"this needs all .* memory, .* pass a slice, such as"):
        in_memory(opened, "this")
    assert in_memory(opened[:2], "this").observations.shape == (2, 2)
