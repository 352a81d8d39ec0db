import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from cqm.worlds import cloning
from cqm.worlds.cloning import Deepcopy, MujocoState, Replay, StateMethods


class Counter(gymnasium.Env):
    """Counts up from the seed of its reset; its state methods get and set the count."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = seed
        return np.array([self.count]), {}

    def step(self, action):
        self.count += action
        return np.array([self.count]), 0.0, False, False, {}

    def get_state(self):
        return np.array([self.count])

    def set_state(self, state):
        self.count = state[0]


class Timer(Counter):
    """Also counts its steps, but its state methods leave them out."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return super().step(action)


class Coin(Counter):
    def step(self, action):
        return self.np_random.random(1), 0.0, False, False, {}


def counted(method, row, action):
    """The count one step after a state."""
    return cloning.step(method.load(row), np.int64(action), 0)[0].item()


@pytest.mark.parametrize("kind", [StateMethods, Deepcopy, Replay])
def test_an_environment_returns_to_its_states(kind):
    method = kind(Counter, max_prefix=4)
    observation, first = method.start(50)
    env = method.load(first)
    for action in (2, 3):
        cloning.step(env, np.int64(action), 0)
    later = first | method.save(env, first, np.array([2, 3]), np.zeros(2, int))
    method.start(90)
    assert observation.item() == 50
    assert [counted(method, row, 1) for row in (first, later, first, later)] == [51, 56, 51, 56]

    numbers = {k: v for k, v in cloning.stack([first, later]).items() if v.dtype != object}
    elsewhere = cloudpickle.loads(cloudpickle.dumps(method))
    for one in (method, elsewhere):
        rows = cloning.unstack(one.restore(numbers))
        assert [counted(one, row, 1) for row in rows] == [51, 56]


def test_replayed_states_keep_their_steps():
    method = Replay(Counter, max_prefix=4)
    _, first = method.start(50)
    row = first | method.save(method.load(first), first, np.array([2, 3]), np.array([7, 8]))
    assert (row["seed"], row["length"]) == (50, 2)
    assert row["actions"].tolist() == [2, 3, 0, 0]
    assert row["noise"].tolist() == [7, 8, 0, 0]
    assert (first["length"], first["actions"].tolist()) == (0, [0, 0, 0, 0])


def test_loading_restores_every_attribute_or_names_those_it_does_not():
    actions = np.array([1, 2])
    assert StateMethods(Counter, max_prefix=4).unrestored(actions) == ""
    lost = StateMethods(Timer, max_prefix=4).unrestored(actions)
    assert lost == "the saved state lacks Timer.steps"


def test_a_step_draws_from_its_seed():
    env = Coin()
    env.reset(seed=0)
    drawn = [cloning.step(env, np.int64(0), seed)[0].item() for seed in (1, 2, 1)]
    expected = [np.random.Generator(np.random.PCG64(seed)).random() for seed in (1, 2, 1)]
    assert drawn == expected


def test_methods_that_do_not_apply_say_so():
    with pytest.raises(ValueError, match="no MuJoCo model and data"):
        MujocoState(Counter, max_prefix=4)
    with pytest.raises(ValueError, match="no method pair among get_state/set_state, "):
        StateMethods(lambda: gymnasium.make("CartPole-v1"), max_prefix=4)
    words = type("Words", (Counter,), {"get_state": lambda self: "words"})
    with pytest.raises(ValueError, match="get_state must return one numeric array; got <U5"):
        StateMethods(words, max_prefix=4).start(0)
