"""The audit passes on what was collected and fails on what was tampered with."""

import json
import re

import numpy as np
import pytest

import cqm
from cqm import storage
from cqm.branches import coupling, shards
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

SETTINGS = {"states": 300, "horizon": 6, "seed": 3}


def findings(report):
    return {finding.name: finding for finding in report.checks}


def failed(report):
    return {finding.name for finding in report.checks if not finding.passed}


def noisy_world(name="drift"):
    """x' = 0.9 x + a + e, with noise that the branches share."""
    return FunctionWorld(
        step=lambda x, a, e: 0.9 * x + a + e,
        initial=lambda num, rng: rng.standard_normal((num, 1)),
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 1)),
        candidate_actions=np.array([[-1.0], [0.0], [1.0]]),
        name=name,
    )


def rewrite(directory, index, change):
    """Change the arrays of a shard and make its checksums right again."""
    with storage.open_arrays(directory / shards.shard_name(index)) as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    sidecar = storage.read_json(directory / shards.shard_name(index).replace("safetensors", "json"))
    change(arrays)
    digest = storage.sha256(directory / shards.MANIFEST)
    shards.write_shard(directory, index, digest, [arrays], sidecar["dropped"])


@pytest.mark.parametrize("name", ["cartpole-swingup", "reacher-easy", "cheetah-run"])
def test_a_collected_set_passes_and_the_result_is_stored(name, tmp_path):
    world = cqm.load_world(name, nuisance=8, seed=7)
    branches = cqm.collect(world, out=tmp_path, **SETTINGS)
    report = cqm.audit(branches)
    assert report, str(report)
    assert report.passed
    assert len(report.checks) == 13
    stored = json.loads((tmp_path / "audit.json").read_text())
    assert stored["passed"] is True
    assert [f["name"] for f in stored["checks"]] == list(findings(report))
    assert cqm.Branches.open(tmp_path)  # the report does not disturb the set


def test_draws_subsets_of_arms_and_exogenous_noise_pass():
    world = NuisanceWorld(noisy_world(), Nuisance(dimension=3))
    branches = cqm.collect(world, draws=2, arms=2, **SETTINGS)
    report = cqm.audit(branches, world)
    assert report, str(report)


def test_a_policy_that_sees_the_state_passes():
    world = NuisanceWorld(noisy_world(), Nuisance(dimension=3))
    policy = cqm.Policy("toss", lambda obs, u: ((u + (obs[:, 0] > 0)) * 1.5).astype(int))
    branches = cqm.collect(world, continuation=policy, **SETTINGS)
    report = cqm.audit(branches, world, policy=policy)
    assert report, str(report)
    with pytest.raises(ValueError, match=r"the continuation of the set is 'toss'; pass policy="):
        cqm.audit(branches, world)
    with pytest.raises(
        ValueError, match="the continuation of the set is 'toss'; got policy 'other'"
    ):
        cqm.audit(branches, world, policy=cqm.Policy("other", policy.act))


def test_independent_nuisance_is_noticed():
    world = NuisanceWorld(noisy_world(), Nuisance(dimension=3, coupling="independent"))
    sharing = "the branches of a family share one nuisance"
    assert failed(cqm.audit(cqm.collect(world, **SETTINGS), world)) == {sharing}
    policy = cqm.Policy("toss", lambda obs, u: ((u + (obs[:, 0] > 0)) * 1.5).astype(int))
    branches = cqm.collect(world, continuation=policy, **SETTINGS)
    assert sharing in failed(cqm.audit(branches, world, policy=policy))


