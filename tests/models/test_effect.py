"""The effect model on worlds small enough to know the answer."""

import copy
import dataclasses

import numpy as np
import pytest
from support.worlds import excess, pendulum_world, pushed_world

import cqm
import cqm.shift
from cqm import storage
from cqm.models.candidates import TRAINING
from cqm.models.choice import _shuffled
from cqm.models.effect import EffectModel
from cqm.models.preprocessing import input_coordinates, output_basis
from cqm.models.scorer import Scorer
from cqm.models.training import Training
from cqm.models.training_log import TrainingLog
from cqm.queries import Query
from cqm.quotient import ComparisonGraph, center
from cqm.storage import DamagedFileError
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

QUICK = Training(updates=600, learning_rate=2e-3, schedule="cosine", chunk=200)
SMALL_BATCHES = dataclasses.replace(QUICK, batch_size=64)
TINY = {"candidates": "direct", "width": 8, "updates": 1}

SETTINGS = {"horizon": 6, "warmup": (0, 0)}


def trained(candidate, branches, **settings):
    """A model of one network that is trained once, on all families."""
    training = QUICK if candidate == "direct" else SMALL_BATCHES
    fixed = {"width": 64, "members": 1, "training": training, "validation": 0.0}
    settings = {**fixed, **settings}
    return EffectModel(candidates=candidate, **settings).fit(branches)


@pytest.fixture(scope="module")
def world():
    return NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=1))


@pytest.fixture(scope="module")
def branches(world):
    return cqm.collect(world, states=3000, per_step=True, seed=1, **SETTINGS)


@pytest.fixture(scope="module")
def held_out(world):
    return cqm.collect(world, states=300, draws=32, seed=2, **SETTINGS)


@pytest.fixture(scope="module")
def unrolled(branches):
    return trained("unrolled", branches)


@pytest.fixture(scope="module")
def direct(branches):
    return trained("direct", branches)


@pytest.mark.parametrize("kind", ["direct", "unrolled"])
def test_both_methods_find_the_expected_effects(kind, request, held_out):
    assert excess(request.getfixturevalue(kind), held_out) < 0.02


def test_knowing_the_continuation_beats_averaging_it_out_where_labels_are_noisy():
    """Later actions multiply what the first one did, which is more than the state does."""

    def step(state, action, exogenous):
        pushed, gain = state.T
        return np.stack([pushed + action[:, 0] * gain, gain + action[:, 0]], axis=1)

    world = pushed_world(
        None, step=step, initial=lambda num, rng: 0.3 * rng.standard_normal((num, 2))
    )
    recipe = {**SETTINGS, "horizon": 3}
    branches = cqm.collect(world, states=150, per_step=True, seed=1, **recipe)
    held_out = cqm.collect(world, states=200, draws=64, seed=2, **recipe)
    training = dataclasses.replace(QUICK, updates=300, batch_size=32, learning_rate=5e-3)
    settings = {"width": 16, "members": None, "training": training, "draws": 256}
    direct, unrolled = (
        excess(trained(name, branches, **settings), held_out) for name in ("direct", "unrolled")
    )
    assert unrolled < 0.6 * direct


def test_what_no_action_moves_is_kept_because_it_modulates(unrolled, world):
    """The gain scales the effects although no action moves it."""
    assert unrolled.predictor_.basis.shape[1] == 2
    states = {"state": np.array([[0.0, 0.0, 0.5], [0.0, 0.0, 1.5]]), "nuisance": np.zeros((2, 8))}
    effects = world.native_effects(unrolled.effect(world.observe(states), action=2, baseline=0))
    assert effects[1, 0] / effects[0, 0] == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("kind", ["direct", "unrolled"])
def test_effects_are_centred_and_recentre_without_training(kind, request, held_out):
    model = request.getfixturevalue(kind)
    observations = held_out.observations[:50]
    effects = model.effect(observations)
    assert np.abs(effects.sum(axis=1)).max() <= 1e-12 * np.abs(effects).max()
    reference = [0.2, 0.3, 0.5]
    moved = model.recenter(reference).effect(observations)
    np.testing.assert_allclose(moved, center(effects, reference), atol=1e-12)
    with pytest.raises(ValueError, match="reference must have full support"):
        model.recenter([0.0, 0.5, 0.5])
    np.testing.assert_allclose(
        model.effect(observations, action=2, baseline=0), effects[:, 2] - effects[:, 0], atol=1e-15
    )


