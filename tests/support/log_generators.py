"""Logs from systems whose causes are known: sound ones, and ones with something wrong planted."""

import dataclasses

import numpy as np

import cqm


def chosen(rng, scores):
    """Actions drawn with the softmax of scores `[n, actions]`, and their propensities."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    propensities = weights / weights.sum(axis=1, keepdims=True)
    draws = rng.random((len(scores), 1))
    return (propensities.cumsum(axis=1)[:, :-1] < draws).sum(axis=1), propensities


def logs_of(observations, actions, outcomes, propensities=None, **options):
    outcomes = outcomes[:, None, None] if outcomes.ndim == 1 else outcomes[:, None]
    return cqm.Logs.from_arrays(
        observations, actions, outcomes, propensities=propensities, discount=1.0, **options
    )


def linear(rng, num, *, effect=1.0, known=False, actions=2, strength=1.0, noise=None):
    """The more of the first observation, the more likely are later actions, and the outcome."""
    x = rng.normal(size=(num, 3))
    scores = strength * x[:, :1] * np.linspace(0, 1, actions)
    taken, propensities = chosen(rng, scores)
    noise = rng.normal(size=num) if noise is None else noise
    outcome = x @ [1.0, 0.5, 0.0] + effect * taken + noise
    return logs_of(x, taken, outcome, propensities if known else None)


def bent(rng, num):
    x = rng.uniform(-2, 2, size=(num, 2))
    taken, _ = chosen(rng, np.stack([0 * x[:, 0], np.sin(2 * x[:, 0])], axis=1))
    outcome = np.cos(2 * x[:, 0]) + x[:, 1] ** 2 + taken * x[:, 1] + 0.5 * rng.normal(size=num)
    return logs_of(x, taken, outcome)


def binary(rng, num):
    x = rng.normal(size=(num, 2))
    taken, _ = chosen(rng, np.stack([0 * x[:, 0], x[:, 0]], axis=1))
    likely = 1 / (1 + np.exp(-x[:, 0] - taken + 0.5))
    return logs_of(x, taken, (rng.random(num) < likely) * 1.0)


def unequal(rng, num):
    """Four actions, of which one is taken in a twentieth of the decisions."""
    x = rng.normal(size=(num, 2))
    scores = np.log([0.5, 0.3, 0.15, 0.05]) + 0.5 * x[:, :1] * [0, 1, -1, 0]
    taken, propensities = chosen(rng, scores)
    outcome = x[:, 0] + np.array([0, 1, -1, 0.5])[taken] + rng.normal(size=num)
    return logs_of(x, taken, outcome, propensities)


def nuisance(rng, num):
    x = rng.normal(size=(num, 10)) @ rng.normal(size=(10, 10))
    first = x[:, 0] / x[:, 0].std()
    taken, _ = chosen(rng, np.stack([0 * first, first], axis=1))
    return logs_of(x, taken, first + taken + rng.normal(size=num))


def repeated(rng, num):
    """Few states and a binary outcome, so that whole decisions come back."""
    x = rng.integers(3, size=(num, 2)) * 1.0
    taken, _ = chosen(rng, np.stack([0 * x[:, 0], x[:, 0] - 1], axis=1))
    return logs_of(x, taken, (rng.random(num) < 0.2 + 0.1 * x[:, 1] + 0.3 * taken) * 1.0)


def episodes(rng, num):
    """Episodes of five decisions that share their state and a part of their noise."""
    number = np.arange(num) // 5
    shared = rng.normal(size=(num // 5 + 1, 2))[number]
    x = shared[:, :1] + 0.5 * rng.normal(size=(num, 1))
    taken, _ = chosen(rng, np.concatenate([0 * x, x], axis=1))
    outcome = x[:, 0] + taken + shared[:, 1] + rng.normal(size=num)
    return logs_of(x, taken, outcome, groups=number)


def skewed(rng, num):
    x = np.stack([rng.lognormal(size=num), rng.integers(2, size=num)], axis=1)
    taken, _ = chosen(rng, np.stack([0 * x[:, 0], np.log(x[:, 0]) * x[:, 1]], axis=1))
    noise = (0.3 + 0.3 * x[:, 0]) * rng.normal(size=num)
    return logs_of(x, taken, np.log(x[:, 0]) + taken + noise)


def before_and_after(rng, num):
    """The outcome was also measured before the action, which depends on it."""
    pain, age = rng.normal(size=(2, num))
    pain = 2 * pain + age
    taken, _ = chosen(rng, np.stack([0 * pain, 0.7 * pain], axis=1))
    return logs_of(np.stack([pain, age], axis=1), taken, pain - taken + 0.8 * rng.normal(size=num))


def two_outcomes(rng, num):
    x = rng.normal(size=(num, 2))
    taken, _ = chosen(rng, np.stack([0 * x[:, 0], x[:, 0], -x[:, 0]], axis=1))
    relief = x[:, 0] + taken + rng.normal(size=num)
    cost = np.array([0.0, 1.0, 3.0])[taken]  # of the action alone
    return logs_of(x, taken, np.stack([relief, cost], axis=1))


def motion(rng, num):
    """Five steps of a point that an action pushes; features are the next observation."""
    state = rng.normal(size=(num, 3))
    state[:, 2] = 1.0 + rng.integers(2, size=num)  # a mass, which never changes
    start, steps, actions = state, [], []
    for _ in range(5):
        taken, _ = chosen(rng, np.stack([0 * state[:, 0], -state[:, 0]], axis=1))
        position, speed, mass = state.T
        speed = speed + 0.3 * (2 * taken - 1) / mass + 0.05 * rng.normal(size=num)
        state = np.stack([position + 0.1 * speed, speed, mass], axis=1)
        steps.append(state)
        actions.append(taken)
    return cqm.Logs.from_arrays(
        start,
        np.stack(actions, axis=1),
        np.stack(steps, axis=1),
        features_are_next_observation=True,
    )


SOUND = {
    "linear, estimated propensities": linear,
    "linear, known propensities": lambda rng, num: linear(rng, num, known=True),
    "no effect": lambda rng, num: linear(rng, num, effect=0.0),
    "no effect, known propensities": lambda rng, num: linear(rng, num, effect=0.0, known=True),
    "a harmful action": lambda rng, num: linear(rng, num, effect=-1.0),
    "three actions": lambda rng, num: linear(rng, num, actions=3),
    "strong confounding": lambda rng, num: linear(rng, num, strength=2.0),
    "heavy tails": lambda rng, num: linear(rng, num, known=True, noise=rng.standard_t(3, size=num)),
    "bent": bent,
    "binary outcome": binary,
    "four unequal actions": unequal,
    "nuisance": nuisance,
    "repeated states": repeated,
    "episodes": episodes,
    "skewed": skewed,
    "before and after": before_and_after,
    "two outcomes": two_outcomes,
    "motion": motion,
}


def with_observation(logs, column):
    """The logs with one more observation, the leak."""
    return dataclasses.replace(
        logs,
        observations=np.concatenate([logs.observations, column[:, None]], axis=1),
        observation_names=(*logs.observation_names, "leak"),
    )


def _leak(column_fn, **options):
    """Logs whose last observation is made of the logs themselves."""

    def make(rng, num):
        logs = linear(rng, num, **options)
        return with_observation(logs, column_fn(logs, rng.normal(size=num)))

    return make


def _copied(share, **options):
    """Logs of which a share of the rows are copies of others."""

    def make(rng, num):
        logs = linear(rng, num, **options)
        copies = round(share * num)
        return logs[np.concatenate([np.arange(num - copies), np.arange(copies)])]

    return make


def _outcome_first(rng, num):
    """The action follows from the outcome."""
    logs = linear(rng, num)
    return logs_of(logs.observations, (logs.outcomes[:, 0] > 0.5) * 1, logs.outcomes[:, 0])


def _outcome_is_action(rng, num):
    logs = linear(rng, num)
    return logs_of(logs.observations, logs.first_actions, 3.0 * logs.first_actions)


def _wrong_propensities(rng, num):
    logs = linear(rng, num)
    return logs.with_propensities([0.5, 0.5])


# Each with the refuter that must fail.
WRONG = {
    "outcome": (_leak(lambda logs, noise: logs.outcomes[:, 0]), "outcome-copy"),
    "outcome, rescaled": (
        _leak(lambda logs, noise: 32 - 1.8 * logs.outcomes[:, 0]),
        "outcome-copy",
    ),
    "outcome without effects": (
        _leak(lambda logs, noise: logs.outcomes[:, 0], effect=0.0),
        "outcome-copy",
    ),
    "outcome, a little noise": (
        _leak(lambda logs, noise: logs.outcomes[:, 0] + 0.1 * noise),
        "outcome-copy",
    ),
    "outcome, much noise": (
        _leak(lambda logs, noise: logs.outcomes[:, 0] + 0.7 * noise),
        "outcome-copy",
    ),
    "outcome, known propensities": (
        _leak(lambda logs, noise: logs.outcomes[:, 0] + 0.7 * noise, known=True),
        "balance",
    ),
    "action": (_leak(lambda logs, noise: logs.first_actions * 1.0), "action-copy"),
    "action, rescaled": (
        _leak(lambda logs, noise: 5.0 - 2 * logs.first_actions, actions=3),
        "action-copy",
    ),
    "action, noisy": (_leak(lambda logs, noise: logs.first_actions + 0.2 * noise), "action-copy"),
    "action, known propensities": (
        _leak(lambda logs, noise: logs.first_actions + 1.0 * noise, known=True),
        "balance",
    ),
    "rows copied": (_copied(0.1), "row-copies"),
    "all rows copied": (_copied(0.5), "row-copies"),
    "action follows from the outcome": (_outcome_first, "mirror"),
    "outcome is the action": (_outcome_is_action, "mirror"),
    "wrong propensities": (_wrong_propensities, "balance"),
}
