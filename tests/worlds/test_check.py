import dataclasses
import threading

import numpy as np
import pytest
from support.worlds import ToyWorld
from support.wrong_worlds import UNUSUAL, WRONG_WORLDS, drift_world

from cqm.worlds.check import Check, Report, check_world
from cqm.worlds.contract import VECTORISE, Rollout, Status, World
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld


def changed(**members):
    """A toy world with some members replaced."""
    return type("Changed", (ToyWorld,), members)()


def after_rollout(change_fn):
    """A toy world whose features are changed after every rollout."""

    def rollout(self, states, controls, noise, *, final=True):
        result = ToyWorld.rollout(self, states, controls, noise, final=final)
        return Rollout(change_fn(result.features, final), result.status, result.states)

    return changed(rollout=rollout)


def forgetful():
    """Half of the state lives in the world instead of in the state."""
    world = changed(speed=0.0)

    def rollout(states, controls, noise, *, final=True):
        if controls.shape[1] > 1:
            world.speed = 0.0
        world.speed += controls[-1, -1, 0]
        result = ToyWorld.rollout(world, states, controls, noise, final=final)
        return Rollout(result.features + world.speed, result.status, result.states)

    world.rollout = rollout
    return world


def destructive():
    """Steps the given states in place."""

    def rollout(self, states, controls, noise, *, final=True):
        result = ToyWorld.rollout(self, states, controls, noise, final=final)
        states["x"][:] = result.states.get("x", states["x"])
        return result

    return changed(rollout=rollout)


def restless():
    """Observing moves the state."""

    def observe(self, states):
        states["x"] += 1
        return states["x"][:, None].copy()

    return changed(observe=observe)


def failing(error=""):
    def rollout(self, states, controls, noise, *, final=True):
        result = ToyWorld.rollout(self, states, controls, noise, final=final)
        result.status[:4] = Status.DIVERGED
        return dataclasses.replace(result, error=error)

    return changed(rollout=rollout)


def exploding():
    def rollout(self, *args, **kwargs):
        raise OSError("the licence has expired")

    return changed(rollout=rollout)


def one_by_one():
    """Handles one state at a time."""

    def rollout(self, states, controls, noise, *, final=True):
        if states["x"] > 100:
            raise OverflowError
        return ToyWorld.rollout(self, states, controls, noise, final=final)

    return changed(rollout=rollout)


def threaded():
    main = threading.get_ident()
    return after_rollout(lambda features, final: features + (threading.get_ident() != main))


def seeded_by_itself():
    rng = np.random.default_rng(5)
    return changed(reset=lambda self, num, _: {"x": rng.standard_normal(num)})


def noisy():
    rng = np.random.default_rng(5)
    return after_rollout(lambda features, final: features + rng.standard_normal(features.shape))


def failures(world):
    report = check_world(world, num=6, horizon=5)
    return {check.name: check.detail for check in report.checks if not check.passed}


def test_a_sound_world_passes_every_check():
    report = check_world(ToyWorld())
    assert report, str(report)
    assert report.passed
    assert str(report) == (
        "toy (cloning: copy)\n"
        "  ok    declaration\n"
        "  ok    runs                                      16 states, 64 steps\n"
        "  ok    the same generator gives the same states\n"
        "  ok    the same generator gives the same noise\n"
        "  ok    noise kind\n"
        "  ok    clone fidelity and shared noise\n"
        "  ok    later calls leave earlier results alone\n"
        "  ok    observing changes nothing\n"
        "  ok    state is complete\n"
        "  ok    skipping final states changes nothing\n"
        "  ok    stored states give the same rollouts\n"
        "  ok    duplicate arms are identical\n"
        "  ok    batch order does not matter\n"
        "  ok    batch size does not matter\n"
        "  ok    threads do not matter\n"
        "  ok    rollouts leave their arguments alone\n"
        "  ok    global random generators are not used"
    )


