import dataclasses
import threading

import numpy as np
import pytest
from support.worlds import ToyWorld

from cqm.worlds.check import Check, Report, check_world
from cqm.worlds.contract import VECTORISE, Rollout, Status, World
from cqm.worlds.nuisance import NuisanceWorld


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
        "toy (cloned by copy)\n"
        "  ok    declaration\n"
        "  ok    runs                                      16 states, 64 steps\n"
        "  ok    arguments are not changed\n"
        "  ok    the same generator gives the same states\n"
        "  ok    the same generator gives the same noise\n"
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
        (failing("no ink"), "runs", "4 of 6 branches failed; one raised no ink"),
        (NuisanceWorld(failing("no ink")), "runs", "4 of 6 branches failed; one raised no ink"),
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
            f"4 of 6 branches failed; one raised TypeError('only length-1 arrays'); {VECTORISE}",
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
            "features rolled out a second time differ by up to",
        ),
        (
            destructive(),
            "arguments are not changed",
            "rollout changes the states that it is given; let it copy them",
        ),
        (restless(), "observing changes nothing", "observe changes the states that it is given"),
        (forgetful(), "state is complete", "the state may lack a variable"),
        (
            after_rollout(lambda features, final: features + 0.25 * final),
            "skipping final states changes nothing",
            "features rolled out without final states differ by up to 0.25",
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
            "features from threads differ by up to 1",
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
    assert "features rolled out a second time" in detail
    assert "nan" in detail.lower()


def test_report_prints_a_table_and_is_false_when_a_check_failed():
    checks = (Check("short", True, ""), Check("longer name", False, "it broke"))
    report = Report("mine (cloned by copy)", checks)
    assert not report
    assert str(report) == ("mine (cloned by copy)\n  ok    short\n  FAIL  longer name  it broke")
    assert Report("mine (cloned by copy)", checks[:1])
