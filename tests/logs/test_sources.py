"""Logs from environments and data sets."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import cqm
from cqm.cli import main
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel


class Corridor(gymnasium.Env):
    """A place on a line; 1 moves right and 0 left, 10 ends it, and it slips now and then."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random.normal(), 0
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += (2 * action - 1) + 0.1 * self.np_random.normal()
        self.time += 1
        observation = np.array([self.place], np.float32)
        return observation, -abs(self.place), abs(self.place) > 10, self.time >= 30, {}


def ended_at_last(logs):
    return logs.features[:, -1, 2] == 1


def test_recorded_from_gymnasium():
    right = lambda observation: np.array([0.3, 0.7])
    logs = Logs.from_gymnasium(Corridor(), trajectories=400, horizon=4, behaviour=right, seed=3)
    assert (len(logs), logs.actions.shape) == (400, (400, 4))
    assert logs.feature_names == ("obs_0", "reward", "terminated")
    assert logs.propensities[0].tolist() == [0.3, 0.7]
    # A window that starts where the one before it stopped is of the same episode.
    follows = (logs.features[:-1, -1, 0] == logs.observations[1:, 0]) & ~ended_at_last(logs)[:-1]
    np.testing.assert_array_equal(np.diff(logs.groups) == 0, follows)
    np.testing.assert_allclose(logs.features[..., 1], -np.abs(logs.features[..., 0]), atol=1e-5)
    ended = logs.features[..., 2] == 1
    assert ended.any()
    # Once ended, always ended; after the step that ended it there is nothing.
    assert (np.diff(ended.astype(int), axis=1) >= 0).all()
    later = ended[:, 1:] & ended[:, :-1]
    assert (logs.features[:, 1:, 0][later] == 0).all()
    model = ResidualModel().fit(logs)
    near = np.array([[0.0, 0.0]])
    assert model.effect(near, action=1, baseline=0)[0, 0] > 3  # about 2 in each of four steps
    with pytest.raises(ValueError, match="horizon must be a whole number of at least 1"):
        Logs.from_gymnasium(Corridor(), trajectories=4, horizon=0)


@pytest.mark.filterwarnings("ignore:effects are set to zero")  # in 2 of 6 directions
def test_branches_of_the_same_environment_calibrate_a_model_of_logs(tmp_path, capsys):
    world = cqm.load_world("CartPole-v1", action_names=("left", "right"))
    recorded = {"trajectories": 300, "horizon": 3, "world": world}
    logs = Logs.from_gymnasium("CartPole-v1", **recorded)
    assert logs.world == world.identity()
    assert logs.feature_names == world.feature_names
    assert logs.action_names == ("left", "right")
    own = Logs.from_gymnasium("CartPole-v1", **recorded, action_names=("brake", "go"))
    assert own.action_names == ("brake", "go")
    model = ResidualModel().fit(logs)
    branches = cqm.collect(world, states=20, horizon=3, draws=16, warmup=(0, 5), threads=1)
    assert model.calibrate(branches).calibration_.excess_error < 0.1
    with pytest.raises(
        ValueError, match=r"calibration branches have horizon 2; .* fitted with horizon 3"
    ):
        model.calibrate(cqm.collect(world, states=4, horizon=2, draws=16, threads=1))
    model.save(tmp_path)  # with what is unknown
    assert ResidualModel.load(tmp_path).recipe_ == model.recipe_
    assert main(["query", str(tmp_path), "--reward=reward"]) == 2
    assert "cannot sample states; pass --states FILE" in capsys.readouterr().err
    with pytest.raises(ValueError, match="must have the same candidate actions"):
        Logs.from_gymnasium("CartPole-v1", **recorded, candidate_actions=[[1], [0]])


