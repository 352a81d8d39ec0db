"""The transition network: unrolled as it would be by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cqm.models.network import named_arrays
from cqm.models.transition import (
    Transition,
    before_steps,
    single_step_loss,
    step_spread,
    unrolled_loss,
)
from cqm.quotient import center

HORIZON, STATES, MOVED, READOUTS, CONTEXT, NOISE = 3, 3, 2, 1, 2, 2
CODES = jnp.eye(3)
DISCOUNTS = jnp.array([1.0, 0.5, 0.25])


def network(**changes):
    sizes = {"num_moved": MOVED, "num_readouts": READOUTS, "num_noise": NOISE, "width": 8}
    settings = {**sizes, "has_latent": False, "key": jax.random.key(0), **changes}
    return Transition(STATES + CONTEXT, 3, STATES, **settings)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


INPUTS = normal(1, 4, STATES + CONTEXT)


def by_hand(model, inputs, actions, noise):
    """Coordinates of one branch of one state after each step."""
    state, context = inputs[:STATES], inputs[STATES:]
    reached = []
    for k, action in enumerate(actions):
        seen = jnp.concatenate([state, context])
        hidden = seen @ model.first.weight + model.first.bias + CODES[action] @ model.controls
        hidden = jax.nn.silu(hidden + noise[k] @ model.noise)
        for layer in model.hidden:
            hidden = hidden + jax.nn.silu(hidden @ layer.weight + layer.bias)
        change = hidden @ model.last.weight + model.last.bias
        state = state + change[:STATES]
        reached.append(jnp.concatenate([state, change[STATES:]]))
    return jnp.stack(reached)


def test_unrolling_is_stepping():
    model, actions = network(), np.array([[0, 1, 2], [2, 1, 2]])
    noise = normal(2, 4, 1, HORIZON, NOISE)
    controls = jnp.broadcast_to(CODES[actions], (4, 2, HORIZON, 3))
    reached = model.unroll(INPUTS, controls, jnp.broadcast_to(noise, (4, 2, HORIZON, NOISE)))
    assert reached.shape == (HORIZON, 4, 2, STATES + READOUTS)
    for n in range(4):
        for branch in range(2):
            expected = by_hand(model, INPUTS[n], actions[branch], noise[n, 0])
            np.testing.assert_allclose(reached[:, n, branch], expected, atol=1e-5)
    outputs = model.outputs(reached)
    np.testing.assert_array_equal(outputs, reached[..., jnp.array([0, 1, 3])])


def test_states_stay_within_the_bound_but_readouts_need_not():
    free, bounded = network(), network(bound=0.5)
    actions = jnp.broadcast_to(CODES[jnp.array([0, 1, 2])], (4, 1, HORIZON, 3))
    noise = normal(2, 4, 1, HORIZON, NOISE)
    reached = bounded.unroll(INPUTS, actions, noise)
    first = free.unroll(INPUTS, actions, noise)[0]
    assert jnp.abs(first[..., :STATES]).max() > 0.5
    np.testing.assert_array_equal(reached[0, ..., :STATES], first[..., :STATES].clip(-0.5, 0.5))
    np.testing.assert_array_equal(reached[0, ..., STATES:], first[..., STATES:])


def test_effects_are_means_over_continuations_and_noise():
    model, later = network(), np.array([[0, 1], [2, 2], [1, 0]])
    noise = normal(3, 3, HORIZON, NOISE)
    found = model.effects(model.branches(INPUTS, CODES, CODES[later], noise), DISCOUNTS)
    expected = np.zeros((4, 3, MOVED + READOUTS))
    for n in range(4):
        for action in range(3):
            for draw in range(3):
                reached = by_hand(model, INPUTS[n], [action, *later[draw]], noise[draw])
                expected[n, action] += DISCOUNTS @ model.outputs(reached) / 3
    np.testing.assert_allclose(found, center(expected), atol=1e-5)


@pytest.mark.parametrize("action", [0, 2])
def test_a_behaviour_that_always_takes_one_action_is_that_continuation(action):
    model, noise = network(), normal(3, 5, HORIZON, NOISE)
    always = lambda seen: jnp.where(jnp.arange(3) == action, 50.0, 0.0) + 0 * seen[..., :1]
    uniforms = jax.random.uniform(jax.random.key(4), (5, HORIZON - 1))
    found = model.effects(
        model.branches_under(INPUTS, CODES, CODES, always, uniforms, noise), DISCOUNTS
    )
    later = np.full((5, HORIZON - 1), action)
    expected = model.effects(model.branches(INPUTS, CODES, CODES[later], noise), DISCOUNTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_behaviour_sees_the_state_that_was_reached_and_the_context():
    model, seen = network(num_noise=0), []

    def behaviour(inputs):
        seen.append(inputs.shape)
        return jnp.zeros((*inputs.shape[:-1], 3))

    uniforms = jnp.full((5, HORIZON - 1), 0.5)  # the middle action of three
    found = model.effects(
        model.branches_under(INPUTS, CODES, CODES, behaviour, uniforms, None), DISCOUNTS
    )
    assert set(seen) == {(4, 5, 3, STATES + CONTEXT)}
    later = np.ones((1, HORIZON - 1), int)
    expected = model.effects(model.branches(INPUTS, CODES, CODES[later], None), DISCOUNTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_losses_vanish_for_the_network_that_made_the_data():
    model = network()
    controls = jnp.broadcast_to(CODES[:, None], (4, 3, HORIZON, 3))
    noise = normal(5, 4, HORIZON, NOISE)
    steps = model.unroll(INPUTS, controls, jnp.broadcast_to(noise[:, None], (4, 3, HORIZON, NOISE)))
    batch = {
        "inputs": INPUTS,
        "controls": controls,
        "noise": noise,
        "steps": jnp.moveaxis(steps, 0, 2),
        "uniform": jnp.array([0.1, 0.5, 0.9, 0.2]),
    }
    targets = jnp.eye(MOVED + READOUTS)
    ones = jnp.ones(STATES + READOUTS)
    assert unrolled_loss(model, batch, DISCOUNTS, targets) < 1e-10
    assert single_step_loss(model, batch, ones) < 1e-10
    wrong = {**batch, "noise": noise + 1}
    assert unrolled_loss(model, wrong, DISCOUNTS, targets) > 1e-8
    assert single_step_loss(model, wrong, ones) > 1e-8
    np.testing.assert_array_equal(
        before_steps(batch, STATES)[:, :, 0], np.repeat(INPUTS[:, None, :STATES], 3, axis=1)
    )


def test_single_steps_are_learned_from_one_branch_of_every_row():
    """Row by row, from the true state before each step; the arms are random."""
    model, arms, num = network(), 3, 4
    actions = np.random.default_rng(0).integers(3, size=(num, arms, HORIZON))
    batch = {
        "inputs": INPUTS,
        "controls": CODES[actions],
        "noise": normal(7, num, HORIZON, NOISE),
        "steps": normal(8, num, arms, HORIZON, STATES + READOUTS),
        "uniform": jnp.array([0.0, 0.99, 0.5, 0.3]),
    }
    spread = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
    weights = {name: np.asarray(values, float) for name, values in named_arrays(model).items()}
    silu = lambda values: values / (1 + np.exp(-values))
    errors = []
    for row, arm in [(0, 0), (1, 2), (2, 1), (3, 0)]:
        state, context = np.split(np.asarray(INPUTS[row], float), [STATES])
        for k in range(HORIZON):
            hidden = np.concatenate([state, context]) @ weights["first.weight"]
            hidden += weights["first.bias"] + weights["controls"][actions[row, arm, k]]
            hidden = silu(hidden + np.asarray(batch["noise"][row, k]) @ weights["noise"])
            for i in range(2):
                layer = hidden @ weights[f"hidden.{i}.weight"] + weights[f"hidden.{i}.bias"]
                hidden = hidden + silu(layer)
            change = hidden @ weights["last.weight"] + weights["last.bias"]
            reached = np.asarray(batch["steps"][row, arm, k], float)
            errors.append((np.append(state + change[:STATES], change[STATES:]) - reached) / spread)
            state = reached[:STATES]
    expected = np.mean(np.square(errors))
    np.testing.assert_allclose(single_step_loss(model, batch, spread), expected, rtol=1e-5)
    others = {**batch, "steps": batch["steps"].at[0, 1:].add(1.0)}  # not the arm of that row
    assert single_step_loss(model, others, spread) == single_step_loss(model, batch, spread)


def test_every_state_may_have_first_actions_of_its_own():
    model, noise = network(), normal(3, 2, HORIZON, NOISE)
    later = CODES[np.array([[0, 1], [2, 2]])]
    first = normal(5, 4, 2, 3)
    found = model.branches(INPUTS, first, later, noise)
    for n in range(4):
        alone = model.branches(INPUTS[n : n + 1], first[n], later, noise)
        np.testing.assert_allclose(found[:, n : n + 1], alone, atol=1e-5)


def test_a_coordinate_that_stays_as_it_is_does_not_outweigh_the_others():
    """A gain that differs between states but not within a branch."""
    steps = normal(6, 4, 3, HORIZON, STATES + READOUTS)
    gain = INPUTS[:, 2]
    steps = steps.at[..., 2].set(jnp.broadcast_to(gain[:, None, None], steps.shape[:3]))
    spread = np.asarray(step_spread({"inputs": INPUTS, "steps": steps}, STATES))
    change = steps[..., :STATES] - before_steps({"inputs": INPUTS, "steps": steps}, STATES)
    np.testing.assert_allclose(spread[:2], np.std(change[..., :2], axis=(0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(spread[3], np.std(steps[..., 3]), rtol=1e-5)
    assert 1e-3 <= spread[2] * (1 + 1e-6) < 0.1
