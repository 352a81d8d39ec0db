"""Rows in blocks: sums, stored columns, and checkpoints from which an interrupted pass resumes."""

from dataclasses import replace

import numpy as np
import pytest

from cqm import rows as module
from cqm.rows import Block, Checkpoints, Rows, zeros
from cqm.storage import DamagedFileError


def numbers(num=10, block=3):
    return Rows.of(x=np.arange(float(num)), block=block)


def test_blocks_cover_all_rows_in_order():
    rows = numbers()
    assert [len(block) for block in rows.blocks()] == [3, 3, 3, 1]
    assert [block.start for block in rows.blocks(first=2)] == [6, 9]
    assert rows.num_blocks == 4
    assert rows.array("x").tolist() == list(range(10))
    assert rows.head(2)["x"].tolist() == [0, 1]
    assert len(rows.head()) == 3
    assert rows.mean("x") == 4.5
    assert rows.array(lambda block: 2 * block["x"]).sum() == 90


def test_rows_are_taken_in_any_order():
    rows = numbers()
    taken, squares = rows.take(np.array([7, 0, 9, 0]), "x", lambda block: block["x"] ** 2)
    assert taken.tolist() == [7, 0, 9, 0]
    assert squares.tolist() == [49, 0, 81, 0]


def test_rows_of_a_group_share_a_fold():
    groups = np.array([0, 0, 1, 2, 1, 2])
    rows = Rows(6, {}, num_groups=3, block=4).having(groups=groups)
    assert rows.folded(np.array([1, 0, 1])).array("folds").tolist() == [1, 1, 0, 1, 0, 1]
    assert rows.folded(np.array([1, 0, 1])).num_folds == 2
    assert Rows(6, {}, block=4).folded(np.arange(6) % 2).array("folds").tolist() == [0, 1] * 3


@pytest.mark.parametrize("block", [3, 100])
def test_a_stored_column_is_computed_once_per_block(block):
    computed = []

    def column(own):
        computed.append(own.start)
        return np.stack([own["x"], -own["x"]], axis=1)

    rows = numbers(block=block).storing(both=column)
    first = rows.array("both")
    num = len(computed)
    np.testing.assert_array_equal(rows.array("both"), first)
    assert len(computed) == num == rows.num_blocks
    assert first[9].tolist() == [9, -9]


def add(sums, block: Block):
    sums["sum"] += block["x"].sum()
    np.maximum(sums["most"], block["x"].max(), out=sums["most"])


def summed(directory, rows=None, identity=None):
    """What two passes add up, with checkpoints in a directory."""
    rows = numbers() if rows is None else rows
    checkpoints = Checkpoints(directory, identity or {"seed": 0})
    rows = replace(rows, checkpoints=checkpoints)
    one = rows.total("one", zeros(sum=(), most=()), add)
    two = rows.total("two", zeros(sum=(2,), most=()), add)
    return float(one["sum"]), float(one["most"]), two["sum"].tolist()


def test_an_interrupted_pass_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN", 0.0)
    read = []

    def column(block):
        if len(read) == 6:
            raise KeyboardInterrupt
        read.append(block.start)
        return np.arange(float(block.start), block.stop)

    rows = Rows(10, {"x": column}, block=3)
    with pytest.raises(KeyboardInterrupt):
        summed(tmp_path, rows)
    assert read == [0, 3, 6, 9, 0, 3]
    read.clear()
    assert summed(tmp_path, rows) == (45, 9, [45, 45])
    assert read == [6, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "01-one.sums.safetensors",
        "02-two.sums.safetensors",
    ]


def test_checkpoints_of_another_fit_are_refused_and_so_is_damage(tmp_path):
    summed(tmp_path)
    with pytest.raises(ValueError, match=r"01-one.* different settings or data:\n +seed: 0 -> 1"):
        summed(tmp_path, identity={"seed": 1})
    path = tmp_path / "02-two.sums.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"02-two.* was changed"):
        summed(tmp_path)
    path.unlink()
    assert summed(tmp_path) == (45, 9, [45, 45])
