"""The hindsight model: convergence, its ratio, rewards, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
from support.finite import DISCOUNT, HORIZON, Problem, rotating, slope
from support.worlds import excess, pendulum_world

import cqm
from cqm.logs.dataset import Logs
from cqm.measures import effect_measure, integrate, successor_measure
from cqm.models.hindsight import HindsightModel
from cqm.models.training import Training

QUICK = Training(updates=300, batch_size=256, learning_rate=4e-3, schedule="cosine", chunk=100)


pytestmark = pytest.mark.filterwarnings("ignore:effects are set to zero")  # in those of a nuisance


@pytest.fixture(scope="module")
def problems():
    return [Problem.random(np.random.default_rng(seed)) for seed in range(6)]


@pytest.fixture(scope="module")
def branched():
    world, recipe = pendulum_world(), {"horizon": 4, "warmup": (0, 0)}
    branches = cqm.collect(world, states=6000, per_step=True, seed=1, **recipe)
    held_out = cqm.collect(world, states=200, draws=32, seed=2, **recipe)
    return Logs.from_branches(branches, rng=np.random.default_rng(0)), held_out


@pytest.fixture(scope="module")
def model(branched):
    return HindsightModel(width=32, training=QUICK).fit(branched[0])


def error(model, problem):
    return np.sqrt(
        np.mean((model.effect(problem.observations) - problem.effects) ** 2)
        / np.mean(problem.effects**2)
    )


@pytest.mark.parametrize("baseline", [True, False])
def test_tabular_error_falls_with_the_root_of_the_trajectories(problems, baseline):
    make = lambda: HindsightModel(method="tabular", baseline=baseline)
    assert -0.6 < slope(make, problems, [1000, 4000, 16000], seed=1) < -0.4


def test_a_baseline_removes_noise_and_no_effect(problems):
    rng = np.random.default_rng(2)
    errors = {True: [], False: []}
    for problem in problems:
        for _ in range(5):
            logs = problem.logs(1000, rng)
            # A common signal that no action moves, different in every state.
            common = 20 * logs.observations[:, None] + logs.features
            noisy = Logs.from_arrays(
                logs.observations,
                logs.actions,
                common,
                propensities=logs.propensities,
                discount=DISCOUNT,
            )
            for baseline in errors:
                model = HindsightModel(method="tabular", baseline=baseline).fit(noisy)
                errors[baseline].append(error(model, problem))
    assert np.mean(errors[True]) < 0.5 * np.mean(errors[False])


@pytest.mark.filterwarnings("ignore:poor coverage")  # it is right
def test_wrong_propensities_are_visible(problems):
    logs = problems[0].logs(30_000, np.random.default_rng(3))
    assert error(HindsightModel(method="tabular").fit(logs), problems[0]) < 0.1
    wrong = logs.with_propensities(np.array([0.8, 0.1, 0.1]))
    assert error(HindsightModel(method="tabular").fit(wrong), problems[0]) > 0.3


def test_rewards_that_are_not_linear(problems):
    """Of a reward per state, through samples of the reference measure."""
    problem = problems[1]
    logs = problem.logs(40_000, np.random.default_rng(4))
    model = HindsightModel(method="tabular").fit(logs)
    by_state = np.array([0.0, 3.0, -1.0, 0.5])
    first = problem.features[:, 0]

    def reward(features):
        return by_state[np.abs(features[..., :1] - first).argmin(axis=-1)]

    measures = successor_measure(problem.mdp, discount=DISCOUNT, horizon=HORIZON)
    exact = integrate(effect_measure(measures), by_state)
    found = model.reward_advantage(problem.observations, reward)
    assert np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)) < 0.1
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-12)


def test_the_classifier_finds_expected_effects(model, branched):
    assert excess(model, branched[1]) < 0.2
    assert "held-out cross-entropy" in model.summary()


def test_without_knowing_the_propensities(branched):
    logs, held_out = branched
    model = HindsightModel(width=32, training=QUICK).fit(logs.with_propensities(None))
    assert excess(model, held_out) < 0.25
    assert "propensities were unknown and estimated by regression on the state" in model.notes_


def test_saved_and_loaded(model, branched, tmp_path):
    observations = branched[1].observations[:20]
    model.save(tmp_path)
    loaded = HindsightModel.load(tmp_path)
    np.testing.assert_array_equal(loaded.effect(observations), model.effect(observations))
    speed = model.reward_advantage(observations, lambda features: features[..., 1])
    assert speed.shape == (20, 3)
    with pytest.raises(ValueError, match="a loaded model has no ratios"):
        loaded.reward_advantage(observations, lambda features: features[..., 1])


def test_a_table_needs_every_action_in_every_state():
    states = np.repeat([0.0, 1.0], 300)[:, None]
    actions = np.where(states[:, 0] == 0, np.arange(600) % 2, 1)
    logs = Logs.from_arrays(states, actions, actions[:, None, None] + 0.0)
    with (
        pytest.warns(UserWarning, match="poor coverage"),
        pytest.raises(ValueError, match="action 0 never occurs among the 300 decisions in state 1"),
    ):
        HindsightModel(method="tabular").fit(logs)
    with pytest.raises(ValueError, match="method must be"):
        HindsightModel(method="magic").fit(logs)


def test_logs_with_a_rhythm_are_as_good_as_others():
    model = HindsightModel(width=32, training=QUICK).fit(rotating(2000, 2))
    found = model.effect([[0.0], [1.0]], action=1, baseline=0)
    np.testing.assert_allclose(found, [[1.0], [2.0]], atol=0.3)


def test_the_correction_removes_the_bias_of_a_poor_classifier(branched):
    logs, held_out = branched
    untrained = replace(QUICK, updates=1)
    plain, corrected = (
        HindsightModel(width=32, training=untrained, corrected=corrected).fit(logs)
        for corrected in (False, True)
    )
    assert excess(plain, held_out) > 0.8
    assert excess(corrected, held_out) < 0.2


def test_a_reward_of_the_spread_needs_all_directions_or_the_correction():
    rng = np.random.default_rng(0)
    actions, noise = rng.integers(2, size=2000), rng.normal(size=(2000, 2))
    features = np.stack([actions + 2 * noise[:, 0], (1 + 2 * actions) * noise[:, 1]], axis=1)
    logs = Logs.from_arrays(
        rng.normal(size=(2000, 1)), actions, features[:, None], feature_names=["u", "v"]
    )
    states, square = np.zeros((1, 1)), lambda features: features[..., 1] ** 2
    model = HindsightModel(width=32, training=QUICK, corrected=False).fit(logs)
    with pytest.warns(UserWarning, match="distinguished along 1 of 2 directions"):
        blind = model.reward_advantage(states, square)
    for options in ({"weighting": False, "corrected": False}, {}):
        model = HindsightModel(width=32, training=QUICK, **options).fit(logs)
        found = model.reward_advantage(states, square)
        np.testing.assert_array_equal(model.reward_advantage(states[0], square), found[0])
        assert found[0, 1] - found[0, 0] > 5  # in truth 8
    assert abs(blind[0, 1] - blind[0, 0]) < 2
    for reward, message in (
        (lambda features: features, "finite rewards of shape"),
        (lambda features: 1.0, r"got shape \(\)"),
        (lambda features: features[..., 0] * np.nan, "2000 not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            model.reward_advantage(states, reward)
    with pytest.raises(ValueError, match="observations"):
        model.reward_advantage(np.zeros((1, 5)), square)
