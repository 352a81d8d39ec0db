"""Answers that need unrolling are taught to direct networks, which give them faster."""

import numpy as np
import pytest
from support.worlds import excess, pushed_world

import cqm
from cqm.models import choice, predictors
from cqm.models.closed_form import Constant, RidgeRegression
from cqm.models.direct import Direct, Distilled
from cqm.models.effect import EffectModel
from cqm.models.predictors import DirectPredictor, UnrolledPredictor
from cqm.models.training import Training
from cqm.models.training_log import TrainingLog
from cqm.models.unrolled import Unrolled
from cqm.quotient import center

RECIPE = {"horizon": 3, "warmup": (0, 0), "per_step": True}
TRAINING = Training(updates=240, batch_size=32, learning_rate=5e-3, schedule="cosine")
NETWORKS = {
    "candidates": ("constant", "unrolled", "direct"),
    "width": 32,
    "members": 1,
    "draws": 16,
    "training": TRAINING,
}
# The direct network has no time to learn from the labels, so that unrolling is best.
LEARNED = {"unrolled": [240], "direct": [1], "distilled": [480]}
FILES = ("model.json", "model.safetensors", "README.md")


def noisy_world():
    """Pushes vary smoothly with the state; noise, which no network sees, scales them."""
    return pushed_world(
        lambda state, action, noise: action * (np.sin(state[:, 1]) + noise[:, 0]),
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 1)),
        noise_kind="seeds",
    )


@pytest.fixture(scope="module")
def noisy():
    return cqm.collect(noisy_world(), states=400, seed=1, **RECIPE)


@pytest.fixture(scope="module")
def distilled(noisy):
    return EffectModel(**NETWORKS, updates=LEARNED).fit(noisy)


@pytest.fixture
def no_direct(monkeypatch):
    """Direct networks learn no labels, only answers."""
    reason = lambda candidate: "" if candidate.name == "distilled" else "needs luck"
    monkeypatch.setattr(Direct, "obstacle", reason)


def rows_of(model):
    return {row.candidate: row for row in model.comparison_}


def files_of(model, directory):
    model.save(directory)
    return [(directory / name).read_bytes() for name in FILES]


class Remembering(EffectModel):
    """A model that keeps how it chose."""

    def _chosen(self, choice):
        self.choice = choice
        return choice.predictor()


def test_a_network_that_is_as_good_as_unrolling_is_taken(distilled):
    assert distilled.method_ == "distilled"
    assert isinstance(distilled.predictor_, DirectPredictor)
    assert distilled.updates_ == LEARNED
    assert {"unrolled-steps", "direct-1", "distilled-1", "distilled-all"} <= set(
        distilled.training_
    )
    rows = rows_of(distilled)
    assert list(rows) == ["constant", "unrolled", "direct", "distilled"]
    assert rows["distilled"].note == "chosen"
    assert rows["distilled"].error < rows["direct"].error
    assert rows["distilled"].standard_error > 0
    error = f"held-out error {rows['distilled'].error:.4g}"
    assert f"candidate `distilled`: {error}" in distilled.summary()


def test_its_answers_are_those_of_unrolling(distilled):
    held_out = cqm.collect(noisy_world(), states=200, draws=64, seed=2, **RECIPE)
    effects = distilled.effect(held_out.observations)
    taught = distilled.transition_(held_out.observations)[0]
    size = np.mean(effects**2)
    assert np.mean((effects - center(taught)) ** 2) < 0.1 * size
    assert excess(distilled, held_out) < 0.4


def test_answers_need_no_unrolling_and_the_transition_is_kept(
    distilled, noisy, tmp_path, monkeypatch
):
    distilled.save(tmp_path)
    loaded = EffectModel.load(tmp_path)
    states = noisy.observations[:7]  # as many as were not asked for before
    expected = distilled.transition_(states)

    def fail(*arguments):
        raise AssertionError("this is slow")

    monkeypatch.setattr(predictors, "_unrolled_effects", fail)
    effects = distilled.effect(states)
    np.testing.assert_array_equal(loaded.effect(states), effects)
    with pytest.raises(AssertionError, match="this is slow"):
        distilled.transition_(states)
    monkeypatch.undo()
    for model in (distilled, loaded):
        assert isinstance(model.transition_, UnrolledPredictor)
        np.testing.assert_array_equal(model.transition_(states), expected)