def test_an_arm_with_a_continuation_of_its_own_is_noticed(tmp_path):
    world = cqm.load_world("cartpole-swingup")
    cqm.collect(world, out=tmp_path, **SETTINGS)
    other = cqm.collect(world, **{**SETTINGS, "seed": 4})

    def spoil(arrays):
        arrays["outcome"][:, :, 1] = other.array("outcome")[:, :, 1]

    rewrite(tmp_path, 0, spoil)
    report = cqm.audit(cqm.Branches.open(tmp_path))
    assert "stored families replay bit for bit" in failed(report)
    assert "64 of 64 differ" in findings(report)["stored families replay bit for bit"].detail
    assert json.loads((tmp_path / "audit.json").read_text())["passed"] is False


def test_states_that_do_not_come_from_the_seed_are_noticed(tmp_path):
    world = cqm.load_world("cartpole-swingup", nuisance=4)
    cqm.collect(world, out=tmp_path, **SETTINGS)

    def spoil(arrays):
        arrays["nuisance"][::7] += 1e-9

    rewrite(tmp_path, 0, spoil)
    report = cqm.audit(cqm.Branches.open(tmp_path))
    assert failed(report) == {
        "inputs of every family follow from the seed",
        "blocks collected again from the seed are identical",
    }


def test_damage_is_a_failed_audit_that_names_the_file(tmp_path):
    world = cqm.load_world("cartpole-swingup")
    cqm.collect(world, out=tmp_path, **SETTINGS)
    path = tmp_path / shards.shard_name(0)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    report = cqm.audit(cqm.Branches.open(tmp_path))
    assert failed(report) == {"checksums"}
    assert shards.shard_name(0) in str(report)


def test_paired_variance_is_measured_against_its_prediction():
    """In x' = 0.9x + a + e a shared second action cancels, an independent one does not."""
    world = noisy_world()
    branches = cqm.collect(world, states=256, horizon=2, discount=1.0, warmup=(0, 0), seed=1)
    finding = findings(cqm.audit(branches, world))[
        "an independent continuation would add twice the covariance"
    ]
    assert finding.passed
    figures = re.findall(r"[\d.e+-]+(?= shared| independent| predicted)", finding.detail)
    shared, independent, predicted = map(float, figures)
    assert shared < 1e-12
    # In units of the outcome's own spread, two independent copies have twice its variance.
    assert independent == pytest.approx(2, abs=0.3)
    assert predicted == pytest.approx(2, abs=0.3)


def test_the_world_must_be_the_one_the_set_came_from():
    world = noisy_world()
    branches = cqm.collect(world, **SETTINGS)
    with pytest.raises(ValueError, match="cannot be loaded by its name"):
        cqm.audit(branches)
    with pytest.raises(ValueError, match="the set was collected from world"):
        cqm.audit(branches, noisy_world("another"))


def test_what_cannot_be_audited_is_refused():
    world = noisy_world()
    first, second = (cqm.collect(world, states=8, horizon=3, seed=seed) for seed in (1, 2))
    combined = cqm.combine([first[:4], second[4:]])
    with pytest.raises(ValueError, match=r"seeds \[1, 2\]; audit each collection separately"):
        cqm.audit(combined[:5], world)
    assert cqm.audit(cqm.combine([first[:4], first[4:]]), world)
    with pytest.raises(ValueError, match="families must be a whole number of at least 2; got 0"):
        cqm.audit(first, world, families=0)
    assert cqm.audit(first[:1], world)


def test_a_right_set_fails_as_rarely_as_is_said(monkeypatch):
    """With few families a spread that is estimated must not count as known."""
    world = NuisanceWorld(noisy_world(), Nuisance(dimension=2))
    branches = cqm.collect(world, states=64, horizon=4, seed=1)
    monkeypatch.setattr(coupling, "FALSE_ALARMS", 0.05)
    names = ("an independent nuisance would", "an independent continuation would")
    counts = dict.fromkeys(names, 0)
    for seed in range(100):
        report = cqm.audit(branches, world, families=2, seed=seed)
        for name in names:
            counts[name] += any(found.startswith(name) for found in failed(report))
    for name, count in counts.items():
        assert count <= 14, name  # 5 are expected; the normal law would give 30
