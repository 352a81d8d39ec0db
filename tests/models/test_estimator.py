"""What every estimator shares: parameters, files, card, and calibration."""

import copy
import dataclasses
import inspect
import re
import zipfile

import gymnasium
import numpy as np
import pytest
from sklearn.base import clone
from support.worlds import pendulum_world
from threadpoolctl import threadpool_info, threadpool_limits

import cqm
from cqm import storage
from cqm.models.estimator import Estimator, load_model
from cqm.models.predictors import in_blocks
from cqm.models.training import Training
from cqm.quotient import ComparisonGraph, center

ESTIMATORS = [cqm.EffectModel, cqm.ResidualModel, cqm.HindsightModel]
QUICK = Training(updates=4, batch_size=8, chunk=2)
NAMES = ("left", "<none>", "right")
RECIPE = {"horizon": 3, "warmup": (0, 0), "per_step": True}


@pytest.fixture(scope="module")
def world():
    return pendulum_world(action_names=NAMES)


@pytest.fixture(scope="module")
def branches(world):
    return cqm.collect(world, states=400, seed=1, **RECIPE)


@pytest.fixture(scope="module")
def logs(branches):
    return cqm.Logs.from_branches(branches, rng=np.random.default_rng(0))


@pytest.fixture(scope="module")
def held_out(world):
    return cqm.collect(world, states=40, draws=16, seed=2, **RECIPE)


@pytest.fixture(params=["effect-direct", "effect-unrolled", "residual", "tabular", "hindsight"])
def fitted(request, branches, logs):
    """A fitted model of each kind; every test gets its own."""
    match request.param:
        case "effect-direct":
            return cqm.EffectModel(candidates="direct", width=8, members=2, training=QUICK).fit(
                branches
            )
        case "effect-unrolled":
            return cqm.EffectModel(candidates="unrolled", width=8, draws=4, training=QUICK).fit(
                branches
            )
        case "residual":
            return cqm.ResidualModel(members=2).fit(logs)
        case "tabular":
            rng = np.random.default_rng(0)
            cells, actions = rng.integers(2, size=(2000, 1)), rng.integers(2, size=2000)
            outcomes = cells + actions[:, None] * (1.0 + cells)
            table = cqm.Logs.from_arrays(cells, actions, outcomes[:, None])
            return cqm.ResidualModel(method="tabular").fit(table)
        case _:
            return cqm.HindsightModel(width=8, training=QUICK).fit(logs)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_parameters_are_stored_untouched_and_follow_scikit_learn(kind):
    reference = np.array([0.2, 0.3, 0.5])
    model = kind(members=3, reference=reference, seed=4)
    assert model.reference is reference
    params = model.get_params()
    assert list(params) == list(inspect.signature(kind).parameters)
    assert (params["members"], params["seed"]) == (3, 4)
    copied = clone(model)
    assert type(copied) is kind
    assert repr(copied.get_params()) == repr(params)
    assert model.set_params(members=5) is model
    assert model.members == 5
    with pytest.raises(ValueError, match=r"unknown parameters \['depth'\]; available: \['"):
        model.set_params(depth=3)
    with pytest.raises(TypeError, match="depth"):
        kind(depth=3)


def test_a_repr_shows_what_differs_from_the_defaults():
    assert repr(cqm.EffectModel()) == "EffectModel()"
    model = cqm.EffectModel(width=64, training=Training(updates=10, seed=2))
    assert repr(model) == "EffectModel(width=64, training=Training(updates=10, seed=2))"
    assert repr(cqm.ResidualModel(weighting=False)) == "ResidualModel(weighting=False)"
    paper = repr(cqm.EffectModel.paper(seed=3))
    assert paper == (
        "EffectModel(candidates='direct', conditioning='none', decoder_rank=8, "
        "members=1, training=Training(), validation=0.0, seed=3)"
    )


