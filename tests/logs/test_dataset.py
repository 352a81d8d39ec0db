"""Logs: made from arrays and branches, split, saved and loaded."""

import json
import os
import shutil

import numpy as np
import pytest
from support.logs import arrays

import cqm
from cqm import storage
from cqm.logs.dataset import Logs
from cqm.logs.files import ARRAYS, CONFIG
from cqm.storage import DamagedFileError


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
    with pytest.raises(ValueError, match=r"share its names, \['obs_0', 'obs_1'\]; got \['x'"):
        Logs.from_arrays(**given, feature_names=["x", "v"], features_are_next_observation=True)


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
    with pytest.raises(ValueError, match="some of the 4 groups for each set; got 250"):
        logs.split(250)
    with pytest.raises(ValueError, match="groups must be whole numbers"):
        Logs.from_arrays(**arrays(), groups=np.full(300, 0.5))
    with pytest.raises(ValueError, match=r"same length; got .*'groups': 7"):
        Logs.from_arrays(**arrays(), groups=np.arange(7))
    with pytest.raises(ValueError, match=r"groups must be \[n\]; got shape \[300, 1\]"):
        Logs.from_arrays(**arrays(), groups=groups[:, None])


def test_one_arm_of_every_family_is_kept():
    world = cqm.load_world("cartpole-swingup", action_names=("left", "none", "right"))
    branches = cqm.collect(world, states=600, horizon=3, per_step=True, seed=1)
    propensities = lambda observations: np.where(
        observations[:, :1] > 0, [[0.8, 0.1, 0.1]], [[0.1] * 2 + [0.8]]
    )
    logs = Logs.from_branches(branches, propensities=propensities, rng=np.random.default_rng(0))
    assert logs.action_names == ("left", "none", "right")
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


NAMES = ("wait", "charge")


def test_actions_have_names(tmp_path):
    given = arrays()
    logs = Logs.from_arrays(**given, action_names=NAMES)
    assert logs.action_names == logs[:7].action_names == NAMES
    assert Logs.from_arrays(**given).action_names == ("0", "1")
    assert "2 actions (wait, charge), " in repr(logs)
    logs.save(tmp_path)
    assert Logs.load(tmp_path).action_names == NAMES
    with pytest.raises(ValueError, match="allowed: 2 different names"):
        Logs.from_arrays(**given, num_actions=2, action_names=("wait",))
    with pytest.raises(ValueError, match=r"actions must be candidate actions in 0..1; got 2"):
        Logs.from_arrays(**{**given, "actions": given["actions"] + 1}, action_names=NAMES)


def test_logs_without_names_store_none(tmp_path):
    Logs.from_arrays(**arrays()).save(tmp_path)
    assert set(json.loads((tmp_path / CONFIG).read_text())) == {
        *("kind", "world", "recipe", "candidate_actions", "observation_names", "feature_names"),
        *("schema", "sha256", "seal"),
    }


@pytest.mark.parametrize("kind", [str, object])
def test_actions_may_be_logged_by_name(kind):
    given = arrays()
    indices, text = given["actions"], np.array(NAMES).astype(kind)
    logs = Logs.from_arrays(**{**given, "actions": text[indices]}, action_names=NAMES)
    np.testing.assert_array_equal(logs.actions, indices)
    found = Logs.from_arrays(**{**given, "actions": text[indices].tolist()})
    assert found.action_names == ("charge", "wait")  # sorted
    np.testing.assert_array_equal(found.actions, 1 - indices)
    with pytest.raises(ValueError, match=r"unknown action 'wait'; .*available: \['idle', 'charge'"):
        Logs.from_arrays(**{**given, "actions": text[indices]}, action_names=("idle", "charge"))


def test_numbers_that_were_read_as_text_are_numbers():
    given = arrays()
    text = {**given, "actions": given["actions"].astype(str)}
    assert Logs.from_arrays(**text).action_names == ("0", "1")
    for names in (None, NAMES):
        logs = Logs.from_arrays(**text, action_names=names)
        np.testing.assert_array_equal(logs.actions, given["actions"])


def test_logs_in_a_notebook():
    html = Logs.from_arrays(**arrays(), action_names=("a<b", "c"))._repr_html_()
    assert "<th>actions</th><td>a&lt;b, c</td>" in html
    assert "<th>later actions</th><td>the logged behaviour</td>" in html


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
        (lambda config: config.pop("recipe"), "logs.json was changed"),
        (lambda config: config.pop("sha256"), "logs.json was changed"),
        (lambda config: config.pop("seal"), "logs.json was changed"),
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


