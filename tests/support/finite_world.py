"""A finite MDP as a world, and branches and tasks of the benchmark's methods on it."""

import numpy as np

import cqm
from cqm.experiments.methods import METHODS, Task
from cqm.worlds.function import FunctionWorld

DISCOUNT = 0.7
LAWS = np.random.default_rng(0).dirichlet(np.full(3, 0.5), size=(3, 2))  # [states, actions, states]


def chain_step(state, action, exogenous):
    """A finite MDP; the state is its indicator."""
    laws = LAWS[state.argmax(axis=1), action[:, 0].astype(int)]
    return np.eye(3)[(exogenous > np.cumsum(laws, axis=1)[:, :-1]).sum(axis=1)]


def chain_world():
    return FunctionWorld(
        step=chain_step,
        initial=lambda num, rng: np.eye(3)[rng.integers(3, size=num)],
        exogenous=lambda num, horizon, rng: rng.random((num, horizon, 1)),
        candidate_actions=[[0.0], [1.0]],
        continuous=False,
        feature_names=("a", "b", "c"),
        observation_names=("a", "b", "c"),
        name="chain",
    )


def collected(world, states, seed, **changes):
    settings = {"horizon": 5, "discount": DISCOUNT, "warmup": (0, 0), "per_step": True, **changes}
    return cqm.collect(world, states=states, seed=seed, **settings)


def directions(num, size, seed):
    g = np.random.default_rng(seed).standard_normal((num, size))
    return g / np.linalg.norm(g, axis=1, keepdims=True)


def task(branches, training, **changes):
    rewards = directions(32, len(branches.feature_names), 1)
    return Task(branches, rewards, training, show_progress=False, **changes)


def fitted(name, *arguments, **changes):
    return METHODS[name].fit(task(*arguments, **changes))


def relative_error(predicted, true):
    return np.sum((predicted - true) ** 2) / np.sum(true**2)
