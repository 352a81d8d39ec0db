import functools
import importlib.util
import json
import pathlib
import re

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cqm.branches.collect import collect
from cqm.worlds.check import check_world
from cqm.worlds.contract import Status
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import NuisanceWorld

A = np.array([[0.9, 0.2, 0.0], [-0.1, 0.8, 0.3], [0.0, 0.1, 0.7]])
B = np.array([[1.0, 0.0, 0.5], [0.0, -1.0, 0.25]])
ACTIONS = np.array([[0.0, 0.0], [1.0, -1.0], [-0.5, 0.5]])


def normal_states(num, rng):
    return rng.standard_normal((num, 3))


def normal_noise(num, horizon, rng):
    return 0.1 * rng.standard_normal((num, horizon, 3))


def linear_step(x, u, e):
    return x @ A.T + u @ B + e


def linear_world(**changes):
    arguments = {
        "step": linear_step,
        "initial": normal_states,
        "exogenous": normal_noise,
        "candidate_actions": ACTIONS,
    }
    return FunctionWorld(**(arguments | changes))


def pendulum_world():
    """Two pendulums in JAX; a compiled step of theirs rounds differently alone than in a loop."""

    def step(state, torque, push):
        angle, speed, swing = state[:, :2], state[:, 2:4], state[:, 4:]
        rate = jnp.sin(angle) * 9.81 / 1.3 + torque * 3.1 - 0.2 * speed * jnp.abs(speed)
        speed = speed + (rate + push * 0.7) * 0.02
        angle = angle + speed * 0.02
        swing = swing * 1.01 + angle[:, :1] * speed[:, 1:]
        return jnp.concatenate([angle, speed, swing], axis=1)

    def features(state, torque, push, following):
        change = (state * following).sum(axis=1, keepdims=True)
        work = following[:, :2] * 3.3 + torque * following[:, 1:3]
        return jnp.concatenate([following, change, work], axis=1)

    return FunctionWorld(
        step,
        lambda num, rng: rng.standard_normal((num, 5)),
        features=features,
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        candidate_actions=[[-1.0, 1.0], [0.0, 0.0], [1.0, 1.0]],
        backend="jax",
        name="pendulums",
    )


def trace_world():
    return linear_world(exogenous=None, trace=np.sin(np.arange(60.0)).reshape(20, 3))


