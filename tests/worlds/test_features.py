import json

import cloudpickle
import numpy as np
import pytest

from cqm.branches.collect import collect
from cqm.worlds import load_world
from cqm.worlds.check import check_world
from cqm.worlds.contract import Status, take
from cqm.worlds.features import (
    ExpandedWorld,
    Products,
    RandomFourier,
    Squares,
    UserFeatures,
    load_maps,
    sample_events,
    varies,
)
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

ROTATION = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]


def shop(**changes):
    """x' = x/2 + u + e in two coordinates; features are x' and u."""

    def features(state, action, exogenous, following):
        return np.concatenate([following, action], axis=1)

    arguments = {
        "step": lambda state, action, exogenous: state / 2 + action + exogenous,
        "initial": lambda num, rng: rng.standard_normal((num, 2)),
        "exogenous": lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        "features": features,
        "feature_names": ["a", "b", "u"],
        "candidate_actions": [[-1.0], [0.0], [2.0]],
        "name": "shop",
    }
    return FunctionWorld(**(arguments | changes))


def rotated(features):
    return np.tanh(features @ ROTATION)


MAPS = (Squares(), Products(), RandomFourier(5), UserFeatures(rotated, ("p", "q", "r")))


def rolled(world, num=7, horizon=5, seed=0):
    """Random states, controls and noise."""
    rng = np.random.default_rng(seed)
    states, noise = world.reset(num, rng), world.sample_noise(num, horizon, rng)
    actions = rng.integers(len(world.candidate_actions), size=(num, horizon))
    return states, world.candidate_actions[actions], noise


def test_names_follow_the_worlds():
    world = ExpandedWorld(shop(), *MAPS)
    assert world.feature_names == (
        *("a", "b", "u"),
        *("a^2", "b^2", "u^2"),
        *("a*b", "a*u", "b*u"),
        *(f"fourier_{i}" for i in range(5)),
        *("p", "q", "r"),
    )


def test_squares_and_products_in_numbers():
    world = ExpandedWorld(shop(), Products(), Squares())
    expanded = world.expand(np.array([[2.0, -3.0, 5.0]]))
    assert expanded.tolist() == [[2.0, -3.0, 5.0, -6.0, 10.0, -15.0, 4.0, 9.0, 25.0]]


def test_random_fourier_features_are_their_definition():
    spread = (1.0, 2.0, 0.5)
    world = ExpandedWorld(shop(), RandomFourier(4, scale=3.0, seed=8, spread=spread))
    rng = np.random.default_rng(8)
    omega, offset = rng.standard_normal((3, 4)) / 3.0, rng.uniform(0, 2 * np.pi, 4)
    features = np.random.default_rng(1).standard_normal((6, 3))
    expected = np.cos((features / spread) @ omega + offset)
    np.testing.assert_allclose(world.expand(features)[:, 3:], expected, rtol=0, atol=1e-13)


def test_random_fourier_features_approximate_a_gaussian_kernel():
    world = ExpandedWorld(shop(), RandomFourier(20_000, scale=2.0, spread=(1.0, 1.0, 1.0)))
    x, y = np.array([0.3, -1.0, 0.5]), np.array([1.0, 0.2, 0.0])
    waves = world.expand(np.stack([x, y]))[:, 3:]
    expected = np.exp(-np.sum((x - y) ** 2) / (2 * 2.0**2))
    assert 2 * np.mean(waves[0] * waves[1]) == pytest.approx(expected, abs=0.03)


def test_the_spread_is_measured_once_to_three_digits():
    world = ExpandedWorld(shop(), RandomFourier(2))
    (stored,) = world.identity()["feature_maps"]
    expected = [float(f"{s:.3g}") for s in sample_events(shop(), 1024).std(axis=0)]
    assert stored["spread"] == expected
    again = ExpandedWorld(shop(), RandomFourier(2, spread=expected))
    features = np.random.default_rng(0).standard_normal((9, 3))
    np.testing.assert_array_equal(world.expand(features), again.expand(features))


