import json

import numpy as np
import pytest

import cqm
from cqm.branches.recipe import Continuation, Policy, Recipe
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld


def valve_world(**changes):
    arguments = {
        "step": lambda x, u, e: 0.5 * x + u + 0.1 * e,
        "initial": lambda num, rng: rng.standard_normal((num, 2)),
        "exogenous": lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        "candidate_actions": [[0.0, -1.0], [1.0, 3.0]],
        "control_low": [0.0, -1.0],
        "control_high": [1.0, 3.0],
        "name": "valve",
    }
    return FunctionWorld(**(arguments | changes))


def collected(world=None, **recipe):
    settings = {"states": 300, "horizon": 3, "actions": "box", "arms": 4, "continuation": "box"}
    return cqm.collect(world or valve_world(), **(settings | recipe))


def test_first_controls_are_spread_evenly_over_the_box():
    branches = collected()
    controls = branches.first_controls
    assert controls.shape == (300, 4, 2)
    assert controls.min(axis=(0, 1)) == pytest.approx([0, -1], abs=0.01)
    assert controls.max(axis=(0, 1)) == pytest.approx([1, 3], abs=0.03)
    # A random sample of 1,200 controls would miss the mean of the box by about 0.008 widths.
    assert controls.mean(axis=(0, 1)) == pytest.approx([0.5, 1.0], abs=0.004)
    assert len(np.unique(controls.reshape(-1, 2), axis=0)) == 1200


def test_outcomes_are_those_of_the_stored_controls():
    world = valve_world(exogenous=None, step=lambda x, u, e: 0.5 * x + u)
    branches = collected(world, per_step=True, draws=2)
    before = branches.observations[:, None, None]
    first = 0.5 * before + branches.first_controls[:, None]
    np.testing.assert_allclose(branches.step_features[..., 0, :], np.repeat(first, 2, axis=1))
    second = 0.5 * first + branches.later_controls[..., 0, :]
    np.testing.assert_allclose(branches.step_features[..., 1, :], second)


def test_a_menu_can_be_followed_by_controls_from_the_box():
    branches = collected(actions="menu", arms=None)
    np.testing.assert_array_equal(
        branches.first_controls[0], valve_world().candidate_actions[branches.arms[0]]
    )
    later = branches.later_controls
    assert later.shape == (300, 1, 1, 2, 2)
    assert (later >= [0, -1]).all()
    assert (later <= [1, 3]).all()
    assert later.std() > 0.3
    with pytest.raises(ValueError, match="use later_controls"):
        _ = branches.continuation


def test_effects_are_centred_over_the_controls_of_a_family_without_the_nuisance():
    world = NuisanceWorld(valve_world(), Nuisance(dimension=3, amplitude=1e3))
    effects = collected(world).effects()
    assert effects.shape == (300, 1, 4, 5)
    assert np.abs(effects.mean(axis=2)).max() < 1e-12
    assert np.abs(effects).max() < 10


@pytest.mark.parametrize("continuation", ["uniform", "box", [0.3, 0.7]])
def test_sets_pass_the_audit_and_changed_controls_do_not(tmp_path, continuation):
    world = valve_world()
    branches = collected(world, continuation=continuation, out=tmp_path, per_step=True)
    assert cqm.audit(branches, world, families=8).passed
    shard = branches.shards[0]
    changed = {name: shard.read(name, slice(None)).copy() for name in shard.names()}
    changed["first_controls"][7, 0] += 1e-9
    wrong = cqm.Branches(branches.manifest, [cqm.branches.shards.MemoryShard(changed, {})])
    report = cqm.audit(wrong, world, families=8)
    assert "first_controls" in " ".join(check.detail for check in report.checks if not check.passed)


def test_a_policy_can_follow_controls_from_the_box():
    policy = Policy("always the first", lambda observations, uniforms: np.zeros(len(uniforms), int))
    branches = collected(continuation=policy)
    assert (branches.continuation == 0).all()
    assert cqm.audit(branches, valve_world(), policy=policy, families=4).passed


def test_the_same_seed_gives_the_same_bytes_for_any_number_of_workers(tmp_path):
    one, two = (collected(out=tmp_path / str(n), threads=n) for n in (1, 2))
    assert one.fingerprint() == two.fingerprint()
    assert collected(seed=1).fingerprint() != collected().fingerprint()


def test_menus_are_stored_as_before():
    assert "actions" not in Recipe().to_json()
    assert Recipe.from_json(Recipe().to_json()) == Recipe()
    box = Recipe(actions="box", continuation="box")
    assert Recipe.from_json(json.loads(json.dumps(box.to_json()))) == box
    plain = cqm.collect(valve_world(), states=4, horizon=2)
    assert plain.box is None
    assert "box" not in plain.manifest


def test_tables_have_one_column_per_control():
    table = collected(states=4).to_pandas()
    assert len(table) == 16
    assert {"control.0", "control.1"} <= set(table.columns)
    assert "action" not in table.columns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": "boxes"}, "actions must be"),
        ({"arms": [[0, 1]]}, "number of controls per state"),
        ({"arms": 1}, "at least 2"),
    ],
)
def test_wrong_settings_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        collected(**changes)


def test_only_bounded_continuous_controls_can_be_drawn():
    discrete = cqm.load_world("CartPole-v1")
    with pytest.raises(ValueError, match="has discrete actions"):
        cqm.collect(discrete, states=2, actions="box")
    unbounded = valve_world(control_low=[-np.inf, -1.0])
    with pytest.raises(ValueError, match="only from a bounded box"):
        cqm.collect(unbounded, states=2, continuation="box")


def test_logs_and_policies_know_the_names_of_the_laws():
    with pytest.raises(ValueError, match="first actions from the menu"):
        cqm.Logs.from_branches(collected(per_step=True), rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="must not be named 'box'"):
        Continuation.of(Policy("box", lambda observations, uniforms: 0))
    assert Continuation.of("box").describe(["a"]) == "uniformly random controls from the box"
