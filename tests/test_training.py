import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cqm.models.network import Linear
from cqm.models.training import InMemory, Training, train
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


def test_checkpoints_of_something_else_are_refused(tmp_path):
    train(start(), squared_error, DATA, SETTINGS, directory=tmp_path)
    other = Training(**{**SETTINGS.__dict__, "learning_rate": 0.1})
    with pytest.raises(ValueError, match="is of another training or other data"):
        train(start(), squared_error, DATA, other, directory=tmp_path)
    wider = Linear(3, 4, jax.random.key(0))
    with pytest.raises(ValueError, match="is of a model of another size"):
        train(wider, squared_error, DATA, SETTINGS, directory=tmp_path)
    path = tmp_path / "training.checkpoint.safetensors"
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
        updates=40, batch_size=1, learning_rate=0.1, weight_decay=0.0, target_every=20, chunk=40
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
