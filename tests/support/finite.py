"""Random finite MDPs with logged trajectories and the exact effects behind them."""

from dataclasses import dataclass

import numpy as np

from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.measures import FiniteMDP, effect_measure, project, successor_measure

DISCOUNT, HORIZON = 0.9, 4


@dataclass(frozen=True)
class Problem:
    """An MDP, its behaviour and features, and the exact effects of first actions."""

    mdp: FiniteMDP
    features: np.ndarray  # [states, features], of the next state
    effects: np.ndarray  # [states, actions, features], uniform reference

    @classmethod
    def random(cls, rng, num_states=4, num_actions=3, num_features=2):
        transitions = rng.dirichlet(np.full(num_states, 0.7), size=(num_states, num_actions))
        behaviour = rng.dirichlet(np.full(num_actions, 3.0), size=num_states)
        behaviour = 0.7 * behaviour + 0.3 / num_actions
        mdp = FiniteMDP(transitions, behaviour)
        features = rng.normal(size=(num_states, num_features))
        measures = successor_measure(mdp, discount=DISCOUNT, horizon=HORIZON)
        return cls(mdp, features, project(effect_measure(measures), features))

    @property
    def observations(self):
        return np.arange(self.mdp.num_states, dtype=float)[:, None]

    def logs(self, num, rng, propensities="known"):
        """Trajectories under the behaviour, from uniformly drawn states."""
        laws = self.mdp.transitions.toarray()
        state = start = rng.integers(self.mdp.num_states, size=num)
        actions, features = [], []
        for _ in range(HORIZON):
            action = draw_actions(self.mdp.policy[state], rng.random(num))
            state = draw_actions(laws[state * self.mdp.num_actions + action], rng.random(num))
            actions.append(action)
            features.append(self.features[state])
        known = self.mdp.policy[start] if propensities == "known" else None
        return Logs.from_arrays(
            start[:, None].astype(float),
            np.stack(actions, axis=1),
            np.stack(features, axis=1),
            num_actions=self.mdp.num_actions,
            propensities=known,
            discount=DISCOUNT,
        )


def slope(make_model, problems, sizes, seed):
    """Of log root-mean-square error against log number of trajectories."""
    rng = np.random.default_rng(seed)
    errors = []
    for num in sizes:
        squares = []
        for problem in problems:
            model = make_model().fit(problem.logs(num, rng))
            squares.append(np.mean((model.effect(problem.observations) - problem.effects) ** 2))
        errors.append(np.sqrt(np.mean(squares)))
    return np.polyfit(np.log(sizes), np.log(errors), 1)[0]


def rotating(num, num_actions, *, noise=0.1):
    """Logs whose actions go round; action 1 adds 1 in state 0 and 2 in state 1."""
    rng = np.random.default_rng(0)
    states = rng.integers(2, size=(num, 1)).astype(float)
    actions = np.arange(num) % num_actions
    outcomes = 5 * states + (1 + states) * (actions == 1)[:, None]
    outcomes = outcomes + noise * rng.normal(size=outcomes.shape)
    return Logs.from_arrays(states, actions, outcomes[:, None], feature_names=["y"])
