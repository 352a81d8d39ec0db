"""What a model learned from, or was chosen by, can never calibrate it."""

import copy
import dataclasses
import pickle
import shutil

import numpy as np
import pytest
from support.worlds import pendulum_world

import cqm
from cqm import storage
from cqm.cli import main
from cqm.models import held_out_scores, provenance
from cqm.models.provenance import Provenance, row_hashes
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

pytestmark = pytest.mark.filterwarnings("ignore:poor coverage")  # a few hundred rows
RECIPE = {"horizon": 2, "warmup": (0, 0), "per_step": True}
DRAWS = {"draws": 16, **RECIPE}
TINY = {"candidates": "direct", "width": 4, "updates": 1}
WORLD = pendulum_world()


def rng():
    return np.random.default_rng(0)


def logs_of(branches):
    return cqm.Logs.from_branches(branches, rng=rng())


def fitted(logs):
    return cqm.ResidualModel(weighting=False).fit(logs)


def bare(logs, **changes):
    """The same logs from plain arrays, which know neither seed nor index."""
    given = {
        "observations": logs.observations,
        "actions": logs.actions,
        "features": logs.features,
        "candidate_actions": logs.candidate_actions,
        "observation_names": logs.observation_names,
        "feature_names": logs.feature_names,
        "continuation": "uniform",
        "world": logs.world,
    }
    return cqm.Logs.from_arrays(**{**given, **changes})


@pytest.fixture(scope="module")
def sets():
    """Branches of seed 0, 1 and 2, and logs of seed 0."""
    named = {seed: cqm.collect(WORLD, states=300, seed=seed, **RECIPE) for seed in (0, 1, 2)}
    return {**named, "logs": logs_of(named[0])}


@pytest.fixture(scope="module")
def drawn():
    """Branches with the draws that calibration needs, by seed; 0 and 1 are those of training."""
    return {seed: cqm.collect(WORLD, states=300, seed=seed, **DRAWS)[:60] for seed in (0, 1, 9)}


@pytest.fixture(scope="module")
def combined(sets):
    """An ensemble that learned from two seeds."""
    return cqm.EffectModel(**TINY, members=2).fit(cqm.combine([sets[0], sets[1]]))


@pytest.fixture(scope="module")
def single(sets):
    """A model of seed 1; half of the families were held out until the end of its training."""
    return cqm.EffectModel(**TINY, validation=0.5).fit(sets[1])


@pytest.fixture(scope="module")
def residual(sets):
    return fitted(sets["logs"])


def refused(model, branches, match):
    before = model.calibration_
    with pytest.raises(ValueError, match=match):
        model.calibrate(branches)
    assert model.calibration_ is before


# The three ways to a false certificate.


def test_the_second_seed_of_a_combined_set_is_refused(combined, drawn):
    message = r"share 60 families of seed 1 with the data .* a different seed"
    refused(combined, drawn[1], message)
    refused(combined, drawn[0], "share 60 families of seed 0 ")


def test_training_families_combined_with_others_are_refused(single, drawn):
    refused(single, cqm.combine([drawn[9], drawn[1]]), "share 60 families of seed 1 ")


def test_the_seed_of_a_models_own_logs_is_refused(residual, drawn):
    refused(residual, drawn[0], "share 60 families of seed 0 ")


# And more of them.