class Coin(gymnasium.Env):
    """Every step ends it with a chance of one in five, whatever the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Discrete(2)
    truncated_at = 1000

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        ended = bool(self.np_random.random() < 0.2)
        return np.array([self.time], np.float32), 0.0, ended, self.time >= self.truncated_at, {}


@pytest.mark.parametrize("known", [True, False])
def test_a_time_limit_does_not_select_windows_by_their_outcome(known):
    env = Coin()
    env.truncated_at = 10
    if known:
        env.spec = gymnasium.envs.registration.EnvSpec("Coin-v0", max_episode_steps=10)
    logs = Logs.from_gymnasium(env, trajectories=600, horizon=4, stride=1, seed=1)
    assert (len(logs), logs.observations[:, 0].max()) == (600, 6)
    ended = logs.features[:, -1, 2]
    for start in range(7):  # it ends within four steps with the same chance wherever it starts
        own = ended[logs.observations[:, 0] == start]
        assert abs(own.mean() - (1 - 0.8**4)) < 4 * np.sqrt(0.25 / len(own))


def test_recorded_into_shards(tmp_path):
    env = Coin()
    env.spec = gymnasium.envs.registration.EnvSpec("Coin-v0", max_episode_steps=10)
    given = {"trajectories": 90, "horizon": 4, "stride": 1, "seed": 1}
    logs = Logs.from_gymnasium(env, **given)
    stored = Logs.from_gymnasium(env, **given, out=tmp_path)
    assert len(stored) == 90
    for name, values in logs.row_arrays().items():
        np.testing.assert_array_equal(stored.read(name, 0, 90), values)
    env.spec = None
    with pytest.raises(ValueError, match="the time limit of Coin is unknown"):
        Logs.from_gymnasium(env, **given, out=tmp_path / "other")


def test_recording_gives_up_where_no_window_fits():
    env = Coin()
    env.truncated_at = 5
    with pytest.raises(
        ValueError, match="100 consecutive episodes of Coin have no window of 6 steps"
    ):
        Logs.from_gymnasium(env, trajectories=50, horizon=6)
    env.spec = gymnasium.envs.registration.EnvSpec("Coin-v0", max_episode_steps=5)
    with pytest.raises(
        ValueError, match="6 steps is longer than the time limit of Coin-v0, 5 steps"
    ):
        Logs.from_gymnasium(env, trajectories=50, horizon=6)


@pytest.fixture
def minari_dataset(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.wrappers.TimeLimit(Corridor(), 24))
    rng = np.random.default_rng(0)
    for seed in range(60):
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(int(rng.integers(2)))
            done = terminated or truncated
    return env.create_dataset(dataset_id="test/corridor-v0", eval_env=None)


@pytest.mark.filterwarnings("ignore")  # of minari, about metadata that this environment lacks
def test_a_minari_data_set_trains_a_model_end_to_end(minari_dataset, tmp_path):
    logs = Logs.from_minari(
        "test/corridor-v0", horizon=4, continuation="uniform", action_names=("left", "right")
    )
    assert logs.action_names == ("left", "right")
    assert len(logs) > 300
    assert logs.propensities is None
    given = {"horizon": 4, "continuation": "uniform", "action_names": ("left", "right")}
    stored = Logs.from_minari("test/corridor-v0", **given, out=tmp_path / "shards")
    for name, values in logs.row_arrays().items():
        np.testing.assert_array_equal(stored.read(name, 0, len(stored)), values)
    again = Logs.from_minari("test/corridor-v0", **given, out=tmp_path / "shards")
    assert again.digest() == stored.digest()
    with pytest.raises(ValueError, match="no episode of test/corridor-v0 has a window of 25 steps"):
        Logs.from_minari("test/corridor-v0", horizon=25)
    model = ResidualModel().fit(logs)
    query = cqm.Query.named({"obs_0": 1.0}, logs)
    states = np.array([[-1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    assert model.act(states, query).tolist() == [1, 1, 1]
    total = 2 * logs.recipe.discounts.sum()
    effect = model.effect(states, action="right", baseline="left")
    np.testing.assert_allclose(effect[:, 0], total, rtol=0.25)
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(
        ResidualModel.load(tmp_path / "model").effect(states), model.effect(states)
    )


class Arm(gymnasium.Env):
    """Two continuous controls; an episode has five steps."""

    observation_space = spaces.Dict({"place": spaces.Box(-np.inf, np.inf, (2,))})
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = np.zeros(2, np.float32), 0
        return {"place": self.place}, {}

    def step(self, action):
        assert action.dtype == np.float32
        self.place, self.time = self.place + action, self.time + 1
        return {"place": self.place}, 0.0, False, self.time == 5, {}


def test_continuous_actions_need_candidates():
    with pytest.raises(ValueError, match=r"continuous; pass .* logs alone do not identify"):
        Logs.from_gymnasium(Arm(), trajectories=4, horizon=2)
    with pytest.raises(ValueError, match=r"candidate_actions must be \[actions, 2\]; got \[1, 1\]"):
        Logs.from_gymnasium(Arm(), trajectories=4, horizon=2, candidate_actions=[[1.0]])
    candidates = np.array([[0.0, 0.0], [1.0, 0.0]])
    logs = Logs.from_gymnasium(Arm(), trajectories=20, horizon=2, candidate_actions=candidates)
    moves = logs.features[:, 0, :2] - logs.observations[:, :2]
    np.testing.assert_allclose(moves, candidates[logs.first_actions])


def test_logged_actions_belong_to_the_nearest_candidate():
    episode = SimpleNamespace(
        observations={"place": np.arange(10.0).reshape(5, 2)},
        actions=np.array([[0.9, 0.0], [0.1, 0.0], [0.0, 0.0], [1.0, 0.1]]),
        rewards=np.ones(4),
        terminations=np.array([False] * 4),
    )
    dataset = SimpleNamespace(
        action_space=Arm.action_space,
        observation_space=Arm.observation_space,
        iterate_episodes=lambda: iter([episode]),
        spec=SimpleNamespace(dataset_id="arm-v0"),
        env_spec=None,
    )
    given = {"horizon": 2, "candidate_actions": [[0.0, 0.0], [1.0, 0.0]]}
    logs = Logs.from_minari(dataset, tolerance=0.2, **given)
    assert logs.actions.tolist() == [[1, 0], [0, 1]]
    assert logs.observations[:, :2].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    with pytest.raises(ValueError, match=r"3 of the 4 logged actions .* than 1e-06 from all 2"):
        Logs.from_minari(dataset, **given)
