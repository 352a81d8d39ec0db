"""What each candidate can learn, in worlds made for it."""

import dataclasses

import numpy as np
import pytest
from support.worlds import SeedWorld, clock_world, excess, pendulum_world, pushed_world

import cqm
from cqm.models.candidates import TRAINING as TRAINING_DEFAULT, Task
from cqm.models.choice import CANDIDATES
from cqm.models.direct import Direct, Distilled, Lessons
from cqm.models.effect import EffectModel
from cqm.models.frame import Frame
from cqm.models.training import InMemory, Training
from cqm.models.unrolled import Unrolled
from cqm.quotient import center
from cqm.worlds.features import ExpandedWorld, Squares

RECIPE = {"horizon": 3, "warmup": (0, 0), "per_step": True}
TINY = {"width": 8, "updates": 1, "draws": 4}
TRAINING = Training(updates=400, batch_size=32, learning_rate=3e-3, schedule="cosine")
QUICK = {"width": 32, "training": TRAINING, "validation": 0.0}


def noise(num, horizon, rng):
    return rng.standard_normal((num, horizon, 1))


def world_in_units(units, **changes):
    """A world whose coordinates are multiplied by powers of two, which rounds nothing."""

    def step(state, action, exogenous):
        pushed, other = (state / units).T
        push = 0.5 * action[:, 0] * np.cos(other) + 0.3 * exogenous.sum(axis=1)
        return units * np.stack([0.8 * pushed + push, 0.9 * other + 0.2 * pushed], axis=1)

    start = lambda num, rng: units * rng.standard_normal((num, 2))
    return pushed_world(None, step=step, initial=start, **changes)