DISGUISES = {
    "a slice of a combined set": lambda d: cqm.combine([d[9], d[1]])[70:80],
    "a split of a combined set": lambda d: cqm.combine([d[9], d[1]]).split(30)[1],
    "a batch of a combined set": lambda d: list(cqm.combine([d[9], d[1]]).batches(50))[1],
    "a combined set in a combined set": lambda d: cqm.combine(
        [cqm.combine([d[9][:20], d[1]])[10:], d[9][30:]]
    ),
    "a single family": lambda d: cqm.combine([d[9], d[1][3:4]]),
    "more states": lambda d: cqm.collect(WORLD, states=700, seed=1, **DRAWS)[200:],
    "fewer states": lambda d: cqm.collect(WORLD, states=20, seed=1, **DRAWS),
    "more draws": lambda d: cqm.collect(WORLD, states=20, seed=1, **{**DRAWS, "draws": 17}),
    "without steps": lambda d: cqm.collect(
        WORLD, states=20, seed=1, **{**DRAWS, "per_step": False}
    ),
    "a seed by NumPy": lambda d: cqm.collect(WORLD, states=20, seed=np.uint8(1), **DRAWS),
    "a pickled set": lambda d: pickle.loads(pickle.dumps(d[1])),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_training_families_are_recognised_in_disguise(single, drawn, disguise):
    refused(single, DISGUISES[disguise](drawn), r"share \d+ famil(y|ies) of seed 1 ")


def test_a_set_on_disk_is_recognised(single, tmp_path):
    cqm.collect(WORLD, states=20, seed=1, out=tmp_path / "set", **DRAWS)
    moved = shutil.move(tmp_path / "set", tmp_path / "moved")
    opened = cqm.Branches.open(moved)
    refused(single, opened, "share 20 families of seed 1 ")
    refused(single, opened[5:], "share 15 families of seed 1 ")
    learned = fitted(logs_of(opened))
    refused(learned, opened[5:], "share 15 families of seed 1 ")


MODELS = {
    "saved": lambda model, where: (model.save(where), cqm.load_model(where))[1],
    "saved twice": lambda model, where: [
        (m.save(where / str(i)), cqm.load_model(where / str(i)))[1]
        for i, m in enumerate([model, MODELS["saved"](model, where)])
    ][-1],
    "zipped": lambda model, where: cqm.load_model(
        (model.save(where / "m"), shutil.make_archive(str(where / "m"), "zip", where / "m"))[1]
    ),
    "recentred": lambda model, where: model.recenter([0.5, 0.25, 0.25]),
    "copied": lambda model, where: copy.deepcopy(model),
    "pickled": lambda model, where: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("change", MODELS)
@pytest.mark.parametrize("kind", ["combined", "residual"])
def test_a_model_remembers(change, kind, drawn, tmp_path, request):
    original = request.getfixturevalue(kind)
    model = MODELS[change](original, tmp_path)
    refused(model, drawn[0], "share 60 families of seed 0 ")
    assert model.calibrate(drawn[9]).calibration_ is not None
    if model is not original:
        assert original.calibration_ is None


def test_families_that_were_held_out_to_compare_candidates_are_refused(single):
    assert single.num_examples_ == 300  # in the end the model learns from them too
    chosen_by = cqm.collect(WORLD, states=300, seed=1, **DRAWS)[285:]
    refused(single, chosen_by, "share 15 families of seed 1 ")


def test_logs_that_scored_a_model_are_refused(sets, drawn):
    model = fitted(logs_of(sets[2]))
    for _ in range(2):  # scoring again is fine
        held_out_scores({"residual": model}, sets["logs"])
    refused(model, drawn[0], "share 60 families of seed 0 with the data")
    assert model.calibrate(drawn[1]).calibration_ is not None


def test_the_last_fit_counts(sets, drawn):
    model = fitted(sets["logs"]).fit(logs_of(sets[2]))
    assert model.calibrate(drawn[0]).calibration_ is not None
    model.fit(sets["logs"])
    assert model.calibration_ is None
    refused(model, drawn[0], "share 60 families of seed 0 ")


LOGS = {
    "slices": lambda logs, where: logs[10:],
    "row numbers": lambda logs, where: logs[rng().permutation(300)[:290]],
    "a mask": lambda logs, where: logs[np.arange(300) != 5],
    "a split": lambda logs, where: logs.split(0.1)[0],
    "other propensities": lambda logs, where: logs.with_propensities(None),
    "files": lambda logs, where: (logs.save(where), cqm.Logs.load(where))[1],
    "a combined set": lambda logs, where: logs_of(
        cqm.combine([cqm.collect(WORLD, states=50, seed=s, **RECIPE) for s in (4, 0)])
    ),
}


@pytest.mark.parametrize("change", LOGS)
def test_logs_remember_the_families_they_were_made_from(change, sets, drawn, tmp_path):
    logs = LOGS[change](sets["logs"], tmp_path)
    assert len(logs.families) == len(logs)
    model = fitted(logs)
    refused(model, drawn[0], r"share \d\d families of seed 0 ")
    assert model.calibrate(drawn[9]).calibration_ is not None


def test_logs_of_earlier_versions_count_as_their_whole_seed(sets, drawn, tmp_path):
    sets["logs"].save(tmp_path)
    arrays, metadata = storage.read_arrays(tmp_path / "logs.safetensors")
    config = storage.read_json(tmp_path / "logs.json")
    del arrays["families"], config["seal"], config["sha256"]
    files = (tmp_path / "logs.json", config, tmp_path / "logs.safetensors", arrays, metadata)
    storage.write_described(*files)
    model = fitted(cqm.Logs.load(tmp_path))
    refused(model, drawn[0], "share 60 families of seed 0 ")
    assert model.calibrate(drawn[9]).calibration_ is not None


# Data without keys are recognised by their content.

COPIES = {
    "arrays": lambda logs: bare(logs),
    "single precision": lambda logs: bare(logs, observations=logs.observations.astype(np.float32)),
    "lost keys": lambda logs: dataclasses.replace(
        logs, families=None, recipe=dataclasses.replace(logs.recipe, warmup=None)
    ),
    "another order": lambda logs: bare(logs[rng().permutation(300)]),
    "a part": lambda logs: bare(logs[:40]),
    "every row three times": lambda logs: bare(logs[np.repeat(np.arange(100), 3)]),
    "joined with others": lambda logs: bare(
        logs[:150],
        **{
            name: np.concatenate([getattr(logs, name), getattr(other, name)])
            for other in [logs_of(cqm.collect(WORLD, states=900, seed=5, **RECIPE))]
            for name in ("observations", "actions", "features")
        },
    ),
}


@pytest.mark.parametrize("copied", COPIES)
def test_copied_observations_are_recognised(copied, sets, drawn):
    logs = COPIES[copied](sets["logs"])
    assert logs.families is None
    model = fitted(logs)
    refused(model, drawn[0], r"\d+ of the 60 observations .* exactly .* a different seed")
    assert model.calibrate(drawn[9]).calibration_ is not None


def test_nine_copied_states_are_enough_to_notice(sets, drawn):
    model = fitted(bare(sets["logs"]))
    refused(model, drawn[0][:9], "9 of the 9 observations")


def test_a_set_under_another_name_is_recognised():
    """The worlds are the same but for their names, so the same seed gives the same states."""
    logs = logs_of(cqm.collect(pendulum_world(name="twin"), states=300, seed=1, **RECIPE))
    logs = bare(logs, world=WORLD.identity())
    model = fitted(logs)
    refused(model, cqm.collect(WORLD, states=300, seed=1, **DRAWS), "300 of the 300 observations")


def test_mixed_observations_are_recognised_whatever_the_size_of_their_blocks():
    world = NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=1))
    logs = logs_of(cqm.collect(world, states=256, seed=1, **RECIPE))
    model = fitted(bare(logs))
    few = cqm.collect(world, states=256, seed=1, **DRAWS)[:30]
    rounded = few.observations * (1 + 2e-16 * rng().normal(size=few.observations.shape))
    assert np.isin(row_hashes(rounded), model.provenance_.observations).mean() > 0.9
    refused(model, few, "30 of the 30 observations")


