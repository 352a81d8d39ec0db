"""Small worlds whose effects are known, and the error of a model on one of them."""

import numpy as np

from cqm.worlds.contract import Rollout, World
from cqm.worlds.function import FunctionWorld


class ToyWorld(World):
    """x' = x/2 + u + e; the features are x' and u."""

    name = "toy"
    observation_names = ("x",)
    feature_names = ("x", "u")
    control_low = np.array([-1.0])
    control_high = np.array([1.0])
    candidate_actions = np.array([[-1.0], [0.0], [1.0]])
    cloning = "copy"
    noise_kind = "signal"

    def reset(self, num, rng):
        return {"x": rng.standard_normal(num)}

    def observe(self, states):
        return states["x"][:, None].copy()

    def sample_noise(self, num, horizon, rng):
        return rng.standard_normal((num, horizon, 1))

    def rollout(self, states, controls, noise, *, final=True):
        x = states["x"]
        features = np.empty((*controls.shape[:2], 2))
        for t in range(controls.shape[1]):
            x = x / 2 + controls[:, t, 0] + noise[:, t, 0]
            features[:, t, 0], features[:, t, 1] = x, controls[:, t, 0]
        return Rollout(features, np.zeros(len(x), np.int8), {"x": x} if final else {})

    def identity(self):
        return {"name": self.name, "kind": "test", "names": self.feature_names}


def scrambled(seeds):
    """A number in [0, 1) for each seed, with no visible relation to it."""
    return np.mod(np.sin(12.9898 * seeds + 1) * 43758.5453, 1)


class SeedWorld(ToyWorld):
    """As the toy world, but where x is beyond a limit, e is a random number for a seed."""

    noise_kind = "seeds"

    def __init__(self, limit=1.0):
        self.limit = limit

    def sample_noise(self, num, horizon, rng):
        return rng.integers(2**31, size=(num, horizon, 1)).astype(float)

    def rollout(self, states, controls, noise, *, final=True):
        x, drew, features = states["x"], np.zeros(len(controls), bool), []
        for t in range(controls.shape[1]):
            draws = np.abs(x) > self.limit
            push = np.where(draws, scrambled(noise[:, t, 0]), 0.5)
            x, drew = x / 2 + controls[:, t, 0] + push, drew | draws
            features.append(np.stack([x, controls[:, t, 0]], axis=1))
        status, after = np.zeros(len(x), np.int8), {"x": x} if final else {}
        return Rollout(np.stack(features, axis=1), status, after, drew=drew)


def pendulum_step(state, action, exogenous):
    """An angle, a speed and a gain that no action moves but that scales what actions do."""
    angle, speed, gain = state.T
    speed = 0.9 * speed - 0.3 * np.sin(angle) + 0.3 * gain * action[:, 0]
    return np.stack([angle + 0.3 * speed, speed, gain], axis=1)


def pendulum_start(num, rng):
    columns = [rng.uniform(-2, 2, num), rng.normal(0, 0.5, num), rng.uniform(0.5, 1.5, num)]
    return np.stack(columns, axis=1)


def pendulum_world(**changes):
    settings = {
        "candidate_actions": [[-1.0], [0.0], [1.0]],
        "feature_names": ("angle", "speed", "gain"),
        "observation_names": ("angle", "speed", "gain"),
        "name": "pendulum",
    }
    return FunctionWorld(
        **{"step": pendulum_step, "initial": pendulum_start, **settings, **changes}
    )


def pushed_world(push_fn, size=2, **changes):
    """Coordinates that stay as they are, but for the first, which is pushed.

    Args:
        push_fn: Maps states `[n, size]`, controls `[n]` and noise `[n, e]` to the push, `[n]`.
        size: Number of coordinates.
        changes: Other arguments of the world.
    """

    def step(state, action, exogenous):
        after = state.copy()
        after[:, 0] += push_fn(state, action[:, 0], exogenous)
        return after

    names = tuple(f"x{i}" for i in range(size))
    settings = {
        "initial": lambda num, rng: rng.standard_normal((num, size)),
        "candidate_actions": [[-1.0], [0.0], [1.0]],
        "feature_names": names,
        "observation_names": names,
        "name": "pushed",
    }
    return FunctionWorld(**{"step": step, **settings, **changes})


def clock_step(state, action, exogenous):
    """A coordinate that actions push as far as the hand of a clock allows."""
    pushed, east, north = state.T
    cosine, sine = np.cos(0.5), np.sin(0.5)
    turned = [cosine * east - sine * north, sine * east + cosine * north]
    return np.stack([0.8 * pushed + east * action[:, 0], *turned], axis=1)


def clock_start(num, rng):
    angle = rng.uniform(0, 2 * np.pi, num)
    return np.stack([rng.standard_normal(num), np.cos(angle), np.sin(angle)], axis=1)


def clock_world():
    return pushed_world(None, 3, step=clock_step, initial=clock_start, name="clock")


def excess(model, held_out):
    """Error against the expected effect, as a share of its size."""
    draws = held_out.effects()
    mean = draws.mean(axis=1)
    noise = draws.var(axis=1, ddof=1).sum() / draws.shape[1]
    error = np.sum((model.effect(held_out.observations) - mean) ** 2) - noise
    return error / (np.sum(mean**2) - noise)


def market_world(*, price_matters, level=0.0):
    """Stock that actions move, and a price that no action moves."""

    def step(state, action, noise):
        gain = 1 + np.tanh(state[:, 1 if price_matters else 0])
        stock = 0.8 * state[:, 0] + action[:, 0] * gain
        price = level + 0.7 * (state[:, 1] - level) + noise[:, 0]
        return np.stack([stock, price], axis=1)

    return FunctionWorld(
        step,
        lambda num, rng: rng.normal(np.array([0.0, level]), size=(num, 2)),
        exogenous=lambda num, horizon, rng: 0.5 * rng.normal(size=(num, horizon, 1)),
        candidate_actions=[[-1.0], [0.0], [1.0]],
        feature_names=["stock", "price"],
        observation_names=["stock", "price"],
    )