@pytest.mark.parametrize(
    ("world", "check", "detail"),
    [
        (
            after_rollout(lambda features, final: features[:, :, :1]),
            "runs",
            "features have shape (6, 5, 1), expected (6, 5, 2)",
        ),
        (failing(), "runs", "4 of 6 branches failed"),
        (failing("no ink"), "runs", "4 of 6 branches failed, for example no ink"),
        (NuisanceWorld(failing("no ink")), "runs", "4 of 6 branches failed, for example no ink"),
        (exploding(), "runs", "raised OSError: the licence has expired"),
        (
            one_by_one(),
            "runs",
            "raised ValueError: The truth value of an array with more than one element is "
            f"ambiguous. Use a.any() or a.all(); {VECTORISE}",
        ),
        (
            after_rollout(lambda features, final: features[:1]),
            "runs",
            f"features have shape (1, 5, 2), expected (6, 5, 2); {VECTORISE}",
        ),
        (
            failing("TypeError('only length-1 arrays')"),
            "runs",
            f"4 of 6 branches failed, for example TypeError('only length-1 arrays'); {VECTORISE}",
        ),
        (
            after_rollout(lambda features, final: np.where(features > 1, np.nan, features)),
            "runs",
            "features are not finite although the branch reports success",
        ),
        (
            changed(observe=lambda self, states: states["x"]),
            "runs",
            "observations have shape (6,), expected (6, 1)",
        ),
        (
            seeded_by_itself(),
            "the same generator gives the same states",
            "observations after the same reset differ by up to",
        ),
        (
            noisy(),
            "clone fidelity and shared noise",
            "features from a second rollout differ by up to",
        ),
        (
            destructive(),
            "rollouts leave their arguments alone",
            "rollout changes the states that it is given; let it copy them",
        ),
        (restless(), "observing changes nothing", "observe changes the states that it is given"),
        (forgetful(), "state is complete", "the state may lack a variable"),
        (
            after_rollout(lambda features, final: features + 0.25 * final),
            "skipping final states changes nothing",
            "features from a rollout without final states differ by up to 0.25",
        ),
        (
            changed(store=lambda self, states: {"x": states["x"].astype(np.float32)}),
            "stored states give the same rollouts",
            "observations of stored states differ by up to",
        ),
        (
            changed(store=lambda self, states: {"x": states["x"].astype(object)}),
            "stored states give the same rollouts",
            "stored arrays ['x'] hold Python objects; only numbers can be stored",
        ),
        (
            after_rollout(
                lambda features, final: features + np.arange(len(features))[:, None, None]
            ),
            "duplicate arms are identical",
            "features of a duplicated arm differ by up to 1",
        ),
        (
            after_rollout(lambda features, final: np.cumsum(features, axis=0)),
            "batch order does not matter",
            "features in another order differ by up to",
        ),
        (
            threaded(),
            "threads do not matter",
            "features from rollouts on other threads differ by up to 1",
        ),
        (
            changed(candidate_actions=np.array([[0.0]])),
            "declaration",
            "candidate_actions have shape (1, 1), expected [at least 2, 1]",
        ),
        (
            changed(candidate_actions=np.array([[0.0], [1.5]])),
            "declaration",
            "candidate_actions lie outside the control bounds",
        ),
        (
            changed(feature_names=("x", "x")),
            "declaration",
            "feature_names contain duplicates: ['x']",
        ),
        (
            changed(action_names=("left", "right")),
            "declaration",
            "action_names cannot be ('left', 'right'); allowed: 3 different names",
        ),
        (
            changed(identity=lambda self: {"name": "toy", "kind": "test", "model": object()}),
            "declaration",
            "must be JSON-able: Object of type object is not JSON serializable",
        ),
        (
            changed(noise_kind="signals"),
            "declaration",
            "noise_kind must be 'none', 'signal' or 'seeds'; got 'signals'",
        ),
        (
            changed(identity=lambda self: {"name": "toy"}),
            "declaration",
            "a world's identity must contain ['kind']; got {'name': 'toy'}",
        ),
    ],
)
def test_the_report_says_what_is_wrong_with_a_broken_world(world, check, detail):
    found = failures(world)
    assert check in found
    assert detail in found[check]


@pytest.mark.parametrize("missing", ["name", "cloning", "feature_names", "control_low"])
def test_a_missing_declaration_is_named(missing):
    members = {key: value for key, value in vars(ToyWorld).items() if key != missing}
    world = type("Undeclared", (World,), members)()
    assert failures(world) == {"declaration": f"attributes ['{missing}'] are missing"}


@pytest.mark.parametrize("some", [True, False], ids=["some", "all"])
def test_features_that_come_and_go_are_a_difference(some):
    calls = []

    def spoil(features, final):
        calls.append(final)
        # The first two rollouts are the warm-up and the one that all others must repeat.
        features[1 if some else slice(None)] *= np.nan if len(calls) > 2 else 1
        return features

    detail = failures(after_rollout(spoil))["clone fidelity and shared noise"]
    assert "features from a second rollout" in detail
    assert "nan" in detail.lower()


def test_report_prints_a_table_and_is_false_when_a_check_failed():
    checks = (Check("short", True, ""), Check("longer name", False, "it broke"))
    report = Report("mine (cloning: copy)", checks)
    assert not report
    assert str(report) == ("mine (cloning: copy)\n  ok    short\n  FAIL  longer name  it broke")
    assert Report("mine (cloning: copy)", checks[:1])


CAUGHT_BY = {
    "SharedBuffer": "later calls leave earlier results alone",
    "SharedObservation": "later calls leave earlier results alone",
    "HiddenState": "clone fidelity and shared noise",
    "LostWarmStart": "stored states give the same rollouts",
    "LateTime": "state is complete",
    "Switch": "threads do not matter",
    "Clock": "clone fidelity and shared noise",
    "RareRandomness": "clone fidelity and shared noise",
    "GlobalNoise": "global random generators are not used",
    "GlobalReset": "the same generator gives the same states",
    "SameStates": "the same generator gives the same states",
    "SameNoise": "the same generator gives the same noise",
    "OnePath": "the same generator gives the same noise",
    "OwnNoise": "the same generator gives the same noise",
    "BatchMean": "batch size does not matter",
    "LargeBatch": "batch size does not matter",
    "Thread": "threads do not matter",
    "SharedScratch": "threads do not matter",
    "InPlaceState": "rollouts leave their arguments alone",
    "InPlaceNoise": "rollouts leave their arguments alone",
    "InPlaceControls": "rollouts leave their arguments alone",
    "CountedObservation": "observing changes nothing",
    "BatchObservation": "observing changes nothing",
    "FinalMatters": "skipping final states changes nothing",
    "SinglePrecision": "stored states give the same rollouts",
    "FlickeringFailure": "state is complete",
    "UndeclaredNoise": "noise kind",
    "SeedsAsSignal": "noise kind",
    "FractionAsSignal": "noise kind",
    "DeniedDraws": "noise kind",
}


