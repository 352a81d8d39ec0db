import json
import os

import numpy as np
import pytest

from cqm import storage
from cqm.models.checkpoint import Checkpoint
from cqm.storage import DamagedFileError

CHECKPOINT = Checkpoint(
    step=12,
    settings={"training": {"updates": 16}, "data": "abc"},
    losses=[0.5, 0.25],
    leaves=[np.arange(3.0, dtype=np.float32), np.array(7, np.int32)],
)


def entries(checkpoint):
    leaves = [(leaf.dtype, leaf.tolist()) for leaf in checkpoint.leaves]
    return checkpoint.step, checkpoint.settings, checkpoint.losses, leaves


@pytest.fixture
def path(tmp_path):
    CHECKPOINT.write(tmp_path / "fit.checkpoint.safetensors")
    return tmp_path / "fit.checkpoint.safetensors"


def test_a_checkpoint_is_read_back(path):
    assert entries(Checkpoint.read(path)) == entries(CHECKPOINT)


def test_no_flipped_bit_goes_unnoticed(path):
    content, problems = path.read_bytes(), []
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        try:
            assert entries(Checkpoint.read(path)) == entries(CHECKPOINT)
        except DamagedFileError as error:
            problems.append(str(error))
    assert len(problems) > 0.95 * len(content)
    assert all(str(path) in text and "remove it to start again" in text for text in problems)


def test_a_checkpoint_without_a_seal_is_refused(path):
    """Version 0.2 wrote a checksum of the arrays, but not of the step."""
    arrays, metadata = storage.read_arrays(path)
    del metadata["seal"]
    metadata["sha256"] = storage.sha256_arrays(arrays)
    storage.write_pieces(path, storage.encode_arrays([arrays], metadata))
    with pytest.raises(DamagedFileError, match=r"written by an earlier version .* remove it to st"):
        Checkpoint.read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, metadata: metadata.pop("step"),
        lambda arrays, metadata: metadata.update(step="-1"),
        lambda arrays, metadata: metadata.update(step="1.5"),
        lambda arrays, metadata: metadata.update(step=""),
        lambda arrays, metadata: metadata.pop("settings"),
        lambda arrays, metadata: metadata.update(settings="{"),
        lambda arrays, metadata: metadata.update(settings="[]"),
        lambda arrays, metadata: metadata.update(settings="[" * 100_000),
        lambda arrays, metadata: metadata.update(more="x"),
        lambda arrays, metadata: arrays.pop("losses"),
        lambda arrays, metadata: arrays.update(held_out=np.zeros(0)),
        lambda arrays, metadata: arrays.update(losses=np.array([[0.5]])),
        lambda arrays, metadata: arrays.update(losses=np.array([1])),
        lambda arrays, metadata: arrays.update(losses=np.array([np.nan])),
        lambda arrays, metadata: arrays.pop("leaf.0000"),
        lambda arrays, metadata: arrays.update(other=np.zeros((1, 2))),
        lambda arrays, metadata: arrays.update({"leaf.0001": np.zeros(0)}),
    ],
)
def test_nonsense_with_the_right_checksum_is_refused(path, change):
    arrays, metadata = storage.read_arrays(path)
    del metadata["seal"]
    change(arrays, metadata)
    storage.write_sealed_arrays(path, arrays, metadata)
    with pytest.raises(DamagedFileError, match=r"is not valid: .*remove it to start again"):
        Checkpoint.read(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(path, make):
    path.unlink()
    make(path)
    with pytest.raises(DamagedFileError, match=r"must be a file; .* remove it to start again"):
        Checkpoint.read(path)


def test_settings_are_stored_as_canonical_json(path):
    _, metadata = storage.read_sealed_arrays(path, repair="")
    assert metadata == {
        "step": "12",
        "settings": json.dumps(CHECKPOINT.settings, sort_keys=True, separators=(",", ":")),
    }
