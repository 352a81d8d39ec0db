"""The best way to answer a reward: chosen on held-out families, saved, or refused."""

import dataclasses
import pickle
import warnings

import numpy as np
import pytest
from support.worlds import SeedWorld, market_world, pendulum_world

import cqm
from cqm.models import answers, held_out as held_out_families
from cqm.models.effect import EffectModel
from cqm.models.training import Training
from cqm.quotient import center
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

QUICK = Training(updates=800, batch_size=32, learning_rate=2e-3, schedule="cosine", chunk=250)
MODEL = {"candidates": ("ridge", "unrolled"), "width": 32, "training": QUICK}
SETTINGS = {"horizon": 6, "warmup": (0, 0), "per_step": True}
pytestmark = pytest.mark.filterwarnings("ignore:on .* events, the reward")


@pytest.fixture(scope="module", params=[0, 8], ids=["plain", "nuisance"])
def fitted(request):
    world = pendulum_world()
    if request.param:
        world = NuisanceWorld(world, Nuisance(dimension=request.param, seed=1))
    branches = cqm.collect(world, states=1200, seed=1, **SETTINGS)
    test = cqm.collect(world, states=200, draws=64, seed=2, **SETTINGS)
    return world, EffectModel(**MODEL).fit(branches), branches, test


def truth_of(test, reward_fn):
    values = (reward_fn(test.array("steps")) @ test.recipe.discounts).mean(axis=1)
    return center(values[..., None])[..., 0]


def error_of(found, truth):
    return np.sum((found - truth) ** 2) / np.sum(truth**2)


def test_a_reward_that_no_projection_expresses_is_integrated_or_regressed(fitted):
    world, model, branches, test = fitted
    query = cqm.Query.formula("-abs(speed)", world)
    truth = truth_of(test, query.reward_fn)
    states = test.observations
    for answer in (model.answer(query), model.answer(query, branches)):
        assert "projected" not in answer.weights
        assert error_of(answer.advantage(states), truth) < 0.05
        by_way = {row.way: row for row in answer.comparison}
        assert by_way["projected"].error > 0.5 > by_way["integrated"].error
    assert error_of(model.advantage(states, query.weights), truth) > 0.4
    np.testing.assert_allclose(model.answer(query).advantage(states).sum(axis=1), 0, atol=1e-9)


def test_queries_that_are_not_linear_get_the_best_answer(fitted):
    world, model, _, test = fitted
    query, linear = (cqm.Query.formula(text, world) for text in ("-abs(speed)", "angle"))
    states, answer = test.observations[:5], model.answer(query)
    found = model.advantage(states, query)
    np.testing.assert_array_equal(found, answer.advantage(states))
    np.testing.assert_array_equal(model.act(states, query), found.argmax(axis=1))
    np.testing.assert_array_equal(model.rank(states, query)[:, 0], answer.act(states))
    np.testing.assert_array_equal(answer.rank(states[0]), model.rank(states, query)[0])
    both = model.advantage(states, [linear, query])
    np.testing.assert_array_equal(both[:, 1], found)
    np.testing.assert_allclose(both[:, 0], model.advantage(states, linear), atol=1e-12)
    np.testing.assert_array_equal(model.act(states, [linear, query])[:, 1], found.argmax(axis=1))
    np.testing.assert_allclose(model.advantage(states[0], query), found[0], atol=1e-6)


def test_a_linear_reward_is_exact_however_it_is_written(fitted):
    world, model, _, test = fitted
    query, states = cqm.Query.formula("2*angle - speed", world), test.observations[:5]
    for reward in (query, lambda features: 2 * features[..., 0] - features[..., 1] + 3):
        answer = model.answer(reward)
        assert answer.way == "exact"
        np.testing.assert_allclose(
            answer.advantage(states), model.advantage(states, query), atol=1e-5
        )


def test_a_saved_model_answers_the_same(fitted, tmp_path):
    world, model, branches, test = fitted
    model.save(tmp_path)
    loaded, query = EffectModel.load(tmp_path), cqm.Query.formula("abs(speed)", world)
    states = test.observations[:5]
    for given in ((), (branches,)):
        first, again = model.answer(query, *given), loaded.answer(query, *given)
        assert repr(again) == repr(first)
        np.testing.assert_array_equal(again.advantage(states), first.advantage(states))


