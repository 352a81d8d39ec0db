import contextlib
import gc
import json
import re
import sys
import time
import types
from pathlib import Path
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cqm import storage
from cqm.models.network import Linear
from cqm.models.training import InMemory, Training, Validation, expected_seconds, train
from cqm.storage import DamagedFileError

RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((500, 3)).astype(np.float32)
WEIGHTS = np.array([[1.0, -2.0], [0.5, 0.0], [0.0, 3.0]], np.float32)
DATA = {"x": INPUTS, "y": INPUTS @ WEIGHTS + 0.25}
SETTINGS = Training(updates=600, batch_size=64, learning_rate=0.03, chunk=100, seed=5)


def squared_error(model, batch, key, target):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def start():
    return Linear(3, 2, jax.random.key(0))


def same_bits(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_a_linear_map_is_found():
    trained = train(start(), squared_error, DATA, SETTINGS)
    np.testing.assert_allclose(trained.model.weight, WEIGHTS, atol=1e-2)
    np.testing.assert_allclose(trained.model.bias, 0.25, atol=1e-2)
    assert trained.losses.shape == (6,)
    assert trained.losses[-1] < 1e-3 < trained.losses[0]


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    first = train(start(), squared_error, DATA, SETTINGS).model
    assert same_bits(first, train(start(), squared_error, DATA, SETTINGS).model)
    other = Training(**{**SETTINGS.__dict__, "seed": 6})
    assert not same_bits(first, train(start(), squared_error, DATA, other).model)


MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="memory maps are read from /proc")
def test_a_program_is_forgotten_when_training_is_over():
    """Linux allows a process some 65,000 memory maps; beyond them it crashes."""

    def maps_after_training(times):
        for _ in range(times):
            train(start(), squared_error, DATA, Training(updates=2, chunk=1, seed=0))
        gc.collect()
        return MAPS.read_bytes().count(b"\n")

    before = maps_after_training(1)
    assert maps_after_training(10) <= before + 5


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupted_training_continues_to_the_same_bits(tmp_path, after):
    whole = train(start(), squared_error, DATA, SETTINGS)
    chunks = []

    def stop(model):
        chunks.append(model)
        if len(chunks) == after + 1:
            raise StoppedError
        return {}

    with pytest.raises(StoppedError):
        train(start(), squared_error, DATA, SETTINGS, directory=tmp_path, evaluate_fn=stop)
    resumed = train(start(), squared_error, DATA, SETTINGS, directory=tmp_path)
    assert same_bits(resumed.model, whole.model)
    np.testing.assert_array_equal(resumed.losses, whole.losses)


NOISY = {"x": INPUTS[:8], "y": DATA["y"][:8] + RNG.standard_normal((8, 2)).astype(np.float32)}
HELD_OUT = Validation({name: rows[8:] for name, rows in DATA.items()}, patience=3)


def test_validation_keeps_the_best_model_and_stops_early():
    """Eight noisy rows are soon learned by heart; rows without noise tell when."""
    settings = Training(**{**SETTINGS.__dict__, "chunk": 20})
    trained = train(start(), squared_error, NOISY, settings, validation=HELD_OUT)
    best = int(np.argmin(trained.validation_losses))
    assert trained.updates == 20 * (best + 1 + 3) < 600
    assert len(trained.losses) == len(trained.validation_losses) == best + 4
    error = float(squared_error(trained.model, HELD_OUT.rows, None, None))
    assert error == pytest.approx(trained.validation_losses.min(), rel=0.05)
    patient = Validation(HELD_OUT.rows, patience=100)
    longer = train(start(), squared_error, NOISY, settings, validation=patient)
    assert longer.updates == 600
    assert longer.validation_losses[-1] > longer.validation_losses.min()
    assert same_bits(longer.model, trained.model)