def test_a_constant_feature_has_spread_one():
    def features(state, action, exogenous, following):
        return np.stack([following[:, 0], 0.1 + 0.2 + 0 * following[:, 0]], axis=1)

    world = ExpandedWorld(shop(features=features, feature_names=["a", "c"]), RandomFourier(2))
    assert world.identity()["feature_maps"][0]["spread"][1] == 1.0


def test_two_scales_need_two_prefixes():
    world = ExpandedWorld(shop(), RandomFourier(1), RandomFourier(1, scale=9.0, prefix="slow"))
    assert world.feature_names[3:] == ("fourier_0", "slow_0")
    with pytest.raises(
        ValueError, match=r"names must be unique; got \['fourier_0'\] more than once"
    ):
        ExpandedWorld(shop(), RandomFourier(1), RandomFourier(1, scale=9.0))


def test_a_row_does_not_depend_on_the_others():
    world = ExpandedWorld(shop(), *MAPS, RandomFourier(17, prefix="more"))
    rng = np.random.default_rng(2)
    features = rng.standard_normal((300, 3)) * rng.choice([1e-3, 1.0, 1e3, 1e9], (300, 1))
    alone = np.concatenate([world.expand(features[i : i + 1]) for i in range(300)])
    for num in (2, 7, 255, 256, 300):
        np.testing.assert_array_equal(world.expand(features[:num]), alone[:num])
        np.testing.assert_array_equal(world.expand(features[-num:]), alone[-num:])
    shaped = world.expand(features.reshape(5, 60, 3))
    np.testing.assert_array_equal(shaped, alone.reshape(5, 60, -1))
    np.testing.assert_array_equal(world.expand(np.asfortranarray(features)), alone)
    assert world.expand(features[:0]).shape == (0, len(world.feature_names))


@pytest.mark.parametrize(
    "make_world",
    [
        lambda: ExpandedWorld(shop(), *MAPS),
        lambda: ExpandedWorld(load_world("reacher-easy"), Squares(), Products(), RandomFourier(9)),
        lambda: ExpandedWorld(load_world("CartPole-v1"), Products(), RandomFourier(3)),
        lambda: NuisanceWorld(ExpandedWorld(shop(), *MAPS), Nuisance(dimension=9)),
    ],
    ids=["shop", "reacher", "gym", "nuisance"],
)
def test_contract_holds(make_world):
    report = check_world(make_world())
    assert report, str(report)


def test_everything_else_is_the_inner_worlds():
    native = load_world("CartPole-v1")
    world = ExpandedWorld(native, Squares())
    assert (world.name, world.cloning) == (native.name, native.cloning)
    assert world.continuous == native.continuous is False
    assert world.observation_names == native.observation_names
    np.testing.assert_array_equal(world.candidate_actions, native.candidate_actions)
    np.testing.assert_array_equal(world.control_low, native.control_low)
    states, controls, noise = rolled(world)
    np.testing.assert_array_equal(noise, rolled(native)[2])
    np.testing.assert_array_equal(world.observe(states), native.observe(states))
    kept = world.store(states)
    assert set(kept) == set(native.store(states))
    ours, theirs = (w.rollout(w.restore(kept), controls, noise) for w in (world, native))
    np.testing.assert_array_equal(ours.features[..., : len(native.feature_names)], theirs.features)
    np.testing.assert_array_equal(world.observe(ours.states), native.observe(theirs.states))
    assert world.rollout(states, controls, noise, final=False).states == {}


def test_a_feature_that_overflows_drops_only_its_row():
    world = ExpandedWorld(shop(), Squares(), RandomFourier(3))
    states, controls, noise = rolled(world)
    sound = world.rollout(states, controls, noise)
    states["state"][2, 0], states["state"][4, 1] = 1e200, np.nan
    result = world.rollout(states, controls, noise)
    expected = [Status.OK, Status.OK, Status.NOT_FINITE, Status.OK, Status.NOT_FINITE]
    assert result.status[:5].tolist() == expected
    rest = [0, 1, 3, 5, 6]
    np.testing.assert_array_equal(result.features[rest], sound.features[rest])