def test_what_is_compared_has_not_seen_the_held_out_families(fitted):
    _, model, branches, _ = fitted
    kept = model.held_out_
    assert len(kept.observations) == 300  # a quarter of 1,200
    keys = held_out_families.family_keys(branches)
    assert len({tuple(key) for key in keys.tolist()} & set(map(tuple, kept.families))) == 300
    [unrolled] = [row for row in model.comparison_ if row.candidate == "unrolled"]
    if unrolled.note == "chosen" or "in the stack" in unrolled.note:  # fitted to all families
        assert kept.transition is not model.transition_
    seen = np.abs(center(model.effect(kept.observations.astype(float))) - kept.effects).max()
    assert seen > 1e-6


def test_the_transition_explains_noise_in_labels_without_bias(fitted):
    world, model, _, _ = fitted
    kept, discounts = model.held_out_, model.recipe_.discounts
    reward = cqm.Query.formula("abs(speed)", world).reward_fn
    values = lambda paths: answers._centred((reward(paths) @ discounts).mean(axis=1))
    explained = answers._explained(model, kept, values)
    labels = values(kept.steps.astype(float))
    noise = labels - model.answer(reward).advantage(kept.observations.astype(float))
    assert np.corrcoef(explained.ravel(), noise.ravel())[0, 1] > 0.8
    spread = explained.std(axis=0) / np.sqrt(len(explained))
    assert (np.abs(explained.mean(axis=0)) < 4 * spread).all()


def test_a_reward_that_is_nearly_linear_is_as_good_as_projected(fitted):
    """Sampling does not spoil what effects answer without it."""
    world, model, _, test = fitted
    query = cqm.Query.formula("angle + 0.02*abs(speed)", world)
    truth, states = truth_of(test, query.reward_fn), test.observations
    projected = error_of(model.advantage(states, query.weights), truth)
    assert error_of(model.advantage(states, query), truth) < 1.1 * projected + 0.001
    corrected = dataclasses.replace(model.answer(query), weights={"corrected": 1.0})
    assert error_of(corrected.advantage(states), truth) < 1.1 * projected + 0.001


def test_a_recentred_model_answers_at_its_reference(fitted):
    world, model, _, test = fitted
    query, reference = cqm.Query.formula("abs(speed)", world), [0.5, 0.4, 0.1]
    found = model.recenter(reference).advantage(test.observations[:5], query)
    np.testing.assert_allclose(found @ reference, 0, atol=1e-9)
    np.testing.assert_allclose(
        center(found[..., None])[..., 0], model.advantage(test.observations[:5], query), atol=1e-9
    )


def test_an_answer_shows_the_comparison(fitted):
    world, model, branches, _ = fitted
    answer = model.answer(cqm.Query.formula("-abs(speed)", world), branches)
    lines = repr(answer).splitlines()
    assert lines[0] == f"RewardAnswer('-abs(speed)', {answer.way})"
    ways = ["projected", "integrated", "corrected", "regressed"]
    assert [line.split()[0] for line in lines[2:6]] == ways
    assert "on 300 held-out families" in lines[6]
    assert sum(row.weight for row in answer.comparison) == pytest.approx(1)
    assert all(row.standard_error > 0 for row in answer.comparison)
    assert "held-out families" in answer._repr_html_()