def test_controls_that_no_family_tried_are_taught_too(no_direct, monkeypatch):
    world = pushed_world(
        lambda state, action, noise: action * np.sin(state[:, 1]),
        control_low=[-1],
        control_high=[1],
    )
    recipe = {**RECIPE, "actions": "box", "continuation": "box", "arms": 4}
    branches = cqm.collect(world, states=400, seed=1, **recipe)
    monkeypatch.setattr(choice, "_LESSONS", 2)
    updates = {"unrolled": [240], "distilled": [1]}
    model = Remembering(**NETWORKS, updates=updates).fit(branches)
    [attempt] = [a for a in model.choice.attempts if a.name == "distilled"]
    rows = attempt.candidate.source(everything=True).arrays
    assert len(rows["inputs"]) == 3 * 400
    assert attempt.candidate.source(everything=False).num == 3 * 300
    np.testing.assert_allclose(np.asarray(rows["targets"]).sum(axis=1), 0, atol=1e-5)
    tried = np.asarray(rows["controls"]).reshape(400, 3, 4)
    assert len(np.unique(tried)) == tried.size
    # An action pushes in every state by as much as the sine of the second coordinate.
    states = model.choice.task.all_families.observations
    pushes = center(tried[..., None])[..., 0] * np.sin(states[:, 1])[:, None, None]
    taught = np.asarray(rows["targets"]).reshape(400, 3, 4, -1)[..., 0]
    for number in range(3):
        assert abs(np.corrcoef(pushes[:, number].ravel(), taught[:, number].ravel())[0, 1]) > 0.9


@pytest.mark.parametrize("reference", [None, (0.2, 0.3, 0.5)])
def test_the_networks_learn_the_mean_answers(reference, noisy, no_direct, monkeypatch):
    taught = {}
    train = Direct.train

    def remembered(candidate, *arguments, everything, **options):
        taught[everything] = candidate.source(everything=everything)
        return train(candidate, *arguments, everything=everything, **options)

    monkeypatch.setattr(Direct, "train", remembered)
    updates = {"unrolled": [60], "distilled": [1]}
    model = Remembering(**NETWORKS, updates=updates, reference=reference).fit(noisy)
    answers = center(model.choice.explanation.effects, reference)
    assert answers.shape == (400, 3, 1)
    targets = taught[False].arrays["targets"]
    np.testing.assert_allclose(targets, answers, atol=1e-5 * np.abs(answers).max())
    assert taught[False].num == 300  # those of the held-out families are not learned


def test_unrolling_is_kept_where_the_network_is_clearly_worse(noisy, no_direct):
    updates = {**LEARNED, "distilled": [1]}
    model = EffectModel(**NETWORKS, updates=updates).fit(noisy)
    assert model.method_ == "unrolled"
    assert model.predictor_ is model.transition_
    rows = rows_of(model)
    assert rows["unrolled"].note == "chosen"
    assert rows["distilled"].note.startswith("error higher by")
    assert "distilled-all" not in model.training_
    assert model.updates_ == {"unrolled": [240], "distilled": [1]}


@pytest.mark.parametrize("case", ["no direct network", "some actions", "a policy"])
def test_nothing_is_distilled_without(case, noisy, no_direct, monkeypatch):
    """What is distilled are direct networks; their labels need all actions and known draws."""
    settings, branches = {**NETWORKS, "updates": {**LEARNED, "unrolled": [60]}}, noisy
    if case == "no direct network":
        monkeypatch.setattr(RidgeRegression, "obstacle", lambda candidate: "needs luck")
        settings["candidates"] = ("ridge", "unrolled")
    elif case == "some actions":
        branches = cqm.collect(noisy_world(), states=60, seed=1, arms=2, **RECIPE)
    else:
        policy = cqm.Policy("back", lambda seen, uniforms: 2 * (seen[:, 0] < 0))
        branches = cqm.collect(noisy_world(), states=60, seed=1, continuation=policy, **RECIPE)
        settings["candidates"] = ("unrolled", "direct")
    model = EffectModel(**settings).fit(branches)
    assert model.method_ == "unrolled"
    assert "distilled" not in rows_of(model)
    assert model.updates_ == {"unrolled": [60]}