def test_a_common_signal_does_not_change_what_is_learned_from(branches):
    """A thousand times the effects, added to every branch of a family."""
    effects = branches.effects()
    signal = (
        1e3 * np.abs(effects).max() * np.random.default_rng(0).standard_normal((3000, 1, 1, 11))
    )
    changed = center(branches.outcomes + signal)
    assert np.abs(changed - effects).max() <= 1e-9 * np.abs(effects).max()


@pytest.mark.parametrize("kind", ["direct", "unrolled"])
def test_saved_models_agree_bit_for_bit_and_numpy_to_rounding(kind, request, tmp_path, held_out):
    model = request.getfixturevalue(kind)
    observations = held_out.observations[:40]
    effects = model.effect(observations)
    model.save(tmp_path)
    np.testing.assert_array_equal(EffectModel.load(tmp_path).effect(observations), effects)
    for scorer in (model.to_numpy(), Scorer.load(tmp_path)):
        assert np.abs(scorer.effect(observations) - effects).max() < 1e-4 * np.abs(effects).max()
    assert "3,000 branch families" in (tmp_path / "README.md").read_text()


def test_the_card_and_the_configuration_say_what_was_done(direct, held_out, tmp_path):
    card = direct.summary()
    assert "method `direct`" in card
    assert "600 of 600 updates, batches of 256, learning rate 0.002 (cosine)" in card
    assert "not calibrated" in card
    direct.save(tmp_path)
    config = storage.read_json(tmp_path / "model.json")
    assert (config["settings"]["candidates"], config["method"]) == ("direct", "direct")
    assert config["training"]["direct-1"]["updates_made"] == 600
    calibrated = EffectModel.load(tmp_path).calibrate(held_out)
    assert calibrated.calibration_.excess_error == pytest.approx(excess(direct, held_out))
    calibrated.save(tmp_path)
    again = EffectModel.load(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.endswith(again.summary())
    for score in (again.calibration_.excess_error, again.calibration_.noise_floor):
        assert f"{score:.4g}" in card
    for section in ("World", "Data", "Model", "Scores", "Limits", "Versions"):
        assert f"## {section}" in card


def test_training_ends_with_the_first_cycle_that_does_not_help_and_repeats_the_best(branches):
    training = Training(updates=1600, batch_size=30, learning_rate=1e-2, chunk=100)
    settings = {"candidates": "direct", "members": 1, "conditioning": "none", "width": 64}
    settings["training"] = training
    few = branches[:40]  # soon known by heart
    model = EffectModel(validation=0.3, **settings).fit(few)
    assert model.num_examples_ == 40
    assert model.updates_ == {"direct": [100, 200, 500, 800]}
    made = {name: record["updates_made"] for name, record in model.training_.items()}
    assert made == {"direct-1": 100, "direct-2": 200, "direct-all": 100}
    # The error is that of the network after the first cycle, in units of the effects' size.
    learned, held_out = _shuffled(few, seed=0).split(12)
    first = EffectModel(validation=0.0, updates=100, **settings).fit(learned)
    misses = first.effect(held_out.observations) - held_out.effects()[:, 0]
    errors = np.mean((misses / learned.effects().std(axis=(0, 1, 2))) ** 2, axis=(1, 2))
    [row] = model.comparison_
    assert (row.candidate, row.note) == ("direct", "chosen")
    assert row.error == pytest.approx(errors.mean(), rel=1e-5)
    assert row.standard_error == pytest.approx(errors.std(ddof=1) / np.sqrt(12), rel=1e-5)


def test_damaged_models_are_refused(direct, tmp_path):
    direct.save(tmp_path)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is damaged"):
        EffectModel.load(tmp_path)
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is damaged"):
        EffectModel.load(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_fit_leaves_no_model_and_resumes_to_the_same_effects(
    branches, tmp_path, held_out, monkeypatch, error
):
    training = Training(updates=60, batch_size=32, learning_rate=2e-3, chunk=20)
    small, observations = branches[:200], held_out.observations[:20]

    def model():
        return EffectModel(candidates="direct", width=16, training=training, validation=0.0)

    expected = model().fit(small).effect(observations)
    write, written = TrainingLog.write, []

    def interrupted(log, step, values):
        write(log, step, values)
        written.append(step)
        if len(written) == 2:
            raise error("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "write", interrupted)
        stopped = model()
        with pytest.raises(error, match="interrupted"):
            stopped.fit(small, directory=tmp_path)
    assert written == [20, 40]
    with pytest.raises(ValueError, match="the model is not fitted"):
        stopped.effect(observations)
    resumed = stopped.fit(small, directory=tmp_path)
    np.testing.assert_array_equal(resumed.effect(observations), expected)
    steps = (tmp_path / "direct-1.metrics.jsonl").read_text().splitlines()
    assert len(steps) == 3  # the first two chunks were not trained again


def test_an_interrupted_second_fit_forgets_the_first(branches, held_out, monkeypatch):
    model = EffectModel(**TINY).fit(branches[:50]).calibrate(held_out)

    def interrupt(training, updates):
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "optimiser", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(branches[:50])
    with pytest.raises(ValueError, match="the model is not fitted"):
        model.effect(held_out.observations)
    with pytest.raises(ValueError, match="the model is not fitted"):
        model.certify(held_out.observations, Query(np.ones(11)))


def test_a_training_without_a_seed_takes_the_models(branches, held_out):
    training = Training(updates=20, batch_size=16, chunk=10)
    observations = held_out.observations[:5]

    def effect(seed, training):
        model = EffectModel(**TINY | {"updates": None}, seed=seed, training=training)
        return model.fit(branches[:100]).effect(observations)

    np.testing.assert_array_equal(
        effect(3, training), effect(3, dataclasses.replace(training, seed=3))
    )
    batches = effect(3, dataclasses.replace(training, seed=0))
    assert not np.array_equal(effect(3, training), batches)


def test_families_of_two_arms_teach_all_three(world, held_out):
    pairs = cqm.collect(world, states=4500, arms=2, seed=3, **SETTINGS)
    model = trained("direct", pairs)
    assert excess(model, held_out) < 0.08


def test_arms_that_do_not_connect_the_actions_are_refused(world):
    pairs = cqm.collect(world, states=1, arms=2, seed=3, **SETTINGS)
    with pytest.raises(ValueError, match="the comparison graph is not connected"):
        EffectModel(training=QUICK).fit(pairs)


def test_pairwise_training_on_a_graph(branches, held_out):
    model = trained("direct", branches, graph=ComparisonGraph.path(3))
    assert excess(model, held_out) < 0.06


def test_an_ensemble_has_members_that_differ_and_is_their_mean(branches, held_out):
    model = EffectModel(**TINY, members=3).fit(branches[:200])
    members = model.member_effects(held_out.observations[:20])
    assert members.shape[0] == 3
    assert np.abs(members[0] - members[1]).max() > 1e-4
    np.testing.assert_allclose(model.effect(held_out.observations[:20]), members.mean(axis=0))


def test_features_that_are_not_the_observation_are_learned_through_a_latent_state():
    world = pendulum_world(
        features=lambda state, action, exogenous, after: np.stack(
            [np.cos(after[:, 0]), action[:, 0] ** 2], axis=1
        ),
        feature_names=("upright", "cost"),
        name="pendulum with cost",
    )
    branches = cqm.collect(world, states=3000, per_step=True, seed=1, **SETTINGS)
    model = trained("unrolled", branches)
    held_out = cqm.collect(world, states=200, draws=32, seed=2, **SETTINGS)
    assert model.predictor_.network.lift is not None
    assert excess(model, held_out) < 0.05
    # The first action's own cost: 1 for pushing, 0 for waiting.
    cost = model.effect(held_out.observations, action=0, baseline=1)[:, 1]
    np.testing.assert_allclose(cost, 1.0, atol=0.15)


def test_queries_rank_and_act(unrolled, world, held_out):
    observations = held_out.observations[:30]
    query = Query.named({"angle": 1.0}, world)
    advantages = unrolled.advantage(observations, query)
    assert advantages.shape == (30, 3)
    assert (unrolled.act(observations, query) == 2).all()  # pushing forward turns forward
    assert (unrolled.rank(observations, query) == [2, 1, 0]).all()
    both = unrolled.advantage(observations, [query, Query.named({"angle": -1.0}, world)])
    assert both.shape == (30, 2, 3)
    np.testing.assert_allclose(both[:, 0], advantages, atol=1e-12)
    np.testing.assert_allclose(both[:, 1], -advantages, atol=1e-12)


def test_certificates_hold_on_other_states(unrolled, world, held_out):
    unrolled = copy.copy(unrolled)  # the fixture is shared, and stays uncalibrated
    with pytest.raises(ValueError, match="no calibration"):
        unrolled.certify(held_out.observations, Query.named({"angle": 1.0}, world))
    calibration, test = held_out.split(100)
    unrolled.calibrate(calibration)
    expected = test.effects().mean(axis=1)
    for name in ("angle", "speed"):
        query = Query.named({name: 1.0}, world)
        verdict = unrolled.certify(test.observations, query, confidence=0.9)
        values = expected @ query.weights
        regret = values.max(axis=1) - np.take_along_axis(values, verdict.action[:, None], 1)[:, 0]
        assert np.mean(regret <= verdict.regret_bound + 1e-12) >= 0.85
        assert verdict.separable.mean() > 0.5  # an infinite bound would not separate any
        assert np.median(verdict.radius) < verdict.combined_bound <= verdict.paper_bound
        low, high = unrolled.effect_interval(
            test.observations, query, action=2, baseline=0, confidence=0.9
        )
        truth = values[:, 2] - values[:, 0]
        assert np.mean((low <= truth) & (truth <= high)) >= 0.85


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"candidates": "magic"}, "candidates must be distinct names out of .*; got 'magic'"),
        ({"candidates": ()}, r"candidates must be distinct names out of .*; got \(\)"),
        ({"candidates": ("ridge", "ridge")}, "candidates must be distinct names"),
        ({"candidates": 3}, "candidates must be several names"),
        ({"budget": "soon"}, "budget must be a time such as '60s', '5min' or '2h'; got 'soon'"),
        ({"budget": "-5s"}, "budget must be a time such as"),
        ({"budget": "1.2.3s"}, "budget must be a time such as"),
        ({"budget": "0s"}, "budget must be a number above 0"),
        ({"budget": 0}, "budget must be a number above 0"),
        ({"budget": np.nan}, "budget must be a number above 0"),
        ({"validation": 0}, "validation=0 leaves no families to compare 4 candidates on"),
        ({"conditioning": "pca"}, "conditioning must be"),
        ({"width": 0}, "width must be a whole number"),
        ({"decoder_rank": 0}, r"decoder_rank must be a whole number in \[1, "),
        ({"validation": 1.0}, r"validation must be a number in \[0, 1\)"),
        ({"memory_gb": 0}, "memory_gb must be a number above 0"),
    ],
)
def test_bad_parameters_are_refused_by_fit(wrong, message, branches):
    with pytest.raises(ValueError, match=message):
        EffectModel(**wrong).fit(branches[:10])


