import json

import gymnasium
import numpy as np
import pytest

from cqm.worlds.features import Squares
from cqm.worlds.gym import GymWorld
from cqm.worlds.identity import stored_identity
from cqm.worlds.loading import load_world, reload_world
from cqm.worlds.nuisance import Nuisance, NuisanceWorld


def test_worlds_load_by_name():
    reacher = load_world("reacher-easy")
    assert (reacher.name, len(reacher.feature_names)) == ("reacher-easy", 6)
    assert isinstance(load_world("CartPole-v1"), GymWorld)
    given = load_world("walker-walk", candidate_actions=[[0.0] * 6, [1.0] * 6])
    assert given.candidate_actions.tolist() == [[0.0] * 6, [1.0] * 6]


def test_worlds_load_with_a_nuisance():
    world = load_world("reacher-easy", nuisance=64, seed=7)
    assert isinstance(world, NuisanceWorld)
    assert world.nuisance == Nuisance(dimension=64, seed=7)
    assert len(world.feature_names) == len(world.observation_names) == 70
    louder = Nuisance(dimension=2, amplitude=60.0)
    assert load_world("reacher-easy", nuisance=louder, seed=7).nuisance == louder


LEFT_RIGHT = ("left", "none", "right")


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("cartpole-swingup", {}, LEFT_RIGHT),
        ("cartpole-swingup", {"nuisance": 2}, LEFT_RIGHT),
        ("cartpole-swingup", {"features": Squares()}, LEFT_RIGHT),
        ("cartpole-swingup", {"features": Squares(), "nuisance": 2}, LEFT_RIGHT),
        ("pendulum-swingup", {}, LEFT_RIGHT),
        ("CartPole-v1", {}, ("left", "right")),
    ],
)
def test_every_kind_of_world_has_names_for_its_actions(name, options, names):
    world, unnamed = load_world(name, action_names=names, **options), load_world(name, **options)
    assert world.action_names == world.native.action_names == names
    assert unnamed.action_names == tuple(map(str, range(len(names))))
    # Names do not change outcomes, so worlds that differ in them continue each other's data.
    assert stored_identity(world) == stored_identity(unnamed)
    assert reload_world(stored_identity(world)).action_names == unnamed.action_names
    with pytest.raises(ValueError, match=f"allowed: {len(names)} different names"):
        load_world(name, action_names=[*names, "more"], **options)


def test_the_seed_changes_the_mixing_and_never_the_actions():
    one, other = (load_world("reacher-easy", nuisance=2, seed=seed) for seed in (1, 2))
    assert not np.array_equal(one.feature_mixing, other.feature_mixing)
    np.testing.assert_array_equal(one.candidate_actions, other.candidate_actions)
    np.testing.assert_array_equal(
        one.candidate_actions, load_world("reacher-easy").candidate_actions
    )


@pytest.mark.parametrize("name", ["no-such", "", "Xyzzy-v9"])
def test_an_unknown_name_lists_the_available_worlds(name):
    with pytest.raises(ValueError, match=f"unknown world '{name}'; available: .*'acrobot-swingup'"):
        load_world(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("reacher-esy", "reacher-easy"),
        ("walker_walk", "walker-walk"),
        ("Cartpole-v1", "CartPole-v1"),
    ],
)
def test_a_misspelt_name_is_recognised(name, meant):
    with pytest.raises(ValueError, match=f"unknown world '{name}'; did you mean '{meant}'"):
        load_world(name)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("actions", [None, [[1.0], [0.0]]])
def test_a_world_is_loaded_again_by_its_identity(name, actions):
    identity = load_world(name, candidate_actions=actions).identity()
    stored = json.loads(json.dumps(identity))
    assert reload_world(stored).identity() == stored == identity
    assert actions in (None, identity["candidate_actions"])


def make_cartpole():
    return gymnasium.make("CartPole-v1")


def test_a_world_made_by_a_function_is_not_loaded_by_its_name():
    message = r"make_cartpole' cannot be loaded by its name; .* audit\(branches, world=\.\.\.\)"
    with pytest.raises(ValueError, match=message):
        reload_world(GymWorld(make_cartpole).identity())


@pytest.mark.parametrize("kind", ["gymnasium", "suite task"])
def test_a_stored_name_cannot_import_a_module(kind, tmp_path, monkeypatch):
    (tmp_path / "intruder.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    name = "intruder:CartPole-v1"
    with pytest.raises(SystemExit):
        gymnasium.make(name)  # as it does by itself
    identity = {**load_world("CartPole-v1").identity(), "name": name, "env": name, "kind": kind}
    with pytest.raises(ValueError, match=name):
        reload_world(identity)


def test_a_world_that_has_changed_since_it_was_stored_is_refused():
    identity = stored_identity(load_world("CartPole-v1"))
    identity["versions"]["gymnasium"] = "0.0"
    message = "'CartPole-v1' has changed since it was stored: stored as .*'0.0'.*, loaded as "
    with pytest.raises(ValueError, match=message):
        reload_world(identity)