@pytest.mark.parametrize("after", [2, 5, 100])
def test_validated_training_continues_to_the_same_bits(tmp_path, after):
    settings = Training(**{**SETTINGS.__dict__, "chunk": 20})
    whole = train(start(), squared_error, NOISY, settings, validation=HELD_OUT)
    options = {"directory": tmp_path, "validation": HELD_OUT}
    chunks = []

    def stop(model):
        chunks.append(model)
        if len(chunks) == after + 1:
            raise StoppedError
        return {}

    with pytest.raises(StoppedError) if after < 100 else contextlib.nullcontext():
        train(start(), squared_error, NOISY, settings, evaluate_fn=stop, **options)
    resumed = train(start(), squared_error, NOISY, settings, **options)
    assert same_bits(resumed.model, whole.model)
    assert resumed.updates == whole.updates
    np.testing.assert_array_equal(resumed.validation_losses, whole.validation_losses)


def test_held_out_rows_that_fill_no_batch_all_count():
    three = Validation({name: rows[:3] for name, rows in DATA.items()}, patience=100)
    once = Training(**{**SETTINGS.__dict__, "updates": 1, "batch_size": 6})
    trained = train(start(), squared_error, DATA, once, validation=three)
    error = float(squared_error(trained.model, three.rows, None, None))
    assert trained.validation_losses[0] == pytest.approx(error, rel=1e-5)


class FakeWriter:
    """Stands for TensorBoard's, which is not installed with the tests."""

    made: ClassVar[list] = []

    def __init__(self, directory):
        self.directory, self.events, self.closed = directory, [], False
        self.made.append(self)

    def add_event(self, event):
        self.events.append(event)

    def flush(self):
        pass

    def close(self):
        self.closed = True


def fake_tensorboard(monkeypatch):
    names = "tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"
    for name in (*names, "tensorboard.compat.proto.summary_pb2"):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    summary = sys.modules["tensorboard.compat.proto.summary_pb2"]
    summary.Summary = type("Summary", (types.SimpleNamespace,), {"Value": types.SimpleNamespace})
    sys.modules["tensorboard.compat.proto.event_pb2"].Event = types.SimpleNamespace
    sys.modules[names[0]].EventFileWriter = FakeWriter


def test_metrics_go_to_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    fake_tensorboard(monkeypatch)
    monkeypatch.setattr(FakeWriter, "made", [])
    trained = train(start(), squared_error, DATA, SETTINGS, directory=tmp_path, name="fit")
    (writer,) = FakeWriter.made
    assert writer.closed
    assert writer.directory == str(tmp_path / "tensorboard" / "fit")
    assert [event.step for event in writer.events] == [100, 200, 300, 400, 500, 600]
    (value,) = writer.events[-1].summary.value
    assert (value.tag, value.simple_value) == ("loss", pytest.approx(trained.losses[-1]))
    train(start(), squared_error, DATA, SETTINGS, directory=tmp_path, name="fit")
    assert len(FakeWriter.made) == 1  # it was finished: no empty file


def test_without_tensorboard_metrics_are_lines_of_json_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    train(start(), squared_error, DATA, SETTINGS, directory=tmp_path, name="fit")
    assert {path.name for path in tmp_path.iterdir()} == {
        "fit.checkpoint.safetensors",
        "fit.metrics.jsonl",
    }