def test_bad_observations_are_refused(direct):
    with pytest.raises(ValueError, match=r"\[n, 11\] for several, .*; got \(2, 3\)"):
        direct.effect(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="observations must be finite"):
        direct.effect(np.full((1, 11), np.nan))
    with pytest.raises(ValueError, match="a contrast needs both"):
        direct.effect(np.zeros((1, 11)), action=1)
    with pytest.raises(ValueError, match="the model is not fitted"):
        EffectModel().effect(np.zeros((1, 11)))


def test_effect_conditioning_puts_controllable_directions_first(branches):
    effects = branches.effects()
    basis = output_basis("effect", effects)
    assert basis.shape == (11, 2)  # angle and speed; neither the gain nor the nuisance
    np.testing.assert_allclose(effects @ basis @ basis.T, effects, atol=1e-9)
    inputs = input_coordinates("effect", branches.observations, basis)
    coordinates = inputs(branches.observations)
    assert coordinates.shape == (3000, 11)  # nothing is dropped
    np.testing.assert_allclose(coordinates.std(axis=0), [1.0] * 2 + [0.1] * 9, rtol=1e-2)
    white = input_coordinates("whiten", branches.observations, basis)
    white = white(branches.observations)
    np.testing.assert_allclose(np.cov(white.T), np.eye(11), atol=1e-2)
    moved = input_coordinates("project", branches.observations, basis)
    np.testing.assert_array_equal(moved(branches.observations), coordinates[:, :2])
    raw = input_coordinates("none", branches.observations, basis)
    np.testing.assert_array_equal(raw(branches.observations), branches.observations)