@pytest.mark.parametrize("name", [CONFIG, ARRAYS])
def test_no_flipped_bit_goes_unnoticed(tmp_path, name):
    logs = Logs.from_arrays(**{key: values[:4] for key, values in arrays().items()})
    logs.save(tmp_path)
    path, problems = tmp_path / name, []
    content = path.read_bytes()
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        try:
            loaded = Logs.load(tmp_path)
            assert (loaded.recipe, loaded.world) == (logs.recipe, logs.world)
        except DamagedFileError as error:
            problems.append(str(error))
    assert len(problems) > 0.98 * len(content)
    assert all(str(path) in text and "save the logs again" in text for text in problems)


@pytest.mark.parametrize(
    ("change", "change_arrays"),
    [
        (lambda config: config.update(kind="model"), None),
        (lambda config: config.update(schema="2"), None),
        (lambda config: config.update(more=1), None),
        (lambda config: config.update(world={"name": "logs"}), None),
        (lambda config: config.update(feature_names=["a"] * 9), None),
        (lambda config: config.update(feature_names="abc"), None),
        (lambda config: config.update(observation_names=[1, 2]), None),
        (lambda config: config.update(action_names=["a", "a"]), None),
        (lambda config: config.update(columns=[{"name": "other"}]), None),
        (lambda config: config.update(columns=[{"name": "obs_0", "more": 1}]), None),
        (lambda config: config.update(columns=[{"name": "x", "categories": ["a", "a"]}]), None),
        (lambda config: config.update(candidate_actions=[[0.0]]), None),
        (lambda config: config.update(candidate_actions=[[0.0], []]), None),
        (lambda config: config["recipe"].update(horizon=0), None),
        (lambda config: config["recipe"].update(horizon=9), None),
        (lambda config: config["recipe"].update(continuation=["a", "b"]), None),
        (lambda config: config["recipe"].update(continuation=[0.5]), None),
        (lambda config: config["recipe"].pop("discount"), None),
        (None, lambda a: a.pop("observations")),
        (None, lambda a: a.pop("actions")),
        (None, lambda a: a.update(more=np.zeros(3))),
        (None, lambda a: a.update(actions=a["actions"] + 7)),
        (None, lambda a: a.update(actions=a["actions"] + 0.5)),
        (None, lambda a: a.update(actions=a["actions"][:, 0])),
        (None, lambda a: a.update(features=a["features"][:-1])),
        (None, lambda a: a.update(features=a["features"] * np.nan)),
        (None, lambda a: a.update(observations=a["observations"][:, :0])),
        (None, lambda a: a.update(groups=np.zeros((2, 2)))),
        (None, lambda a: a.update(propensities=np.zeros((2, 2)))),
    ],
)
def test_nonsense_with_the_right_checksum_is_refused(tmp_path, change, change_arrays):
    Logs.from_arrays(**arrays()).save(tmp_path)
    config = storage.read_json(tmp_path / CONFIG)
    values, metadata = storage.read_arrays(tmp_path / ARRAYS)
    del config["seal"], config["sha256"]
    (change or dict)(config)
    (change_arrays or dict)(values)
    storage.write_described(tmp_path / CONFIG, config, tmp_path / ARRAYS, values, metadata)
    with pytest.raises(DamagedFileError, match="save the logs again") as caught:
        Logs.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_process_that_dies_while_saving_leaves_the_old_logs_or_the_new(tmp_path, monkeypatch):
    old, new = (Logs.from_arrays(**arrays(), discount=discount) for discount in (0.5, 0.75))
    new = new[:10]
    directory, copies, replace = tmp_path / "logs", [], os.replace
    old.save(directory)

    def watched(source, target):
        copies.append(shutil.copytree(directory, tmp_path / str(len(copies))))
        replace(source, target)
        copies.append(shutil.copytree(directory, tmp_path / str(len(copies))))

    monkeypatch.setattr(os, "replace", watched)
    new.save(directory)
    monkeypatch.undo()
    found = [(len(logs), logs.recipe.discount) for logs in map(Logs.load, copies)]
    assert found == [(len(old), 0.5)] * 3 + [(10, 0.75)] * 3
    new.save(copies[0])
    assert sorted(os.listdir(copies[0])) == [CONFIG, ARRAYS]


@pytest.mark.parametrize("name", [CONFIG, ARRAYS])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, name, make):
    Logs.from_arrays(**arrays()).save(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(DamagedFileError, match=r"must be a file; .*save the logs again"):
        Logs.load(tmp_path)


def test_missing_logs_are_called_that(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=r"contains no logs: logs\.json is missing"):
            Logs.load(directory)
