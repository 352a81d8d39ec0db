"""A small world whose effects are known, and the error of a model on it."""

import numpy as np

from cqm.worlds.function import FunctionWorld


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


def excess(model, held_out):
    """Error against the expected effect, as a share of its size."""
    draws = held_out.effects()
    mean = draws.mean(axis=1)
    noise = draws.var(axis=1, ddof=1).sum() / draws.shape[1]
    error = np.sum((model.effect(held_out.observations) - mean) ** 2) - noise
    return error / (np.sum(mean**2) - noise)