def test_an_unknown_basis_cannot_be_projected_on(branches):
    with pytest.raises(ValueError, match="'project' needs features that are the observation"):
        input_coordinates("project", branches.observations, None)
    with pytest.raises(ValueError, match="'effect' or 'project'; got 'pca'"):
        input_coordinates("pca", branches.observations, None)


def test_a_checkpoint_of_other_data_is_refused(branches, tmp_path):
    training = Training(updates=20, chunk=10)
    model = EffectModel(**TINY | {"updates": 20}, training=training)
    model.fit(branches[:100], directory=tmp_path)
    with pytest.raises(ValueError, match="different settings or data:\\n  data: "):
        model.fit(branches[100:200], directory=tmp_path)


def test_calibration_must_be_of_the_same_world_and_recipe(direct, world):
    other = NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=2))
    branches = cqm.collect(other, states=20, draws=16, seed=2, **SETTINGS)
    with pytest.raises(ValueError, match=r"from another world:\n  nuisance.seed: 1 -> 2"):
        direct.calibrate(branches)
    branches = cqm.collect(world, states=20, draws=16, horizon=5, warmup=(0, 0), seed=2)
    with pytest.raises(ValueError, match="have horizon 5; the model was fitted with horizon 6"):
        direct.calibrate(branches)