@pytest.mark.parametrize("make_world", WRONG_WORLDS, ids=lambda world: world.__name__)
def test_subtly_wrong_worlds_are_caught(make_world):
    for seed in range(3):
        report = check_world(make_world(), seed=seed)
        failed = {check.name for check in report.checks if not check.passed}
        assert CAUGHT_BY[make_world.__name__] in failed, str(report)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_worlds_pass(name):
    report = check_world(UNUSUAL[name].make_world(), seed=1)
    assert report, str(report)


def test_rare_randomness_is_found_at_the_stated_rate():
    """One step in 1,300 is found with probability 0.9999, one in 20,000 about every other time."""

    def found(steps, seed):
        rng = np.random.default_rng(seed)

        def spoil(features, final):
            return features + (rng.random((*features.shape[:2], 1)) < 1 / steps)

        return not check_world(after_rollout(spoil), seed=seed)

    assert all(found(1300, seed) for seed in range(8))
    assert 1 <= sum(found(20_000, seed) for seed in range(12)) <= 11


def test_branches_that_fail_are_a_remark_unless_most_do():
    report = check_world(UNUSUAL["failures"].make_world())
    assert report, str(report)
    assert "7 of 16 branches failed (collecting drops and counts their families)" in str(report)
    assert "most branches failed: 4 of 6" in str(check_world(failing(), num=6, horizon=5))


def test_a_world_that_fails_later_is_checked_with_fewer_steps():
    world = drift_world(
        step=lambda x, a, e: np.where(x > 30, np.nan, x + 1.0),
        initial=lambda num, rng: rng.uniform(0, 1, (num, 2)),
        features=None,
    )
    report = check_world(world)
    assert report, str(report)
    assert "16 states, 16 steps" in str(report)


def test_a_trace_limits_the_steps():
    world = drift_world(exogenous=None, trace=np.eye(13, 2), features=None)
    assert "16 states, 8 steps" in str(check_world(world))
    with pytest.raises(ValueError, match="fixed_noise describes exogenous"):
        drift_world(exogenous=None, fixed_noise=True)


def test_one_path_for_all_must_be_declared():
    def path(num, horizon, rng):
        return np.broadcast_to(np.arange(horizon)[None, :, None] % 7, (num, horizon, 2))

    report = check_world(drift_world(exogenous=path, features=None))
    assert "declare fixed_noise=True" in str(report)
    declared = drift_world(exogenous=path, features=None, fixed_noise=True)
    assert check_world(declared)
    assert declared.identity()["fixed_noise"] is True
    assert "fixed_noise" not in drift_world().identity()  # sets of earlier versions go on


def test_a_nuisance_does_not_hide_noise_that_ignores_its_generator():
    same_noise = next(world for world in WRONG_WORLDS if world.__name__ == "SameNoise")
    world = NuisanceWorld(same_noise(), Nuisance(dimension=2))
    assert "noise is the same for every generator" in str(check_world(world))


def test_a_world_may_be_given_by_name():
    assert str(check_world("cartpole-swingup", num=2, horizon=2)).startswith("cartpole-swingup")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world": 3}, ValueError, "world must be a World or the name of one; got 3"),
        ({"num": 0}, ValueError, "num must be a whole number in \\[1, 10000\\]; got 0"),
        ({"num": 1.5}, ValueError, "num must be a whole number in \\[1, 10000\\]; got 1.5"),
        (
            {"horizon": True},
            ValueError,
            "horizon must be a whole number in \\[1, 10000\\], or None; got True",
        ),
        ({"seed": -1}, ValueError, "seed must be a whole number of at least 0; got -1"),
    ],
)
def test_wrong_arguments_are_explained(arguments, error, message):
    with pytest.raises(error, match=message):
        check_world(**{"world": ToyWorld(), **arguments})


def test_features_with_the_names_of_observations_must_be_those():
    names = {"feature_names": ["x", "y"], "observation_names": ["x", "y"]}

    def world(scale):
        return FunctionWorld(
            lambda state, action, exogenous: 0.5 * state + action,
            lambda num, rng: rng.standard_normal((num, 2)),
            features=lambda state, action, exogenous, after: scale * after,
            candidate_actions=[[0.0, 0.0], [1.0, 1.0]],
            name="named",
            **names,
        )

    assert check_world(world(np.ones(2)))
    report = check_world(world(np.array([1.0, 1000.0])))
    assert not report
    assert "feature 'y' has the name of an observation, but is not its value" in str(report)