def test_a_poor_transition_loses_to_the_regression():
    branches = cqm.collect(pendulum_world(), states=1200, seed=1, **SETTINGS)
    test = cqm.collect(pendulum_world(), states=200, draws=64, seed=2, **SETTINGS)
    model = EffectModel(candidates=("ridge", "unrolled"), width=8, updates=5).fit(branches)
    reward = lambda features: -np.abs(features[..., 1])
    truth = truth_of(test, reward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the comparison replaces the warning of a poor transition
        answer = model.answer(reward, branches)
        found = answer.advantage(test.observations)
    assert answer.weights["regressed"] > 0.9
    assert error_of(found, truth) < 0.1


def test_a_price_that_no_action_moves_is_left_to_the_regression():
    world = market_world(price_matters=False)
    branches = cqm.collect(world, states=1200, seed=1, **SETTINGS)
    test = cqm.collect(world, states=100, draws=64, seed=2, **SETTINGS)
    model = EffectModel(**MODEL).fit(branches)
    worth = cqm.Query.formula("stock * price", world)
    answer = model.answer(worth, branches)
    assert answer.weights["regressed"] > 0.9
    [refused] = [row for row in answer.comparison if row.way == "integrated"]
    assert "futures of the features price are not learned" in refused.note
    assert error_of(answer.advantage(test.observations), truth_of(test, worth.reward_fn)) < 0.1
    assert model.answer(worth).way == "projected"
    stock = cqm.Query.formula("abs(stock) + 0*price", world)  # its projection has a weight on price
    assert "projected" not in model.answer(stock).weights


def test_noise_given_as_seeds_leaves_projection_and_regression():
    world = SeedWorld(limit=0.0)
    branches = cqm.collect(world, states=400, seed=1, **SETTINGS)
    model = EffectModel(candidates=("ridge", "unrolled"), width=8, updates=10).fit(branches)
    answer = model.answer(lambda features: np.abs(features[..., 0]), branches)
    by_way = {row.way: row for row in answer.comparison}
    assert by_way["integrated"].note == "not possible: no transition can sample futures"
    assert set(answer.weights) <= {"projected", "regressed"}
    assert "not possible" in repr(answer)


def test_few_families_are_kept(monkeypatch):
    branches = cqm.collect(pendulum_world(), states=100, seed=1, **SETTINGS)
    assert held_out_families.num_kept(branches) == 100
    monkeypatch.setattr(held_out_families, "_MOST_FAMILIES", 30)
    assert held_out_families.num_kept(branches) == 30
    monkeypatch.setattr(held_out_families, "_MOST_BYTES", 4 * 3 * 6 * 3 * 7)
    assert held_out_families.num_kept(branches) == 7


@pytest.fixture(scope="module")
def plain():
    """A model that kept no families, and the branches it learned from."""
    branches = cqm.collect(pendulum_world(), states=400, seed=1, **SETTINGS)
    return EffectModel(candidates="ridge", validation=0.0).fit(branches), branches


def test_a_model_that_kept_no_families_compares_on_branches_it_has_not_seen(plain):
    model, branches = plain
    query = cqm.Query.formula("-abs(speed)", pendulum_world())
    assert model.answer(query).way == "projected"
    assert model.answer(query).comparison == ()
    with pytest.raises(ValueError, match="the branches share 400 families"):
        model.answer(query, branches)
    unseen = cqm.collect(pendulum_world(), states=400, seed=3, **SETTINGS)
    answer = model.answer(query, unseen)
    assert answer.way == "regressed"
    assert answer.num_families == 100


@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        (lambda features: features[..., 0] ** 2, None, "pass branches collected with per_step"),
        (3, None, "reward must be a function"),
        (cqm.Query([1.0]), None, "the query has 1 weights"),
        (lambda features: features, {}, "finite rewards of shape"),
        (lambda features: np.nan * features[..., 0], {}, "not finite"),
        (lambda features: features[..., 99], {}, "reward_fn raised IndexError"),
        (lambda features: features[..., 0] ** 2, {"per_step": False}, "per_step=True"),
        (lambda features: features[..., 0] ** 2, {"horizon": 5}, "horizon 5"),
    ],
)
def test_rewards_and_branches_that_are_refused(plain, reward, settings, message):
    branches = None
    if settings is not None:
        branches = cqm.collect(pendulum_world(), states=40, seed=4, **{**SETTINGS, **settings})
    with pytest.raises(ValueError, match=message):
        plain[0].answer(reward, branches)


def test_branches_of_another_world_are_refused(plain):
    other = cqm.collect(SeedWorld(limit=0.0), states=20, **SETTINGS)
    with pytest.raises(ValueError, match="come from another world"):
        plain[0].answer(lambda features: features[..., 0] ** 2, other)