def test_calibration_on_training_states_is_refused(direct, world, tmp_path):
    direct.save(tmp_path)
    for model in (direct, EffectModel.load(tmp_path)):
        seen = cqm.collect(world, states=20, draws=16, seed=1, **SETTINGS)
        with pytest.raises(ValueError, match=r"share 20 families of seed 1 .* a different seed"):
            model.calibrate(seen)
    later = cqm.collect(world, states=3020, draws=16, seed=1, **SETTINGS)[3000:]
    assert EffectModel.load(tmp_path).calibrate(later).calibration_.draws == 16


@pytest.fixture(scope="module")
def single():
    return cqm.collect(pendulum_world(), states=600, seed=4, **SETTINGS)


def test_families_that_are_set_aside_calibrate_the_model(single, tmp_path):
    model = EffectModel(candidates="ridge").fit(single, calibration=0.2, world=pendulum_world())
    assert (model.num_examples_, model.calibration_.draws) == (480, 16)
    assert len(model.calibration_.residuals) == 120
    # It has not learned from them, so they may calibrate it again; from the others it has.
    many = cqm.collect(pendulum_world(), states=600, draws=16, seed=4, **SETTINGS)
    again = copy.copy(model).calibrate(many[480:])
    np.testing.assert_array_equal(again.calibration_.residuals, model.calibration_.residuals)
    with pytest.raises(ValueError, match="share 1 family of seed 4"):
        copy.copy(model).calibrate(many[479:])
    alone = EffectModel(candidates="ridge").fit(many, calibration=0.2)
    assert len(alone.calibration_.residuals) == 120
    query = Query.named({"angle": 1.0}, model)
    model.save(tmp_path)
    before, after = (
        own.certify(single.observations[480:], query) for own in (model, EffectModel.load(tmp_path))
    )
    np.testing.assert_array_equal(before.separable, after.separable)
    np.testing.assert_array_equal(before.radius, after.radius)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": 0.2}, r"the branches have 1; pass world= to draw"),
        ({"calibration": 0.01}, r"at least 19 of the 600 families .* got 0\.01, which is 6"),
        ({"calibration": 1.5}, r"calibration must be a number in \(0, 1\); got 1\.5"),
        ({"world": pendulum_world()}, r"world is only needed for calibration"),
        ({"calibration": 0.2, "world": "pendulum"}, r"world must be the World that the branches"),
    ],
)
def test_what_cannot_be_set_aside_is_refused_before_training(single, options, message):
    with pytest.raises(ValueError, match=message):
        EffectModel(candidates="ridge").fit(single, **options)


