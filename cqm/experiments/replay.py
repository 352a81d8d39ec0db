"""Replay sets: every step of long episodes is a decision, and nobody thought of a reward.

Several policies took turns: at every step, one of them was chosen at random. Together they are one
behaviour that depends on the state, which also continues the branches that tell the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cqm.branches.recipe import draw_actions
from cqm.experiments.zoo import Propensities, state_behaviour
from cqm.logs.dataset import Logs
from cqm.logs.shards import ShardedLogs
from cqm.logs.windows import cut, gathered
from cqm.worlds.contract import Rollout, States, World, take
from cqm.worlds.nuisance import NuisanceWorld

NAME = "mixed"  # of the behaviour
_SEEDS = (0, 1)  # of the policies that depend on the state
_EPISODES = 256  # that are simulated at once


def mixed_behaviour(world: World) -> Propensities:
    """Propensities of a uniform policy and of two that depend on the native state, in turns."""
    num_actions = len(world.candidate_actions)
    others = [state_behaviour(world, seed) for seed in _SEEDS]

    def propensities(observations: np.ndarray) -> np.ndarray:
        chosen = [np.full((len(observations), num_actions), 1 / num_actions)]
        return np.mean([*chosen, *(other(observations) for other in others)], axis=0)

    return propensities


def record_replay(
    world: World,
    directory: str | Path,
    *,
    decisions: int,
    horizon: int,
    discount: float,
    steps: int,
    seed: int,
) -> ShardedLogs:
    """Record episodes of the mixed behaviour, and cut a window at every step; resumes if stopped.

    Args:
        world: The world.
        directory: Where to write.
        decisions: Number of windows.
        horizon: Steps per window.
        discount: Discount factor.
        steps: Steps per episode.
        seed: Random seed.
    """
    behaviour = mixed_behaviour(world)

    def make(**arrays: Any) -> Logs:
        return Logs.from_arrays(
            **arrays,
            candidate_actions=world.candidate_actions,
            action_names=world.action_names,
            continuation=NAME,
            discount=discount,
            observation_names=world.observation_names,
            feature_names=world.feature_names,
            world=world.identity(),
        )

    pieces = cut(_episodes(world, behaviour, steps, seed), horizon, stride=1)
    gathered(pieces, make, directory, most=decisions)
    return ShardedLogs.open(directory)


def _episodes(
    world: World, behaviour: Propensities, steps: int, seed: int
) -> Iterator[Mapping[str, np.ndarray]]:
    """An endless sequence of episodes; those that fail are left out."""
    batch = 0
    while True:
        rng = np.random.default_rng([seed, batch])
        states, noise = world.reset(_EPISODES, rng), world.sample_noise(_EPISODES, steps, rng)
        seen, actions, features = [], [], []
        failed = np.zeros(_EPISODES, bool)
        for t in range(steps):
            seen.append(world.observe(states))
            actions.append(draw_actions(behaviour(seen[-1]), rng.random(_EPISODES)))
            result = world.step(states, world.candidate_actions[actions[-1]], noise[:, t])
            failed |= result.status != 0
            features.append(result.features[:, 0])
            states = result.states
        columns = {
            "observations": np.stack(seen, axis=1),
            "actions": np.stack(actions, axis=1),
            "features": np.stack(features, axis=1),
        }
        for i in np.flatnonzero(~failed):
            own = {name: values[i] for name, values in columns.items()}
            yield {**own, "propensities": behaviour(own["observations"])}
        batch += 1


class VisitedStates(World):
    """A world that starts in the states of its replay set.

    A reset makes a random number of steps with the mixed behaviour, as many as may come before a
    decision of a replay set. It has no nuisance: `visited_states` adds that of a world.
    """

    def __init__(self, world: World, most: int):
        """Start after up to `most` steps of a world without a nuisance."""
        self.world, self.most = world, most
        self.name, self.cloning, self.runs_python = world.name, world.cloning, world.runs_python
        self.observation_names, self.feature_names = world.observation_names, world.feature_names
        self.control_low, self.control_high = world.control_low, world.control_high
        self.candidate_actions, self.action_names = world.candidate_actions, world.action_names
        self.continuous, self.noise_kind = world.continuous, world.noise_kind

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """States after a random number of steps."""
        states, behaviour = self.world.reset(num, rng), mixed_behaviour(self.world)
        noise, lengths = (
            self.sample_noise(num, self.most, rng),
            rng.integers(self.most + 1, size=num),
        )
        for t in range(self.most):
            drawn = draw_actions(behaviour(self.observe(states)), rng.random(num))
            going = np.flatnonzero(lengths > t)
            if not len(going):
                break
            result = self.step(
                take(states, going), self.candidate_actions[drawn[going]], noise[going, t]
            )
            for name, values in result.states.items():
                states[name] = states[name].copy()
                states[name][going] = values
        return states

    def observe(self, states: States) -> np.ndarray:
        """As in the world."""
        return self.world.observe(states)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """As in the world."""
        return self.world.rollout(states, controls, noise, final=final)

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """As in the world."""
        return self.world.sample_noise(num, horizon, rng)

    def store(self, states: States) -> dict[str, np.ndarray]:
        """As in the world."""
        return self.world.store(states)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """As in the world."""
        return self.world.restore(arrays)

    def identity(self) -> dict[str, Any]:
        """The world's own, and how far a reset may go."""
        return {**self.world.identity(), "visited": self.most}


def visited_states(world: World, most: int) -> World:
    """The same world, starting in states after up to `most` steps of the mixed behaviour."""
    visited = VisitedStates(world.native, most)
    return visited if world.nuisance is None else NuisanceWorld(visited, world.nuisance)
