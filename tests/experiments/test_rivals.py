"""The rivals beyond the paper, each against the exact answer of a finite MDP."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.finite_world import (
    DISCOUNT,
    LAWS,
    chain_world,
    collected,
    fitted,
    relative_error,
)

from cqm.experiments.methods import METHODS, RIVALS
from cqm.experiments.methods.direct_advantage import AdvantageNetwork, with_remaining
from cqm.experiments.methods.one_step_fb import density_loss
from cqm.experiments.methods.recurrent_world import (
    CLASSES,
    GROUPS,
    RecurrentWorld,
    divergence,
    probabilities,
    sampled,
)
from cqm.experiments.methods.whole_branches import later_actions, one_branch_each
from cqm.experiments.protocol import PAPER, SEEDS, preset
from cqm.measures import FiniteMDP, successor_measure
from cqm.models.network import Network, num_parameters
from cqm.models.training import Training
from cqm.quotient import center

HORIZON = 5


def settings(updates, batch_size, learning_rate):
    sizes = {"updates": updates, "batch_size": batch_size, "learning_rate": learning_rate}
    return Training(**sizes, schedule="cosine", chunk=200, seed=3)


QUICK = settings(600, 64, 3e-3)
# The largest squared error of the effects, as a share of their size, and the training it takes.
# Predicting no effects gives 1. Methods that cannot cancel what branches share need more training.
TOLERANCES = {
    "ridge": (0.005, QUICK),
    "fourier-ridge": (0.005, QUICK),
    "paired-sf": (0.01, QUICK),
    "one-step-fb": (0.015, QUICK),
    "dae": (0.03, settings(600, 256, 3e-3)),
    "latent-world": (0.015, settings(1_500, 128, 1e-3)),
    "recurrent-world": (0.04, settings(1_500, 128, 1e-3)),
}


@pytest.fixture(scope="module")
def chain():
    return collected(chain_world(), 4000, 1)


@pytest.fixture(scope="module")
def every_state():
    """Branches that start in each state of the chain, for asking."""
    branches = collected(chain_world(), 40, 2)
    return branches, branches.observations.argmax(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_effects_are_those_of_the_finite_mdp(name, chain, every_state, monkeypatch):
    # The chain is far noisier than the benchmark's worlds, so more sampled futures are needed.
    monkeypatch.setattr(RecurrentWorld, "sequences", 512)
    branches, states = every_state
    tolerance, training = TOLERANCES[name]
    vectors = fitted(name, chain, training).vectors(branches)
    exact = successor_measure(FiniteMDP(LAWS), discount=DISCOUNT, horizon=HORIZON)[states]
    assert relative_error(center(vectors), center(exact)) < tolerance
    if METHODS[name].predicts == "outcomes":
        assert relative_error(vectors, exact) < 0.003
    else:
        np.testing.assert_allclose(vectors.sum(axis=1), 0, atol=1e-5)


def test_the_density_loss_is_least_at_the_successor_measure():
    """Exact expectations: every state equally often, with futures in exact proportions."""
    measure = successor_measure(FiniteMDP(LAWS), discount=DISCOUNT, horizon=HORIZON)
    chances = measure / measure.sum(axis=-1, keepdims=True)  # [states, actions, states]
    marginal = chances.mean(axis=(0, 1))
    counts = np.rint(1_000 * chances).astype(int)
    counts[..., 0] += 1_000 - counts.sum(axis=-1)
    reached = np.array([[np.repeat(np.arange(3), n) for n in row] for row in counts])
    order = np.random.default_rng(0).permuted(reached, axis=-1)  # [states, actions, futures]
    futures = np.moveaxis(order, -1, 0).reshape(-1, 2)  # [futures · states, actions]
    states = np.tile(np.arange(3), 1_000)

    # An orthonormal basis under the marginal, apart from the constant.
    whole = np.linalg.qr(np.sqrt(marginal)[:, None] * np.c_[np.ones(3), np.eye(3)[:, :2]])[0]
    basis = (whole / np.sqrt(marginal)[:, None])[:, 1:]
    forward = np.einsum("sat,td->sad", chances, basis)

    def loss(forward, basis):
        return float(density_loss(jnp.asarray(forward[states]), jnp.asarray(basis[futures])))

    best, rng = loss(forward, basis), np.random.default_rng(1)
    density = 1 + forward @ basis.T
    np.testing.assert_allclose(density * marginal, chances, atol=1e-9)
    for size in (0.05, 0.3):
        moved = forward + size * rng.standard_normal(forward.shape)
        assert loss(moved, basis) > best + 0.1 * size**2
        assert loss(forward, basis + size * rng.standard_normal(basis.shape)) > best


def test_one_branch_per_family_is_a_branch_of_that_family():
    steps = np.arange(4 * 3 * 2).reshape(4, 3, 2, 1).astype(np.float32)
    batch = {
        "start": jnp.arange(4.0)[:, None],
        "steps": jnp.asarray(steps),
        "later": jnp.full((4, 2), 7),
    }
    start, actions, taken = one_branch_each(batch, jax.random.key(0))
    arms = np.asarray(actions[:, 0])
    np.testing.assert_array_equal(actions[:, 1], 7)
    np.testing.assert_array_equal(taken, steps[np.arange(4), arms])
    np.testing.assert_array_equal(start[:, 0], np.arange(4))
    drawn = [one_branch_each(batch, jax.random.key(k))[1][:, 0] for k in range(300)]
    shares = np.bincount(np.ravel(drawn), minlength=3) / 1_200
    np.testing.assert_allclose(shares, 1 / 3, atol=0.05)


def test_later_actions_are_balanced_at_every_step():
    actions = later_actions(5, 12, 20, seed=3)
    assert actions.shape == (20, 11)
    for step in actions.T:
        assert np.bincount(step, minlength=5).tolist() == [4] * 5
    assert not np.array_equal(actions, later_actions(5, 12, 20, seed=4))


def test_direct_advantages_explain_a_return_by_all_its_actions():
    network = AdvantageNetwork(3, 2, 4, key=jax.random.key(0))
    inputs = jax.random.normal(jax.random.key(1), (6, 5, 3))
    actions = jax.random.randint(jax.random.key(2), (6, 5), 0, 2)
    discounts = 0.7 ** jnp.arange(5)
    every = network.advantages.effects(with_remaining(inputs))  # [n, steps, actions, features]
    taken = np.take_along_axis(np.asarray(every), np.asarray(actions)[..., None, None], axis=2)
    wanted = np.einsum("h,nhd->nd", discounts, taken[:, :, 0])
    explained = network.explained(inputs, actions, discounts)
    value = network.explained(inputs, actions, 0 * discounts)  # what does not depend on actions
    np.testing.assert_allclose(explained - value, wanted, atol=1e-5)


def test_latent_variables_are_drawn_from_their_chances():
    logits = jnp.zeros(GROUPS * CLASSES).at[0].set(2.0)
    chances = probabilities(logits)
    np.testing.assert_allclose(chances.sum(axis=-1), 1, atol=1e-6)
    noise = jax.random.gumbel(jax.random.key(0), (4_000, GROUPS, CLASSES))
    drawn = sampled(chances, noise).reshape(-1, GROUPS, CLASSES)
    np.testing.assert_allclose(drawn.mean(axis=0), chances, atol=0.03)
    assert float(divergence(chances, chances)) == pytest.approx(0, abs=1e-6)
    assert float(divergence(probabilities(0 * logits), chances)) > 0.1


def test_a_batch_of_one_state_is_refused(chain):
    with pytest.raises(ValueError, match="batch_size must be at least 2; got 1"):
        fitted("one-step-fb", chain, settings(1, 1, 1e-3))


def test_sizes_are_as_announced(chain):
    """At the size of the benchmark's largest world."""
    from cqm.experiments.methods.latent_world import LatentNetwork

    paper = num_parameters(Network(88, 5, 88, rank=8, width=128, key=jax.random.key(0)))
    latent = num_parameters(LatentNetwork(88, 5, 88, 12, key=jax.random.key(0)))
    assert 2.7 < latent / paper < 3.5
    assert fitted("ridge", chain, QUICK).num_parameters == 4 * 2 * 3


def test_the_paper_preset_runs_the_rivals_on_five_seeds():
    protocol = preset("paper")
    (stage,) = (stage for stage in protocol.stages if "ridge" in stage.methods)
    assert stage.methods == RIVALS
    assert stage.seeds == SEEDS
    assert not set(RIVALS) & set(PAPER)
    only = protocol.restricted(methods=["dae"])
    assert {job.method for job in only.jobs()} == {"dae", "ceilings"}
    assert len(only.jobs()) == 2 * 4 * 5
