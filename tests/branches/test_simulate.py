import itertools
import math

import numpy as np
import pytest
from support.worlds import SeedWorld, ToyWorld

import cqm
from cqm.branches.collect import plan_collection
from cqm.branches.recipe import Policy, Recipe
from cqm.branches.simulate import simulate_block, stream
from cqm.worlds.contract import Rollout, Status, World, num_states
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

# Worlds that fail are what is tested here; test_collect.py has the warning.
pytestmark = pytest.mark.filterwarnings("ignore::cqm.branches.collect.DroppedWarning")

ACTIONS = [[0.0, 0.0], [1.0, 0.5], [-0.5, -1.0]]


def spiral_step(x, u, e):
    """A linear system written elementwise, so that rows round alike in any batch."""
    return np.stack(
        [
            0.9 * x[:, 0] - 0.3 * x[:, 1] + u[:, 0] + 0.2 * e[:, 0],
            0.3 * x[:, 0] + 0.9 * x[:, 1] + u[:, 1] + 0.2 * e[:, 0],
        ],
        axis=1,
    )


def spiral_features(x, u, e, y):
    return np.concatenate([y, x * u, e], axis=1)


def spiral_world(**changes):
    arguments = {
        "step": spiral_step,
        "features": spiral_features,
        "initial": lambda num, rng: rng.standard_normal((num, 2)),
        "exogenous": lambda num, horizon, rng: rng.standard_normal((num, horizon, 1)),
        "candidate_actions": ACTIONS,
        "name": "spiral",
    }
    return FunctionWorld(**(arguments | changes))


def collect(world, **settings):
    return cqm.collect(world, threads=1, **({"states": 40, "horizon": 5} | settings))


def arrays_of(branches):
    return {name: branches.array(name) for name in branches.array_names()}


def assert_same_arrays(one, other):
    assert sorted(one) == sorted(other)
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def python_branch(state, actions, noise):
    """Features of every step of one branch in plain Python, from the actions it takes."""
    x, y = (float(v) for v in state)
    steps = []
    for action, (e,) in zip(actions, noise.tolist(), strict=True):
        u, v = ACTIONS[action]
        next_x = 0.9 * x - 0.3 * y + u + 0.2 * e
        next_y = 0.3 * x + 0.9 * y + v + 0.2 * e
        steps.append([next_x, next_y, x * u, y * v, e])
        x, y = next_x, next_y
    return steps


def python_outcome(steps, discount):
    return [sum(discount**k * step[i] for k, step in enumerate(steps)) for i in range(5)]


