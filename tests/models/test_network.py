import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from cqm.models.network import Network, num_parameters
from cqm.quotient import center


@pytest.mark.parametrize(
    ("size", "num_actions", "expected"),
    [(69, 3, 78_757), (70, 5, 78_926), (81, 5, 80_433), (88, 5, 81_392)],
    ids=["cartpole", "reacher", "cheetah", "walker"],
)
def test_parameter_counts_are_the_papers(size, num_actions, expected):
    network = Network(size, num_actions, size, key=jax.random.key(0))
    assert num_parameters(network) == expected


@given(st.integers(0, 2**31 - 1), st.integers(2, 6), st.floats(0.01, 100))
def test_effects_are_centred_for_every_parameter_value_and_reference(seed, num_actions, scale):
    rng = np.random.default_rng(seed)
    network = Network(7, num_actions, 4, rank=3, width=16, key=jax.random.key(seed))
    network = jax.tree.map(lambda leaf: scale * leaf, network)
    inputs = jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)
    for reference in (None, rng.dirichlet(np.ones(num_actions)) * 0.9 + 0.1 / num_actions):
        effects = network.effects(inputs, reference)
        weights = np.full(num_actions, 1 / num_actions) if reference is None else reference
        mean = np.einsum("a,nad->nd", weights, np.asarray(effects, float))
        assert np.abs(mean).max() <= 1e-6 * max(float(jnp.abs(effects).max()), 1e-30)


def test_effects_are_the_centred_absolute_prediction():
    network = Network(7, 5, 4, key=jax.random.key(1))
    inputs = jax.random.normal(jax.random.key(2), (6, 7))
    np.testing.assert_allclose(
        network.effects(inputs), center(network(inputs)), rtol=1e-4, atol=1e-6
    )


def test_the_first_layer_of_the_head_sees_state_and_action_side_by_side():
    network = Network(3, 2, 4, rank=2, width=8, key=jax.random.key(0))
    x = jnp.array([0.3, -1.0, 2.0])
    first, second, third = network.encoder
    state = third(jax.nn.relu(second(jax.nn.relu(first(x)))))
    first, second, third = network.head
    for action in range(2):
        both = jnp.concatenate([state, network.embedding[action]])
        code = third(jax.nn.relu(second(jax.nn.relu(first(both)))))
        np.testing.assert_allclose(network.code(x)[action], code, rtol=1e-5, atol=1e-6)


def test_a_gate_multiplies_what_a_control_adds_to_the_first_layer_of_the_head():
    network = Network(3, 5, 4, rank=2, width=8, num_controls=2, gated=True, key=jax.random.key(0))
    x, controls = jnp.array([0.3, -1.0, 2.0]), jnp.array([[0.5, -1.0], [1.0, 0.2]])
    first, second, third = network.encoder
    state = third(jax.nn.silu(second(jax.nn.silu(first(x)))))
    factors = 1 + state @ network.gate.weight + network.gate.bias
    first, second, third = network.head
    for control, code in zip(controls, network.code(x, controls), strict=True):
        hidden = state @ first.weight[:8] + factors * (control @ first.weight[8:]) + first.bias
        expected = third(jax.nn.silu(second(jax.nn.silu(hidden))))
        np.testing.assert_allclose(code, expected, rtol=1e-5, atol=1e-6)