def test_a_user_function_that_raises_drops_only_its_row():
    def careful(features):
        if np.any(features > 100):
            raise RuntimeError("too large for me")
        return rotated(features)

    world = ExpandedWorld(shop(), UserFeatures(careful, ["p", "q", "r"]))
    states, controls, noise = rolled(world)
    sound = world.rollout(states, controls, noise)
    states["state"][2, 0] = 1e6
    result = world.rollout(states, controls, noise)
    assert np.flatnonzero(result.status).tolist() == [2]
    assert (sound.error, result.error) == ("", "RuntimeError('too large for me')")
    rest = [0, 1, 3, 4, 5, 6]
    np.testing.assert_array_equal(result.features[rest], sound.features[rest])


def test_a_user_function_that_always_raises_is_reported_at_once():
    def broken(features):
        raise RuntimeError("not written yet")

    with pytest.raises(ValueError, match="raised RuntimeError: not written yet"):
        ExpandedWorld(shop(), UserFeatures(broken, ["p"]))


def test_maps_are_rebuilt_from_the_identity():
    maps = MAPS[:3]
    world = ExpandedWorld(shop(), *maps)
    identity = json.loads(json.dumps(world.identity()))
    stored = identity.pop("feature_maps")
    assert identity == json.loads(json.dumps(shop().identity()))
    assert [entry["map"] for entry in stored] == ["Squares", "Products", "RandomFourier"]
    again = ExpandedWorld(shop(), *load_maps(stored))
    assert json.loads(json.dumps(again.identity())) == json.loads(json.dumps(world.identity()))
    features = np.random.default_rng(3).standard_normal((9, 3))
    np.testing.assert_array_equal(world.expand(features), again.expand(features))


def test_different_maps_have_different_identities():
    worlds = [
        ExpandedWorld(shop(), RandomFourier(3)),
        ExpandedWorld(shop(), RandomFourier(3, seed=1)),
        ExpandedWorld(shop(), RandomFourier(3, scale=2.0)),
        ExpandedWorld(shop(), UserFeatures(rotated, ["p", "q", "r"])),
    ]
    assert len({json.dumps(world.identity()) for world in worlds}) == 4
    user = worlds[-1].identity()["feature_maps"][0]
    assert user["fn"].endswith(".rotated")
    with pytest.raises(ValueError, match=r"\['UserFeatures'\] cannot be loaded; allowed: \['Squar"):
        load_maps([user])


def test_one_map_need_not_be_in_a_sequence():
    one, listed = (load_world("cartpole-swingup", features=f) for f in (Squares(), [Squares()]))
    assert one.identity() == listed.identity()
    assert one.feature_names[-1] == "pole_velocity^2"
    assert "feature_maps" not in load_world("cartpole-swingup", features=()).identity()


def test_a_world_travels_to_another_process():
    world = ExpandedWorld(load_world("reacher-easy"), Squares(), RandomFourier(3))
    copy = cloudpickle.loads(cloudpickle.dumps(world))
    features = np.random.default_rng(0).standard_normal((4, 6))
    np.testing.assert_array_equal(copy.expand(features), world.expand(features))


@pytest.mark.parametrize(
    ("make_world", "message"),
    [
        (
            lambda: ExpandedWorld(NuisanceWorld(shop()), Squares()),
            "expand world.native instead: products with a nuisance do not cancel",
        ),
        (
            lambda: ExpandedWorld(ExpandedWorld(shop(), Squares()), Products()),
            "already expanded; pass all maps to one",
        ),
        (
            lambda: ExpandedWorld(shop(), UserFeatures(rotated, ["a", "q", "r"])),
            r"names must be unique; got \['a'\] more than once",
        ),
        (
            lambda: ExpandedWorld(shop(), UserFeatures(rotated, ["p"])),
            r"shape of the user features \['p'\]: expected \[256, 1\], got \[256, 3\]",
        ),
        (lambda: ExpandedWorld(shop(), RandomFourier(0)), "num must be .*; got 0"),
        (
            lambda: ExpandedWorld(shop(), RandomFourier(scale=0.0)),
            "scale must be a number above 0; got 0.0",
        ),
        (
            lambda: ExpandedWorld(shop(), RandomFourier(spread=[1.0])),
            "spread must be 3 positive numbers",
        ),
        (lambda: ExpandedWorld(shop(), RandomFourier(spread=[1, 1, -1])), "3 positive numbers"),
    ],
)
def test_mistakes_are_refused(make_world, message):
    with pytest.raises(ValueError, match=message):
        make_world()


