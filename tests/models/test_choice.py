"""The choice between candidates: what is compared, chosen, recorded and refused."""

import contextlib
import dataclasses
import io
import re

import jax
import numpy as np
import pytest
from support.worlds import pushed_world

import cqm
from cqm.models import choice
from cqm.models.candidates import CYCLES
from cqm.models.choice import CANDIDATES, Combination
from cqm.models.closed_form import RidgeRegression
from cqm.models.direct import Direct
from cqm.models.effect import EffectModel
from cqm.models.predictors import StackedPredictor
from cqm.models.training import Training
from cqm.models.training_log import TrainingLog

RECIPE = {"horizon": 3, "warmup": (0, 0), "per_step": True}
TINY = {"width": 8, "updates": 1, "draws": 4}
# Some thousand times too large: the first updates overflow.
DIVERGING = Training(updates=1, batch_size=16, learning_rate=1e38, clip=1e30)
NETWORK = {
    "width": 16,
    "training": Training(updates=300, batch_size=16, learning_rate=5e-3, schedule="cosine"),
}
# Briefly trained, and compared on many families.
STACKED = {
    "width": 16,
    "members": 1,
    "training": Training(updates=300, batch_size=32, learning_rate=1e-2, schedule="cosine"),
    "validation": 0.5,
}
FILES = ("model.json", "model.safetensors", "README.md")


def collected(world, states=200, **changes):
    return cqm.collect(world, states=states, seed=1, **{**RECIPE, **changes})


@pytest.fixture(scope="module")
def alike():
    """Effects that are the same in every state."""
    return collected(pushed_world(lambda state, action, noise: action))


@pytest.fixture(scope="module")
def smooth():
    """Effects that vary smoothly with a coordinate that no action moves."""
    return collected(pushed_world(lambda state, action, noise: action * np.sin(state[:, 1])))


@pytest.fixture(scope="module")
def hard():
    """Effects that neither ridge nor a quickly trained network learns well from few families."""
    world = pushed_world(
        lambda state, action, noise: (
            0.5 * action * np.sin(2 * state[:, 1] + state[:, 2] * state[:, 3])
        ),
        size=4,
    )
    return collected(world, states=600, horizon=1, per_step=False)


