import gc
import json
import re
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cqm import storage
from cqm.models.network import Linear
from cqm.models.training import (
    InMemory,
    Objective,
    Training,
    expected_seconds,
    stacked_members,
    train,
    train_members,
)
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
    other = replace(SETTINGS, seed=6)
    assert not same_bits(first, train(start(), squared_error, DATA, other).model)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_runs_of_any_length_share_one_program_and_give_the_bits_they_give_alone(schedule):
    objective = Objective(squared_error)
    for updates in (50, 130, 7):
        settings = replace(SETTINGS, updates=updates, chunk=20, schedule=schedule)
        shared = train(start(), objective, DATA, settings)
        assert len(objective.programs) == 1
        alone = train(start(), squared_error, DATA, settings)
        assert same_bits(shared.model, alone.model)
        np.testing.assert_array_equal(shared.losses, alone.losses)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 32}, {"learning_rate": 0.1}, {"schedule": "cosine"}, {"target_every": 3}],
)
def test_other_settings_or_rows_need_a_program_of_their_own(change):
    objective = Objective(squared_error)
    settings = replace(SETTINGS, updates=4)
    train(start(), objective, DATA, settings)
    changed = replace(settings, **change)
    shared = train(start(), objective, DATA, changed).model
    assert len(objective.programs) == 2
    assert same_bits(shared, train(start(), squared_error, DATA, changed).model)
    fewer = {name: rows[:90] for name, rows in DATA.items()}
    train(start(), objective, fewer, settings)
    assert len(objective.programs) == 3


def test_the_members_of_an_ensemble_share_a_program_too():
    objective = Objective(lambda member, batch: squared_error(member, batch, None, None))
    networks = stacked_members(lambda key: Linear(3, 2, key), members=2, seed=0)
    found = []
    for updates in (5, 9):
        settings = replace(SETTINGS, updates=updates)
        found.append(train_members(networks, objective, DATA, settings).model)
        alone = train_members(networks, objective.loss_fn, DATA, settings).model
        assert same_bits(found[-1], alone)
    assert len(objective.programs) == 1
    assert not same_bits(*found)


@pytest.mark.parametrize("num", [1, 200, 500])
def test_batches_are_drawn_from_the_first_rows(num):
    """As if the others were not there."""
    arrays = {name: jnp.asarray(rows) for name, rows in DATA.items()}
    settings = replace(SETTINGS, updates=50)
    some = train(start(), squared_error, InMemory(arrays, num=num), settings)
    first = InMemory({name: rows[:num] for name, rows in arrays.items()})
    only = train(start(), squared_error, first, settings)
    assert same_bits(some.model, only.model)
    np.testing.assert_array_equal(some.losses, only.losses)
    if num < 500:
        assert not same_bits(some.model, train(start(), squared_error, arrays, settings).model)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_training_is_what_optax_does(schedule):
    """A single row, so that every batch is the same."""
    settings = replace(SETTINGS, updates=40, chunk=16, clip=0.5, schedule=schedule)
    row = {name: jnp.asarray(rows[:1]) for name, rows in DATA.items()}
    rate = settings.learning_rate
    if schedule == "cosine":
        rate = optax.cosine_decay_schedule(rate, settings.updates)
        assert float(rate(settings.updates)) == 0
    adamw = optax.adamw(rate, weight_decay=settings.weight_decay)
    optimiser = optax.chain(optax.clip_by_global_norm(settings.clip), adamw)
    model = start()
    state, models = optimiser.init(model), []
    for _ in range(settings.updates):
        gradient = jax.grad(lambda model: squared_error(model, row, None, None))(model)
        changes, state = optimiser.update(gradient, state, model)
        model = optax.apply_updates(model, changes)
        models.append(model)
    trained = train(start(), squared_error, row, settings).model
    np.testing.assert_allclose(trained.weight, model.weight, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trained.bias, model.bias, rtol=0, atol=1e-5)
    last, before = (np.abs(models[i].weight - models[i - 1].weight).max() for i in (-1, 1))
    assert (last < 0.02 * before) == (schedule == "cosine")


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
    other = replace(SETTINGS, learning_rate=0.1)
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
    never = replace(settings, target_every=1000)
    assert float(train(Number(jnp.array(0.0)), chase, data, never).model.value) < moved


def test_a_window_is_asked_for_at_every_chunk():
    asked = []

    class Source:
        num = None

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
