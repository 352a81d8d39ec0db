"""The audit passes on what was collected and fails on what was tampered with."""

import json
import re
import shutil
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.worlds import SeedWorld
from support.wrong_worlds import (
    UNUSUAL,
    WRONG_SETS,
    collect_set,
    drift_world,
    reseal,
    reseal_manifest,
    set_world,
)

import cqm
from cqm import storage
from cqm.branches import collect as collecting, coupling, shards
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

    reseal(tmp_path, 0, spoil)
    report = cqm.audit(cqm.Branches.open(tmp_path))
    assert "stored families replay bit for bit" in failed(report)
    assert (
        "64 of 64 families differ" in findings(report)["stored families replay bit for bit"].detail
    )
    assert json.loads((tmp_path / "audit.json").read_text())["passed"] is False


def test_states_that_do_not_come_from_the_seed_are_noticed(tmp_path):
    world = cqm.load_world("cartpole-swingup", nuisance=4)
    cqm.collect(world, out=tmp_path, **SETTINGS)

    def spoil(arrays):
        arrays["nuisance"][::7] += 1e-9

    reseal(tmp_path, 0, spoil)
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
        "separate continuations per branch add the predicted variance"
    ]
    assert finding.passed
    figures = re.findall(r"[\d.e+-]+(?= with)|(?<=predicted )[\d.e+-]+", finding.detail)
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
    with pytest.raises(
        ValueError, match="families must be a whole number of at least 2, or None; got 0"
    ):
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


COUNTED, INPUTS = "every state has one family or is counted as dropped", "inputs of every family"
REPLAYED, FITS = "stored families replay bit for bit", "stored values fit together"
AGAIN, MANIFEST = "blocks collected again from the seed", "manifest fits the world"
CAUGHT_BY = {
    "deleted families": (COUNTED, "shard 1 has 512 states, but 505 families and 4 dropped states"),
    "a family twice": (COUNTED, "shard 1 has state 516 more than once"),
    "deleted and counted as dropped": (AGAIN, "index"),
    "families in another order": (COUNTED, "shard 1 is not sorted by state"),
    "too many counted as dropped": (COUNTED, "has 512 states, but"),
    "dropped for another reason": (AGAIN, "records {'diverged': 4} as dropped; collecting"),
    "an index outside its shard": (COUNTED, "which is not one of its own"),
    "tampered steps in one shard": (FITS, "outcome of block 4 in shard 2 is not the discounted"),
    "tampered steps and sums": (REPLAYED, "differ in first, outcome, steps"),
    "tampered first features": (REPLAYED, "differ in first"),
    "tampered outcomes in 5%": (REPLAYED, "differ in outcome"),
    "tampered observations": (REPLAYED, "differ in observation"),
    "swapped arms": (REPLAYED, "differ in first, outcome, steps"),
    "other arms": (INPUTS, "block 2 in shard 1 differs in arms"),
    "another continuation": (INPUTS, "block 2 in shard 1 differs in continuation"),
    "other noise": (INPUTS, "block 2 in shard 1 differs in noise"),
    "another nuisance": (INPUTS, "block 2 in shard 1 differs in nuisance"),
    "another nuisance at the start": (INPUTS, "block 2 in shard 1 differs in nuisance_start"),
    "states of other families": (REPLAYED, "observation"),
    "states in single precision": (REPLAYED, "observation"),
    "an array is missing": (COUNTED, "shard 1 lacks first"),
    "swapped feature names": (MANIFEST, "differs in feature_names"),
    "another mixing": (MANIFEST, "differs in mixing"),
}