def test_a_model_without_steps_projects():
    branches = cqm.collect(pendulum_world(), states=200, seed=1, **{**SETTINGS, "per_step": False})
    model = EffectModel(candidates="ridge").fit(branches)
    query, states = cqm.Query.formula("-abs(speed)", pendulum_world()), branches.observations[:3]
    assert model.held_out_ is None
    np.testing.assert_array_equal(
        model.advantage(states, query), model.advantage(states, query.weights)
    )


def test_changes_to_kept_families_are_refused_on_load(fitted, tmp_path):
    _, model, _, _ = fitted
    for change, message in (
        ({"later": model.held_out_.later + 9}, "'later' must consist of finite whole numbers"),
        ({"steps": model.held_out_.steps[:, :, :, 1:]}, "'steps' must be"),
        ({"effects": model.held_out_.effects * np.nan}, "'effects' must consist of finite"),
    ):
        model.held_out_, kept = dataclasses.replace(model.held_out_, **change), model.held_out_
        try:
            model.save(tmp_path)
        finally:
            model.held_out_ = kept
        with pytest.raises(cqm.storage.DamagedFileError, match=message):
            EffectModel.load(tmp_path)


def test_rewards_that_are_integrated_get_certificates(fitted, tmp_path):
    world, model, _, test = fitted
    query, linear = (cqm.Query.formula(text, world) for text in ("-abs(speed)", "angle"))
    model = cqm.load_model(_saved(model, tmp_path / "plain"))
    pool = cqm.collect(world, states=300, draws=16, seed=5, **SETTINGS)
    model.calibrate(pool)
    verdict = model.certify(test.observations, query, shift="ignore")
    truth = truth_of(test, query.reward_fn)
    np.testing.assert_array_equal(verdict.action, model.act(test.observations, query))
    np.testing.assert_allclose(verdict.advantages, model.advantage(test.observations, query))
    regret = truth.max(axis=1) - truth[np.arange(len(truth)), verdict.action]
    assert np.mean(regret <= verdict.regret_bound + 1e-9) > 0.9
    wrong = verdict.separable & (truth.argmax(axis=1) != verdict.action)
    assert verdict.separable.mean() > 0.2
    assert wrong.sum() <= 0.1 * verdict.separable.sum()
    assert "integrated" in verdict.query or "corrected" in verdict.query
    assert np.isnan(verdict.combined_bound)

    both = model.certify_all(test.observations, [linear, query], shift="ignore")
    np.testing.assert_array_equal(both[1].action, verdict.action)
    assert (both[1].radius >= verdict.radius - 1e-12).all()

    low, high = model.effect_interval(test.observations, query, action=0, baseline=1)
    values = model.advantage(test.observations, query)
    np.testing.assert_allclose((low + high) / 2, values[:, 0] - values[:, 1])
    alone = model.certify(test.observations, linear, shift="ignore")
    assert both[0].combined_bound == alone.combined_bound
    pickle.loads(pickle.dumps(model))  # for worker processes

    again = cqm.load_model(_saved(model, tmp_path / "calibrated"))
    found = again.certify(test.observations, query, shift="ignore")
    np.testing.assert_array_equal(found.regret_bound, verdict.regret_bound)


def _saved(model, directory):
    model.save(directory)
    return directory


def test_calibration_without_steps_certifies_the_projection(fitted):
    world, model, _, test = fitted
    query = cqm.Query.formula("-abs(speed)", world)
    settings = {**SETTINGS, "per_step": False}
    model.calibrate(cqm.collect(world, states=100, draws=16, seed=6, **settings))
    states = test.observations[:5]
    message = r"about the projection of '-abs\(speed\)'"
    with pytest.warns(UserWarning, match=message) as caught:
        verdict = model.certify(states, query, shift="ignore")
    with pytest.warns(UserWarning, match=message) as caught_later:
        model.effect_interval(states, query, action=0, baseline=1)
    assert {warning.filename for warning in (*caught, *caught_later)} == {__file__}
    assert verdict.projected
    np.testing.assert_array_equal(verdict.action, model.act(test.observations[:5], query.weights))
