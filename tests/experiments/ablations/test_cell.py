from dataclasses import replace

import numpy as np
import pytest

import cqm
from cqm.experiments.ablations import Fit, Setting
from cqm.experiments.ablations.cell import LAWS, MAPS, Cell, law, menu
from cqm.experiments.job import Clock
from cqm.experiments.protocol import preset
from cqm.worlds.suite import load_task

PROTOCOL = replace(preset("smoke"), nuisance=4, horizon=3)


ONE = (Fit("cqm"),)


def cell(tmp_path, setting=None, fits=ONE, axes=("rank",), domain="reacher-easy"):
    setting = setting or Setting()
    protocol = setting.applied(PROTOCOL)
    return Cell(protocol, setting, fits, axes, domain, 7, tmp_path, Clock())


def test_the_world_has_the_nuisance_of_the_setting(tmp_path):
    assert cell(tmp_path).world().nuisance == cqm.Nuisance(4, seed=7)
    assert cell(tmp_path, Setting(amplitude=50.0)).world().nuisance.amplitude == 50
    assert cell(tmp_path, Setting(nuisance=0)).world().nuisance is None


def test_the_benchmarks_menu_is_the_default():
    own = load_task("reacher-easy").candidate_actions
    np.testing.assert_array_equal(menu("reacher-easy", Setting()), own)
    assert not np.array_equal(menu("reacher-easy", Setting(prototypes=1)), own)


@pytest.mark.parametrize("num", [2, 3, 5, 9, 33])
def test_menus_reach_the_bounds_and_contain_smaller_ones(num):
    actions = menu("cheetah-run", Setting(actions=num))
    assert actions.shape == (num, 6)
    assert len(np.unique(actions, axis=0)) == num
    reach = np.abs(actions).max(axis=1)
    assert np.allclose(reach[num % 2 :], 1)
    np.testing.assert_allclose(actions.sum(axis=0), 0, atol=1e-12)
    larger = menu("cheetah-run", Setting(actions=num + 2))
    assert {tuple(action) for action in actions} <= {tuple(action) for action in larger}


def test_one_control_has_evenly_spaced_candidates():
    assert menu("cartpole-swingup", Setting(actions=5)).ravel().tolist() == [-1, -0.5, 0, 0.5, 1]


def test_laws_of_later_actions():
    world = cqm.load_world("cartpole-swingup")
    assert (law(world, "uniform"), law(world, "box")) == ("uniform", "box")
    assert law(world, "zero") == [0, 1, 0]
    assert law(world, "feedback").name == "state"
    with pytest.raises(ValueError, match=r"unknown continuation 'lazy'; available: \['uniform'"):
        law(world, "lazy")
    edges = cqm.load_world("cartpole-swingup", candidate_actions=[[-1.0], [1.0]])
    with pytest.raises(ValueError, match="no candidate action in the middle of its box"):
        law(edges, "zero")


@pytest.mark.parametrize("name", LAWS)
def test_branches_follow_the_law_of_the_setting(tmp_path, name):
    own = cell(tmp_path, Setting(continuation=name, states=4))
    branches = own.training(own.world())
    expected = {"feedback": "state", "zero": (1.0, 0.0, 0.0, 0.0, 0.0)}.get(name, name)
    assert branches.recipe.continuation.law == expected


def test_branches_with_other_recipes_are_kept_apart_and_found_again(tmp_path):
    own = cell(tmp_path, Setting(states=4))
    world = own.world()
    many = [[0, action] for action in range(1, 5)]
    for changes in ({}, {"arms": many}, {"continuation": law(world, "feedback")}):
        for _ in range(2):  # a policy is another object in each process
            own.training(world, **changes)
    kept = sorted(path.name for path in (tmp_path / "branches").iterdir())
    assert len(kept) == 3
    assert {len(name) for name in kept} == {len("training-") + 12}


def test_steps_are_stored_only_for_methods_that_need_them(tmp_path):
    for method, needed in (("cqm+effect", False), ("sf", True)):
        own = cell(tmp_path / method, Setting(states=4), (Fit("world"), Fit(method)))
        assert own.training(own.world()).recipe.per_step is needed


def test_every_map_of_features_can_be_loaded(tmp_path):
    for name in MAPS:
        own = cell(tmp_path, Setting(nuisance=0, features=name))
        assert len(own.world().feature_names) >= 6


def test_training_rewards_are_nested_and_held_out_ones_fixed(tmp_path):
    own = cell(tmp_path)
    world = own.world()
    few, held_out = own.rewards(world, Fit("direct", rewards=2))
    many, same = own.rewards(world, Fit("direct", rewards=40))
    np.testing.assert_array_equal(many[:2], few)
    np.testing.assert_array_equal(held_out, same)
    assert own.rewards(world, Fit("cqm", rewards=0))[0].shape == (0, 10)
    other = cell(tmp_path, Setting(prototypes=1))
    assert not np.allclose(other.rewards(world)[1], held_out)


def test_rows_say_where_a_fit_stands(tmp_path):
    axes = ("rank", "horizon", "states", "graph", "conditioning")
    own = cell(tmp_path, axes=axes)
    row = own.row("cqm", "accuracy", 0.5, Fit("cqm", rank=4))
    assert row == {
        **{"rank": 4, "horizon": 3, "states": 64, "graph": "full", "conditioning": "none"},
        **{"method": "cqm", "measure": "accuracy", "value": 0.5},
    }
    limit = own.row("limit", "noise_floor", np.nan)
    assert limit == {
        **{"rank": None, "horizon": 3, "states": None, "graph": "full", "conditioning": "any"},
        **{"method": "limit", "measure": "noise_floor", "value": None},
    }
    assert own.row("subspace", "excess_error", 0.1, rank=2)["rank"] == 2
