"""Recipes and continuations: what they accept, draw, store and refuse."""

import dataclasses
import inspect
import json

import numpy as np
import pytest

import cqm
from cqm.branches.recipe import Continuation, Policy, Recipe, draw_actions


def test_actions_of_no_probability_are_never_drawn():
    uniforms = np.array([0.0, 0.25, 0.5, 1 - 2**-53])
    for law, expected in (
        ((0.0, 0.5, 0.5), [1, 1, 2, 2]),
        ((0.5, 0.0, 0.5), [0, 0, 2, 2]),
        ((0.5, 0.5, 0.0), [0, 0, 1, 1]),
        ("uniform", [0, 0, 1, 2]),
    ):
        assert Continuation.of(law).draw(uniforms, 3).tolist() == expected


def test_discounted_sums_one_step_after_the_other():
    steps = np.array([[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]])
    assert Recipe(horizon=3, discount=0.5).discounted(steps).tolist() == [[3.0, 30.0]]
    rng = np.random.default_rng(0)
    steps, recipe = rng.standard_normal((50, 7, 3)), Recipe(horizon=7, discount=0.9)
    whole = recipe.discounted(steps)
    for row in range(50):
        np.testing.assert_array_equal(recipe.discounted(steps[row : row + 1])[0], whole[row])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": 0}, "states must be .*at least 1; got 0"),
        ({"horizon": 0}, "horizon must be .*at least 1; got 0"),
        ({"draws": -1}, "draws must be .*at least 1; got -1"),
        ({"discount": 1.01}, r"discount must be a number in \[0, 1\]; got 1.01"),
        ({"discount": -0.1}, r"discount must be a number in \[0, 1\]; got -0.1"),
        ({"discount": float("nan")}, r"discount must be a number in \[0, 1\]; got nan"),
        ({"warmup": (3, 2)}, r"0 <= minimum <= maximum; got \(3, 2\)"),
        ({"warmup": (-1, 2)}, r"0 <= minimum <= maximum; got \(-1, 2\)"),
        ({"warmup": (1, 2, 3)}, r"warmup must be \(minimum, maximum\).*got \(1, 2, 3\)"),
        ({"seed": -1}, "seed must be .*got -1"),
        ({"states": 2.5}, "states must be .*got 2.5"),
        ({"states": "many"}, "states must be .*got 'many'"),
        ({"horizon": 2.0}, "horizon must be .*got 2.0"),
        ({"seed": 1.5}, "seed must .*got 1.5"),
        ({"seed": None}, "seed must .*got None"),
        ({"discount": "high"}, r"discount must be a number in \[0, 1\]; got 'high'"),
    ],
)
def test_a_recipe_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_a_recipe_round_trips_through_json():
    recipe = Recipe(
        states=7, arms=((0, 1), (1, 2)), warmup=(1, 4), continuation=(0.25, 0.25, 0.5), seed=3
    )
    stored = json.loads(json.dumps(recipe.to_json()))
    assert stored["arms"] == [[0, 1], [1, 2]]
    assert Recipe.from_json(stored) == recipe
    assert Recipe.from_json(Recipe().to_json()) == Recipe()


def test_a_recipe_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().seed = 3


def test_discounts():
    assert Recipe(horizon=4, discount=0.5).discounts.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert Recipe(horizon=3, discount=0.0).discounts.tolist() == [1.0, 0.0, 0.0]
    assert Recipe(horizon=3, discount=1.0).discounts.tolist() == [1.0, 1.0, 1.0]


PUSH = Policy("push", lambda observations, uniforms: np.zeros(len(uniforms), int))


@pytest.mark.parametrize(
    ("given", "law", "open_loop", "text"),
    [
        ("uniform", "uniform", True, "uniform"),
        ([0.25, 0.75], (0.25, 0.75), True, "(0.25, 0.75)"),
        (np.array([0.25, 0.75]), (0.25, 0.75), True, "(0.25, 0.75)"),
        (PUSH, "push", False, "push"),
        ("behaviour", "behaviour", False, "behaviour"),
    ],
)
def test_a_continuation_answers_what_callers_ask(given, law, open_loop, text):
    continuation = Continuation.of(given)
    assert (continuation.law, continuation.open_loop, str(continuation)) == (law, open_loop, text)
    assert Continuation.of(continuation) is continuation
    assert continuation == Continuation(law)  # by value: the function of a policy is not compared
    recipe = Recipe(continuation=given)
    assert recipe.continuation == continuation
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.to_json()["continuation"] == json.loads(json.dumps(law))


@pytest.mark.parametrize("continuation", [Continuation.of(PUSH), Continuation("push")])
def test_a_policy_s_name_is_not_taken_for_the_uniform_law(continuation):
    with pytest.raises(ValueError, match="'push' names a policy"):
        continuation.draw(np.array([0.1, 0.9]), 3)
    with pytest.raises(ValueError, match="'push' names a policy"):
        continuation.probabilities(3)


@pytest.mark.parametrize("law", [(0.5, 0.5), (0.5, 0.6, 0.0), (1.5, -0.5, 0.0), (np.nan, 0.5, 0.5)])
def test_probabilities_are_checked(law):
    with pytest.raises(ValueError, match="3 probabilities that sum to 1; got "):
        Continuation.of(law).draw(np.array([0.5]), 3)


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ("uniform", "uniformly random actions"),
        ((0.125, 0.875), "random actions (wait 12.5%, charge 87.5%)"),
        ((0.0, 1.0), "charge at every step"),
        (PUSH, "the policy 'push'"),
        ("behaviour", "the logged behaviour"),
    ],
)
def test_a_continuation_in_words(law, words):
    assert Continuation.of(law).describe(("wait", "charge")) == words


@pytest.mark.parametrize("law", [3, 0.5, None])
def test_other_laws_are_refused(law):
    with pytest.raises(
        ValueError, match=r"'uniform', 'box', one probability per candidate action or a P"
    ):
        Continuation.of(law)
    with pytest.raises(ValueError, match="must not be named 'uniform'"):
        Continuation.of(Policy("uniform", PUSH.act))


def test_rows_of_probabilities_are_drawn_from_row_by_row():
    rows = np.array([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]])
    assert draw_actions(rows, np.array([0.3, 0.6])).tolist() == [1, 1]
    assert draw_actions(rows[1], np.array([[0.4, 0.6], [0.76, 0.74]])).tolist() == [[0, 1], [2, 1]]


def test_recipes_of_older_and_newer_files():
    stored = Recipe(states=7, seed=3).to_json()
    del stored["per_step"], stored["draws"]
    assert Recipe.from_json(stored) == Recipe(states=7, seed=3)
    with pytest.raises(ValueError, match=r"a recipe has no \['menu', 'noise'\]; its fields are "):
        Recipe.from_json({**stored, "noise": 1, "menu": 2})


def test_collect_takes_the_fields_of_a_recipe_with_their_defaults():
    parameters = inspect.signature(cqm.collect).parameters
    fields = dataclasses.fields(Recipe)
    assert list(parameters)[1 : 1 + len(fields)] == [field.name for field in fields]
    chosen = {name: p.default for name, p in parameters.items() if name in vars(Recipe())}
    assert Recipe(**chosen) == Recipe()
    world = cqm.load_world("cartpole-swingup")
    recipe = Recipe(
        5, 3, 0.5, 2, ((0, 1), (1, 2)), (1, 2), Continuation((0.5, 0.25, 0.25)), True, 9
    )
    assert cqm.collect(world, **vars(recipe)).recipe == recipe
