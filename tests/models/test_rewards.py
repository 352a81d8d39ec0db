"""Rewards, events and measures of a branched model: integrated over futures, or refused."""

import pickle

import numpy as np
import pytest
from support.worlds import SeedWorld, market_world, pendulum_world

import cqm
from cqm.models.effect import EffectModel
from cqm.models.training import Training
from cqm.quotient import center
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

QUICK = Training(updates=800, batch_size=32, learning_rate=2e-3, schedule="cosine", chunk=250)
UNROLLED = {"candidates": "unrolled", "width": 32, "training": QUICK, "validation": 0.0}
SETTINGS = {"horizon": 6, "warmup": (0, 0), "per_step": True}


def sets(world, states=2000, **settings):
    settings = {**SETTINGS, **settings}
    branches = cqm.collect(world, states=states, seed=1, **settings)
    return branches, cqm.collect(world, states=200, draws=64, seed=2, **settings)


@pytest.fixture(scope="module", params=[0, 8], ids=["plain", "nuisance"])
def fitted(request):
    world = pendulum_world()
    if request.param:
        world = NuisanceWorld(world, Nuisance(dimension=request.param, seed=1))
    branches, held_out = sets(world)
    return world, EffectModel(**UNROLLED).fit(branches), held_out


def squared_error(found, truth):
    return np.sum((found - truth) ** 2) / np.sum(truth**2)


def expected(held_out, values_fn):
    """Centred means over the draws of a function of paths, `[n, actions]`."""
    values = values_fn(held_out.array("steps")).mean(axis=1)
    return center(values[..., None])[..., 0]


@pytest.mark.filterwarnings("ignore:on 4096 events")  # the projection is poor
def test_a_reward_that_no_projection_can_express_is_integrated(fitted):
    world, model, held_out = fitted
    query = cqm.Query.formula("-abs(speed)", world)
    truth = expected(held_out, lambda paths: query.reward_fn(paths) @ held_out.recipe.discounts)
    found = model.reward_advantage(held_out.observations, query)
    assert squared_error(found, truth) < 0.05
    assert squared_error(model.advantage(held_out.observations, query), truth) > 0.4
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-12)
    of_one = model.reward_advantage(held_out.observations[0], query.reward_fn)
    np.testing.assert_allclose(of_one, found[0], atol=1e-6)


def test_a_linear_reward_gets_the_answer_of_the_effects(fitted):
    world, model, held_out = fitted
    query = cqm.Query.named({world.native.feature_names[0]: 2.0}, world)
    states = held_out.observations[:5]
    np.testing.assert_array_equal(
        model.reward_advantage(states, query), model.advantage(states, query)
    )
    integrated = model.reward_advantage(states, lambda features: 2 * features[..., 0])
    np.testing.assert_allclose(integrated, model.advantage(states, query), atol=0.05)


def test_events_of_whole_paths(fitted):
    _, model, held_out = fitted
    fast = lambda paths: (paths[..., :2, 1] > 0.5).any(axis=-1)
    truth = expected(held_out, fast)
    found = model.event_effect(held_out.observations, fast)
    assert 0.9 < np.sum(found * truth) / np.sum(found**2) < 1.1
    assert squared_error(found, truth) < 0.3


def test_a_measure_has_no_mass_and_integrates_to_the_effect(fitted):
    world, model, held_out = fitted
    state = held_out.observations[3]
    effects = world.native_effects(model.transition_(state[None]).mean(axis=0))[0]
    for action, effect in enumerate(center(effects)):
        measure = model.effect_measure(state, action)
        assert abs(measure.mass) < 1e-12
        np.testing.assert_allclose(measure.mean_features()[:2], effect[:2], atol=1e-4)
        reward = lambda events: np.abs(events[..., 1])
        np.testing.assert_allclose(
            model.effect_measure(state, action, draws=256).integrate(reward),
            model.reward_advantage(state, reward)[action],
            atol=1e-9,
        )
    with pytest.raises(ValueError, match="one state"):
        model.effect_measure(held_out.observations, 0)
    for wrong in (17, -1, [0, 1]):
        with pytest.raises(ValueError, match="action must be the name or the index of one"):
            model.effect_measure(state, wrong)


def test_saved_and_loaded(fitted, tmp_path):
    _, model, held_out = fitted
    model.save(tmp_path)
    reward = lambda features: features[..., 0] ** 2
    states = held_out.observations[:5]
    np.testing.assert_array_equal(
        EffectModel.load(tmp_path).reward_advantage(states, reward),
        model.reward_advantage(states, reward),
    )


