"""The NumPy scorer agrees with the model it was made from, whatever the model consists of."""

import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.worlds import pendulum_world, pushed_world

import cqm
from cqm.models.effect import EffectModel
from cqm.models.network import Network
from cqm.models.predictors import restore_predictor
from cqm.models.training import Training

# Enough for effects that are not small beside the outcomes, whose rounding they share.
TRAINING = Training(updates=30, batch_size=16, learning_rate=2e-2)
RECIPE = {"horizon": 3, "warmup": (0, 0), "per_step": True}
BACK = cqm.Policy("back", lambda seen, uniforms: np.where(uniforms < 0.3, 1, 2 * (seen[:, 0] < 0)))
NORMAL = {"exogenous": lambda num, horizon, rng: rng.standard_normal((num, horizon, 1))}


def product(state, action, noise):
    return action * state[:, 0] * state[:, 1]


def wave(state, action, noise):
    return action * np.sin(2 * state[:, 1])


def driven(state, action, noise):
    return action * noise[:, 0]


COST = pendulum_world(
    features=lambda state, action, exogenous, after: np.stack(
        [np.cos(after[:, 0]), action[:, 0] ** 2], axis=1
    ),
    feature_names=("upright", "cost"),
    name="pendulum with cost",
)
# The world, settings of the model and of the collection, and arrays that only such a model has.
CASES = {
    "constant": (pushed_world(wave), {"candidates": "constant"}, {}, ["waves.weights"]),
    "ridge": (pushed_world(wave), {"candidates": "ridge"}, {}, ["waves.frequencies"]),
    "direct with controls": (
        pushed_world(wave),
        {"candidates": "direct"},
        {},
        ["controls", "network.gate.weight"],
    ),
    "direct with an embedding": (
        pushed_world(wave),
        {"candidates": "direct", "conditioning": "effect"},
        {},
        ["network.embedding"],
    ),
    "direct, two members": (
        pushed_world(wave),
        {"candidates": "direct", "members": 2},
        {},
        ["network.decoder.weight"],
    ),
    "unrolled": (pushed_world(wave), {"candidates": "unrolled"}, {}, ["continuations"]),
    "unrolled with noise": (
        pushed_world(driven, **NORMAL),
        {"candidates": "unrolled", "members": 2},
        {},
        ["noise", "network.noise"],
    ),
    "unrolled with a latent state": (
        COST,
        {"candidates": "unrolled"},
        {},
        ["network.lift.weight"],
    ),
    "unrolled under a policy": (
        pushed_world(wave),
        {"candidates": "unrolled"},
        {"continuation": BACK},
        ["behaviour.layers.0.weight"],
    ),
    "unrolled with noise under a policy": (
        pushed_world(driven, **NORMAL),
        {"candidates": "unrolled"},
        {"continuation": BACK},
        ["behaviour.layers.0.weight", "noise"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_scorer_agrees_with_the_model(case, tmp_path):
    world, settings, recipe, arrays = CASES[case]
    branches = cqm.collect(world, states=100, seed=1, **RECIPE, **recipe)
    settings = {"width": 8, "training": TRAINING, "draws": 4, "validation": 0.0, **settings}
    check(EffectModel(**settings).fit(branches), branches.observations, arrays, tmp_path)


def test_networks_without_a_gate_which_earlier_versions_saved_answer_as_before(tmp_path):
    branches = cqm.collect(pushed_world(wave), states=100, seed=1, **RECIPE)
    settings = {"candidates": "direct", "width": 8, "training": TRAINING, "validation": 0.0}
    model = EffectModel(**settings, members=1).fit(branches)
    predictor = model.predictor_
    sizes = (predictor.inputs.matrix.shape[1], 3, predictor.basis.shape[1])
    network = Network(*sizes, rank=2, width=8, num_controls=1, key=jax.random.key(0))
    stacked = jax.tree.map(lambda leaf: leaf[None], network)
    model.predictor_ = replace(predictor, network=stacked)
    inputs = jnp.asarray(predictor.inputs(branches.observations), jnp.float32)
    controls = jnp.asarray(predictor.controls, jnp.float32)
    expected = network.effects(inputs, controls=controls) @ predictor.basis.T
    np.testing.assert_allclose(model.effect(branches.observations), expected, rtol=1e-4, atol=1e-6)
    check(model, branches.observations, ["controls"], tmp_path)


def test_the_scorer_of_a_regression_on_products_agrees_with_it(tmp_path):
    branches = cqm.collect(pushed_world(product), states=400, horizon=1, warmup=(0, 0), seed=1)
    model = EffectModel(candidates="ridge").fit(branches)
    arrays = model.predictor_.arrays()
    inputs, waves = arrays["waves.frequencies"].shape[1:]
    assert arrays["waves.weights"].shape[2] == 1 + inputs + waves + inputs * (inputs + 1) // 2
    check(model, branches.observations, ["waves.weights"], tmp_path)


def check(model, observations, arrays, directory):
    effects = model.effect(observations)
    size = np.abs(effects).max()
    assert size > 0
    model.save(directory)
    stored = cqm.Scorer.load(directory)
    assert set(arrays) <= set(stored.arrays)
    np.testing.assert_array_equal(EffectModel.load(directory).effect(observations), effects)
    for scorer in (model.to_numpy(), stored):
        np.testing.assert_allclose(scorer.effect(observations), effects, rtol=0, atol=1e-5 * size)
    np.testing.assert_allclose(stored.effect(observations[0]), effects[0], atol=1e-5 * size)


def test_a_regression_needs_no_memory_for_all_states_at_once():
    branches = cqm.collect(pushed_world(wave), states=100, seed=1, **RECIPE)
    model = EffectModel(candidates="ridge").fit(branches)
    arrays = model.predictor_.arrays()
    inputs, num = arrays["waves.frequencies"].shape[1], 1024
    arrays["waves.frequencies"] = np.zeros((1, inputs, num))
    arrays["waves.phases"] = np.zeros((1, num))
    actions, *_, coordinates = arrays["waves.weights"].shape[1:]
    arrays["waves.weights"] = np.ones((1, actions, 1 + inputs + num, coordinates))
    model.predictor_ = restore_predictor(arrays)
    states = np.zeros((20_000, 2))
    for predict in (model.effect, model.to_numpy().effect):
        tracemalloc.start()
        predict(states)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60e6 < 8 * num * len(states)


def test_predicted_states_stay_within_the_same_bound():
    branches = cqm.collect(pushed_world(wave), states=40, seed=0, **RECIPE)
    model = EffectModel(candidates="unrolled", width=8, training=TRAINING).fit(branches)
    free = model.effect(branches.observations)
    model.predictor_ = restore_predictor({**model.predictor_.arrays(), "bound": np.array([0.5])})
    bounded = model.effect(branches.observations)
    assert np.abs(bounded - free).max() > 0.01
    np.testing.assert_allclose(model.to_numpy().effect(branches.observations), bounded, atol=1e-5)
