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


def test_the_kind_of_noise_is_inferred():
    kinds = {
        name: cqm.Branches.open(OLD / name).noise_kind for name in ("branches", "branches-noise")
    }
    assert kinds == {"branches": "none", "branches-noise": "signal"}


def test_branches_pass_the_audit_and_are_collected_alike_today(tmp_path):
    copy = shutil.copytree(OLD / "branches", tmp_path / "branches")
    assert cqm.audit(cqm.Branches.open(copy), families=8)
    world = cqm.load_world("cartpole-swingup", nuisance=4, seed=7)
    again = cqm.collect(world, states=40, horizon=6, per_step=True, seed=7, out=tmp_path / "again")
    np.testing.assert_array_equal(again.outcomes, EXPECTED["branches/outcomes"])
    old, new = (storage.read_json(path / "manifest.json") for path in (copy, tmp_path / "again"))
    assert old.pop("versions")["cqm"] == "0.1.0"
    assert new.pop("versions")["cqm"] == cqm.__version__
    assert new == old
    for path in (tmp_path / "again").glob("*.safetensors"):
        arrays, metadata = storage.read_arrays(path)
        old_arrays, old_metadata = storage.read_arrays(copy / path.name)
        assert storage.sha256_arrays(arrays) == storage.sha256_arrays(old_arrays)
        assert metadata | {"manifest": ""} == old_metadata | {"manifest": ""}


def test_another_version_does_not_continue_a_collection(tmp_path):
    copy = shutil.copytree(OLD / "branches", tmp_path / "branches")
    world = cqm.load_world("cartpole-swingup", nuisance=4, seed=7)
    with pytest.raises(ValueError, match=f'versions.cqm: "0.1.0" -> "{cqm.__version__}"'):
        cqm.collect(world, states=40, horizon=6, per_step=True, seed=7, out=copy)


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
    (copy / "effect.checkpoint.safetensors").rename(copy / "direct-1.checkpoint.safetensors")
    training = cqm.Training(updates=16, batch_size=8, chunk=4)
    model = cqm.EffectModel(
        candidates="direct",
        conditioning="effect",
        width=8,
        members=1,
        training=training,
        validation=0.0,
    )
    branches = cqm.Branches.open(OLD / "branches")
    with pytest.raises(ValueError, match=r"written by an earlier version .* remove it to start"):
        model.fit(branches, directory=copy)
    (copy / "direct-1.checkpoint.safetensors").unlink()
    effect = model.fit(branches, directory=copy).effect(EXPECTED["checkpoint/observations"])
    size = np.abs(effect).max()
    np.testing.assert_allclose(effect, EXPECTED["checkpoint/effect"], atol=1e-5 * size)