def test_hashes_ignore_precision_and_the_sign_of_zero():
    rows = np.array([[0.1, 0.0], [0.1, -0.0], [np.float32(0.1), 0.0], [0.0, 0.1], [0.1, 1e300]])
    hashes = row_hashes(rows)
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes.tolist())) == 3
    random = row_hashes(rng().normal(size=(100_000, 2)))
    assert len(np.unique(random)) == 100_000
    np.testing.assert_allclose((random >> np.uint64(60)).mean(), 7.5, atol=0.1)


def test_large_sets_keep_a_sample_of_their_hashes(monkeypatch, sets, drawn):
    monkeypatch.setattr(provenance, "LIMIT", 200)
    model = fitted(bare(sets["logs"]))
    assert len(model.provenance_.observations) == 200
    refused(model, drawn[0], r"\d\d of the 60 observations")
    assert model.calibrate(drawn[9]).calibration_ is not None


# Legitimate uses.


def test_other_seeds_and_disjoint_slices_calibrate(sets, drawn, single):
    assert copy.copy(single).calibrate(drawn[9]).calibration_ is not None
    assert copy.copy(single).calibrate(drawn[0]).calibration_ is not None
    both = cqm.combine([drawn[0], drawn[9]])
    assert copy.copy(single).calibrate(both).calibration_ is not None
    training, held_out = cqm.collect(WORLD, states=600, seed=1, **DRAWS).split(0.5)
    model = fitted(logs_of(training))
    assert model.calibrate(held_out).calibration_ is not None
    around = fitted(logs_of(cqm.combine([held_out[:100], held_out[200:]])))
    assert around.calibrate(held_out[100:200]).calibration_ is not None
    refused(around, held_out[99:200], "share 1 family of seed 1 ")
    logs, _ = logs_of(training).split(0.5)
    assert fitted(logs).calibrate(training[len(logs) :]).calibration_ is not None


