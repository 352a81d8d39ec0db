"""Every method of the benchmark on a world small enough to know the answer."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.finite_world import (
    DISCOUNT,
    LAWS,
    chain_world,
    collected,
    directions,
    relative_error,
    task as make_task,
)

import cqm
from cqm import storage
from cqm.decisions import ties
from cqm.experiments.methods import METHODS, RIVALS, Task, fitting, method_of
from cqm.experiments.methods.cocoa import contributed
from cqm.experiments.methods.transitions import Transitions
from cqm.experiments.methods.vector import for_action, mean_over_actions
from cqm.experiments.protocol import PAPER, preset
from cqm.measures import FiniteMDP, integrate, outcome_posterior, successor_measure
from cqm.models import estimator
from cqm.models.checkpoint import Checkpoint
from cqm.models.network import Network, num_parameters
from cqm.models.training import Trained, Training
from cqm.quotient import center
from cqm.worlds.function import FunctionWorld

QUICK = Training(
    updates=400, batch_size=32, learning_rate=3e-3, schedule="cosine", chunk=200, seed=3
)
LONGER = replace(QUICK, updates=1000)  # ten target networks: each looks one step further ahead
TINY = Training(updates=30, batch_size=16, chunk=10, seed=3)
TURN = 0.9 * np.array([[np.cos(0.5), np.sin(0.5)], [-np.sin(0.5), np.cos(0.5)]])
PUSH = np.array([[0.3, -0.1], [0.0, 0.0], [0.1, 0.3]])  # [actions, features]


def linear_world(**changes):
    """o' = o T + push of the action, so that outcomes are linear in o and known."""
    return FunctionWorld(
        step=lambda state, action, exogenous: state @ TURN + action,
        initial=lambda num, rng: rng.uniform(-1, 1, (num, 2)),
        candidate_actions=PUSH,
        feature_names=("x", "y"),
        name="linear",
        **{"observation_names": ("x", "y"), **changes},
    )


def linear_outcomes(observations, horizon):
    """Expected discounted sums under a uniform continuation, `[n, actions, features]`."""
    reached = (observations @ TURN)[:, None] + PUSH
    total = reached.copy()
    for k in range(1, horizon):
        reached = reached @ TURN + PUSH.mean(axis=0)
        total += DISCOUNT**k * reached
    return total


@pytest.fixture(scope="module")
def chain():
    return collected(chain_world(), 4000, 1)


@pytest.fixture(scope="module")
def every_state():
    """Branches that start in each state of the chain, for asking."""
    branches = collected(chain_world(), 40, 2)
    return branches, branches.observations.argmax(axis=1)


@pytest.fixture(scope="module")
def linear():
    return collected(linear_world(), 2000, 1)


@pytest.fixture(scope="module")
def linear_test():
    return collected(linear_world(), 200, 2)


def task(branches, training=QUICK, **changes):
    return make_task(branches, training, **changes)


def fitted(name, *arguments, **changes):
    return METHODS[name].fit(task(*arguments, **changes))


def test_successor_features_are_those_of_the_finite_mdp(chain, every_state):
    branches, states = every_state
    predictor = fitted("sf", chain, LONGER)
    exact = successor_measure(FiniteMDP(LAWS), discount=DISCOUNT)[states]
    assert np.abs(predictor.vectors(branches) - exact).max() < 0.15


def test_task_td_values_are_those_of_the_finite_mdp(chain, every_state):
    branches, states = every_state
    predictor = fitted("task-td", chain, LONGER)
    weights = directions(16, 3, 2)
    exact = successor_measure(FiniteMDP(LAWS), discount=DISCOUNT)[states]
    exact = np.swapaxes(exact @ weights.T, 1, 2)
    assert relative_error(predictor.values(branches, weights), exact) < 0.02


@pytest.mark.parametrize("name", ["world", "world-ensemble"])
def test_world_models_roll_linear_dynamics_forward(name, linear, linear_test):
    predictor = fitted(name, linear, conditioning="whiten")
    exact = linear_outcomes(linear_test.observations, 5)
    assert relative_error(predictor.vectors(linear_test), exact) < 1e-3
    assert relative_error(center(predictor.vectors(linear_test)), center(exact)) < 0.02


@pytest.mark.parametrize("conditioning", ["effect", "project"])
def test_direct_values_are_those_of_linear_outcomes(linear, linear_test, conditioning):
    predictor = fitted("direct", linear, conditioning=conditioning)
    weights = directions(16, 2, 2)
    exact = np.swapaxes(linear_outcomes(linear_test.observations, 5) @ weights.T, 1, 2)
    assert relative_error(predictor.values(linear_test, weights), exact) < 0.02