def test_groups_are_calibrated_asked_about_and_saved(single, tmp_path):
    world = pendulum_world()
    model = EffectModel(candidates="ridge").fit(single)
    held_out = cqm.collect(world, states=200, draws=16, seed=5, **SETTINGS)
    above = lambda seen: np.where(seen[:, 0] > 0, "above", "below")
    model.calibrate(held_out, groups=above).save(tmp_path)
    query, states = Query.named({"angle": 1.0}, model), single.observations[:50]
    loaded = EffectModel.load(tmp_path)
    assert loaded.calibration_.group_names == ["above", "below"]
    found = [own.certify(states, query, groups=above(states)) for own in (model, loaded)]
    np.testing.assert_array_equal(found[0].radius, found[1].radius)
    assert set(found[0].limits) == {"above", "below"}
    low, high = model.effect_interval(states, query, action=1, baseline=0, groups=above)
    np.testing.assert_allclose((high - low) / 2, found[0].radius)
    several = model.certify_all(states, [query, Query.named({"speed": 1.0}, model)])
    assert (several[0].radius >= model.certify(states, query).radius).all()


def test_states_from_elsewhere_are_noticed_despite_a_nuisance(direct, held_out, world):
    model = copy.copy(direct).calibrate(held_out)
    query = cqm.Query.direction(np.array([1.0, 0.0, 0.0]), world)
    fresh = cqm.collect(world, states=100, seed=9, **SETTINGS).observations
    assert not model.certify(fresh, query).shifted
    wider = fresh.mean(axis=0) + 2 * (fresh - fresh.mean(axis=0))
    with pytest.warns(cqm.shift.ShiftWarning):
        assert model.certify(wider, query).shifted


def test_one_step_is_a_horizon_too(world):
    recipe = {"horizon": 1, "warmup": (0, 0)}
    branches = cqm.collect(world, states=1000, per_step=True, seed=1, **recipe)
    test = cqm.collect(world, states=100, draws=16, seed=2, **recipe)
    model = trained("unrolled", branches, draws=2, updates=300)
    assert excess(model, test) < 0.05
    np.testing.assert_allclose(
        model.to_numpy().effect(test.observations), model.effect(test.observations), atol=1e-5
    )


@pytest.mark.parametrize("candidate", ["constant", "ridge", "direct", "unrolled"])
def test_a_single_state_has_effects_too(candidate):
    world = pendulum_world(initial=lambda num, rng: np.tile([0.5, 0.0, 1.0], (num, 1)))
    branches = cqm.collect(world, states=200, per_step=True, seed=1, **SETTINGS)
    model = trained(candidate, branches, width=16, updates=300)
    expected = branches.effects()[:, 0].mean(axis=0)
    found = model.effect(branches.observations[:1])[0]
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        ({"decoder_rank": 1}, "decoder_rank=None"),
        ({"conditioning": "none"}, "conditioning='learned'"),
        ({"graph": ComparisonGraph.path(3)}, "graph=None"),
    ],
)
def test_parameters_that_only_the_direct_network_can_use_choose_it(branches, wanted, missing):
    model = EffectModel(width=8, updates=1, **wanted).fit(branches[:50])
    assert model.method_ == "direct"
    notes = {row.candidate: row.note for row in model.comparison_}
    assert notes.pop("direct") == "chosen"
    assert notes == dict.fromkeys(("constant", "ridge", "unrolled"), f"needs {missing}")
    for candidate in notes:
        with pytest.raises(ValueError, match=f"can be fitted: {candidate} needs {missing}"):
            EffectModel(candidates=candidate, **wanted).fit(branches[:50])


def test_the_card_says_which_feature_is_learned_least():
    world = pendulum_world()
    branches = cqm.collect(world, states=300, seed=1, **SETTINGS)
    model = EffectModel(candidates="ridge").fit(branches)
    model.calibrate(cqm.collect(world, states=100, draws=16, seed=2, **SETTINGS))
    errors = model.calibration_.feature_errors
    assert np.isnan(errors[2])  # no action moves the gain
    worst = int(np.nanargmax(errors))
    assert f"to {errors[worst]:.4g} ({model.feature_names[worst]})" in model.summary()