def test_squares_of_mixed_features_would_not_cancel():
    # Why a nuisance is not expanded: its square differs between arms that share it.
    world = NuisanceWorld(shop(), Nuisance(dimension=2, seed=1))
    rng = np.random.default_rng(0)
    states = world.reset(1, rng)
    noise = world.sample_noise(1, 1, rng)[np.zeros(3, int)]
    effects = []
    for shift in (0.0, 100.0):
        moved = {**states, "nuisance": states["nuisance"] + shift}
        rows = take(moved, np.zeros(3, int))
        squares = world.rollout(rows, world.candidate_actions[:, None], noise).features[:, 0] ** 2
        effects.append(squares - squares.mean(axis=0))
    assert np.abs(effects[1] - effects[0]).max() > 10 * np.abs(effects[0]).max()


def test_a_nuisance_around_the_expansion_cancels():
    expanded = ExpandedWorld(shop(), Squares(), RandomFourier(4))
    world = NuisanceWorld(expanded, Nuisance(dimension=6, amplitude=6000.0, seed=2))
    branches = collect(world, states=20, horizon=4, per_step=True, seed=3, threads=1)
    steps = branches.array("steps")
    assert steps.shape[-1] == 3 + 3 + 4
    np.testing.assert_array_equal(steps[..., 3:6], steps[..., :3] ** 2)
    native = branches.recipe.discounted(steps)
    native = native - native.mean(axis=2, keepdims=True)
    effects = world.native_effects(branches.effects())
    np.testing.assert_allclose(effects, native, rtol=0, atol=1e-9 * np.abs(native).max())


def test_events_are_a_deterministic_sample_of_steps():
    world = load_world("reacher-easy")
    events = sample_events(world, 100, seed=4)
    assert events.shape == (128, 6)
    np.testing.assert_array_equal(events, sample_events(world, 100, seed=4))
    assert not np.array_equal(events, sample_events(world, 100, seed=5))
    assert np.all(varies(events))


def test_events_fit_a_short_trace():
    trace = np.random.default_rng(0).standard_normal((9, 2))
    assert sample_events(shop(exogenous=None, trace=trace), 64).shape == (64, 3)


def test_failed_rollouts_give_no_events():
    def step(state, action, exogenous):
        return np.where(state > 1.5, np.nan, state + 0.1 * (action + 1))

    world = shop(step=step)
    events = sample_events(world, 320)
    assert np.isfinite(events).all()
    assert 0 < len(events) < 320


def test_a_failed_rollout_is_not_continued():
    def features(state, action, exogenous, following):
        return 1 / (following[:, :1] - 5)  # infinite at the fifth step from 0, and fine after it

    world = shop(
        step=lambda state, action, exogenous: state + 1,
        initial=lambda num, rng: 100.0 * (np.arange(2 * num).reshape(num, 2) % 4 > 1),
        features=features,
        feature_names=["f"],
    )
    events = sample_events(world, 320)
    assert events.shape == (160, 1)
    assert events.max() == 1 / 96


def test_a_world_that_always_fails_is_reported():
    def step(state, action, exogenous):
        return np.where(np.abs(state) > 5, np.nan, state + 3)

    with pytest.raises(ValueError, match="every rollout of 'shop' with random actions failed"):
        sample_events(shop(step=step), 32)


def test_varies_sees_more_than_rounding():
    values = np.array([[0.1 + 0.2, 1.0, 0.0], [0.3, 1.0 + 1e-9, 0.0]])
    assert varies(values).tolist() == [False, True, False]