@pytest.fixture(scope="module")
def sound_set(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sets") / "sound"
    branches = collect_set(directory)
    assert len(branches.shards) == 3
    assert sum(branches.dropped.values()) > 3
    assert cqm.audit(branches, set_world())
    return directory


@pytest.mark.parametrize("name", WRONG_SETS)
def test_subtly_wrong_sets_are_caught(name, sound_set, tmp_path):
    shutil.copytree(sound_set, tmp_path / "set")
    WRONG_SETS[name](tmp_path / "set")
    report = cqm.audit(tmp_path / "set", set_world())
    check, detail = CAUGHT_BY[name]
    found = {found.name: found.detail for found in report.checks if not found.passed}
    assert any(key.startswith(check) and detail in found[key] for key in found), str(report)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_sets_pass(name):
    case = UNUSUAL[name]
    world, settings = case.make_world(), {"states": 300, "horizon": 6, **case.settings}
    if case.policy is not None:
        settings["continuation"] = case.policy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped families
        branches = cqm.collect(world, seed=1, **settings)
    report = cqm.audit(branches, world, policy=case.policy, seed=1)
    assert report, str(report)


@pytest.fixture(scope="module")
def long_set(tmp_path_factory):
    """20 blocks without step features, so that only a replay sees what an outcome should be."""
    directory = tmp_path_factory.mktemp("sets") / "long"
    cqm.collect(drift_world(features=None), states=5120, horizon=2, warmup=(0, 0), out=directory)
    return directory


@pytest.mark.parametrize(
    ("rows", "least"),
    [
        (slice(1000, 1256), 8),  # 5% in a row: more than two stretches, so always found
        (slice(1000, 1080), 4),  # one stretch in a row: 83% on average
        (slice(None, None, 20), 6),  # 5% scattered: 1 − 0.95^64 = 96%
    ],
)
def test_changed_outcomes_are_found_at_the_stated_rates(rows, least, long_set, tmp_path):
    shutil.copytree(long_set, tmp_path / "set")

    def spoil(arrays):
        arrays["outcome"][rows] += 1e-9

    for index in range(2 if rows.step else 1):
        reseal(tmp_path / "set", index, spoil)
    branches, world = cqm.Branches.open(tmp_path / "set"), drift_world(features=None)
    reports = [cqm.audit(branches, world, seed=seed) for seed in range(8)]
    assert sum(REPLAYED in failed(report) for report in reports) >= least


def test_several_blocks_are_collected_again(long_set):
    report = cqm.audit(long_set, drift_world(features=None))
    assert "8 of 20 blocks" in str(report)
    assert "64 families replayed" in report.title


def test_a_family_deleted_and_counted_as_dropped_is_looked_for(long_set, tmp_path):
    """Blocks with dropped families come first, so one in 20 is always collected again."""
    shutil.copytree(long_set, tmp_path / "set")

    def delete(arrays):
        return {name: np.delete(values, 3000, axis=0) for name, values in arrays.items()}

    reseal(tmp_path / "set", 0, delete, lambda counts: {"raised": 1})
    for seed in range(5):
        report = cqm.audit(tmp_path / "set", drift_world(features=None), seed=seed)
        assert failed(report) == {"blocks collected again from the seed are identical"}


def test_a_set_that_cannot_be_written_to_is_audited(sound_set, monkeypatch):
    def refuse(path, value):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(storage, "write_json", refuse)
    report = cqm.audit(sound_set, set_world())
    assert report, str(report)
    assert report.title.endswith("replayed (report not saved: Permission denied)")


def test_a_slice_is_audited_with_its_own_families(sound_set):
    report = cqm.audit(cqm.Branches.open(sound_set)[700:720], set_world())
    assert report, str(report)
    assert "20 families replayed" in report.title
    assert "1 of 5 blocks" in str(report)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"branches": 3}, ValueError, "branches must be Branches or their directory; got 3"),
        ({"branches": Path("nowhere")}, FileNotFoundError, "nowhere contains no branches"),
        ({"world": "drift"}, ValueError, "world must be the world .*got 'drift'"),
        ({"families": 1.5}, ValueError, "families must be a whole number of at least 2"),
        ({"families": True}, ValueError, "families must be a whole number .* got True"),
        ({"seed": -1}, ValueError, "seed must be a whole number of at least 0; got -1"),
    ],
)
def test_wrong_arguments_are_explained(arguments, error, message, sound_set):
    with pytest.raises(error, match=message):
        cqm.audit(**{"branches": sound_set, "world": set_world(), **arguments})


def test_failed_branches_do_not_enter_the_variance():
    world = UNUSUAL["failures"].make_world()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped families
        branches = cqm.collect(world, states=300, horizon=6, warmup=(0, 0))
    assert sum(branches.dropped.values()) > 50
    name = "separate continuations per branch add the predicted variance"
    finding = findings(cqm.audit(branches, world))[name]
    assert finding.passed
    assert "standard errors apart" in finding.detail
    assert "nan" not in finding.detail


def _flip(arrays):
    arrays["drew"][10:60] ^= True


@pytest.mark.parametrize(
    ("change", "check", "detail"),
    [
        (lambda out: reseal(out, 0, _flip), "stored families replay bit for bit", "drew"),
        (
            lambda out: reseal(out, 0, lambda a: {n: a[n] for n in a if n != "drew"}),
            "blocks collected again from the seed are identical",
            "missing or unexpected arrays: drew",
        ),
        (
            lambda out: reseal_manifest(out, lambda m: m.update(noise_kind="signal")),
            "manifest fits the world",
            "differs in noise_kind",
        ),
    ],
)
def test_reported_draws_are_replayed(change, check, detail, tmp_path):
    world = SeedWorld()
    cqm.collect(world, out=tmp_path, draws=2, **SETTINGS)
    assert cqm.audit(tmp_path, world)
    change(tmp_path)
    finding = findings(cqm.audit(tmp_path, world))[check]
    assert not finding.passed
    assert detail in finding.detail


def test_draws_missing_from_one_shard_are_noticed(tmp_path):
    with mock.patch.object(collecting, "SHARD_BYTES", 0):
        cqm.collect(SeedWorld(), out=tmp_path, **SETTINGS)
    reseal(tmp_path, 1, lambda arrays: {n: arrays[n] for n in arrays if n != "drew"})
    assert "shard 1 lacks drew" in str(cqm.audit(tmp_path, SeedWorld()))