@pytest.mark.parametrize("arms", [None, 2])
def test_open_loop_branches_are_what_plain_python_gets(arms):
    settings = dict(states=60, horizon=5, draws=2, discount=0.9, arms=arms, per_step=True, seed=3)
    branches = collect(spiral_world(), **settings)
    noise, states = branches.array("noise"), branches.states["state"]
    first, steps = branches.first_features, branches.step_features
    for i, draw in itertools.product(range(60), range(2)):
        later = branches.continuation[i, draw, 0].tolist()
        for k, arm in enumerate(branches.arms[i].tolist()):
            expected = python_branch(states[i], [arm, *later], noise[i, draw])
            np.testing.assert_allclose(steps[i, draw, k], expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(first[i, draw, k], expected[0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(
                branches.outcomes[i, draw, k],
                python_outcome(expected, 0.9),
                rtol=1e-12,
                atol=1e-12,
            )


def test_open_loop_arms_share_one_continuation():
    branches = collect(spiral_world(), draws=2)
    assert branches.continuation.shape == (40, 2, 1, 4)
    assert "uniforms" not in branches.array_names()
    assert set(branches.continuation.ravel()) == {0, 1, 2}


def leaning(observations, uniforms):
    """Action 1 or 2 more often the further the first observation is to one side."""
    lean = 1 / (1 + np.exp(-observations[:, 0]))
    return np.where(uniforms < 0.2, 0, np.where(uniforms < 0.2 + 0.8 * lean, 1, 2))


def python_leaning(first_observation, uniform):
    lean = 1 / (1 + math.exp(-first_observation))
    if uniform < 0.2:
        return 0
    return 1 if uniform < 0.2 + 0.8 * lean else 2


@pytest.mark.parametrize(
    "nuisance",
    [
        None,
        Nuisance(dimension=3, amplitude=0.5),
        Nuisance(3, amplitude=1.0, coupling="independent"),
    ],
    ids=["no nuisance", "shared nuisance", "independent nuisance"],
)
def test_closed_loop_branches_replay_in_plain_python(nuisance):
    world = spiral_world()
    if nuisance is not None:
        world = NuisanceWorld(world, nuisance)
    settings = dict(states=60, horizon=5, draws=2, discount=0.9, seed=3)
    branches = collect(world, continuation=Policy("leaning", leaning), **settings)
    noise, states = branches.array("noise"), branches.states["state"]
    uniforms, outcomes = branches.array("uniforms"), branches.array("outcome")
    chosen = branches.continuation
    assert uniforms.shape == (60, 2, 4)  # shared by the arms
    assert chosen.shape == (60, 2, 3, 4)

    def observed(i, draw, k, t, state):
        """The first observation before step t of a branch."""
        if nuisance is None:
            return state[0]
        path = branches.array("nuisance")[i, draw, k if nuisance.coupling == "independent" else 0]
        seen = [*(nuisance.amplitude * path[t - 1]).tolist(), *state]
        return sum(q * s for q, s in zip(world.observation_mixing[0].tolist(), seen, strict=True))

    for i, draw, k in itertools.product(range(60), range(2), range(3)):
        actions = [k]
        for t in range(1, 5):
            steps = python_branch(states[i], actions, noise[i, draw, :t])
            first = observed(i, draw, k, t, steps[-1][:2])
            actions.append(python_leaning(first, uniforms[i, draw, t - 1]))
        assert chosen[i, draw, k].tolist() == actions[1:]
        expected = python_outcome(python_branch(states[i], actions, noise[i, draw]), 0.9)
        np.testing.assert_allclose(outcomes[i, draw, k], expected, rtol=1e-12, atol=1e-12)

    # The noise is shared, the actions are not: somewhere the arms' states made them choose apart.
    assert (chosen != chosen[:, :, :1]).any()
    assert (chosen == chosen[:, :, :1]).mean() > 0.5


def test_a_policy_that_ignores_the_state_equals_the_open_loop():
    by_index = Policy("by index", lambda observations, uniforms: (uniforms * 3).astype(int))
    settings = dict(states=300, draws=2, seed=4, per_step=True)
    closed = collect(spiral_world(), continuation=by_index, **settings)
    opened = collect(spiral_world(), **settings)
    for name in ("outcome", "first", "steps", "observation", "noise", "index", "arms"):
        np.testing.assert_array_equal(closed.array(name), opened.array(name), err_msg=name)
    np.testing.assert_array_equal(closed.continuation, np.repeat(opened.continuation, 3, axis=2))


@pytest.mark.parametrize(
    "act",
    [
        lambda observations, uniforms: np.full(len(uniforms), 3),
        lambda observations, uniforms: np.full(len(uniforms), -1),
        lambda observations, uniforms: np.full(len(uniforms), 0.5),
        lambda observations, uniforms: np.full(len(uniforms), np.nan),
        lambda observations, uniforms: np.zeros((len(uniforms), 1), int),
        lambda observations, uniforms: np.zeros(len(uniforms) - 1, int),
        lambda observations, uniforms: 0,
        lambda observations, uniforms: None,
        lambda observations, uniforms: ["left"] * len(uniforms),
    ],
    ids=["large", "negative", "fraction", "nan", "matrix", "short", "number", "none", "words"],
)
def test_a_policy_that_returns_rubbish_is_refused(act):
    with pytest.raises(
        ValueError, match=r"policy 'odd' must return one candidate action in 0\.\.2"
    ):
        collect(spiral_world(), continuation=Policy("odd", act))


@pytest.mark.parametrize("dtype", [float, bool, np.uint8])
def test_a_policy_may_return_whole_numbers_of_any_type(dtype):
    act = lambda observations, uniforms: (observations[:, 0] > 0).astype(dtype)
    branches = collect(spiral_world(), continuation=Policy("sign", act))
    assert set(branches.continuation.ravel()) == {0, 1}


def test_a_failing_policy_stops_the_collection():
    def act(observations, uniforms):
        raise RuntimeError("no policy today")

    with pytest.raises(ValueError, match=r"policy .failing. raised RuntimeError: no policy today"):
        collect(spiral_world(), continuation=Policy("failing", act))


@pytest.mark.parametrize("continuation", ["uniform", Policy("leaning", leaning)])
def test_collecting_leaves_the_world_s_inputs_alone(continuation):
    world = spiral_world()
    first = collect(world, continuation=continuation)
    again = collect(world, continuation=continuation)
    assert_same_arrays(arrays_of(first), arrays_of(again))
    assert world.candidate_actions.tolist() == ACTIONS


def test_each_key_has_a_stream_of_its_own():
    keys = list(itertools.product((0, 1, 2**40), (0, 1, 2), (0, 1, 5)))
    drawn = {tuple(stream(*key).random(4)) for key in keys}
    assert len(drawn) == len(keys)
    assert {tuple(stream(*key).random(4)) for key in keys} == drawn
    # A different key is no shift of the same numbers.
    assert not set(stream(0, 0, 1).random(1000)) & set(stream(0, 1, 0).random(1000))


def test_the_same_seed_gives_the_same_arrays():
    world = NuisanceWorld(spiral_world(), Nuisance(3))
    settings = dict(states=300, draws=2, arms=2, per_step=True)
    one, again, other = (arrays_of(collect(world, **settings, seed=s)) for s in (7, 7, 8))
    assert_same_arrays(one, again)
    random = set(one) - {"index"}
    assert random >= {"arms", "observation", "state.state", "nuisance", "noise", "outcome"}
    for name in random:
        assert (one[name] != other[name]).any(), name


def test_purposes_have_streams_of_their_own():
    # What one purpose draws does not move the others.
    base = arrays_of(collect(spiral_world(), seed=5))
    for changes in ({"arms": 2}, {"continuation": (0.2, 0.3, 0.5)}, {"discount": 0.5}):
        other = arrays_of(collect(spiral_world(), seed=5, **changes))
        for name in ("observation", "state.state", "noise"):
            np.testing.assert_array_equal(base[name], other[name])
    nuisance = arrays_of(collect(NuisanceWorld(spiral_world(), Nuisance(3)), seed=5))
    for name in base:
        np.testing.assert_array_equal(base[name], nuisance[name])


def test_a_block_does_not_depend_on_the_others():
    world = NuisanceWorld(spiral_world(), Nuisance(3))
    settings = dict(states=2 * 256 + 100, horizon=4, draws=2, arms=2, seed=6)
    whole = arrays_of(collect(world, **settings))
    plan = plan_collection(world, Recipe(**settings))
    for block in (2, 1, 0, 1):
        rows = slice(256 * block, 256 * (block + 1))
        alone = simulate_block(plan, block).arrays
        assert_same_arrays(alone, {name: values[rows] for name, values in whole.items()})
    fewer = arrays_of(collect(world, **{**settings, "states": 256}))
    assert_same_arrays(fewer, {name: values[:256] for name, values in whole.items()})


def test_blocks_differ():
    branches = collect(spiral_world(), states=512)
    for name in ("observation", "noise", "continuation"):
        values = branches.array(name)
        assert (values[:256] != values[256:]).mean() > 0.5, name


def test_warmup_leads_away_from_the_initial_states():
    counting = spiral_world(
        initial=lambda num, rng: np.zeros((num, 2)),
        step=lambda x, u, e: x + [1.0, 0.0] + 1e-3 * u,
    )
    lengths = lambda warmup: np.round(
        collect(counting, states=2000, warmup=warmup, horizon=1).observations[:, 0]
    )
    np.testing.assert_array_equal(lengths((0, 0)), 0)
    np.testing.assert_array_equal(lengths((3, 3)), 3)
    values, counts = np.unique(lengths((2, 5)), return_counts=True)
    assert values.tolist() == [2, 3, 4, 5]
    assert np.abs(counts - 500).max() < 4 * math.sqrt(2000 * 3 / 16)
    states = collect(spiral_world(), warmup=(0, 0)).observations
    np.testing.assert_array_equal(states, stream(0, 0, 0).standard_normal((40, 2)))


class Tape(World):
    """A world of one number, whose failures are declared as a simulator declares them."""

    name, cloning = "tape", "copy"
    observation_names = feature_names = ("position",)
    control_low, control_high = np.array([-1.0]), np.array([1.0])
    candidate_actions = np.array([[-1.0], [0.0], [1.0]])

    def __init__(self, end=math.inf):
        self.end = end

    def reset(self, num, rng):
        return {"position": rng.standard_normal((num, 1))}

    def observe(self, states):
        return states["position"].copy()

    def rollout(self, states, controls, noise, *, final=True):
        start = states["position"][:, None]
        features = np.cumsum(np.concatenate([start, controls], axis=1), axis=1)[:, 1:]
        failed = (features > self.end).any(axis=(1, 2))
        features[failed] = np.nan  # unspecified, says the contract
        status = np.where(failed, Status.DIVERGED, Status.OK).astype(np.int8)
        return Rollout(features, status, {"position": features[:, -1]} if final else {})

    def identity(self):
        return {"name": self.name, "kind": "test"}


def nan_step(x, u, e):
    following = spiral_step(x, u, e)
    return np.where((following[:, :1] > 2.0) & (u[:, :1] > 0), np.nan, following)


def raising_step(x, u, e):
    following = spiral_step(x, u, e)
    if ((following[:, 0] > 2.0) & (u[:, 0] > 0)).any():
        raise RuntimeError("fell off")
    return following


def infinite_features(x, u, e, y):
    beyond = (y[:, :1] > 2.0) & (u[:, :1] > 0)
    return np.where(beyond, np.inf, spiral_features(x, u, e, y))


FAILING = {
    "not finite": lambda: spiral_world(step=nan_step),
    "not finite features": lambda: spiral_world(features=infinite_features),
    "raised": lambda: spiral_world(step=raising_step),
}


@pytest.mark.parametrize("failure", FAILING)
@pytest.mark.parametrize("closed", [False, True], ids=["open loop", "closed loop"])
def test_one_failed_branch_drops_its_family_and_no_other(failure, closed):
    settings = dict(states=300, draws=2, per_step=True, warmup=(0, 0), seed=2)
    if closed:
        settings["continuation"] = Policy("leaning", leaning)
    tame = collect(spiral_world(), **settings)
    failing = collect(FAILING[failure](), **settings)

    # Which families have a branch that goes where it fails, in plain Python.
    noise, states = tame.array("noise"), tame.states["state"]
    fallen = set()
    for i, draw, arm in itertools.product(range(300), range(2), range(3)):
        later = tame.continuation[i, draw, arm if closed else 0].tolist()
        actions = [arm, *later]
        steps = python_branch(states[i], actions, noise[i, draw])
        if any(s[0] > 2.0 and ACTIONS[a][0] > 0 for s, a in zip(steps, actions, strict=True)):
            fallen.add(i)
    assert 30 < len(fallen) < 270
    reason = failure.removesuffix(" features")
    assert failing.dropped == {reason: len(fallen)}
    assert failing.index.tolist() == [i for i in range(300) if i not in fallen]
    assert_same_arrays(
        arrays_of(failing), {name: v[failing.index] for name, v in arrays_of(tame).items()}
    )
    for name, values in arrays_of(failing).items():
        assert np.isfinite(values).all(), name


def test_divergence_that_a_simulator_declares_is_counted():
    settings = dict(states=600, horizon=4, warmup=(0, 0))
    tame, failing = collect(Tape(), **settings), collect(Tape(end=3.5), **settings)
    gone = (tame.outcomes.shape[0]) - len(failing)
    assert 0 < gone < 600
    assert failing.dropped == {"diverged": gone}
    kept = arrays_of(tame)
    assert_same_arrays(arrays_of(failing), {n: v[failing.index] for n, v in kept.items()})
    assert all(np.isfinite(values).all() for values in arrays_of(failing).values())


@pytest.mark.parametrize("failure", ["not finite", "raised"])
def test_failures_of_the_warmup_are_counted(failure):
    """Every fifth state fails at controls that only the warm-up applies."""

    def initial(num, rng):
        return np.stack([rng.uniform(size=num), np.arange(num) % 5 == 4], axis=1)

    def step(x, u, e):
        due = (x[:, 1:] == 1) & (u > 0) & (u < 1)
        if failure == "raised" and due.any():
            raise RuntimeError("still cold")
        return np.where(due, np.nan, x)

    world = spiral_world(
        initial=initial,
        step=step,
        features=lambda x, u, e, y: y,
        exogenous=None,
        candidate_actions=[[0.0], [1.0]],
    )
    branches = collect(world, states=300, warmup=(1, 4))
    kept = [i for i in range(300) if i % 256 % 5 != 4]
    assert branches.dropped == {failure: 300 - len(kept)}
    assert branches.index.tolist() == kept
    assert all(np.isfinite(values).all() for values in arrays_of(branches).values())
    # The states, which nothing moves, are still in the order in which they were drawn.
    drawn = np.concatenate([initial(256, stream(0, 0, 0)), initial(44, stream(0, 1, 0))])
    np.testing.assert_array_equal(branches.states["state"], drawn[kept])


def test_without_a_warmup_nothing_is_drawn_for_it():
    """A sampler that starts with the first step cannot give none."""

    def drifting(num, horizon, rng):
        noise = rng.standard_normal((num, horizon, 1))
        noise[:, 0] *= 3
        return noise

    branches = collect(spiral_world(exogenous=drifting), warmup=(0, 0))
    assert branches.array("noise").shape == (40, 1, 5, 1)


def test_a_trace_too_short_for_the_warmup_is_told_so():
    world = spiral_world(exogenous=None, trace=np.zeros((15, 1)))
    assert len(collect(world, warmup=(0, 15))) == 40
    with pytest.raises(ValueError, match="a warmup of up to 20 steps: the trace has 15 rows"):
        collect(world)


def choosy_observe(x):
    if np.isnan(x).any():
        raise ValueError("cannot observe what is not a number")
    return x


def wild_step(x, u, e):
    return np.where(x[:, :1] > 1.5, np.nan, spiral_step(x, u, e))


def test_a_state_that_failed_its_warmup_is_not_observed():
    plain = collect(spiral_world(step=wild_step), states=300, warmup=(0, 4))
    choosy = collect(
        spiral_world(step=wild_step, observe=choosy_observe), states=300, warmup=(0, 4)
    )
    assert 0 < choosy.dropped["not finite"] < 300
    assert_same_arrays(arrays_of(choosy), arrays_of(plain))


def test_a_policy_does_not_see_branches_that_failed():
    def act(observations, uniforms):
        assert np.isfinite(observations).all()
        return leaning(observations, uniforms)

    settings = dict(states=300, warmup=(0, 0))
    plain = collect(
        spiral_world(step=wild_step), continuation=Policy("leaning", leaning), **settings
    )
    choosy = collect(
        spiral_world(step=wild_step, observe=choosy_observe),
        continuation=Policy("leaning", act),
        **settings,
    )
    assert 0 < choosy.dropped["not finite"] < 300
    assert_same_arrays(arrays_of(choosy), arrays_of(plain))


def test_a_state_whose_observation_is_not_finite_is_dropped():
    odd = lambda x: np.where(x > 1, np.nan, x)
    branches = collect(spiral_world(observe=odd), states=300, warmup=(0, 0))
    tame = collect(spiral_world(), states=300, warmup=(0, 0))
    bad = (tame.observations > 1).any(axis=1)
    assert branches.dropped == {"not finite": bad.sum()}
    assert branches.index.tolist() == np.flatnonzero(~bad).tolist()
    assert np.isfinite(branches.observations).all()


def test_features_that_are_not_finite_are_dropped_whatever_the_status_says():
    class Sloppy(Tape):
        def rollout(self, states, controls, noise, *, final=True):
            result = super().rollout(states, controls, noise, final=final)
            return Rollout(result.features, np.zeros(num_states(states), np.int8), result.states)

    settings = dict(states=300, horizon=4, warmup=(0, 0))
    honest, sloppy = collect(Tape(end=3.5), **settings), collect(Sloppy(end=3.5), **settings)
    assert sloppy.dropped == {"not finite": honest.dropped["diverged"]}
    assert_same_arrays(arrays_of(sloppy), arrays_of(honest))


def test_an_explosion_gives_no_warnings_of_arithmetic():
    """A branch that overflows to both infinities; warnings are errors."""
    world = spiral_world(
        initial=lambda num, rng: rng.uniform(0, 1.2, (num, 2)), step=lambda x, u, e: -3.0 * x**5
    )
    branches = collect(world, states=300, horizon=12, warmup=(0, 3))
    assert 30 < branches.dropped["not finite"] < 270
    assert np.isfinite(branches.outcomes).all()


def test_noise_of_any_shape_reaches_the_world():
    class Windy(Tape):
        noise_kind = "signal"

        def sample_noise(self, num, horizon, rng):
            return rng.standard_normal((num, horizon, 2, 3))

        def rollout(self, states, controls, noise, *, final=True):
            assert noise.shape == (num_states(states), controls.shape[1], 2, 3)
            return super().rollout(states, controls + noise[:, :, 1, 2:], noise, final=final)

    assert cqm.check_world(Windy())
    branches = collect(Windy(), draws=2, horizon=3, warmup=(0, 2))
    assert branches.array("noise").shape == (40, 2, 3, 2, 3)
    pushes = np.array([-1.0, 0.0, 1.0])
    gusts = branches.array("noise")[..., 1, 2]  # [n, draws, horizon]
    first = branches.observations[:, None] + pushes + gusts[:, :, :1]
    np.testing.assert_allclose(branches.first_features[..., 0], first, rtol=1e-12)


@pytest.mark.parametrize("draws", [1, 2])
def test_a_block_holds_no_more_than_it_stores(draws):
    """A small part of a large array would keep all of it in memory until the shard is written."""
    plan = plan_collection(spiral_world(), Recipe(states=256, horizon=50, draws=draws))
    for name, values in simulate_block(plan, 0).arrays.items():
        held = values if values.base is None else values.base
        assert held.nbytes <= 2 * values.nbytes, name


def test_duplicate_candidates_have_the_same_outcomes():
    world = spiral_world(candidate_actions=[ACTIONS[1], ACTIONS[2], ACTIONS[1]])
    outcomes = collect(world, states=300, draws=2).outcomes
    np.testing.assert_array_equal(outcomes[:, :, 0], outcomes[:, :, 2])
    assert (outcomes[:, :, 0] != outcomes[:, :, 1]).any()


@pytest.mark.parametrize("policy", [None, cqm.Policy("stay", lambda seen, u: np.ones(len(u), int))])
def test_a_family_drew_if_any_of_its_branches_did(policy):
    world, settings = SeedWorld(2.2), {"draws": 2, "horizon": 3, "per_step": True}
    continuation = "uniform" if policy is None else policy
    branches = collect(world, continuation=continuation, **settings)
    drew = branches.array("drew")
    assert drew.dtype == bool
    before = np.broadcast_to(branches.observations[:, None, None, None], (40, 2, 3, 1, 1))
    x = np.concatenate([before, branches.step_features[:, :, :, :-1, :1]], axis=3)[..., 0]
    np.testing.assert_array_equal(drew, (np.abs(x) > world.limit).any(axis=(2, 3)))
    assert 0 < drew.sum() < drew.size


def test_draws_are_stored_only_for_seeds_that_report_them():
    silent = type("Silent", (SeedWorld,), {"rollout": ToyWorld.rollout})()
    signal = type("Signal", (SeedWorld,), {"noise_kind": "signal"})()
    undeclared = type("Undeclared", (SeedWorld,), {"noise_kind": "none"})()
    for world, kind in ((silent, "seeds"), (signal, "signal"), (undeclared, "seeds")):
        branches = collect(world)
        assert "drew" not in branches.array_names()
        assert branches.noise_kind == kind
    wrong = type("Wrong", (SeedWorld,), {"noise_kind": None})()
    with pytest.raises(ValueError, match="noise_kind must be 'none', 'signal' or 'seeds'"):
        collect(wrong)