def test_what_the_candidates_need_is_said(world):
    branches = cqm.collect(world, states=20, arms=2, seed=1, **SETTINGS)
    steps = r"features of every step \(collect with per_step=True\)"
    with pytest.raises(ValueError, match=f"no candidate can be fitted: unrolled needs {steps}"):
        EffectModel(candidates="unrolled").fit(branches)
    with pytest.raises(ValueError, match="ridge needs families that branch every action"):
        EffectModel(candidates=["constant", "ridge"]).fit(branches)


def test_updates_are_those_of_every_training_and_nothing_else_changes(branches):
    settings = {"width": 8, "updates": 3, "validation": 0.0}
    model = EffectModel(candidates="unrolled", **settings).fit(branches[:50])
    whole = dataclasses.replace(TRAINING, updates=3, learning_rate=5e-4, seed=0)
    # Single steps: six times as many updates, in chunks six times as long, with half the batch, at
    # eight times the rate.
    steps = dataclasses.replace(
        whole, updates=18, batch_size=8, learning_rate=4e-3, chunk=6 * whole.chunk
    )
    assert model.training_ == {
        "unrolled-steps": {**dataclasses.asdict(steps), "updates_made": 18},
        "unrolled-1": {**dataclasses.asdict(whole), "updates_made": 3},
    }
    own = Training(updates=5, batch_size=4, seed=9)
    model = EffectModel(candidates="direct", training=own, **settings).fit(branches[:50])
    assert model.training_["direct-1"]["batch_size"] == 4 * 4  # of four networks together
    assert model.training_["direct-1"]["updates_made"] == 3
    with pytest.raises(ValueError, match=r"updates must be .*or None; got 0"):
        EffectModel(updates=0).fit(branches[:50])


def test_fitting_says_what_it_does(branches, capsys):
    EffectModel(width=8, updates=1).fit(branches[:50], show_progress=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Read 50 branch families"
    for start in (
        "constant: error ",
        "ridge: error ",
        "unrolled-steps: compiling, then 24 updates",  # six times all cycles
        "unrolled-1: compiling, then 1 updates",
        "unrolled: error ",
        "direct-1: compiling, then 1 updates",
        "direct: error ",
        "Chosen: ",
    ):
        assert any(line.startswith(start) for line in said), start


def test_several_draws_are_several_training_examples(world, held_out):
    branches = cqm.collect(world, states=800, draws=4, per_step=True, seed=5, **SETTINGS)
    model = trained("unrolled", branches)
    assert excess(model, held_out) < 0.03


def test_no_states_are_no_problem(direct, unrolled):
    for model in (direct, unrolled, unrolled.to_numpy()):
        assert model.effect(np.empty((0, 11))).shape == (0, 3, 11)


def test_references_and_graphs_that_do_not_fit_are_refused_before_training(branches):
    with pytest.raises(ValueError, match="reference must be"):
        EffectModel(reference=[0.5, 0.5]).fit(branches)
    with pytest.raises(ValueError, match="a graph of 4 actions needs"):
        EffectModel(graph=ComparisonGraph.path(4)).fit(branches)
    with pytest.raises(ValueError, match="not connected"):
        EffectModel(graph=ComparisonGraph(3, ((0, 1),))).fit(branches)


def test_a_second_fit_in_the_directory_is_refused(branches, tmp_path):
    model = EffectModel(**TINY)
    with storage.exclusive(tmp_path), pytest.raises(ValueError, match=r"is in use by process \d+"):
        model.fit(branches[:50], directory=tmp_path)
    assert model.predictor_ is None
    model.fit(branches[:50], directory=tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_model_that_ignores_the_state_notices_states_unlike_calibration():
    world = cqm.load_world("cartpole-swingup")
    model = cqm.EffectModel(candidates="constant").fit(cqm.collect(world, states=60, horizon=3))
    model.calibrate(cqm.collect(world, states=40, horizon=3, draws=16, seed=1))
    far = np.full((5, len(world.observation_names)), 1e6)
    assert model.certify(far, np.eye(5)[0], shift="ignore").unlike.all()