def walk(num, rng):
    return rng.integers(10, size=(num, 1)).astype(float)


def ring(state, action, exogenous):
    return (state + action + 10) % 10


def discrete_world(**changes):
    settings = {"candidate_actions": [[-1.0], [0.0], [1.0]], "feature_names": ("place",)}
    settings |= {"observation_names": ("place",), "name": "ring", "step": ring, "initial": walk}
    return FunctionWorld(**{**settings, **changes})


WORLDS = {
    "10 states": discrete_world(),
    "1,000 states": discrete_world(
        initial=lambda num, rng: rng.integers(1000, size=(num, 1)).astype(float),
        step=lambda state, action, exogenous: (state + action + 1000) % 1000,
    ),
    "one-hot states": discrete_world(
        initial=lambda num, rng: np.eye(7)[rng.integers(7, size=num)],
        step=lambda state, action, exogenous: np.where(
            action > 0, np.roll(state, 1, axis=1), state
        ),
        feature_names=tuple("abcdefg"),
        observation_names=tuple("abcdefg"),
    ),
    "one start": pendulum_world(initial=lambda num, rng: np.tile([0.5, 0.0, 1.0], (num, 1))),
}


@pytest.mark.parametrize("name", WORLDS)
def test_states_that_repeat_by_nature_raise_no_alarm(name):
    world = WORLDS[name]
    for seed in range(5):
        recipe = {**RECIPE, "warmup": (0, 3)}
        branches = cqm.collect(world, states=400, seed=seed, **recipe)
        seen = Provenance.of(bare(logs_of(branches)))
        for states in (20, 400):
            other = cqm.collect(world, states=states, seed=100 + seed, **recipe)
            seen.check_held_out(Provenance.of(other), "calibration branches", independent=False)


@pytest.mark.parametrize("num_states", [3, 30, 300, 3_000, 30_000])
def test_false_alarms_are_as_rare_as_promised(num_states):
    """Independent states of any two laws; the worst case is states that repeat twice at most."""
    random, alarms = rng(), 0
    for trial in range(100):
        num = random.integers(10, 2_000, size=2)
        law = random.dirichlet(np.full(num_states, 0.5)) if trial % 2 else None
        drawn = [random.choice(num_states, size, p=law) for size in num]
        if trial % 3 == 0:  # another law: half of the states, in the second set alone
            drawn[1] //= 2
        seen, other = (
            Provenance(cqm.branches.families.Families.none(), np.sort(row_hashes(rows[:, None])))
            for rows in drawn
        )
        try:
            seen.check_held_out(other, "other states", independent=bool(trial % 4))
        except ValueError:
            alarms += 1
    assert alarms == 0


# Models of earlier versions.


def earlier(model, directory, families):
    """A saved model as version 0.2 wrote it: one interval of one seed, no hashes."""
    model.save(directory)
    path = directory / "model.safetensors"
    arrays, metadata = storage.read_arrays(path)
    arrays = {n: values for n, values in arrays.items() if not n.startswith("provenance")}
    written = storage.write_pieces(path, storage.encode_arrays([arrays], metadata))
    config = storage.read_json(directory / "model.json")
    config |= {"schema": 2, "sha256": written.sha256, "families": families}
    del config["seal"]
    storage.write_json(directory / "model.json", config)
    return cqm.load_model(directory)


def test_the_interval_of_an_earlier_model_is_used(single, drawn, tmp_path):
    model = earlier(single, tmp_path / "old", [1, 0, single.num_examples_ - 1])
    refused(model, drawn[1], "share 60 families of seed 1 ")
    assert copy.copy(model).calibrate(drawn[0]).calibration_ is not None
    model.save(tmp_path / "again")
    refused(cqm.load_model(tmp_path / "again"), drawn[1], "share 60 families of seed 1 ")