@pytest.fixture(scope="module")
def default(smooth):
    """A default fit, and what it said."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model = EffectModel(**TINY).fit(smooth, show_progress=True)
    return model, said.getvalue().splitlines()


@pytest.fixture(scope="module")
def mixed():
    """A smooth effect, which suits a regression, and one with a jump, which suits a network."""

    def step(state, action, noise):
        after = state.copy()
        after[:, 0] += action[:, 0] * np.sin(2 * state[:, 2])
        after[:, 1] += action[:, 0] * np.sign(state[:, 3])
        return after

    world = pushed_world(None, size=4, step=step)
    return collected(world, states=800, horizon=1, per_step=False)


@pytest.fixture(scope="module")
def stacked(mixed):
    """A regression and a network whose mean is clearly better than each."""
    model = EffectModel(candidates=("ridge", "direct"), **STACKED).fit(mixed)
    assert model.method_ == "stack"
    return model


def notes(model):
    return {row.candidate: row.note for row in model.comparison_}


def files_of(model, directory):
    model.save(directory)
    return [(directory / name).read_bytes() for name in FILES]


def test_the_simplest_is_chosen_where_effects_do_not_depend_on_the_state(alike):
    model = EffectModel(candidates=("constant", "ridge", "direct"), **TINY).fit(alike)
    assert model.method_ == "constant"
    assert model.comparison_[0].error < 1e-20
    expected = np.zeros((5, 3, 2))
    # The push of a step stays: it counts in all three, discounted.
    expected[:, :, 0] = np.array([-1.0, 0.0, 1.0]) * (1 + 0.95 + 0.95**2)
    found = model.effect(np.random.default_rng(0).normal(size=(5, 2)))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_ridge_is_chosen_in_a_smooth_world_and_the_comparison_is_shown(default):
    model, said = default
    assert model.method_ == "ridge"
    rows = {row.candidate: row for row in model.comparison_}
    assert rows["ridge"].error < 1e-2 < rows["constant"].error
    assert {"constant", "ridge", "unrolled", "direct"} <= set(rows)
    card = model.summary()
    for row in model.comparison_:
        assert row.standard_error > 0
        assert 0 <= row.seconds < 600
        assert row.note == "chosen" if row.candidate == "ridge" else "error higher by" in row.note
        shown = f"{row.error:.4g} ± {row.standard_error:.2g}, {row.seconds:.0f} s, {row.note}"
        assert f"candidate `{row.candidate}`: held-out error {shown}" in card
        error = re.escape(f"{row.error:.3g} ± {row.standard_error:.2g}")
        lines = [line for line in said if line.startswith(f"{row.candidate}: error ")]
        assert len(lines) == 1
        if row.candidate in ("constant", "ridge") and "cleaned" not in card:
            assert re.fullmatch(rf"{row.candidate}: error {error} in \d+ s", lines[0])
    assert "Chosen: ridge; fitting to all families" in said


def test_a_loaded_model_shows_the_comparison_without_seconds(default, tmp_path):
    model, _ = default
    model.save(tmp_path)
    loaded = EffectModel.load(tmp_path)
    assert np.isnan([row.seconds for row in loaded.comparison_]).all()
    for old, new in zip(model.comparison_, loaded.comparison_, strict=True):
        assert dataclasses.replace(new, seconds=old.seconds) == old
    assert (loaded.method_, loaded.updates_) == ("ridge", model.updates_)
    assert loaded.summary() == re.sub(r", \d+ s(?=, )", "", model.summary())


def test_one_seed_gives_one_model_and_the_same_files_however_often(default, smooth, tmp_path):
    model, _ = default
    first = files_of(model, tmp_path / "first")
    assert files_of(model, tmp_path / "again") == first
    assert files_of(EffectModel.load(tmp_path / "first"), tmp_path / "loaded") == first
    assert files_of(EffectModel(**TINY).fit(smooth), tmp_path / "refitted") == first


def test_a_transition_that_did_not_win_is_kept(default, smooth, tmp_path):
    model, _ = default
    model.save(tmp_path)
    observations = smooth.observations[:5]
    expected = model.transition_(observations)
    assert expected.shape == (1, 5, 3, 2)
    np.testing.assert_array_equal(EffectModel.load(tmp_path).transition_(observations), expected)


@pytest.mark.parametrize("candidate", ["constant", "ridge"])
def test_a_default_is_what_its_choice_is_alone(candidate, alike, smooth, default):
    model, branches = default[0], smooth
    if candidate == "constant":
        branches = alike
        model = EffectModel(candidates=("constant", "ridge"), **TINY).fit(alike)
    assert model.method_ == candidate
    alone = EffectModel(candidates=candidate, **TINY).fit(branches)
    observations = branches.observations
    np.testing.assert_array_equal(alone.effect(observations), model.effect(observations))


def test_a_network_that_is_chosen_is_what_it_is_alone(hard):
    model = EffectModel(candidates=("constant", "direct"), **NETWORK).fit(hard)
    assert model.method_ == "direct"
    alone = EffectModel(candidates="direct", **NETWORK).fit(hard)
    np.testing.assert_array_equal(alone.effect(hard.observations), model.effect(hard.observations))


def test_a_stack_is_the_weighted_mean_of_its_candidates(stacked, mixed):
    model, observations = stacked, mixed.observations
    assert isinstance(model.predictor_, StackedPredictor)
    weights = model.predictor_.weights
    assert (weights > 0.1).all()
    assert weights.sum() == pytest.approx(1, abs=1e-9)
    names = ("ridge", "direct")
    alone = [EffectModel(candidates=name, **STACKED).fit(mixed) for name in names]
    effects = [each.effect(observations) for each in alone]
    for part, own in zip(model.predictor_.parts, alone, strict=True):
        np.testing.assert_array_equal(part(observations), own.predictor_(observations))
    expected = weights[0] * effects[0] + weights[1] * effects[1]
    size = np.abs(expected).max()
    np.testing.assert_allclose(model.effect(observations), expected, atol=1e-12 * size)


def test_the_comparison_shows_the_weights_of_a_stack_and_its_own_error(stacked):
    *parts, stack = stacked.comparison_
    assert [(row.candidate, row.note) for row in parts] == [
        (name, f"in the stack, weight {weight:.2f}")
        for name, weight in zip(("ridge", "direct"), stacked.predictor_.weights, strict=True)
    ]
    assert (stack.candidate, stack.note, stack.seconds) == ("stack", "chosen", 0)
    assert len(stacked.losses_) > 0  # those of the network
    assert stack.error < 0.95 * min(row.error for row in parts)
    assert 0 < stack.standard_error < stack.error
    assert f"candidate `stack`: held-out error {stack.error:.4g} ± " in stacked.summary()


def test_a_stack_is_saved_loaded_and_scored(stacked, mixed, tmp_path):
    model, observations = stacked, mixed.observations[:300]
    effects = model.effect(observations)
    size = np.abs(effects).max()
    model.save(tmp_path)
    loaded = EffectModel.load(tmp_path)
    np.testing.assert_array_equal(loaded.effect(observations), effects)
    assert (loaded.method_, loaded.comparison_[-1].note) == ("stack", "chosen")
    for scorer in (model.to_numpy(), cqm.Scorer.load(tmp_path)):
        np.testing.assert_allclose(scorer.effect(observations), effects, rtol=0, atol=1e-5 * size)
    moved = model.recenter([0.2, 0.3, 0.5])
    found = moved.to_numpy().effect(observations)
    np.testing.assert_allclose(found, moved.effect(observations), atol=1e-5 * size)


def test_candidates_that_cannot_be_told_apart_are_averaged():
    """Effects hardly depend on the state, and labels are so noisy that 50 of them cannot show it.

    A candidate with a lower error gets a larger weight.
    """
    noisy = pushed_world(
        lambda state, action, noise: action * (1 + 0.1 * np.sin(state[:, 1]) + noise[:, 0]),
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 1)),
    )
    branches = collected(noisy, horizon=1, per_step=False)
    model = EffectModel(candidates=("constant", "ridge", "direct"), **TINY).fit(branches)
    assert model.method_ == "stack"
    used = [row for row in model.comparison_ if row.note.startswith("in the stack")]
    assert [row.candidate for row in used] == ["constant", "ridge"]
    better = np.argmin([row.error for row in used])
    weights = model.predictor_.weights
    assert 0.4 < weights[1 - better] < weights[better] < 0.6


def test_one_held_out_family_proves_nothing(alike):
    """The standard error is unknown, so candidates with similar errors count alike."""
    values = np.array([2.0])
    assert choice._with_error(values) == "2 (standard error unknown)"
    model = EffectModel(candidates=("ridge", "direct"), **TINY).fit(alike[:4])
    assert np.isnan([row.standard_error for row in model.comparison_]).all()
    assert "nan" not in model.summary()


def test_a_candidate_that_diverges_is_left_out_with_its_reason(smooth):
    settings = {"width": 8, "training": DIVERGING}
    with pytest.warns(UserWarning, match="the candidate direct failed: .*") as caught:
        model = EffectModel(candidates=("ridge", "direct"), **settings).fit(smooth)
    assert [warning.filename for warning in caught] == [__file__]
    assert model.method_ == "ridge"
    row = model.comparison_[1]
    assert row.candidate == "direct"
    assert np.isnan(row.error)
    assert row.note == "failed: its predictions are not finite; lower the learning rate"
    assert row.note in model.summary()
    with pytest.raises(ValueError, match="its predictions are not finite"):
        EffectModel(candidates="direct", **settings).fit(smooth)


FAILURES = [ValueError, MemoryError, jax.errors.JaxRuntimeError]


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("stage", ["initial", "maps", "train", "predictor"])
def test_a_network_that_fails_is_left_out_with_its_reason(stage, error, smooth, monkeypatch):
    def fail(*arguments, **options):
        raise error("out of luck")

    monkeypatch.setattr(Direct, stage, property(fail) if stage == "maps" else fail)
    with pytest.warns(UserWarning, match="the candidate direct failed: out of luck"):
        model = EffectModel(candidates=("constant", "direct"), **TINY).fit(smooth)
    assert notes(model) == {"constant": "chosen", "direct": "failed: out of luck"}
    with pytest.raises(error, match="out of luck"):
        EffectModel(candidates="direct", **TINY).fit(smooth)


@pytest.mark.parametrize("error", FAILURES)
def test_a_regression_that_fails_is_left_out_with_its_reason(error, smooth, monkeypatch):
    def fail(candidate, families):
        raise error("out of luck")

    monkeypatch.setattr(RidgeRegression, "fit", fail)
    with pytest.warns(UserWarning, match="the candidate ridge failed: out of luck"):
        model = EffectModel(candidates=("constant", "ridge"), **TINY).fit(smooth)
    assert notes(model) == {"constant": "chosen", "ridge": "failed: out of luck"}


def test_other_errors_are_not_hidden(smooth, monkeypatch):
    def fail(candidate, families):
        raise TypeError("a defect")

    monkeypatch.setattr(RidgeRegression, "fit", fail)
    with pytest.raises(TypeError, match="a defect"):
        EffectModel(candidates=("constant", "ridge"), **TINY).fit(smooth)


@pytest.mark.parametrize("error", FAILURES)
def test_a_refit_that_fails_leaves_what_was_compared(error, smooth, monkeypatch, tmp_path):
    fit = RidgeRegression.fit

    def fail(candidate, families):
        if len(families) == 200:
            raise error("out of luck")
        return fit(candidate, families)

    with monkeypatch.context() as patch:
        patch.setattr(RidgeRegression, "fit", fail)
        with pytest.warns(
            UserWarning, match="ridge did not learn from the held-out families: out"
        ) as caught:
            model = EffectModel(candidates=("constant", "ridge"), **TINY).fit(smooth)
    assert [warning.filename for warning in caught] == [__file__]
    assert model.method_ == "ridge"
    text = "ridge did not learn from the held-out families: out of luck"
    assert model.notes_ == [text]
    assert text in model.summary()
    model.save(tmp_path)
    assert EffectModel.load(tmp_path).notes_ == [text]
    learned = choice._shuffled(smooth, seed=0)[:150]
    alone = EffectModel(candidates="ridge", validation=0.0).fit(learned)
    np.testing.assert_array_equal(
        model.effect(smooth.observations), alone.effect(smooth.observations)
    )


def test_a_refit_whose_predictions_are_not_finite_leaves_what_was_compared(smooth, monkeypatch):
    train, compared = Direct.train, []

    def diverging(candidate, network, name, training, **options):
        trained = train(candidate, network, name, training, **options)
        if name != "all":
            compared.append(trained)
            return trained
        return jax.tree.map(lambda values: values * np.nan, trained)

    monkeypatch.setattr(Direct, "train", diverging)
    text = (
        "direct did not learn from the held-out families: its predictions are not finite; lower "
        "the learning rate"
    )
    with pytest.warns(UserWarning, match=text):
        model = EffectModel(candidates="direct", **TINY).fit(smooth)
    assert any(model.predictor_.network is network for network in compared)
    assert model.notes_ == [text]
    assert text in model.summary()
    assert np.isfinite(model.effect(smooth.observations)).all()
    assert (model.method_, notes(model)) == ("direct", {"direct": "chosen"})


# Held-out errors of four families after each cycle; the second number of a pair is their spread.
CLEAR = [(1.0, 0.0), (0.8, 0.0), (0.6, 0.0), (0.4, 0.0)]


@pytest.mark.parametrize(
    ("errors", "made", "best"),
    [
        (CLEAR, 4, 4),
        ([(1.0, 0.0), (0.8, 0.3), *CLEAR[2:]], 4, 4),  # lower by 0.2 ± 0.15
        ([(1.0, 0.0), (0.8, 0.5), *CLEAR[2:]], 2, 2),  # by 0.2 ± 0.25
        ([*CLEAR[:2], (0.9, 0.0), CLEAR[3]], 3, 2),
    ],
)
def test_training_goes_on_while_cycles_help_by_a_standard_error(
    errors, made, best, smooth, monkeypatch
):
    after_training = (0.0, 0.0)  # of the best network, which is scored once more
    scores, signs = iter([*errors, after_training]), np.array([1.0, -1.0, 1.0, -1.0])

    def found(chooser, predicted):
        mean, spread = next(scores)
        return mean + spread * signs

    monkeypatch.setattr(choice.Choice, "_errors", found)
    monkeypatch.setattr(choice.Choice, "_combined", lambda self, fitted: Combination(tuple(fitted)))
    settings = {**TINY, "updates": {"direct": [1, 2, 3, 4]}}
    model = EffectModel(candidates="direct", **settings).fit(smooth)
    updates = {name: run["updates_made"] for name, run in model.training_.items()}
    assert updates == {**{f"direct-{i}": i for i in range(1, made + 1)}, "direct-all": best}


@pytest.mark.parametrize(
    ("members", "expected"),
    [(None, {"unrolled": 1, "direct": 4}), (2, {"unrolled": 2, "direct": 2})],
)
@pytest.mark.parametrize("candidate", ["unrolled", "direct"])
def test_direct_networks_are_four_unless_their_number_is_given(
    candidate, members, expected, smooth, tmp_path
):
    settings = {**TINY, "candidates": candidate, "members": members, "validation": 0.0}
    model = EffectModel(**settings).fit(smooth)
    assert len(model.member_effects(smooth.observations[:3])) == expected[candidate]
    model.save(tmp_path)
    loaded = EffectModel.load(tmp_path)
    assert loaded.members == members
    assert len(loaded.member_effects(smooth.observations[:3])) == expected[candidate]


def test_the_papers_model_is_one_network():
    assert EffectModel.paper().members == 1


def test_without_time_for_networks_there_is_a_model_that_says_so(smooth, capsys):
    model = EffectModel(budget="0.001s", width=8).fit(smooth, show_progress=True)
    assert model.method_ == "ridge"
    left_out = "left out: the budget is too short"
    assert notes(model)["direct"] == notes(model)["unrolled"] == left_out
    assert model.updates_ == {}
    said = capsys.readouterr().err.splitlines()
    for name in ("direct", "unrolled"):
        assert f"candidate `{name}`: 0 s, {left_out}" in model.summary()
        assert f"{name}: {left_out}" in said
    with pytest.raises(ValueError, match=f"no candidate can be fitted: direct {left_out}"):
        EffectModel(candidates="direct", budget="0.001s").fit(smooth)


@pytest.mark.parametrize("candidate", ["direct", "unrolled"])
def test_a_budget_shortens_training_and_its_updates_repeat_it(candidate, smooth, monkeypatch):
    # As if there were time for one update in seventy.
    monkeypatch.setattr(choice, "expected_seconds", lambda *arguments: 1e6)
    settings = {"candidates": candidate, "width": 8, "draws": 4}
    model = EffectModel(budget="10h", **settings).fit(smooth)
    planned = model.updates_[candidate]
    assert len(planned) == len(CYCLES)
    assert 200 < sum(planned) < 250
    for name, record in model.training_.items():
        most = 6 * sum(planned) if name == "unrolled-steps" else max(planned)
        assert record["updates"] <= most
    again = EffectModel(updates=model.updates_, **settings).fit(smooth)
    assert again.updates_ == model.updates_
    np.testing.assert_array_equal(
        again.effect(smooth.observations), model.effect(smooth.observations)
    )


def test_a_network_without_updates_is_left_out(smooth):
    model = EffectModel(candidates=("constant", "direct"), width=8, updates={}).fit(smooth)
    assert notes(model) == {
        "constant": "chosen",
        "direct": "left out: `updates` has no entry for it",
    }


def test_few_updates_are_made_if_there_is_time(smooth):
    model = EffectModel(candidates="direct", budget="10h", **TINY).fit(smooth)
    assert model.updates_ == {"direct": [1, 1, 1, 1]}


def test_families_of_some_actions_teach_only_networks():
    world = pushed_world(lambda state, action, noise: action * np.sin(state[:, 1]))
    model = EffectModel(**TINY).fit(collected(world, arms=2))
    assert model.method_ in ("direct", "unrolled", "stack")
    needs = "needs families that branch every action"
    assert notes(model)["constant"] == notes(model)["ridge"] == needs
    errors = {row.candidate: row.error for row in model.comparison_}
    assert np.isfinite([errors["direct"], errors["unrolled"]]).all()


@pytest.mark.parametrize("candidates", [*CANDIDATES, tuple(CANDIDATES)])
def test_a_world_in_which_actions_do_nothing_has_no_effects(candidates):
    branches = collected(pushed_world(lambda state, action, noise: 0 * action))
    model = EffectModel(candidates=candidates, **TINY).fit(branches)
    assert model.method_ == (candidates if isinstance(candidates, str) else "constant")
    assert [row.error for row in model.comparison_] == [0] * len(model.comparison_)
    assert (model.effect(branches.observations) == 0).all()


@pytest.mark.parametrize("states", [2, 5])
def test_a_few_families_are_enough_for_a_model(states, alike):
    model = EffectModel(candidates=("constant", "ridge"), **TINY).fit(alike[:states])
    expected = alike.effects()[:1, 0]
    np.testing.assert_allclose(model.effect(alike.observations[:1]), expected, atol=1e-9)


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_one_family_is_enough_for_one_candidate(candidate, alike):
    model = EffectModel(candidates=candidate, validation=0, **TINY).fit(alike[:1])
    expected = alike.effects()[:1, 0]
    found = model.effect(alike.observations[:1])
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    if candidate in ("constant", "ridge"):
        np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(
    ("candidates", "validation", "families"),
    [(("constant", "ridge"), None, 1), ("ridge", 0.96, 10), (("constant", "ridge"), 0.99, 40)],
)
def test_families_to_learn_from_must_remain(candidates, validation, families, alike):
    model = EffectModel(candidates=candidates, validation=validation, **TINY)
    with pytest.raises(ValueError, match=rf"there are too few families \({families}\) to hold"):
        model.fit(alike[:families])


def test_an_interrupted_comparison_resumes_to_the_same_bits(smooth, tmp_path, monkeypatch):
    """Interrupted in the second cycle of the second network."""
    settings = {**TINY, "candidates": ("constant", "unrolled", "direct")}
    expected = files_of(EffectModel(**settings).fit(smooth), tmp_path / "whole")
    write, begun = TrainingLog.write, []

    def interrupted(log, step, values):
        write(log, step, values)
        begun.append(log.path.name)
        if begun[-1].startswith("direct-2"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            EffectModel(**settings).fit(smooth, directory=tmp_path / "stopped")
    assert any(name.startswith("unrolled") for name in begun)
    resumed = EffectModel(**settings).fit(smooth, directory=tmp_path / "stopped")
    assert files_of(resumed, tmp_path / "resumed") == expected


def in_order(branches, values):
    """The same families, those with low values first."""
    return cqm.combine([branches[int(i) : int(i) + 1] for i in np.argsort(values)])


def test_the_order_of_the_families_does_not_matter():
    """The second feature is moved only where x0 is positive, that is, by the last families."""
    world = pushed_world(
        lambda state, action, noise: 0 * action,
        size=1,
        features=lambda state, action, noise, after: np.concatenate(
            [action, action * np.maximum(state, 0)], axis=1
        ),
        feature_names=("all", "some"),
    )
    branches = collected(world, horizon=1, per_step=False)
    ordered = in_order(branches, branches.observations[:, 0])
    shuffled, sorted_ = (
        EffectModel(candidates=("constant", "ridge"), **TINY).fit(each)
        for each in (branches, ordered)
    )
    assert shuffled.method_ == sorted_.method_ == "ridge"
    for one, other in zip(shuffled.comparison_, sorted_.comparison_, strict=True):
        uncertainty = np.hypot(one.standard_error, other.standard_error)
        assert abs(one.error - other.error) < 3 * uncertainty
    effects = sorted_.effect(np.array([[1.0], [-1.0]]))[:, 2]
    np.testing.assert_allclose(effects, [[1, 1], [1, 0]], atol=0.1)


def test_shuffling_keeps_every_family_and_depends_on_the_seed_alone(smooth):
    ordered = in_order(smooth, smooth.observations[:, 0])
    for branches in (smooth, ordered):
        first, again, other = (choice._shuffled(branches, seed) for seed in (0, 0, 1))
        np.testing.assert_array_equal(first.index, again.index)
        assert not np.array_equal(first.index, other.index)
        np.testing.assert_array_equal(np.sort(first.index), np.sort(smooth.index))
        rows = np.argsort(first.index)
        np.testing.assert_array_equal(first.observations[rows], smooth.observations)
    held_out = choice._shuffled(ordered, 0).observations[150:, 0]
    assert held_out.min() < -1 < 1 < held_out.max()


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [("60s", 60), (".5s", 0.5), ("1.h", 3600), ("1.5min", 90), (" 2 h ", 7200), (0.5, 0.5)],
)
def test_budgets_are_times(budget, seconds):
    assert choice.seconds_of(budget) == seconds


@pytest.mark.parametrize(
    "budget", ["soon", "-5s", "", "s", ".s", ".", "5", "1.2.3s", 0, -1, np.nan, "0s"]
)
def test_what_is_no_budget(budget):
    with pytest.raises(ValueError, match="budget must be "):
        choice.seconds_of(budget)