def test_metrics_are_lines_of_json(tmp_path):
    train(
        start(),
        squared_error,
        DATA,
        SETTINGS,
        directory=tmp_path,
        name="fit",
        evaluate_fn=lambda model: {"bias": float(model.bias[0])},
    )
    lines = [json.loads(line) for line in (tmp_path / "fit.metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [100, 200, 300, 400, 500, 600]
    assert set(lines[0]) == {"step", "loss", "bias"}


def test_a_kill_neither_loses_nor_repeats_a_line_of_the_log(tmp_path, monkeypatch):
    log = tmp_path / "fit.metrics.jsonl"

    def run():
        train(start(), squared_error, DATA, SETTINGS, directory=tmp_path, name="fit")

    run()
    whole = log.read_bytes()
    for path in tmp_path.iterdir():
        path.unlink()
    write = storage.write_sealed_arrays

    def killed(path, arrays, metadata):
        if metadata["step"] == "300":
            raise KeyboardInterrupt
        write(path, arrays, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_sealed_arrays", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert log.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    with open(log, "ab") as file:
        file.write(b'{"step": 4')  # a torn line
    run()
    assert log.read_bytes() == whole


def test_checkpoints_of_something_else_are_refused(tmp_path):
    train(start(), squared_error, DATA, SETTINGS, directory=tmp_path)
    other = Training(**{**SETTINGS.__dict__, "learning_rate": 0.1})
    with pytest.raises(
        ValueError, match=r"different settings or data:\n  training.learning_rate: 0.03 -> 0.1"
    ):
        train(start(), squared_error, DATA, other, directory=tmp_path)
    wider = Linear(3, 4, jax.random.key(0))
    with pytest.raises(ValueError, match="belongs to a model of a different size"):
        train(wider, squared_error, DATA, SETTINGS, directory=tmp_path)
    path = tmp_path / "training.checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 64
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="its checksum is wrong; remove it"):
        train(start(), squared_error, DATA, SETTINGS, directory=tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        DamagedFileError, match=r"training\.checkpoint\.safetensors is not a complete"
    ):
        train(start(), squared_error, DATA, SETTINGS, directory=tmp_path)


def test_the_target_network_is_a_copy_from_some_updates_ago():
    """A number that may only move near its own target gets farther the more often that follows."""

    class Number(eqx.Module):
        value: jax.Array

    def chase(model, batch, key, target):
        # A unit gradient as long as the model is within 0.5 of its own target.
        near = jnp.abs(jax.lax.stop_gradient(model.value) - target.value) < 0.5
        return jnp.where(near, -model.value, 0.0)

    settings = Training(
        updates=40,
        batch_size=1,
        learning_rate=0.1,
        weight_decay=0.0,
        target_every=20,
        chunk=40,
        seed=0,
    )
    data = {"x": np.zeros((1, 1), np.float32)}
    moved = float(train(Number(jnp.array(0.0)), chase, data, settings).model.value)
    never = Training(**{**settings.__dict__, "target_every": 1000})
    assert float(train(Number(jnp.array(0.0)), chase, data, never).model.value) < moved


def test_a_window_is_asked_for_at_every_chunk():
    asked = []

    class Source:
        def window(self, chunk):
            asked.append(chunk)
            return InMemory({k: jnp.asarray(v) for k, v in DATA.items()}).window(chunk)

    train(start(), squared_error, Source(), SETTINGS)
    assert asked == [0, 1, 2, 3, 4, 5]


def test_a_loss_that_is_no_number_stops_the_training():
    with pytest.raises(ValueError, match="the loss is nan after 100 updates; check the data"):
        train(start(), lambda m, b, k, t: jnp.sum(m.weight) * jnp.nan, DATA, SETTINGS)


@pytest.mark.parametrize(
    "wrong", [{"updates": 0}, {"batch_size": 0}, {"chunk": 0}, {"schedule": "linear"}]
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Training(**wrong)


def test_progress_says_what_it_does_and_the_expected_time(capsys):
    train(start(), squared_error, DATA, SETTINGS, later_fn=lambda: 200.0, show_progress=True)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "training: compiling, then 600 updates"
    assert re.fullmatch(r"training: 100/600 updates, [\d,]+/s, 0 s left", printed[1])
    assert printed[2] == "Expected time: 3 min 20 s"  # the 200 seconds that follow included
    assert printed[-1].startswith("training: 600/600 updates, ")


def test_later_trainings_are_timed_only_if_someone_listens(tmp_path):
    def unwanted():
        raise AssertionError

    options = {"directory": tmp_path, "later_fn": unwanted}
    train(start(), squared_error, DATA, SETTINGS, **options, show_progress=False)
    train(start(), squared_error, DATA, SETTINGS, **options, show_progress=True)  # found finished


def test_the_expected_time_is_that_of_all_updates_without_compiling():
    def slow(model, batch, key, target):
        jax.debug.callback(lambda: time.sleep(0.01))
        return squared_error(model, batch, key, target)

    assert 6 <= expected_seconds(train, start(), slow, DATA, SETTINGS) < 60