def test_an_interval_wider_than_the_examples_may_hide_another_seed(single, drawn, tmp_path):
    model = earlier(single, tmp_path / "old", [1, 0, single.num_examples_])
    refused(model, drawn[9], "saved by an earlier version .* fit it again with this version")


@pytest.mark.parametrize(("kind", "families"), [("combined", [0, 0, 299]), ("residual", None)])
def test_an_earlier_model_without_a_full_record_keeps_its_calibration(
    kind, families, drawn, tmp_path, request
):
    calibrated = copy.copy(request.getfixturevalue(kind)).calibrate(drawn[9])
    model = earlier(calibrated, tmp_path / "old", families)
    assert model.calibration_ is not None
    refused(model, drawn[9], "saved by an earlier version .* fit it again with this version")
    model.save(tmp_path / "again")
    again = cqm.load_model(tmp_path / "again")
    np.testing.assert_array_equal(again.calibration_.residuals, calibrated.calibration_.residuals)
    refused(again, drawn[9], "fit it again with this version")


def test_the_accepted_path_has_nominal_coverage():
    """Over 20 calibrations, the intervals hold in 90 % of new states, as they say."""
    training = cqm.collect(WORLD, states=100, seed=0, **RECIPE)
    model = fitted(logs_of(training))
    held_out = cqm.collect(WORLD, states=20 * 99 + 1_000, seed=1, **DRAWS)
    query = cqm.Query.named({"angle": 1.0, "speed": 0.5}, WORLD)
    new = held_out[20 * 99 :]
    values = new.effects().mean(axis=1) @ query.weights
    errors = np.ptp(values - model.effect(new.observations) @ query.weights, axis=1)
    covered = []
    for i in range(20):
        calibration = model.calibrate(held_out[99 * i : 99 * (i + 1)]).calibration_
        covered.append(np.mean(errors <= calibration.radius(query.weights, 0.9)))
    assert abs(np.mean(covered) - 0.9) < 0.025


@pytest.mark.parametrize("estimator", ["branched", "residual"])
def test_the_command_refuses_before_it_trains(estimator, tmp_path, capsys):
    branches = cqm.collect(WORLD, states=20, seed=1, out=tmp_path / "branches", **RECIPE)
    logs_of(branches).save(tmp_path / "residual")
    shutil.copytree(tmp_path / "branches", tmp_path / "branched")
    fit = ["fit", str(tmp_path / estimator), "--out", str(tmp_path / "model")]
    fit += ["--estimator", estimator, "--calibration", str(tmp_path / "branches")]
    assert main(fit) != 0
    assert "share 20 families of seed 1 with the data" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_seeds_of_any_size_are_remembered():
    seed = 2**70 + 3
    branches = cqm.collect(WORLD, states=300, seed=seed, **RECIPE)
    model = fitted(logs_of(branches))
    assert branches.families.runs.tolist() == [[3, 0, 299]]
    refused(model, cqm.collect(WORLD, states=20, seed=seed, **DRAWS), "share 20 families")


def of_rows(rows):
    hashes = np.sort(row_hashes(np.asarray(rows, float)))
    return Provenance(cqm.branches.families.Families.none(), hashes)


def copies(seen, other):
    with pytest.raises(ValueError, match="more than repeated states can explain"):
        of_rows(seen).check_held_out(of_rows(other), "states", independent=False)


def test_copies_that_repeat_unevenly_are_recognised():
    states = rng().normal(size=(2_000, 5))
    copies(np.repeat(states, 3, axis=0)[1:], states)
    copies(np.repeat(states, 3, axis=0)[1:], states[:100])
    copies(np.repeat(states, rng().integers(2, 4, size=2_000), axis=0), states)
    copies(states[rng().integers(2_000, size=2_000)], states)


def test_scoring_twice_hides_nothing():
    fitted_on, scored_on = of_rows(rng().normal(size=(900, 4))), of_rows(np.eye(300) + 0.5)
    once = fitted_on.union(scored_on)
    np.testing.assert_array_equal(once.union(scored_on).observations, once.observations)


def test_a_log_that_passes_once_through_a_year_raises_no_alarm():
    random, hours = rng(), np.arange(8_760)
    for _ in range(20):
        seen = np.stack([hours, random.integers(10, size=8_760)], axis=1)
        other = np.stack([random.integers(8_760, size=2_000), random.integers(10, size=2_000)], 1)
        of_rows(seen).check_held_out(of_rows(other), "states", independent=False)