@pytest.mark.parametrize(
    ("candidates", "noisy"),
    [*((name, False) for name in CANDIDATES), ("unrolled", True), (tuple(CANDIDATES), True)],
)
def test_units_do_not_matter(candidates, noisy):
    changes = {"exogenous": noise} if noisy else {}

    def effects(units):
        branches = cqm.collect(world_in_units(units, **changes), states=100, seed=1, **RECIPE)
        validation = 0.0 if isinstance(candidates, str) else None
        model = EffectModel(candidates=candidates, validation=validation, **TINY).fit(branches)
        return model.effect(branches.observations) / units

    expected = effects(np.ones(2))
    found = effects(np.array([1 / 1024, 4]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("candidate", "error"), [("ridge", 1e-6), ("direct", 1e-2), ("unrolled", 1e-2)]
)
def test_a_clock_that_no_action_moves_is_read(candidate, error):
    branches = cqm.collect(clock_world(), states=600, seed=1, **RECIPE)
    held_out = cqm.collect(clock_world(), states=100, draws=16, seed=2, **RECIPE)
    model = EffectModel(candidates=candidate, **QUICK).fit(branches)
    assert excess(model, held_out) < error
    assert excess(EffectModel(candidates="constant").fit(branches), held_out) > 0.5


def driven_world(**changes):
    """Each push is as large as the noise of that step."""
    step = lambda state, action, exogenous: 0.5 * state + action * exogenous
    start = lambda num, rng: rng.standard_normal((num, 1))
    settings = {"step": step, "initial": start, "exogenous": noise, **changes}
    return pushed_world(None, 1, **settings)


def test_a_transition_sees_a_signal_and_averages_over_observed_paths():
    shifted = lambda num, horizon, rng: 1 + noise(num, horizon, rng)
    branches = cqm.collect(driven_world(exogenous=shifted), states=600, seed=1, **RECIPE)
    seen = EffectModel(candidates="unrolled", **QUICK).fit(branches)
    unseen = EffectModel(candidates="unrolled", **QUICK).fit(
        cqm.collect(
            driven_world(exogenous=shifted, noise_kind="seeds"), states=600, seed=1, **RECIPE
        )
    )
    assert unseen.predictor_.noise is None
    assert seen.losses_[-1] < 0.01 < 0.1 < unseen.losses_[-1]
    paths = seen.predictor_.noise
    assert paths.shape == (64, 3, 1)
    observed = branches.noise[:, 0]
    observed = (observed - observed.mean()) / observed.std()
    for path in paths:
        assert np.abs(observed - path).max(axis=(1, 2)).min() < 1e-9
    # Pushes are 1 on average, over all noise; the mean over 64 paths is uncertain by an eighth.
    expected = np.array([-1, 0, 1]) * (1 + 0.95 * 0.5 + 0.95**2 * 0.25)
    found = seen.effect(branches.observations[:50])[..., 0]
    np.testing.assert_allclose(found, np.tile(expected, (50, 1)), atol=0.4)
    assert np.ptp(found, axis=0).max() < 0.2  # the same paths in every state


def test_seeds_say_nothing_so_the_transition_does_not_see_them():
    branches = cqm.collect(SeedWorld(), states=100, seed=1, **RECIPE)
    model = EffectModel(candidates="unrolled", validation=0.0, **TINY).fit(branches)
    assert model.predictor_.noise is None
    assert model.predictor_.network.noise is None


def test_later_actions_of_a_policy_are_estimated():
    policy = cqm.Policy(
        "back", lambda seen, uniforms: np.where(uniforms < 0.2, 1, 2 * (seen[:, 0] < 0))
    )
    recipe = {**RECIPE, "continuation": policy}
    world = pushed_world(lambda state, action, exogenous: 0.5 * action * np.cos(state[:, 1]))
    branches = cqm.collect(world, states=600, seed=1, **recipe)
    held_out = cqm.collect(world, states=100, draws=16, seed=2, **recipe)
    model = EffectModel(candidates="unrolled", **QUICK).fit(branches)
    assert model.predictor_.behaviour is not None
    assert excess(model, held_out) < 0.1
    # The policy pushes back, so effects are smaller than under random later actions.
    random = cqm.collect(world, states=600, seed=1, **RECIPE)
    assert excess(EffectModel(candidates="ridge").fit(random), held_out) > 0.2


def test_a_policy_that_sees_what_the_features_lack_cannot_be_unrolled():
    world = pendulum_world(
        features=lambda state, action, exogenous, after: np.cos(after[:, :1]),
        feature_names=("upright",),
        name="upright",
    )
    policy = cqm.Policy("back", lambda seen, uniforms: 2 * (seen[:, 0] < 0))
    branches = cqm.collect(world, states=100, seed=1, continuation=policy, **RECIPE)
    reason = "needs features that contain the observation, because the later actions depend on it"
    with pytest.raises(ValueError, match=f"no candidate can be fitted: unrolled {reason}"):
        EffectModel(candidates="unrolled", **TINY).fit(branches)
    model = EffectModel(candidates=("constant", "unrolled"), **TINY).fit(branches)
    assert [row.note for row in model.comparison_] == ["chosen", reason]


def task_of(branches, learned=None, **settings):
    """A task, before any candidate is fitted."""
    model = EffectModel(**{**TINY, **settings})
    learned = branches if learned is None else learned
    options = {"directory": None, "show_progress": False}
    return Task(model, learned, branches, Frame(learned, seed=0), "digest", options)


def test_direct_networks_learn_longer_from_the_box_and_faster_with_a_gate():
    menu = cqm.collect(pendulum_world(), states=20, seed=1, **RECIPE)
    box = cqm.collect(pendulum_world(), states=20, seed=1, actions="box", arms=3, **RECIPE)
    lessons = Lessons(np.zeros((20, 3, 3, 1)), np.zeros((20, 3, 3, 2)))
    default = dataclasses.replace(TRAINING_DEFAULT, seed=0)
    by_default = {"updates": None}
    assert Direct(task_of(menu, **by_default)).settings == dataclasses.replace(
        default, learning_rate=2e-3
    )
    assert Direct(task_of(menu, conditioning="whiten", **by_default)).settings == default
    assert Direct(task_of(box, **by_default)).settings.updates == 2 * default.updates
    assert Distilled(task_of(box, **by_default), lessons).settings.updates == 4 * default.updates
    own = {"updates": None, "training": TRAINING}
    for candidate in (Direct(task_of(box, **own)), Distilled(task_of(box, **own), lessons)):
        assert candidate.settings.updates == TRAINING.updates


@pytest.mark.parametrize("reference", [None, (0.8, 0.1, 0.1)])
@pytest.mark.parametrize("arms", [None, 2])
def test_the_noise_that_is_known_is_removed_whatever_the_reference(reference, arms):
    """Here all noise is known, so that no noise is left in the targets."""
    world = pushed_world(
        lambda state, action, exogenous: action * (np.sin(state[:, 1]) + exogenous[:, 0]),
        exogenous=noise,
    )
    branches = cqm.collect(world, states=50, horizon=1, warmup=(0, 0), seed=1, arms=arms)
    actions = np.array([-1.0, 0.0, 1.0])[branches.arms]

    def targets(pushes, reference=None):
        effects = np.stack([actions * pushes, 0 * actions], axis=-1)
        return center(effects, reference) @ task.frame.targets

    task = task_of(branches, reference=reference)
    before = Direct(task).source(everything=True).arrays["targets"]
    cleaned = dataclasses.replace(task, corrections=targets(branches.noise[:, 0, 0]))
    after = Direct(cleaned).source(everything=True).arrays["targets"]
    # Families of some actions are centred over their own.
    expected = targets(np.sin(branches.observations[:, 1:]), reference if arms is None else None)
    assert np.abs(before - expected).max() > 0.5
    np.testing.assert_allclose(after, expected, atol=1e-5)


@pytest.mark.parametrize("kind", [Direct, Unrolled])
def test_rows_are_held_once_for_a_part_of_the_families_and_for_all(kind):
    branches = cqm.collect(world_in_units(1.0), states=20, draws=2, seed=1, **RECIPE)
    candidate = kind(task_of(branches, branches[:15]))
    part, everything = (candidate.source(everything=every) for every in (False, True))
    assert isinstance(part, InMemory)
    assert all(part.arrays[name] is rows for name, rows in everything.arrays.items())
    per_family = 2 if kind is Unrolled else 1
    assert (part.num, everything.num) == (15 * per_family, None)
    learned = kind(task_of(branches[:15])).rows(branches[:15])
    for name, rows in candidate.sample().items():
        assert len(rows) == len(learned[name]) == 15 * per_family


def test_features_may_be_more_than_the_observation():
    """Whatever they are called: here the state has other names as a feature."""
    plain = pushed_world(
        lambda state, action, exogenous: action * np.cos(state[:, 1]),
        feature_names=None,
        observation_names=None,
    )
    branches = cqm.collect(ExpandedWorld(plain, Squares()), states=100, draws=2, seed=1, **RECIPE)
    model = EffectModel(candidates="ridge").fit(branches)
    assert excess(model, branches) < 0.2
    settings = {"candidates": "direct", "conditioning": "effect", "validation": 0.0}
    model = EffectModel(**settings, **TINY).fit(branches)
    assert model.effect(branches.observations).shape == (100, 3, 4)
