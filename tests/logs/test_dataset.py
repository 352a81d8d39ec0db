"""Logs: where they come from, what they refuse, and whether they cover the actions."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import cqm
from cqm.cli import main
from cqm.logs.dataset import ARRAYS, CONFIG, Logs
from cqm.models.residual import ResidualModel
from cqm.storage import DamagedFileError


def arrays(num=300, horizon=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "observations": rng.normal(size=(num, 2)),
        "actions": rng.integers(2, size=(num, horizon)),
        "features": rng.normal(size=(num, horizon, 2)),
    }


def test_from_arrays_and_its_properties():
    given = arrays()
    logs = Logs.from_arrays(**given, discount=0.5, propensities=[0.5, 0.5])
    assert (len(logs), logs.num_actions, logs.feature_names[1]) == (300, 2, "feature_1")
    expected = given["features"] @ np.eye(2)
    expected = expected[:, 0] + 0.5 * expected[:, 1] + 0.25 * expected[:, 2]
    np.testing.assert_allclose(logs.outcomes, expected)
    first, last = logs.split(100)
    assert (len(first), len(last)) == (200, 100)
    np.testing.assert_array_equal(last.observations, given["observations"][200:])
    assert not logs.recipe.continuation.open_loop
    assert Logs.from_arrays(**given, continuation="uniform").recipe.continuation.open_loop
    with pytest.raises(ValueError, match="some of the 300 trajectories for each set"):
        logs.split(300)


def test_features_are_the_next_observation_only_on_purpose():
    given = arrays()
    assert not Logs.from_arrays(**given).features_are_next_observation  # however many there are
    assert Logs.from_arrays(
        **given, features_are_next_observation=True
    ).features_are_next_observation
    named = Logs.from_arrays(**given, observation_names=["x", "v"], feature_names=["x", "v"])
    assert named.features_are_next_observation
    with pytest.raises(ValueError, match=r"have its names; got \['x', 'v'\] for \['obs_0'"):
        Logs.from_arrays(**given, feature_names=["x", "v"], features_are_next_observation=True)


def changed(name, value):
    return {**arrays(), name: value}


def with_nan(values):
    values = values.copy()
    values[7] = np.nan
    return values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (changed("observations", np.zeros((10, 2))), "must be equally long; got .*'features': 300"),
        (changed("actions", [[0, 1], [1]]), "equally long; got 1 to 2 steps"),
        (changed("actions", np.zeros((300, 2))), "one action and one row of features a step"),
        (changed("actions", np.full((300, 3), 0.5)), "actions must be whole numbers"),
        (
            {**changed("actions", np.full((300, 3), 5)), "num_actions": 2},
            r"candidate actions in 0\.\.1",
        ),
        (
            changed("observations", with_nan(arrays()["observations"])),
            "observations must be finite; got NaN or infinity in 1 of 300 trajectories, "
            "the first in row 7",
        ),
        (changed("features", with_nan(arrays()["features"])), "features must be finite"),
        ({**arrays(), "propensities": [0.0, 1.0]}, r"propensities must be in \(0, 1\]"),
        ({**arrays(), "propensities": [1.5, 0.5]}, r"propensities must be in \(0, 1\]"),
        ({**arrays(), "propensities": [np.nan, 0.5]}, r"propensities must be in \(0, 1\]"),
        ({**arrays(), "propensities": [0.5, 0.4]}, "must sum to 1; row 0 sums to 0.9"),
        ({**arrays(), "propensities": np.full((300, 3), 1 / 3)}, r"propensities must be \[n, act"),
        (
            {**arrays(), "propensities": np.full(300, 0.5)},
            r"not only of the one taken; got \[300\]",
        ),
        ({**arrays(), "propensities": 0.5}, r"not only of the one taken; got \[\]"),
        ({**arrays(), "continuation": [0.5, 0.4]}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": [0.5, np.nan]}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": [1.5, -0.5]}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": [1 / 3] * 3}, "2 probabilities that sum to 1"),
        ({**arrays(), "continuation": 0.5}, "one probability per candidate action"),
        (
            {**arrays(), "num_actions": 3, "candidate_actions": [[0.0], [1.0]]},
            "num_actions is 3, but there are 2 candidate actions",
        ),
        ({**arrays(), "num_actions": 2.5}, "num_actions must be a whole number; got 2.5"),
        ({**arrays(), "num_actions": 10**12}, "at most 32768 actions; got 1000000000000"),
        (changed("actions", np.full((300, 3), 10**12)), "at most 32768 actions; got 1000000000001"),
        ({**arrays(), "candidate_actions": [[0.0], [np.nan]]}, "candidate_actions must be finite"),
        (
            {**arrays(), "candidate_actions": [0.0, 1.0]},
            r"must be \[actions, controls\]; got .*\[2\]",
        ),
        ({**arrays(), "candidate_actions": 2.0}, r"must be \[actions, controls\]; got .*\[\]"),
        ({**arrays(), "world": {"name": "plant"}}, r"a name and a kind; got no \['kind'\]"),
        (changed("features", np.zeros((300, 3, 0))), "at least one feature"),
        ({**arrays(), "groups": 3}, r"groups must be \[n\]"),
        (changed("actions", np.zeros((300, 3), int)), "at least 2 actions; got 1"),
        (arrays(num=0), "there are no trajectories"),
        (changed("features", np.zeros((300, 3))), "features \\[n, horizon, features\\]"),
    ],
)
def test_what_is_wrong_is_said(given, message):
    with pytest.raises(ValueError, match=message):
        Logs.from_arrays(**given)


def test_rows_and_propensities_are_replaced_by_fitting_ones_only():
    logs = Logs.from_arrays(**arrays())
    assert len(logs[[3, 5]]) == 2
    for rows in (3, np.int64(3), np.zeros((2, 2), int)):
        with pytest.raises(ValueError, match="cut by slices or arrays of rows"):
            logs[rows]
    for wrong in (0.5, np.full(300, 0.5), np.full((300, 3), 1 / 3), np.full((1, 2), 0.5)):
        with pytest.raises(ValueError, match="not only of the one taken"):
            logs.with_propensities(wrong)


def test_windows_of_one_episode_stay_together():
    groups = np.repeat([7, 2, 9, 4], [100, 50, 90, 60])
    logs = Logs.from_arrays(**arrays(), groups=groups)
    train, test = logs.split(100)
    assert set(train.groups) == {7, 2}
    assert set(test.groups) == {9, 4}  # 150 rows: 100 would tear the group 9 apart
    np.testing.assert_array_equal(test.observations, logs.observations[150:])
    mixed = Logs.from_arrays(**arrays(), groups=np.arange(300) % 5)
    train, test = mixed.split(0.2)
    assert (set(train.groups), set(test.groups), len(test)) == ({0, 1, 2, 3}, {4}, 60)
    with pytest.raises(ValueError, match="groups on both sides of 4; got 250, which takes all"):
        logs.split(250)
    with pytest.raises(ValueError, match="groups must be whole numbers"):
        Logs.from_arrays(**arrays(), groups=np.full(300, 0.5))
    with pytest.raises(ValueError, match=r"equally long; got .*'groups': 7"):
        Logs.from_arrays(**arrays(), groups=np.arange(7))
    with pytest.raises(ValueError, match=r"groups must be \[n\]; got shape \[300, 1\]"):
        Logs.from_arrays(**arrays(), groups=groups[:, None])


def test_one_arm_of_every_family_is_kept():
    world = cqm.load_world("cartpole-swingup")
    branches = cqm.collect(world, states=600, horizon=3, per_step=True, seed=1)
    chances = lambda observations: np.where(
        observations[:, :1] > 0, [[0.8, 0.1, 0.1]], [[0.1] * 2 + [0.8]]
    )
    logs = Logs.from_branches(branches, propensities=chances, rng=np.random.default_rng(0))
    rows = np.arange(600)
    np.testing.assert_array_equal(
        logs.features, branches.step_features[rows, 0, logs.first_actions]
    )
    np.testing.assert_allclose(logs.outcomes, branches.outcomes[rows, 0, logs.first_actions])
    right = logs.observations[:, 0] > 0
    assert np.mean(logs.first_actions[right] == 0) == pytest.approx(0.8, abs=0.07)
    assert np.mean(logs.first_actions[~right] == 2) == pytest.approx(0.8, abs=0.07)
    with pytest.raises(ValueError, match="per_step=True"):
        Logs.from_branches(cqm.collect(world, states=4), rng=np.random.default_rng(0))


def test_saved_and_loaded(tmp_path):
    logs = Logs.from_arrays(
        **arrays(),
        propensities=[0.25, 0.75],
        groups=np.arange(300) // 7,
        continuation=[0.5, 0.5],
    )
    logs.save(tmp_path)
    loaded = Logs.load(tmp_path)
    for name in ("observations", "actions", "features", "propensities", "groups"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(logs, name))
    assert (loaded.recipe, loaded.feature_names) == (logs.recipe, logs.feature_names)
    content = bytearray((tmp_path / ARRAYS).read_bytes())
    content[-5] ^= 1
    (tmp_path / ARRAYS).write_bytes(content)
    with pytest.raises(DamagedFileError, match="checksum is wrong"):
        Logs.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("recipe"), r"logs.json lacks \['recipe'\]"),
        (lambda config: config.pop("sha256"), r"logs.json lacks \['sha256'\]"),
        (lambda config: config["recipe"].update(discount=0.5), "logs.json was changed"),
        (lambda config: config.update(feature_names=["a", "b"]), "logs.json was changed"),
    ],
)
def test_a_changed_description_is_noticed(tmp_path, change, message):
    Logs.from_arrays(**arrays()).save(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    change(config)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(DamagedFileError, match=message):
        Logs.load(tmp_path)


def test_even_choices_are_covered():
    coverage = Logs.from_arrays(**arrays(num=2000), propensities=[0.5, 0.5]).coverage()
    assert coverage.problems == []
    coverage.check()
    np.testing.assert_allclose(coverage.frequencies, 0.5, atol=0.05)
    assert coverage.regions.shape == (20, 2)
    assert (coverage.effective > 900).all()
    assert "no problem seen" in str(coverage)


def test_actions_that_depend_on_the_state_lack_overlap():
    given = arrays(num=2000)
    given["actions"][:, 0] = given["observations"][:, 0] > 0  # one action on either side
    coverage = Logs.from_arrays(**given).coverage()
    assert coverage.regions.min() == 0
    with pytest.warns(UserWarning, match=r"action \d is 0.00% of \d+ decisions in region"):
        coverage.check()


@pytest.mark.parametrize("propensities", [None, [0.5, 0.5]])
def test_a_lack_of_overlap_that_no_line_shows(propensities):
    given = arrays(num=2000)
    given["observations"] = np.random.default_rng(1).normal(size=(2000, 7))
    given["actions"][:, 0] = np.abs(given["observations"][:, 6]) > 0.67
    coverage = Logs.from_arrays(**given, propensities=propensities).coverage()
    assert coverage.regions.min() == 0
    with pytest.warns(UserWarning, match=r"action \d is 0.00% of 100 decisions in region 0"):
        coverage.check()
    told = "where its propensity is 50.00%" in " ".join(coverage.problems)
    assert told == (propensities is not None)
    if propensities is None:
        assert coverage.smallest_propensity == 0


def test_propensities_that_contradict_the_actions():
    rng, given = np.random.default_rng(2), arrays(num=2000)
    given["actions"][:, 0] = rng.random(2000) < 0.9
    right = Logs.from_arrays(**given, propensities=[0.1, 0.9])
    assert right.coverage().problems == []
    swapped = right.with_propensities([0.9, 0.1]).coverage()
    assert any("of 2000 decisions, where its propensity is" in p for p in swapped.problems)
    # On average they are right, but not where the first observation is large.
    chances = np.where(given["observations"][:, :1] > 0, [[0.3, 0.7]], [[0.7, 0.3]])
    given["actions"][:, 0] = rng.random(2000) < chances[:, 0]
    turned = Logs.from_arrays(**given, propensities=chances).coverage()
    assert turned.frequencies[0] == pytest.approx(chances[:, 0].mean(), abs=0.05)
    assert any("in region" in p and "where its propensity is" in p for p in turned.problems)


def test_nothing_observed_is_one_region():
    given = {**arrays(num=2000), "observations": np.empty((2000, 0))}
    coverage = Logs.from_arrays(**given).coverage()
    assert coverage.regions.shape == (1, 2)
    assert coverage.problems == [
        "all observations are the same, so effects cannot depend on the state"
    ]


def test_rare_propensities_are_worth_little():
    given = arrays(num=2000)
    chances = np.tile([0.5, 0.5], (2000, 1))
    chances[:20] = [0.999, 0.001]
    given["actions"][:20, 0] = 1
    coverage = Logs.from_arrays(**given, propensities=chances).coverage()
    assert coverage.effective[1] < 40 < coverage.effective[0]
    with pytest.warns(UserWarning, match="action 1 is worth"):
        coverage.check()


def test_an_action_that_never_occurs_is_an_error():
    coverage = Logs.from_arrays(**arrays(), num_actions=3).coverage()
    with pytest.raises(ValueError, match=r"actions \[2\] never occur among 300 decisions"):
        coverage.check()


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
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        Logs.from_gymnasium(Corridor(), trajectories=4, horizon=0)


def test_branches_of_the_same_environment_calibrate_a_model_of_logs(tmp_path, capsys):
    world = cqm.load_world("CartPole-v1")
    recorded = {"trajectories": 300, "horizon": 3, "world": world}
    logs = Logs.from_gymnasium("CartPole-v1", **recorded)
    assert logs.world == world.identity()
    assert logs.feature_names == world.feature_names
    model = ResidualModel().fit(logs)
    branches = cqm.collect(world, states=20, horizon=3, draws=16, warmup=(0, 5), threads=1)
    assert model.calibrate(branches).calibration_.excess_error < 0.1
    with pytest.raises(ValueError, match=r"calibration branches have horizon 2; .* learned from 3"):
        model.calibrate(cqm.collect(world, states=4, horizon=2, draws=16, threads=1))
    model.save(tmp_path)  # with what is unknown
    assert ResidualModel.load(tmp_path).recipe_ == model.recipe_
    assert main(["query", str(tmp_path), "--reward=reward"]) == 2
    assert "is unknown; give --states FILE" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the world's candidate actions are"):
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


def test_recording_gives_up_where_no_window_fits():
    env = Coin()
    env.truncated_at = 5
    with pytest.raises(ValueError, match="100 episodes of Coin in a row have no window of 6 steps"):
        Logs.from_gymnasium(env, trajectories=50, horizon=6)
    env.spec = gymnasium.envs.registration.EnvSpec("Coin-v0", max_episode_steps=5)
    with pytest.raises(ValueError, match="6 steps is longer than Coin-v0's limit of 5"):
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
    logs = Logs.from_minari("test/corridor-v0", horizon=4, continuation="uniform")
    assert len(logs) > 300
    assert logs.propensities is None
    with pytest.raises(ValueError, match="no episode of test/corridor-v0 has a window of 25 steps"):
        Logs.from_minari("test/corridor-v0", horizon=25)
    model = ResidualModel().fit(logs)
    query = cqm.Query.named({"obs_0": 1.0}, logs)
    states = np.array([[-1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    assert model.act(states, query).tolist() == [1, 1, 1]
    total = 2 * logs.recipe.discounts.sum()
    np.testing.assert_allclose(model.effect(states, action=1, baseline=0)[:, 0], total, rtol=0.25)
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(
        ResidualModel.load(tmp_path / "model").effect(states), model.effect(states)
    )


def test_continuous_actions_need_candidates():
    from cqm.logs.sources import _candidates, _nearest

    box = spaces.Box(-1, 1, (2,))
    with pytest.raises(ValueError, match="continuous; give candidate_actions"):
        _candidates(box, None)
    with pytest.raises(ValueError, match=r"candidate_actions must be \[actions, 2\]"):
        _candidates(box, [[1.0]])
    candidates, _ = _candidates(box, [[0.0, 0.0], [1.0, 0.0]])
    logged = np.array([[0.9, 0.0], [0.1, 0.0]])
    assert _nearest(logged, candidates, 0.2).tolist() == [1, 0]
    with pytest.raises(ValueError, match="2 of 2 logged actions of an episode are none of the 2"):
        _nearest(logged, candidates, 1e-6)


def test_the_page_on_logs_runs(capsys):
    page = (Path(__file__).parent.parent / "docs" / "logs.md").read_text()
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=(900, 1))
    given = {
        "observations": rng.normal(size=(900, 2)),
        "actions": actions,
        "features": actions[..., None] + 0.1 * rng.normal(size=(900, 1, 1)),
        "propensities": [0.5, 0.5],
    }
    exec(compile(page.split("```python\n")[1].split("```")[0], "logs.md", "exec"), given)
    assert "no problem seen" in capsys.readouterr().out