def test_the_updates_of_a_fit_with_a_budget_repeat_it(noisy, no_direct, monkeypatch, tmp_path):
    # As if there were time for about three updates in four.
    monkeypatch.setattr(choice, "expected_seconds", lambda *arguments: 2e4)
    model = EffectModel(**NETWORKS, budget="10h").fit(noisy)
    assert model.method_ == "distilled"
    assert len(model.updates_["distilled"]) == 4
    assert sum(model.updates_["distilled"]) < TRAINING.updates
    again = EffectModel(**NETWORKS, updates=model.updates_).fit(noisy)
    assert again.updates_ == model.updates_
    np.testing.assert_array_equal(
        again.effect(noisy.observations), model.effect(noisy.observations)
    )
    model.save(tmp_path)
    assert EffectModel.load(tmp_path).updates_ == model.updates_


@pytest.mark.parametrize("stage", ["distilled-1", "distilled-all"])
def test_an_interrupted_distillation_resumes_to_the_same_bits(
    stage, distilled, noisy, tmp_path, monkeypatch
):
    expected = files_of(distilled, tmp_path / "whole")
    model, write, begun = EffectModel(**NETWORKS, updates=LEARNED), TrainingLog.write, []

    def interrupted(log, step, values):
        write(log, step, values)
        begun.append(log.path.name.partition(".")[0])
        if begun[-1] == stage:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(noisy, directory=tmp_path / "stopped")
    assert begun[-1] == stage
    resumed = EffectModel(**NETWORKS, updates=LEARNED).fit(noisy, directory=tmp_path / "stopped")
    assert files_of(resumed, tmp_path / "resumed") == expected


def test_a_distillation_that_fails_leaves_unrolling(noisy, no_direct, monkeypatch):
    def fail(candidate):
        raise ValueError("out of luck")

    monkeypatch.setattr(Direct, "initial", fail)
    with pytest.warns(UserWarning, match="the candidate distilled failed: out of luck") as caught:
        model = EffectModel(**NETWORKS, updates={**LEARNED, "unrolled": [60]}).fit(noisy)
    assert [warning.filename for warning in caught] == [__file__]
    assert model.method_ == "unrolled"
    assert rows_of(model)["distilled"].note == "failed: out of luck"


@pytest.mark.parametrize(
    ("worst", "excess", "spread", "method"),
    [
        (2.0, 0.019, 0.0, "distilled"),  # two percent of what unrolling gains
        (2.0, 0.021, 0.0, "unrolled"),
        (1.1, 0.009, 0.0, "unrolled"),  # much, where most of every error is noise
        (1.01, 0.0009, 0.0, "distilled"),  # more than two percent, but tiny
        (1.01, 0.0011, 0.0, "unrolled"),
        (2.0, 0.001, 0.18, "distilled"),  # the mean of 100 is 0.001 ± 0.018
        (2.0, 0.001, 0.2, "unrolled"),  # 0.001 ± 0.02
        (2.0, -0.1, 0.0, "distilled"),
    ],
)
def test_answers_without_unrolling_must_be_about_as_good(
    worst, excess, spread, method, monkeypatch
):
    """They may be worse by two percent of the gain or by 0.001, a standard error included."""
    spreads = spread * np.tile([-1.0, 1.0], 50)
    errors = {Constant: np.full(100, worst), Unrolled: np.ones(100)}
    errors[Distilled] = 1 + excess + spreads
    chooser = object.__new__(choice.Choice)
    chooser.attempts = [
        choice.Attempt(object.__new__(kind), kind.name, predictor=object(), errors=own)
        for kind, own in errors.items()
    ]
    chooser.teacher = choice.Combination((chooser.attempts[1],))
    best = lambda self, fast: choice.Combination((fast[-1],))
    monkeypatch.setattr(choice.Choice, "_combined", best)
    [taken] = chooser._fast_enough().attempts
    assert taken.name == method