def test_contribution_coefficients_give_the_advantages_of_the_finite_mdp():
    """Exact posteriors over all that can follow: then the estimate has no error."""
    measures = successor_measure(FiniteMDP(LAWS), discount=DISCOUNT, horizon=4)
    reward = np.array([1.0, -0.5, 2.0])
    posterior = np.swapaxes(outcome_posterior(measures), 1, 2)  # [states, events, actions]
    visits = measures.mean(axis=1)  # discounted, under the uniform first action
    outcomes = np.broadcast_to(reward, visits.shape)
    advantages = contributed(posterior, outcomes, visits)
    exact = integrate(center(measures), reward)
    np.testing.assert_allclose(advantages, exact, atol=1e-6)
    shifted = contributed(posterior, outcomes + 7.0, visits)
    np.testing.assert_allclose(shifted, exact, atol=1e-5)  # a constant earns no credit


def test_cocoa_learns_who_did_it_and_what_to_do(chain, every_state):
    one_step = collected(chain_world(), 4000, 1, horizon=1)
    predictor = fitted("cocoa", one_step)
    branches, states = every_state
    weights = directions(16, 3, 2)
    measures = successor_measure(FiniteMDP(LAWS), discount=DISCOUNT, horizon=1)
    values = np.swapaxes(measures[states] @ weights.T, 1, 2)
    scores = predictor.values(branches, weights)
    clear = np.ptp(values, axis=-1) > 0.1
    assert clear.mean() > 0.3
    assert np.mean((scores.argmax(-1) == values.argmax(-1))[clear]) > 0.95


@pytest.fixture
def untrained(monkeypatch):
    """Methods as they are before the first update, without compiling a training."""

    def unchanged(model, *_, **__):
        return Trained(model, np.zeros(1))

    for module, name in (
        (fitting, "train"),
        (fitting, "train_members"),
        (estimator, "train_members"),
    ):
        monkeypatch.setattr(module, name, unchanged)


@pytest.mark.usefixtures("untrained")
def test_the_three_vector_models_have_equally_many_parameters(linear):
    counts = {
        "cqm": num_parameters(fitted("cqm", linear, TINY).model.predictor_.network),
        "world": num_parameters(fitted("world", linear, TINY).network),
        "sf": num_parameters(fitted("sf", linear, TINY).network),
    }
    assert len(set(counts.values())) == 1
    network = Network(2, 3, 2, rank=8, width=128, key=jax.random.key(0))
    assert counts["cqm"] == num_parameters(network)


def test_one_action_at_a_time_is_the_same_network():
    network = Network(5, 3, 4, key=jax.random.key(0))
    inputs = jax.random.normal(jax.random.key(1), (7, 5))
    every = network(inputs)
    for action in range(3):
        one = for_action(network, inputs, jnp.broadcast_to(network.embedding[action], (7, 16)))
        np.testing.assert_allclose(one, every[:, action], atol=1e-6)
    np.testing.assert_allclose(mean_over_actions(network, inputs), every.mean(axis=1), atol=1e-6)


def test_transitions_are_those_of_the_branches():
    """In the linear world every row can be checked against the dynamics."""
    given = task(collected(linear_world(), 50, 1, draws=2), TINY)
    rows = Transitions.of(given).window(0)
    before, after = (np.asarray(rows[name], float) for name in ("before", "after"))
    pushed = before @ TURN + PUSH[np.asarray(rows["action"])]
    np.testing.assert_allclose(after, pushed, atol=1e-6)
    again = Transitions.of(given).window(0)
    other = Transitions.of(given).window(1)
    np.testing.assert_array_equal(rows["before"], again["before"])
    assert not np.array_equal(rows["before"], other["before"])


def test_oracle_zero_and_random(linear, linear_test):
    weights = directions(16, 2, 2)
    truth = np.swapaxes(linear_test.effects().mean(axis=1) @ weights.T, 1, 2)
    oracle = fitted("oracle", linear, TINY).values(linear_test, weights)
    np.testing.assert_array_equal(oracle.argmax(-1), truth.argmax(-1))
    zero = fitted("zero", linear, TINY)
    assert (ties(zero.values(linear_test, weights)) == 3).all()
    chance = fitted("random", linear, TINY)
    scores = chance.values(linear_test, weights)
    assert np.mean(scores.argmax(-1) == truth.argmax(-1)) == pytest.approx(1 / 3, abs=0.03)
    np.testing.assert_array_equal(scores, chance.values(linear_test, weights))
    assert chance.vectors(linear_test) is None