def test_a_saved_model_is_the_same_model(fitted, tmp_path):
    observations = _observations(fitted)
    fitted.save(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is type(fitted)
    assert repr(loaded) == repr(fitted)
    np.testing.assert_array_equal(loaded.effect(observations), fitted.effect(observations))
    np.testing.assert_array_equal(
        loaded.member_effects(observations), fitted.member_effects(observations)
    )
    assert loaded.summary() == without_seconds(fitted.summary())
    _, front_matter, card = (tmp_path / "README.md").read_text().split("---\n")
    assert card == loaded.summary()
    assert front_matter.startswith("library_name: cqm\ntags:\n- cqm\n")


def test_effects_are_centred_at_any_reference(fitted, tmp_path):
    observations = _observations(fitted)
    effects = fitted.effect(observations)
    num_actions = effects.shape[1]
    size = np.abs(effects).max()
    np.testing.assert_allclose(effects.sum(axis=1), 0, atol=1e-13 * size)
    reference = np.arange(1.0, num_actions + 1) / sum(range(1, num_actions + 1))
    moved = fitted.recenter(reference)
    np.testing.assert_allclose(
        moved.effect(observations), center(effects, reference), atol=1e-13 * size
    )
    assert fitted.reference is None  # the model itself stays as it is
    moved.save(tmp_path)
    np.testing.assert_array_equal(
        load_model(tmp_path).effect(observations), moved.effect(observations)
    )


@pytest.mark.parametrize("kind", ["effect", "residual", "hindsight"])
def test_a_calibrated_model_shows_its_scores_on_its_card(kind, branches, logs, held_out, tmp_path):
    model: Estimator
    if kind == "effect":
        model = cqm.EffectModel(candidates="direct", width=8, training=QUICK).fit(branches)
    elif kind == "residual":
        model = cqm.ResidualModel().fit(logs)
    else:
        model = cqm.HindsightModel(width=8, training=QUICK).fit(logs)
    assert "not calibrated" in model.summary()
    model.calibrate(held_out).save(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"excess error {model.calibration_.excess_error:.4g} on 40 held-out states" in card
    assert card.endswith(load_model(tmp_path).summary())
    for section in ("World", "Data", "Model", "Scores", "Limits", "Versions"):
        assert f"## {section}" in card


def test_models_learn_only_from_their_own_data(branches, logs):
    with pytest.raises(ValueError, match="EffectModel learns from Branches; got Logs"):
        cqm.EffectModel().fit(logs)
    with pytest.raises(ValueError, match="ResidualModel learns from Logs; got Branches"):
        cqm.ResidualModel().fit(branches)


def test_saved_parameters_round_trip(branches, tmp_path):
    graph = ComparisonGraph(3, ((2, 0), (0, 1)))  # neither sorted nor oriented
    model = cqm.EffectModel(
        candidates="direct",
        width=8,
        graph=graph,
        reference=np.array([0.2, 0.3, 0.5]),
        training=QUICK,
    )
    model.fit(branches).save(tmp_path)
    loaded = cqm.EffectModel.load(tmp_path)
    assert loaded.graph == graph
    assert loaded.training == QUICK
    assert loaded.reference == (0.2, 0.3, 0.5)


def test_a_model_of_another_kind_is_refused(logs, tmp_path):
    cqm.ResidualModel().fit(logs).save(tmp_path)
    with pytest.raises(storage.DamagedFileError, match="kind 'residual'; EffectModel loads 'eff"):
        cqm.EffectModel.load(tmp_path)
    config = storage.read_json(tmp_path / "model.json")
    del config["seal"]
    storage.write_sealed(tmp_path / "model.json", {**config, "kind": "magic"})
    with pytest.raises(storage.DamagedFileError, match="kind 'magic'; known: "):
        load_model(tmp_path)
    storage.write_sealed(tmp_path / "model.json", {"kind": "residual", "schema": 6})
    with pytest.raises(ValueError, match=r"schema 6, written by a newer version .* upgrade"):
        load_model(tmp_path)


def test_a_missing_model_is_called_that(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the model directory .*nothing does not exist"):
        load_model(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"the model directory .* lacks model\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("folder", ["", "model/"])
def test_a_model_is_loaded_from_a_zip_archive(logs, tmp_path, folder):
    model = cqm.ResidualModel().fit(logs)
    model.save(tmp_path / "model")
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (tmp_path / "model").iterdir():
            file.write(path, folder + path.name)
    observations = _observations(model)
    np.testing.assert_array_equal(
        load_model(archive).effect(observations), model.effect(observations)
    )
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(storage.DamagedFileError, match="is not a complete zip archive"):
        load_model(archive)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../model.json", "{}")
    with pytest.raises(storage.DamagedFileError, match=r"must hold one model\.safetensors; got 0"):
        load_model(archive)


def test_a_setting_that_an_older_checkpoint_lacks_counts_as_its_default(
    branches, tmp_path, monkeypatch
):
    """Adding a parameter must not make the checkpoints of earlier versions unreadable."""
    defaults = cqm.EffectModel._defaults()
    older = {name: value for name, value in defaults.items() if name != "memory_gb"}
    model = cqm.EffectModel(candidates="direct", width=8, training=QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(cqm.EffectModel, "_defaults", classmethod(lambda cls: older))
        expected = model.fit(branches, directory=tmp_path).effect(_observations(model))
    again = clone(model).fit(branches, directory=tmp_path)  # finds it finished
    np.testing.assert_array_equal(again.effect(_observations(model)), expected)
    changed = clone(model).set_params(memory_gb=1.0)
    with pytest.raises(ValueError, match=r"model\.memory_gb: 2\.0 -> 1\.0"):
        changed.fit(branches, directory=tmp_path)


@pytest.mark.parametrize(
    ("num", "size", "rows"),
    [
        (0, 8, 1),
        (1, 8, 1),
        (2, 8, 8),
        (20, 8, 8),
        (2, 32, 16),
        (16, 32, 16),
        (17, 32, 32),
        (3, 1, 1),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_predictions_in_blocks_are_those_of_all_rows_at_once(num, size, rows, axis):
    """In blocks of one row, of 16 or of the given size, so that few shapes are compiled."""
    inputs = np.arange(3.0 * num, dtype=np.float32).reshape(num, 3)
    shapes = []

    def predict(block):
        shapes.append(block.shape)
        return 2 * block if axis == 0 else 2 * block[None]

    found = in_blocks(predict, inputs, size, axis=axis)
    np.testing.assert_array_equal(found, 2 * inputs if axis == 0 else 2 * inputs[None])
    assert set(shapes) == {(rows, 3)}
    assert found.dtype == np.float64


def test_copies_do_not_share_their_calibration(branches, held_out):
    model = cqm.EffectModel(candidates="direct", width=8, training=QUICK).fit(branches)
    calibrated = copy.copy(model).calibrate(held_out)
    assert calibrated.calibration_ is not None
    assert model.calibration_ is None


def test_an_action_may_be_named_wherever_it_may_be_indexed(branches, held_out):
    model = cqm.EffectModel(candidates="direct", width=8, training=QUICK).fit(branches)
    observations, by_index = _observations(model), {"action": 2, "baseline": 0}
    expected = model.effect(observations, **by_index)
    by_name = {"action": "right", "baseline": "left"}
    np.testing.assert_array_equal(model.effect(observations, **by_name), expected)
    names, indices = ["right", "left", "right", "<none>", "left"], [2, 0, 2, 1, 0]
    np.testing.assert_array_equal(
        model.effect(observations, action=names, baseline="<none>"),
        model.effect(observations, action=indices, baseline=1),
    )
    with pytest.raises(ValueError, match=r"unknown action 'rihgt'; did you mean \['right'\]"):
        model.effect(observations, action="rihgt", baseline="left")
    with pytest.raises(ValueError, match=r"action must hold action indices in 0\.\.2; got 3"):
        model.effect(observations, action=3, baseline="left")
    model.calibrate(held_out)
    query = cqm.Query.named({"angle": 1.0}, model)
    intervals = (model.effect_interval(observations, query, **by) for by in (by_index, by_name))
    np.testing.assert_array_equal(*intervals)


def test_one_state_in_gives_one_answer_out(fitted):
    batch = _observations(fitted)
    one = batch[1]
    weights = np.ones((2, len(fitted.feature_names)))
    for found, expected in (
        (fitted.effect(one), fitted.effect(batch)[1]),
        (fitted.member_effects(one), fitted.member_effects(batch)[:, 1]),
        (fitted.effect(one, action=1, baseline=0), fitted.effect(batch, action=1, baseline=0)[1]),
        (fitted.advantage(one, weights), fitted.advantage(batch, weights)[1]),
        (fitted.advantage(one, weights[0]), fitted.advantage(batch, weights[0])[1]),
        (fitted.rank(one.tolist(), weights[0]), fitted.rank(batch, weights[0])[1]),
        (fitted.act(one, weights), fitted.act(batch, weights)[1]),
    ):
        # Rounding, of networks in float32, may depend on the number of rows.
        size = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * size, strict=True)
    assert np.shape(fitted.act(one, weights[0])) == ()
    columns = ", ".join(fitted.observation_names)
    width = len(fitted.observation_names)
    with pytest.raises(
        ValueError, match=rf"\[{width}\] for one state .*the columns {columns}; got"
    ):
        fitted.act(np.append(one, 0.0), weights)


@pytest.mark.filterwarnings("ignore:the query uses features that")  # it hardly learned any
def test_a_verdict_has_the_names_and_says_what_best_means(branches, held_out):
    model = cqm.EffectModel(candidates="direct", width=8, training=QUICK).fit(branches)
    query = cqm.Query.named({"angle": 1.0}, model)
    verdict = model.calibrate(held_out).certify(_observations(model), query, confidence=0.9)
    assert verdict.best == tuple(NAMES[i] for i in model.act(_observations(model), query))
    assert verdict.meaning == (
        "The best action is the one that, taken first and followed by uniformly random actions, "
        "gives the highest expected sum of rewards over 3 steps (discount 0.95)."
    )
    assert "90% confidence over states like the 40 calibration states" in verdict.trust
    one = model.certify(_observations(model)[0], query)
    assert one.best == verdict.best[:1]
    low, high = model.effect_interval(_observations(model)[0], query, action=1, baseline=0)
    assert np.shape(low) == np.shape(high) == ()


def test_names_of_actions_are_saved_and_on_the_card(fitted, tmp_path):
    named = fitted.method_ != "tabular"
    assert fitted.action_names_ == (NAMES if named else ("0", "1"))
    assert ("3 actions (left, <none>, right)" in fitted.summary()) == named
    fitted.save(tmp_path)
    assert load_model(tmp_path).action_names_ == fitted.action_names_
    config = storage.read_json(tmp_path / "model.json")
    del config["action_names"], config["seal"]  # as written by earlier versions
    storage.write_json(tmp_path / "model.json", {**config, "schema": 2})
    assert load_model(tmp_path).action_names_ == ("0", "1", "2")[: len(fitted.action_names_)]


def test_a_fitted_model_prints_what_it_is_about(branches, held_out):
    model = cqm.EffectModel(candidates="direct", width=8, training=QUICK)
    assert str(model) == repr(model)
    assert "no; call fit with branch families" in model._repr_html_()
    model.fit(branches)
    assert str(model).splitlines() == [
        "Effect model",
        "  world         pendulum",
        "  actions       left, <none>, right",
        "  features      angle, speed, gain",
        "  learned from  400 branch families",
        "  method        direct",
        "  excess error  unknown; measure it with calibrate",
    ]
    # As scikit-learn wants.
    assert repr(model).startswith("EffectModel(candidates='direct', width=8")
    error = f"{model.calibrate(held_out).calibration_.excess_error:.3g} on 40 held-out states"
    assert error in str(model)
    html = model._repr_html_()
    assert error in html
    assert "<td>left, &lt;none&gt;, right</td>" in html


def test_raw_observations_of_an_environment_are_enough(tmp_path):
    world = cqm.load_world("CartPole-v1", action_names=("left", "right"))
    branches = cqm.collect(world, states=60, horizon=3, warmup=(0, 3), threads=1)
    model = cqm.EffectModel(candidates="direct", width=8, training=QUICK).fit(branches)
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    assert observation.shape == (4,)
    np.testing.assert_array_equal(
        model.effect(observation), model.effect([*observation.astype(float), 0.0])
    )
    query = cqm.Query.named({"obs_0": 1.0}, model)
    observation, *_ = env.step(model.act(observation, query))
    assert model.rank([observation, observation], query).shape == (2, 2)
    model.save(tmp_path)
    for scorer in (model.to_numpy(), cqm.Scorer.load(tmp_path)):
        np.testing.assert_allclose(
            scorer.effect(observation), model.effect(observation), atol=1e-5, rtol=1e-4
        )
    with pytest.raises(ValueError, match="columns obs_0, obs_1, obs_2, obs_3, terminated; got"):
        model.act(observation[:3], query)


def without_seconds(card):
    """A card without the seconds that fitting took, which are not stored."""
    return re.sub(r", \d+ s(?=, )", "", card)


def _observations(model):
    if model.method_ == "tabular":
        return np.array([[0.0], [1.0]])
    return np.random.default_rng(3).normal(size=(5, len(model.observation_names)))


def test_a_query_on_what_the_model_has_not_learned_names_it(branches, held_out):
    model = cqm.EffectModel(candidates="direct", width=64, updates=400).fit(branches)
    states = held_out.observations[:2]
    angle, speed, both = (
        cqm.Query(np.array(weights)) for weights in ([1, 0, 0], [0, 1, 0], [1, 1, 0])
    )
    model.advantage(states, speed)  # its error is unknown
    model.calibrate(held_out)
    expected = held_out.effects().mean(axis=1)
    # As if the angle had been predicted to stay as it is.
    residuals = model.calibration_.residuals.copy()
    residuals[..., 0] = expected[..., 0]
    model.calibration_ = dataclasses.replace(model.calibration_, residuals=residuals)
    model.certify(states, speed)
    for ask in (model.advantage, model.rank, model.act, model.certify):
        message = r"has learned poorly: angle \(excess error 1\); "
        with pytest.warns(UserWarning, match=message) as caught:
            ask(states, angle)
        assert {warning.filename for warning in caught} == {__file__}
        with pytest.warns(UserWarning, match="angle"):
            ask(states, both)
    with pytest.warns(UserWarning, match="angle"):
        model.act(states, [speed, angle])


def test_numbers_of_numpy_are_as_good_as_plain_ones(branches, tmp_path):
    training = cqm.Training(
        updates=np.int64(2), batch_size=np.int32(8), learning_rate=np.float32(1e-3)
    )
    settings = {"seed": np.int64(2), "members": np.int64(2), "width": np.int64(8)}
    model = cqm.EffectModel(
        candidates="direct",
        validation=np.float64(0),
        training=training,
        updates=np.int64(3),
        **settings,
    )
    model.fit(branches).save(tmp_path)
    loaded = cqm.load_model(tmp_path)
    assert (loaded.members, loaded.updates, loaded.updates_) == (2, 3, {"direct": [3]})


def test_a_refused_fit_leaves_the_model_as_it_was(logs):
    model = cqm.ResidualModel().fit(logs)
    before = model.predictor_
    with pytest.raises(FileNotFoundError):
        model.fit("nowhere")
    assert model.predictor_ is before


def test_a_fit_does_not_depend_on_the_number_of_threads(logs):
    seen = []

    class Model(cqm.ResidualModel):
        def _learn(self, logs, options):
            seen.extend(own["num_threads"] for own in threadpool_info() if "blas" in own.values())
            return super()._learn(logs, options)

    effects = []
    for num in (1, 2):
        with threadpool_limits(num, user_api="blas"):
            effects.append(Model().fit(logs).effect(logs.observations[:5]))
    assert set(seen) == {1}
    np.testing.assert_array_equal(*effects)