def test_recentred(fitted):
    _, model, held_out = fitted
    reference, reward = [0.5, 0.4, 0.1], lambda features: features[..., 0] ** 2
    states = held_out.observations[:5]
    found = model.recenter(reference).reward_advantage(states, reward)
    np.testing.assert_allclose(found @ reference, 0, atol=1e-12)
    measure = model.recenter(reference).effect_measure(states[0], 2, draws=256)
    np.testing.assert_allclose(measure.integrate(reward), found[0, 2], atol=1e-9)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda features: features, "finite rewards of shape"),
        (lambda features: 1.0, r"got shape \(\)"),
        (lambda features: features[..., 0] * np.nan, "not finite"),
        (lambda features: features[..., 99], "reward_fn raised IndexError"),
        (3, "reward_fn must be a function"),
    ],
)
def test_rewards_that_are_refused(fitted, reward, message):
    _, model, held_out = fitted
    with pytest.raises(ValueError, match=message):
        model.reward_advantage(held_out.observations[:2], reward)


def test_events_must_be_boolean(fitted):
    _, model, held_out = fitted
    with pytest.raises(ValueError, match="must return booleans of shape"):
        model.event_effect(held_out.observations[:2], lambda paths: paths[..., 0, 0])
    with pytest.raises(ValueError, match="must return booleans of shape"):
        model.event_effect(held_out.observations[:2], lambda paths: paths[..., 0] > 0)


@pytest.mark.filterwarnings("ignore:on")  # the projections are poor
def test_queries_are_functions_that_check_their_features(fitted):
    world, model, held_out = fitted
    native = np.tile([1.0, -2.0, 0.0], (2, 1))
    for query, expected in (
        (cqm.Query.formula("-abs(speed)", world), [-2.0, -2.0]),
        (cqm.Query.goal({"angle": 4.0, "speed": 2.0}, world), [-5.0, -5.0]),
    ):
        copied = pickle.loads(pickle.dumps(query))  # as for other processes
        np.testing.assert_allclose(copied.reward_fn(native), expected)
        with pytest.raises(ValueError, match="function of 3 features"):
            query.reward_fn(native[:, :2])
    events = np.random.default_rng(0).normal(size=(50, 1))
    other = cqm.Query.goal({"x": 0.0}, ["x"], events=events)
    with pytest.raises(ValueError, match="feature"):
        model.reward_advantage(held_out.observations[:2], other)
    with pytest.raises(ValueError, match="needs the error of its projection"):
        cqm.Query(np.ones(3), reward_fn=lambda features: features[..., 0])


def test_no_states(fitted):
    _, model, held_out = fitted
    none = held_out.observations[:0]
    assert model.reward_advantage(none, lambda features: features[..., 0]).shape == (0, 3)


@pytest.mark.filterwarnings("ignore:on 50 events")
def test_a_query_that_knows_only_samples_is_refused(fitted):
    world, model, held_out = fitted
    size = len(world.native.feature_names)
    events = np.random.default_rng(0).normal(size=(50, size))
    query = cqm.Query.samples(events, np.abs(events[:, 0]), world)
    with pytest.raises(ValueError, match="knows its reward only on samples"):
        model.reward_advantage(held_out.observations[:2], query)


def test_a_price_that_shapes_effects_is_part_of_the_futures():
    branches, held_out = sets(market_world(price_matters=True))
    model = EffectModel(**UNROLLED).fit(branches)
    worth = lambda features: np.maximum(features[..., 0] * features[..., 1], 0)
    truth = expected(held_out, lambda paths: worth(paths) @ held_out.recipe.discounts)
    assert squared_error(model.reward_advantage(held_out.observations, worth), truth) < 0.1
    [futures] = model.transition_.futures(held_out.observations[:2])
    prices = futures[..., 1]  # shared by all actions, and different in every draw
    np.testing.assert_allclose(prices, np.broadcast_to(prices[:, :, :1], prices.shape), atol=1e-6)
    assert len(np.unique(prices[0, :, 0, -1].round(9))) == 64


@pytest.mark.parametrize("level", [0.0, 1e4])
def test_a_reward_of_futures_that_are_not_learned_is_refused_by_name(level):
    branches, held_out = sets(market_world(price_matters=False, level=level))
    model = EffectModel(**{**UNROLLED, "updates": 10}).fit(branches)
    states = held_out.observations[:2]
    for reward in (
        lambda features: features[..., 0] * features[..., 1],
        lambda features: features[..., 0] * (features[..., 1] < level - 0.5),
        lambda features: np.where(features[..., 1] > level + 1.5, features[..., 0], 0),
    ):
        with pytest.raises(ValueError, match="the futures of the features price are not learned"):
            model.reward_advantage(states, reward)
    with pytest.raises(ValueError, match="price are not learned"):
        model.event_effect(states, lambda paths: (paths[..., 1] > level).any(axis=-1))
    assert model.reward_advantage(states, lambda features: features[..., 0] ** 2).shape == (2, 3)
    assert np.isnan(model.effect_measure(states[0], 1).events[:, 1]).all()