def test_an_interrupted_fit_continues_to_the_same_predictions(
    linear, linear_test, tmp_path, monkeypatch
):
    """Task-TD has all that must be found again: a target network and windows of transitions."""
    weights = directions(4, 2, 2)
    whole = fitted("task-td", linear, TINY).values(linear_test, weights)
    written, write = [], Checkpoint.write

    def interrupted(self, path):
        write(self, path)
        written.append(self.step)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted("task-td", linear, TINY, directory=tmp_path)
    resumed = fitted("task-td", linear, TINY, directory=tmp_path)
    assert written == [10, 20, 30]  # chunks of 10 of the 30 updates
    np.testing.assert_array_equal(resumed.values(linear_test, weights), whole)
    with pytest.raises(
        ValueError, match=r"(?s)with different settings or data.*sha256.observations"
    ):
        fitted("task-td", linear[:100], TINY, directory=tmp_path)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_answers_in_the_agreed_shapes(name):
    branches = collected(linear_world(), 60, 1)
    predictor, test = fitted(name, branches, TINY, conditioning="effect"), branches[:7]
    values = predictor.values(test, directions(4, 2, 2))
    assert values.shape == (7, 4, 3)
    assert np.isfinite(values).all()
    vectors = predictor.vectors(test)
    assert (vectors is not None) == METHODS[name].predicts_vectors
    assert vectors is None or vectors.shape == (7, 3, 2)


def test_tasks_that_do_not_fit_are_refused(linear):
    with pytest.raises(ValueError, match=r"rewards must be \[rewards, 2 features\]"):
        Task(linear, np.ones((32, 3)), TINY)
    pairs = collected(linear_world(), 20, 1, arms=2)
    with pytest.raises(ValueError, match="need families with all 3 arms; these have 2"):
        task(pairs)
    with pytest.raises(ValueError, match="needs training settings with a seed"):
        task(linear, Training())
    world = linear_world(
        observation_names=("u", "v"), features=lambda state, action, exogenous, after: 2 * after
    )
    with pytest.raises(ValueError, match="needs features that are the observation"):
        fitted("world", collected(world, 20, 1), TINY)


def test_a_name_is_a_method_and_the_conditioning_of_its_input():
    assert method_of("world+effect") == (METHODS["world"], "effect")
    assert method_of("default") == (METHODS["default"], "none")
    for name in ("dreamer", "cqm+magic", "cqm+", "world+none", "default+effect", "zero+whiten"):
        with pytest.raises(
            ValueError, match=f"unknown method {name!r}; available:".replace("+", ".")
        ):
            method_of(name)


def test_the_registry_is_read_without_jax():
    code = "import sys, cqm.experiments.methods; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


V01 = Path(__file__).parents[1] / "data" / "v0.1"


@pytest.fixture(scope="module")
def smoke():
    """Task and test set of the benchmark at smoke size, as for `methods.safetensors`."""
    protocol = preset("smoke")
    world = cqm.load_world("cartpole-swingup", nuisance=protocol.nuisance, seed=7)
    sets = {
        name: cqm.collect(world, show_progress=False, **recipe)
        for name, recipe in protocol.branch_sets(7).items()
    }
    rewards, held_out = map(world.mixed_weights, protocol.rewards(len(world.native.feature_names)))
    training = protocol.training.with_seed(7)
    given = Task(sets["training"], rewards, training, show_progress=False)
    return given, sets["test"], held_out, storage.read_arrays(V01 / "methods.safetensors")[0]


# The default model has changed, and there were no rivals.
AS_IN_VERSION_0_1 = {*METHODS, *(f"{m}+effect" for m in (*PAPER, "cqm-full-rank"))} - {
    "default",
    *RIVALS,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(AS_IN_VERSION_0_1))
def test_every_method_predicts_what_version_0_1_did(smoke, name):
    given, test, held_out, expected = smoke
    method, conditioning = method_of(name)
    predictor = method.fit(replace(given, conditioning=conditioning))
    num = len(expected[f"{name}/values"])
    found = {f"{name}/values": predictor.values(test, held_out)[:num]}
    if method.predicts_vectors:
        found[f"{name}/outcomes"] = predictor.vectors(test)[:num]
    for key, values in found.items():
        # Not bit for bit, because another processor or thread count rounds differently, and
        # training amplifies that: two processors differed by 4e-5 of the scale.
        scale = np.abs(expected[key]).max()
        np.testing.assert_allclose(values, expected[key], rtol=1e-4, atol=1e-4 * scale)