def inventory_world():
    path = pathlib.Path(__file__).parents[2] / "examples" / "inventory.py"
    spec = importlib.util.spec_from_file_location("inventory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_world()


def problems(world):
    return {check.name: check.detail for check in check_world(world).checks if not check.passed}


def drawn(world, num, horizon, seed=0):
    """Random states, controls and noise."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(len(world.candidate_actions), size=(num, horizon))
    states, noise = world.reset(num, rng), world.sample_noise(num, horizon, rng)
    return states, world.candidate_actions[actions], noise


@pytest.mark.parametrize(
    "make_world",
    [inventory_world, linear_world, pendulum_world, trace_world],
    ids=lambda fn: fn.__name__,
)
def test_contract_holds(make_world):
    world = make_world()
    report = check_world(world)
    assert report, str(report)
    # More rows than a block, and more steps than the compiled program takes at once.
    report = check_world(world, num=270, horizon=2)
    assert report, str(report)
    report = check_world(world, num=3, horizon=35 if world.trace is None else 20)
    assert report, str(report)


def test_contract_refuses_hidden_randomness():
    def step(x, u, e):
        return linear_step(x, u, e) + np.random.standard_normal(x.shape)  # noqa: NPY002

    found = problems(linear_world(step=step))
    assert "from a second rollout differ by up to" in found["clone fidelity and shared noise"]
    assert "duplicate arms are identical" in found


def test_contract_refuses_a_state_that_lacks_a_variable():
    hidden = {"speed": 0.0}

    def step(x, u, e):
        hidden["speed"] = 0.9 * hidden["speed"] + u @ B
        return x + hidden["speed"] + e

    assert "the state may lack a variable" in problems(linear_world(step=step))["state is complete"]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_linear_system_follows_its_closed_form(backend):
    world = linear_world(backend=backend)
    states, controls, noise = drawn(world, num=5, horizon=20)
    rolled = world.rollout(states, controls, noise)
    power = np.linalg.matrix_power
    for h in (1, 7, 20):
        inputs = [(controls[:, t] @ B + noise[:, t]) @ power(A.T, h - 1 - t) for t in range(h)]
        expected = states["state"] @ power(A.T, h) + sum(inputs)
        np.testing.assert_allclose(rolled.features[:, h - 1], expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(rolled.states["state"], rolled.features[:, -1])
    assert rolled.features.dtype == np.float64
    assert rolled.status.tolist() == [Status.OK] * 5


def test_backends_agree():
    states, controls, noise = drawn(linear_world(), num=300, horizon=17)
    numpy = linear_world().rollout(states, controls, noise)
    single = linear_world(backend="jax").rollout(states, controls, noise)
    np.testing.assert_allclose(single.features, numpy.features, rtol=1e-6, atol=2e-6)
    with jax.enable_x64(True):
        double = linear_world(backend="jax").rollout(states, controls, noise)
    np.testing.assert_allclose(double.features, numpy.features, rtol=1e-12, atol=1e-12)


def test_features_see_the_whole_transition():
    world = FunctionWorld(
        lambda x, u, e: x + u,
        lambda num, rng: np.zeros((num, 1)),
        features=lambda x, u, e, y: np.concatenate([x, u, e, y], axis=1),
        exogenous=lambda num, horizon, rng: np.zeros((num, horizon, 1)),
        candidate_actions=[[0.0], [5.0]],
    )
    rolled = world.rollout({"state": [[1.0]] * np.ones((1, 1))}, [[[2.0], [3.0]]], [[[7.0], [8.0]]])
    assert rolled.features.tolist() == [[[1.0, 2.0, 7.0, 3.0], [3.0, 3.0, 8.0, 6.0]]]
    assert rolled.states["state"].tolist() == [[6.0]]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_defaults_lay_out_the_state_in_the_order_of_initial(backend):
    world = FunctionWorld(
        lambda s, u, e: {"a": s["a"] + 1, "b": s["b"] * 2},
        lambda num, rng: {"b": np.ones((num, 2)), "a": np.zeros(num, int)},
        candidate_actions=[[0.0], [1.0]],
        backend=backend,
    )
    states = {"a": np.array([5]), "b": np.array([[1.0, 3.0]])}  # as a file would sort them
    rolled = world.rollout(states, np.zeros((1, 2, 1)), np.empty((1, 2, 0)))
    assert world.observe(states).tolist() == [[1.0, 3.0, 5.0]]
    assert rolled.features.tolist() == [[[2.0, 6.0, 6.0], [4.0, 12.0, 7.0]]]
    assert rolled.states["a"].dtype == states["a"].dtype
    assert world.feature_names == ("feature_0", "feature_1", "feature_2")
    assert world.observation_names == ("observation_0", "observation_1", "observation_2")
    assert world.sample_noise(3, 4, np.random.default_rng(0)).shape == (3, 4, 0)


def bath_world(**changes):
    """A state that is a dict with one number per key, neither of which sorts first."""
    arguments = {
        "step": lambda s, u, e: {"heat": s["heat"] + u[:, 0], "age": s["age"] + 1},
        "initial": lambda num, rng: {"heat": rng.uniform(10, 20, num), "age": np.zeros(num)},
        "candidate_actions": [[0.0], [1.0]],
    }
    return FunctionWorld(**(arguments | changes))


def test_the_keys_of_a_state_name_its_columns():
    world = bath_world()
    assert world.feature_names == world.observation_names == ("heat", "age")
    own = bath_world(features=lambda s, u, e, t: u, observe=lambda s: s["age"][:, None])
    assert (own.feature_names, own.observation_names) == (("feature_0",), ("observation_0",))
    wide = bath_world(initial=lambda num, rng: {"heat": np.ones(num), "age": np.zeros((num, 1))})
    assert (wide.feature_names, wide.observation_names) == (("heat", "age"),) * 2
    branches = collect(world, states=4, horizon=2, threads=1, seed=0)
    assert branches.features_are_next_observation


def test_default_names_never_declare_that_a_function_returns_the_next_observation():
    def doubled(s, u, e, t):
        return 2 * np.column_stack([t["heat"], t["age"]])

    def halved(s):
        return 0.5 * np.column_stack([s["heat"], s["age"]])

    keys = ["heat", "age"]
    assert bath_world(features=doubled, feature_names=keys).observation_names[0] == "observation_0"
    assert bath_world(observe=halved, observation_names=keys).feature_names[0] == "feature_0"
    declared = bath_world(features=doubled, feature_names=keys, observation_names=keys)
    assert declared.feature_names == declared.observation_names == ("heat", "age")


@pytest.mark.parametrize("kind", ["feature", "observation"])
def test_names_that_are_keys_must_be_in_the_order_of_the_state(kind):
    names, fn = f"{kind}_names", {"feature": "features", "observation": "observe"}[kind]
    message = (
        rf"{names} must have the keys .* got \['age', 'heat'\], allowed: \['heat', 'age'\], or"
    )
    with pytest.raises(ValueError, match=message):
        bath_world(**{names: ["age", "heat"]})
    with pytest.raises(ValueError, match="in the order in which initial returns"):
        bath_world(**{names: ["age", "warmth"]})
    for allowed in (["heat", "age"], ["heat", "time"], ["warmth", "time"]):
        assert getattr(bath_world(**{names: allowed}), names) == tuple(allowed)

    def swapped(*transition):
        return np.column_stack([transition[-1]["age"], transition[-1]["heat"]])

    assert getattr(bath_world(**{names: ["age", "heat"], fn: swapped}), names) == ("age", "heat")


def test_bounds_come_from_the_actions_unless_given():
    world = linear_world()
    assert (world.control_low.tolist(), world.control_high.tolist()) == ([-0.5, -1.0], [1.0, 0.5])
    wide = linear_world(control_low=-2.0, control_high=[3.0, 4.0])
    assert (wide.control_low.tolist(), wide.control_high.tolist()) == ([-2.0, -2.0], [3.0, 4.0])


@pytest.mark.parametrize("continuous", [True, False])
def test_where_controls_are_not_continuous_only_candidate_actions_are_tried(continuous):
    tried = set()

    def step(x, u, e):
        tried.update(map(tuple, u.tolist()))
        return linear_step(x, u, e)

    world = linear_world(step=step, continuous=continuous)
    assert world.identity()["continuous"] is continuous
    collect(world, states=4, horizon=2, threads=1, seed=0)
    assert (tried == set(map(tuple, ACTIONS.tolist()))) is not continuous


def test_controls_are_continuous_by_default():
    assert linear_world().continuous


@pytest.mark.parametrize("make_world", [linear_world, pendulum_world, trace_world])
def test_a_world_can_be_sent_to_another_process(make_world):
    world = make_world()
    states, controls, noise = drawn(world, num=5, horizon=18)
    copy = cloudpickle.loads(cloudpickle.dumps(world))
    assert copy.identity() == world.identity()
    np.testing.assert_array_equal(
        copy.rollout(states, controls, noise).features,
        world.rollout(states, controls, noise).features,
    )


def mutating_step(x, u, e):
    x @= A.T
    x += u @ B
    x += e
    u[:] = e[:] = np.nan
    return x


def test_functions_may_work_in_place():
    def features(x, u, e, y):
        return np.concatenate([x, u, e, y], axis=1)

    def mutating_features(x, u, e, y):
        result = features(x, u, e, y)
        for array in (x, u, e, y):
            array[:] = np.nan
        return result

    pure = linear_world(features=features)
    careless = linear_world(step=mutating_step, features=mutating_features)
    states, controls, noise = drawn(pure, num=4, horizon=5)
    before = [states["state"].copy(), controls.copy(), noise.copy()]
    expected = pure.rollout(states, controls, noise)
    got = careless.rollout(states, controls, noise)
    np.testing.assert_allclose(got.features, expected.features, rtol=1e-12)
    for old, new in zip(before, (states["state"], controls, noise), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("where", ["state", "features"])
def test_rows_that_are_not_finite_are_isolated(backend, where):
    def step(x, u, e):
        bad = (abs(x[:, :1]) > 1e3) & (where == "state")
        return x * 0.5 + u @ B + 0.0 / (1.0 - bad)

    def features(x, u, e, y):
        return abs(y) + 1.0 / (1.0 - ((abs(x[:, :1]) > 1e3) & (where == "features")))

    world = linear_world(step=step, features=features, backend=backend)
    states, controls, noise = drawn(world, num=6, horizon=4)
    clean = world.rollout(states, controls, noise)
    states["state"][2] = 7000.0  # above the limit for three steps
    rolled = world.rollout(states, controls, noise)
    assert clean.status.tolist() == [Status.OK] * 6
    others = [0, 1, 3, 4, 5]
    assert rolled.status[2] == Status.NOT_FINITE
    assert rolled.status[others].tolist() == [Status.OK] * 5
    np.testing.assert_array_equal(rolled.features[others], clean.features[others])
    np.testing.assert_array_equal(rolled.states["state"][others], clean.states["state"][others])


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_a_nan_that_the_next_step_hides_still_counts(backend):
    world = FunctionWorld(
        lambda x, u, e: 2.0 * (x != 1) / (x != 1),  # NaN after 1, and 2 after anything else
        lambda num, rng: np.zeros((num, 1)),
        features=lambda x, u, e, y: u,
        candidate_actions=[[0.0], [1.0]],
        backend=backend,
    )
    states = {"state": np.array([[1.0], [3.0]])}
    rolled = world.rollout(states, np.zeros((2, 20, 1)), np.empty((2, 20, 0)))
    assert rolled.states["state"].tolist() == [[2.0], [2.0]]
    assert rolled.status.tolist() == [Status.NOT_FINITE, Status.OK]


def test_rows_that_raise_are_isolated():
    def step(x, u, e):
        if np.any(np.abs(x) > 1e3):
            raise RuntimeError("overflow of the tank")
        return linear_step(x, u, e)

    world = linear_world(step=step)
    states, controls, noise = drawn(world, num=300, horizon=3)
    clean = world.rollout(states, controls, noise)
    bad = [7, 290]
    states["state"][bad] = 2e3
    rolled = world.rollout(states, controls, noise)
    others = np.setdiff1d(np.arange(300), bad)
    assert rolled.status[bad].tolist() == [Status.RAISED] * 2
    assert (clean.error, rolled.error) == ("", "RuntimeError('overflow of the tank')")
    assert np.all(np.isnan(rolled.features[bad]))
    assert np.all(rolled.status[others] == Status.OK)
    np.testing.assert_array_equal(rolled.features[others], clean.features[others])


def test_blocks_have_one_size_whatever_the_batch():
    seen = set()

    def step(x, u, e):
        seen.add(len(x))
        return linear_step(x, u, e)

    world = linear_world(step=step, block_size=4)
    for num in (1, 4, 6):
        world.rollout(*drawn(world, num=num, horizon=2))
    assert seen == {4}
    assert world.rollout(*drawn(world, num=0, horizon=2)).features.shape == (0, 2, 3)


def test_trace_windows_are_pieces_of_the_trace():
    world = trace_world()
    windows = world.sample_noise(400, 17, np.random.default_rng(1))
    pieces = [world.trace[start : start + 17] for start in range(4)]
    counts = [sum(np.array_equal(window, piece) for window in windows) for piece in pieces]
    assert sum(counts) == 400
    assert min(counts) > 60  # every start is used, the last one included
    np.testing.assert_array_equal(
        world.sample_noise(2, 20, np.random.default_rng(1)), [world.trace, world.trace]
    )
    with pytest.raises(ValueError, match=r"20 rows, too few for 21 steps; .* at most 20"):
        world.sample_noise(2, 21, np.random.default_rng(1))


def test_trace_drives_the_rollout():
    world = FunctionWorld(
        lambda x, u, e: x + u * e,
        lambda num, rng: np.zeros((num, 1)),
        trace=[[1.0], [10.0], [100.0]],
        candidate_actions=[[1.0], [2.0]],
    )
    noise = world.sample_noise(2, 3, np.random.default_rng(0))
    rolled = world.rollout({"state": np.zeros((2, 1))}, [[[1.0]] * 3, [[2.0]] * 3], noise)
    assert rolled.features[:, :, 0].tolist() == [[1.0, 11.0, 111.0], [2.0, 22.0, 222.0]]


def test_different_worlds_have_different_identities():
    identity = json.loads(json.dumps(linear_world(name="plant").identity()))
    assert identity["name"] == "plant"
    assert identity["kind"] == "function"
    assert identity["functions"] == {
        "step": f"{__name__}.linear_step",
        "initial": f"{__name__}.normal_states",
        "features": None,
        "observe": None,
        "exogenous": f"{__name__}.normal_noise",
    }
    assert identity["candidate_actions"] == ACTIONS.tolist()
    assert identity["control_bounds"] == [[-0.5, -1.0], [1.0, 0.5]]
    wide, unbounded = (linear_world(control_high=high).identity() for high in (9.0, np.inf))
    assert wide["control_bounds"] == [[-0.5, -1.0], [9.0, 9.0]]  # the warm-up goes there
    assert unbounded["control_bounds"] is None
    assert identity["trace"] is None
    assert identity["versions"] == {"numpy": np.__version__}

    compiled = linear_world(backend="jax").identity()
    assert (compiled["backend"], compiled["precision"]) == ("jax", str(jnp.zeros(1).dtype))
    assert compiled["versions"]["jax"] == jax.__version__

    # The SHA-256 of eight zero bytes.
    zero = linear_world(step=lambda x, u, e: x + e, exogenous=None, trace=[[0.0]]).identity()
    assert zero["trace"] == "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "torch"}, "backend must be 'numpy' or 'jax'; got 'torch'"),
        ({"trace": np.zeros((9, 3))}, "both exogenous and trace"),
        ({"exogenous": None, "trace": np.zeros(9)}, r"trace has shape \(9,\)"),
        ({"exogenous": None, "trace": [[np.nan]]}, "trace .* 1 non-finite values"),
        ({"candidate_actions": [0.0, 1.0]}, r"candidate_actions has shape \(2,\)"),
        ({"candidate_actions": [[0.0, np.inf]]}, "1 non-finite values"),
        ({"candidate_actions": [[0.0, 1.0]]}, r"shape \(1, 2\) .* at least 2 rows"),
        ({"control_high": 0.25}, r"candidate_actions cannot be .* to \[0\.25, 0\.25\]"),
        ({"block_size": 0}, r"block_size must be .*\[1, 1048576\]; got 0"),
        ({"feature_names": ["x", "y"]}, "feature_names has 2 names, but there are 3 features"),
        ({"action_names": ["x"]}, r"action_names cannot be \['x'\]; allowed: \d different names"),
        ({"observation_names": ["x"]}, "observation_names has 1 names, but .* 3 observations"),
        ({"initial": lambda num, rng: np.zeros((1, 3))}, r"'state' from initial .* \(1, 3\)"),
        ({"initial": lambda num, rng: 0.0}, r"initial must return one row per state"),
        ({"initial": lambda num, rng: {}}, "without variables"),
        (
            {"initial": lambda num, rng: np.full((num, 3), "x")},
            "must be an array of numbers or booleans",
        ),
        (
            {"initial": lambda num, rng: np.zeros((num, 3), int)},
            "float64, but initial returned it as int64",
        ),
        ({"step": lambda x, u, e: x[:, :2]}, r"'state' from step has shape \(256, 2\)"),
        (
            {"step": lambda x, u, e: {"speed": x}},
            r"step must return an array; got a dict with keys \['speed'\]",
        ),
        ({"step": lambda x, u, e: None}, "step must return an array; got None"),
        (
            {"step": lambda x, u: x},
            r"step is called as step\(state, action, exogenous\); .* parameters \(x, u\)$",
        ),
        ({"initial": lambda num: np.zeros((num, 3))}, r"initial\(num, rng\); .* \(num\)$"),
        ({"features": lambda x, u, e: x}, r"features\(state, action, exogenous, next_state\); got"),
        ({"observe": lambda x, u: x}, r"observe is called as observe\(state\); got"),
        ({"exogenous": lambda num, rng: 0}, r"exogenous\(num, horizon, rng\); .* \(num, rng\)$"),
        (
            {"step": lambda x, u, e: x["speed"]},
            r"step raised IndexError: .* indices; the state is an array of shape \(256, 3\)$",
        ),
        (
            {"features": lambda x, u, e, y: y + None},
            r"features raised TypeError: .*; the state is an array of shape \(256, 3\)$",
        ),
        (
            {"initial": lambda num, rng: np.full((num, 3), np.nan)},
            "initial returned NaN in the state; allowed: states without NaN",
        ),
        ({"step": lambda x, u, e: x * np.nan}, "NaN or infinity"),
        ({"step": lambda x, u, e: x / u[:, :1]}, r"with candidate actions \[0\]"),
        (
            {"features": lambda x, u, e, y: y[:, 0]},
            r"features has shape \(256,\), expected .* side by side with np.column_stack\(\[",
        ),
        (
            {"exogenous": lambda n, h, rng: np.zeros((n, h))},
            r"exogenous has shape \(3, 1\), expected \(3, 1, any\); add an axis",
        ),
        ({"exogenous": lambda n, h, rng: np.zeros((n, 3))}, r"exogenous has shape \(3, 3\)"),
    ],
)
def test_mistakes_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        linear_world(**changes)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda s, u, e: s["heat"],
            r"step must return a dict with keys \['heat', 'age'\]; got an array of shape \(256,\)",
        ),
        (lambda s, u, e: None, r"a dict with keys \['heat', 'age'\]; got None"),
        (
            lambda s, u, e: {"heat": s["heat"]},
            r"keys \['heat', 'age'\]; got a dict with keys \['heat'\]",
        ),
        (
            lambda s, u, e: s[:, 0],
            r"step raised .*; the state is a dict with keys \['heat', 'age'\]",
        ),
        (lambda s, u, e: {**s, "heat": s["cold"]}, r"KeyError: 'cold'; the state is a dict with"),
        (
            lambda s, u, e: {**s, "age": s["age"][:, None]},
            r"'age' from step has shape \(256, 1\), expected \(256,\); .* as in x\[:, 0\]",
        ),
        (
            lambda s, u, e: {**s, "heat": s["heat"] + u},
            r"'heat' from step has shape \(256, 256\), expected \(256,\); .* as in action\[:, 0\]",
        ),
    ],
)
def test_mistakes_in_a_state_with_keys_are_explained(step, message, backend):
    with pytest.raises(ValueError, match=message) as e:
        bath_world(step=step, backend=backend)
    assert "np.where" not in str(e.value)


def test_initial_is_blamed_for_what_it_returns():
    with pytest.raises(ValueError, match=r"initial returned NaN in 'age'; allowed"):
        bath_world(initial=lambda num, rng: {"heat": np.ones(num), "age": np.full(num, np.nan)})
    kinds = iter([{"heat": np.ones(2), "age": np.ones(2)}, np.ones((2, 2))])
    with pytest.raises(ValueError, match=r"initial must return a dict with keys .* got an array"):
        bath_world(initial=lambda num, rng: next(kinds))


def unpacking_step(x, u, e):
    angle, speed, height = x
    return np.array([angle + speed, speed, height])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"step": lambda x, u, e: x if x[0] > 0 else -x},
            "step raised ValueError: .*np.where inst",
        ),
        (
            {"step": lambda x, u, e: [max(v, 0.0) for v in x]},
            "use np.where .* or pass block_size=1",
        ),
        (
            {"step": unpacking_step},
            "step raised ValueError: too many values to unpack .*np.where inst",
        ),
        ({"step": lambda x, u, e: np.zeros(3)}, r"'state' from step has shape \(3,\).*np.where"),
        ({"features": lambda x, u, e, y: [float(y)]}, "features raised TypeError: .*np.where inst"),
        ({"observe": lambda x: [float(x)]}, "observe raised TypeError: .*np.where instead of if"),
        ({"observe": lambda x: x.sum()}, r"observe has shape \(\), expected \(256, any\)"),
    ],
)
def test_functions_of_one_state_are_told_what_to_change(changes, message):
    world = linear_world(**changes)
    found = problems(world)
    assert list(found) == ["declaration"]
    assert re.search(message, found["declaration"])
    for use in (collect, NuisanceWorld, lambda world: world.rollout(*drawn(linear_world(), 2, 2))):
        with pytest.raises(ValueError, match=message):
            use(world)
    assert re.search(f"FunctionWorld.*cannot be used: .*{message}", repr(world))
    assert "cannot be used" in world._repr_html_()
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        _ = world.speed


def test_rollout_refuses_other_shapes():
    world = linear_world()
    states, controls, noise = drawn(world, num=4, horizon=3)
    with pytest.raises(ValueError, match=r"got controls \[4, 3, 1\] .*\[4, horizon, 2\]"):
        world.rollout(states, controls[..., :1], noise)
    with pytest.raises(ValueError, match=r"noise \[4, 2, 3\]; allowed for 4 states"):
        world.rollout(states, controls, noise[:, :2])


def test_the_exogenous_input_is_a_signal_unless_it_is_declared_to_be_seeds():
    def exogenous(num, horizon, rng):
        return rng.normal(size=(num, horizon, 1))

    settings = {"step": lambda x, u, e: x, "initial": lambda num, rng: np.zeros((num, 1))}
    make = functools.partial(FunctionWorld, candidate_actions=[[0.0], [1.0]], **settings)
    assert make().noise_kind == "none"
    assert make(exogenous=exogenous).noise_kind == "signal"
    assert make(trace=np.zeros((9, 1))).noise_kind == "signal"
    assert make(exogenous=exogenous, noise_kind="seeds").noise_kind == "seeds"
    assert "noise_kind" not in make(exogenous=exogenous).identity()  # sets stay compatible
    with pytest.raises(ValueError, match="noise_kind must be 'signal' or 'seeds'; got 'none'"):
        make(exogenous=exogenous, noise_kind="none")
    with pytest.raises(ValueError, match="noise_kind='seeds' describes exogenous"):
        make(noise_kind="seeds")
