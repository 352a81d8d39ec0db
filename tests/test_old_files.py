"""Files written by version 0.1.0, which `tests/data/v0.1/README.md` describes, are still read."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import cqm
from cqm import storage

OLD = Path(__file__).parent / "data" / "v0.1"
MODELS = sorted(path.name for path in (OLD / "models").iterdir())
EXPECTED, _ = storage.read_arrays(OLD / "expected.safetensors")


@pytest.mark.parametrize("name", ["branches", "branches-policy", "branches-noise"])
def test_branches_give_the_same_arrays(name):
    branches = cqm.Branches.open(OLD / name)
    branches.verify()
    for array in ("observations", "outcomes", "step_features", "continuation", "arms"):
        if f"{name}/{array}" in EXPECTED:
            np.testing.assert_array_equal(getattr(branches, array), EXPECTED[f"{name}/{array}"])
    if f"{name}/effects" in EXPECTED:
        np.testing.assert_array_equal(branches.effects(), EXPECTED[f"{name}/effects"])


def test_branches_pass_the_audit_and_continue_the_same_collection(tmp_path):
    copy = shutil.copytree(OLD / "branches", tmp_path / "branches")
    assert cqm.audit(cqm.Branches.open(copy), families=8)
    world = cqm.load_world("cartpole-swingup", nuisance=4, seed=7)
    shard = next(copy.glob("*.safetensors"))
    again = cqm.collect(world, states=40, horizon=6, per_step=True, seed=7, out=tmp_path / "again")
    np.testing.assert_array_equal(again.outcomes, EXPECTED["branches/outcomes"])
    assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()


def test_logs_give_the_same_arrays():
    logs = cqm.Logs.load(OLD / "logs")
    for array in ("outcomes", "actions", "propensities"):
        np.testing.assert_array_equal(getattr(logs, array), EXPECTED[f"logs/{array}"])


@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_same_effects_to_the_last_bits(name, tmp_path):
    """Effects are centred once now, which moves their last bits."""
    model = cqm.load_model(OLD / "models" / name)
    observations, expected = (
        EXPECTED[f"models/{name}/{what}"] for what in ("observations", "effect")
    )
    # Networks are evaluated in float32, whose rounding differs between processors.
    tolerance = 1e-14 if getattr(model.predictor_, "network", None) is None else 1e-6
    size = np.abs(expected).max()
    np.testing.assert_allclose(model.effect(observations), expected, atol=tolerance * size)
    if f"models/{name}/calibration" in EXPECTED:
        calibration = model.calibration_
        scores = (calibration.excess_error, calibration.nmse, calibration.noise_floor)
        np.testing.assert_allclose(scores, EXPECTED[f"models/{name}/calibration"], rtol=1e-9)
    model.save(tmp_path)
    again = cqm.load_model(tmp_path)
    np.testing.assert_array_equal(again.effect(observations), model.effect(observations))
    if name.startswith("effect"):
        scored = cqm.Scorer.load(OLD / "models" / name).effect(observations)
        np.testing.assert_allclose(scored, expected, atol=1e-4 * size)


def test_an_interrupted_checkpoint_is_refused_with_the_way_out(tmp_path):
    copy = shutil.copytree(OLD / "checkpoint", tmp_path / "checkpoint")
    training = cqm.Training(updates=16, batch_size=8, chunk=4)
    model = cqm.EffectModel(method="direct", width=8, training=training)
    branches = cqm.Branches.open(OLD / "branches")
    with pytest.raises(ValueError, match=r"written by an earlier version .* remove it to start"):
        model.fit(branches, directory=copy)
    (copy / "effect.checkpoint.safetensors").unlink()
    effect = model.fit(branches, directory=copy).effect(EXPECTED["checkpoint/observations"])
    size = np.abs(effect).max()
    np.testing.assert_allclose(effect, EXPECTED["checkpoint/effect"], atol=1e-5 * size)