def test_a_transition_that_lost_the_comparison_warns_and_is_saved_with_its_levels(tmp_path):
    branches, _ = sets(pendulum_world(), states=400)
    model = EffectModel(candidates=("ridge", "unrolled"), width=8, updates=5).fit(branches)
    assert model.method_ == "ridge"
    model.save(tmp_path)
    states, answers = branches.observations[:3], []
    for one in (model, EffectModel.load(tmp_path)):
        with pytest.warns(UserWarning, match="answers from its futures may mislead") as caught:
            answers.append(one.reward_advantage(states, lambda features: features[..., 0] ** 2))
        with pytest.warns(UserWarning, match="answers from its futures may mislead") as again:
            one.effect_measure(states[0], 1)
        assert {warning.filename for warning in (*caught, *again)} == {__file__}
    np.testing.assert_array_equal(*answers)


def test_models_that_cannot_sample_futures_say_why():
    reward = lambda features: features[..., 0]
    branches, _ = sets(SeedWorld(limit=0.0), states=300)
    model = EffectModel(**{**UNROLLED, "updates": 10}).fit(branches)
    with pytest.raises(ValueError, match="noise is given as seeds"):
        model.reward_advantage(branches.observations[:2], reward)
    without = EffectModel(candidates="ridge").fit(branches)
    with pytest.raises(ValueError, match="per_step=True"):
        without.reward_advantage(branches.observations[:2], reward)
    with pytest.raises(ValueError, match="not fitted"):
        EffectModel().reward_advantage(branches.observations[:2], reward)


def cast_die(num_states, num_actions, seed):
    """A finite MDP whose next state is looked up by state, action and the cast of a four-sided die.

    Returns the table `[states, actions, sides]` of next states, and a world that shows the state
    and the die as indicators.
    """
    table = np.random.default_rng(seed).integers(num_states, size=(num_states, num_actions, 4))

    def step(state, action, noise):
        chosen = state.argmax(axis=1), action[:, 0].astype(int), noise.argmax(axis=1)
        return np.eye(num_states)[table[chosen]]

    world = FunctionWorld(
        step,
        lambda num, rng: np.eye(num_states)[rng.integers(num_states, size=num)],
        exogenous=lambda num, horizon, rng: np.eye(4)[rng.integers(4, size=(num, horizon))],
        candidate_actions=np.arange(num_actions)[:, None],
    )
    return table, world


def test_sampled_measures_converge_to_the_exact_ones_of_a_finite_mdp():
    num_states, num_actions, horizon = 4, 3, 4
    table, world = cast_die(num_states, num_actions, seed=3)
    law = np.eye(num_states)[table].mean(axis=2)  # [states, actions, next states]
    exact = cqm.measures.effect_measure(
        cqm.measures.successor_measure(cqm.measures.FiniteMDP(law), discount=0.95, horizon=horizon)
    )
    size = cqm.measures.total_variation(exact).mean()

    def distance(states, draws):
        """Mean total variation between sampled and exact measures, relative to their size."""
        branches = cqm.collect(
            world, states=states, horizon=horizon, warmup=(0, 0), per_step=True, seed=1
        )
        model = EffectModel(**UNROLLED).fit(branches)
        distances = []
        for state, action in np.ndindex(num_states, num_actions):
            measure = model.effect_measure(np.eye(num_states)[state], action, draws=draws)
            assert abs(measure.mass) < 1e-12
            cells = measure.events.argmax(axis=1)  # futures are continuous: take the nearest state
            found = np.bincount(cells, weights=measure.weights, minlength=num_states)
            distances.append(cqm.measures.total_variation(found - exact[state, action]))
        return np.mean(distances) / size

    few, many = distance(states=40, draws=16), distance(states=1500, draws=512)
    assert many < 0.1
    assert many < few / 3


def test_a_pole_falls_within_the_horizon():
    """Termination of a Gymnasium environment is a feature, and the state after it is absorbing."""
    world = cqm.GymWorld("CartPole-v1")
    settings = {"horizon": 8, "warmup": (0, 15), "per_step": True}
    branches = cqm.collect(world, states=1500, seed=1, **settings)
    test = cqm.collect(world, states=150, draws=32, seed=2, **settings)
    model = EffectModel(**{**UNROLLED, "width": 64, "updates": 2000}).fit(branches)
    falls = lambda paths: (paths[..., -1] > 0.5).any(axis=-1)
    truth = expected(test, falls)
    found = model.event_effect(test.observations, falls)
    assert np.abs(truth).max() > 0.2
    assert 0.85 < np.sum(found * truth) / np.sum(found**2) < 1.15
