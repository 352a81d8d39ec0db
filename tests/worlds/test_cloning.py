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


def step(env, action, seed):
    """The observation one step later, as a number."""
    [seeded] = cloning.seeded_states(np.array([seed]))
    return cloning.step(env, np.int64(action), seeded)[0].item()


def counted(method, row, action):
    """The count one step after a state."""
    return step(method.load(row), action, 0)


@pytest.mark.parametrize("kind", [StateMethods, Deepcopy, Replay])
def test_an_environment_returns_to_its_states(kind):
    method = kind(Counter, max_prefix=4)
    observation, first = method.start(50)
    env = method.load(first)
    for action in (2, 3):
        step(env, action, 0)
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
    drawn = [step(env, 0, seed) for seed in (1, 2, 1)]
    expected = [np.random.Generator(np.random.PCG64(seed)).random() for seed in (1, 2, 1)]
    assert drawn == expected


def test_all_seeds_at_once_give_the_states_that_numpy_gives():
    edges = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    seeds = np.array([*edges, *np.random.default_rng(0).integers(2**32, size=999), 1, 0])
    states = cloning.seeded_states(seeds.reshape(2, -1).astype(float))
    assert states.shape == (2, 504)
    assert states.ravel().tolist() == [np.random.PCG64(int(seed)).state for seed in seeds]
    assert cloning.seeded_states(np.empty((3, 0))).shape == (3, 0)
    assert cloning.seeded_states(np.zeros(1)).tolist() == [
        {
            "bit_generator": "PCG64",
            "state": {
                "state": 35399562948360463058890781895381311971,
                "inc": 87136372517582989555478159403783844777,
            },
            "has_uint32": 0,
            "uinteger": 0,
        }
    ]


class Spawner(Counter):
    """Draws from a generator that it derives from its own, which Gymnasium does not seed."""

    def step(self, action):
        [child] = self.np_random.spawn(1)
        return child.random(1), 0.0, False, False, {}


def test_a_copied_environment_has_a_generator_of_its_own_with_the_same_history():
    method = Deepcopy(Spawner, max_prefix=4)
    _, first = method.start(50)
    one, two = method.load(first), method.load(first)
    assert one.np_random is not two.np_random
    assert one.np_random.bit_generator.state == first["clone"].np_random.bit_generator.state
    plain = Spawner()
    plain.reset(seed=50)
    expected = [step(plain, 0, 7) for _ in range(3)]
    assert [step(one, 0, 7) for _ in range(3)] == expected
    assert [step(two, 0, 7) for _ in range(3)] == expected
    assert len(set(expected)) == 3


def test_methods_that_do_not_apply_say_so():
    with pytest.raises(ValueError, match="no MuJoCo model and data"):
        MujocoState(Counter, max_prefix=4)
    with pytest.raises(ValueError, match="no method pair among get_state/set_state, "):
        StateMethods(lambda: gymnasium.make("CartPole-v1"), max_prefix=4)
    words = type("Words", (Counter,), {"get_state": lambda self: "words"})
    with pytest.raises(ValueError, match="get_state must return one numeric array; got <U5"):
        StateMethods(words, max_prefix=4).start(0)
