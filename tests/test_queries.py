import threading
import warnings
from dataclasses import FrozenInstanceError, asdict

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cqm.bounds import combined_regret, total_mass
from cqm.branches.collect import collect
from cqm.branches.recipe import Recipe
from cqm.names import quoted
from cqm.queries import ProjectionError, Query, project
from cqm.worlds import load_world
from cqm.worlds.contract import take
from cqm.worlds.features import ExpandedWorld, Products, RandomFourier, Squares, sample_events
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

NAMES = ("x", "y", "z")
REACHER = load_world("reacher-easy")


def events(num=400, seed=0):
    return np.random.default_rng(seed).standard_normal((num, 3))


def quietly(make_query):
    """A query whose poor fit is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make_query()


def least_squares(features, rewards):
    """Weights and residuals by NumPy's own solver, with a column of ones."""
    design = np.column_stack([features, np.ones(len(features))])
    solution = np.linalg.lstsq(design, rewards, rcond=None)[0]
    return solution[:-1], rewards - design @ solution


def formula(text):
    """A formula's query on three plain features."""
    return quietly(lambda: Query.formula(text, NAMES, events=events()))


def same_as(text, reward_fn):
    """Whether a formula is projected as the reward function that it should be."""
    sample = events()
    expected, _ = least_squares(sample, reward_fn(*sample.T))
    np.testing.assert_allclose(formula(text).weights, expected, rtol=0, atol=1e-12)


class Named:
    feature_names = NAMES


def test_a_vector_is_itself():
    query = Query.vector([1.0, -2.0, 0.0], Named(), name="mine")
    assert query.weights.tolist() == [1.0, -2.0, 0.0]
    assert query.weights.dtype == np.float64
    assert query.error is None
    assert str(query) == "mine (linear in the features)"


def test_a_query_shows_its_reward_and_its_precision():
    query = Query.formula("x - 2*y", NAMES)
    assert repr(query) == "Query('x - 2*y (linear in the features)', weights on 2 of 3 features)"
    projected = formula("x*x < y")
    assert "x*x < y (projected unless a model can integrate it: R² " in repr(projected)
    html = projected._repr_html_()
    assert "<b>Query: x*x &lt; y</b>" in html
    assert f"largest {projected.error.supremum:.2g} on 400 events" in html


def test_a_query_does_not_change():
    weights = np.ones(3)
    query = Query.vector(weights, NAMES)
    weights[0] = 7.0
    assert query.weights[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        query.weights[0] = 2.0
    with pytest.raises(FrozenInstanceError):
        query.name = "other"


def test_names_come_from_worlds_branches_and_sequences():
    branches = collect(REACHER, states=4, horizon=2, threads=1)
    expected = [0.0, 0.0, -1.0, 0.0, 0.5, 0.0]
    for features in (REACHER, branches, REACHER.feature_names, list(REACHER.feature_names)):
        query = Query.named({"to_target_x": -1.0, "velocity_shoulder": 0.5}, features)
        assert query.weights.tolist() == expected
    assert str(query) == "-1*to_target_x + 0.5*velocity_shoulder (linear in the features)"


def test_a_direction_of_a_plain_world_is_its_weights():
    g = np.arange(6.0)
    np.testing.assert_array_equal(Query.direction(g, REACHER).weights, g)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("x", [1, 0, 0]),
        ("-x", [-1, 0, 0]),
        ("+x - -y", [1, 1, 0]),
        ("3", [0, 0, 0]),
        ("2*x + 1", [2, 0, 0]),
        ("x*2 - y/4 + 3*(z - x)", [-1, -0.25, 3]),
        ("(x + y)*(1 + 1) - x**1", [1, 2, 0]),
        ("2**3*x + sqrt(4)*y - abs(-3)*z", [8, 2, -3]),
        ("x*(2 > 1) + y*(2 < 1) + z*where(0, 1, 5)", [1, 0, 5]),
        ("x + x + x - 3*x + y", [0, 1, 0]),
        ("maximum(1, 2)*x + minimum(1, 2)*y + clip(9, 0, 1)*z", [2, 1, 1]),
        ("  x\t+ y ", [1, 1, 0]),
        ("x  # a comment", [1, 0, 0]),
        ("1e2*x + .5*y", [100, 0.5, 0]),
    ],
)
def test_linear_formulas_are_exact(text, weights):
    query = Query.formula(text, NAMES)
    assert query.weights.tolist() == weights
    assert query.error is None
    assert query.name == text


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), st.permutations(range(4)))
def test_a_linear_formula_is_the_vector(values, order):
    *weights, constant = values
    terms = [f"{w!r}*{n}" for w, n in zip(weights, NAMES, strict=True)] + [repr(constant)]
    query = Query.formula(" + ".join(terms[i] for i in order), NAMES)
    assert query.error is None
    np.testing.assert_array_equal(query.weights, Query.vector(weights, NAMES).weights)


@st.composite
def affine_texts(draw, depth=3):
    """An affine text and its coefficients, the constant last."""
    if depth == 0 or draw(st.booleans()):
        if draw(st.booleans()):
            i = draw(st.integers(0, 2))
            return NAMES[i], np.eye(4)[i]
        number = draw(st.integers(-9, 9))
        return f"({number})", number * np.eye(4)[3]
    left, a = draw(affine_texts(depth=depth - 1))
    kind = draw(st.sampled_from("+-*/n"))
    if kind in "+-":
        right, b = draw(affine_texts(depth=depth - 1))
        return f"({left} {kind} {right})", a + b if kind == "+" else a - b
    if kind == "n":
        return f"-({left})", -a
    number = draw(st.integers(1, 9))
    if kind == "*":
        return draw(st.sampled_from([f"{number}*({left})", f"({left})*{number}"])), number * a
    return f"({left})/{number}", a / number


@given(affine_texts())
def test_any_affine_text_is_compiled(case):
    text, coefficients = case
    query = Query.formula(text, NAMES)
    assert query.error is None
    np.testing.assert_allclose(query.weights, coefficients[:3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "reward_fn"),
    [
        ("x**2 - 0.5*y", lambda x, y, z: x**2 - 0.5 * y),
        ("-(x**2 + y**2)", lambda x, y, z: -(x**2 + y**2)),
        ("x*y + z", lambda x, y, z: x * y + z),
        ("-2**2*x + abs(y)", lambda x, y, z: -4 * x + np.abs(y)),
        ("abs(x) + z", lambda x, y, z: np.abs(x) + z),
        ("sqrt(abs(y)) + exp(-x**2)", lambda x, y, z: np.sqrt(np.abs(y)) + np.exp(-(x**2))),
        ("log(1 + x**2)*z", lambda x, y, z: np.log(1 + x**2) * z),
        ("sin(x) + cos(y) + tanh(z)", lambda x, y, z: np.sin(x) + np.cos(y) + np.tanh(z)),
        ("minimum(x, 0.5) + maximum(y, z)", lambda x, y, z: np.minimum(x, 0.5) + np.maximum(y, z)),
        ("clip(x, -1, y)", lambda x, y, z: np.clip(x, -1, y)),
        ("where(x > 0, y, -z)", lambda x, y, z: np.where(x > 0, y, -z)),
        ("where(x > 0, sqrt(x), 0)", lambda x, y, z: np.sqrt(np.maximum(x, 0))),
        (
            "(x < 0) + 2*(y >= z) - (x <= y)",
            lambda x, y, z: 1.0 * (x < 0) + 2 * (y >= z) - (x <= y),
        ),
        ("(x == x) * z + (y != y) + x", lambda x, y, z: z + x),
        ("-(x > 0)", lambda x, y, z: -1.0 * (x > 0)),
        ("1/(2 + tanh(x)) + x**-2.0*0", lambda x, y, z: 1 / (2 + np.tanh(x))),
        ("(x*x)**0.5 + (1/2)*y", lambda x, y, z: np.abs(x) + y / 2),
    ],
)
def test_nonlinear_formulas_are_projected(text, reward_fn):
    same_as(text, reward_fn)


def test_a_projection_in_numbers():
    # x² on −1, 0, 1, 2: the line nearest to it is x + 1, and residuals are 1, −1, −1, 1.
    query = quietly(lambda: Query.formula("x**2", ["x"], events=[[-1.0], [0.0], [1.0], [2.0]]))
    np.testing.assert_allclose(query.weights, [1.0], atol=1e-14)
    assert query.error.supremum == pytest.approx(1.0)
    assert query.error.quantiles == pytest.approx((1.0, 1.0, 1.0))
    assert query.error.num_events == 4
    # Of a sum of squares of 9 with three degrees of freedom, 4 is left with two.
    assert query.error.r_squared == pytest.approx(1 - (4 / 2) / (9 / 3))


def test_errors_are_those_of_numpys_solver_up_to_a_constant():
    sample = events(300) * [1.0, 5.0, 0.2]
    rewards = np.exp(sample[:, 0]) + sample[:, 1]
    weights, error = project(sample, rewards)
    expected, residuals = least_squares(sample, rewards)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
    assert error.supremum == pytest.approx((residuals.max() - residuals.min()) / 2)
    assert error.supremum <= np.abs(residuals).max()
    centred = np.abs(residuals - (residuals.max() + residuals.min()) / 2)
    assert error.quantiles == pytest.approx(tuple(np.quantile(centred, (0.5, 0.9, 0.99))))
    assert list(error.quantiles) == sorted(error.quantiles)
    assert error.quantiles[-1] <= error.supremum
    plain = 1 - residuals.var() / rewards.var()
    assert error.r_squared == pytest.approx(1 - (1 - plain) * 299 / 296)


@given(st.integers(6, 40), st.integers(1, 4), st.floats(-1e3, 1e3), st.integers(0, 2**32 - 1))
def test_a_constant_is_free(num, width, constant, seed):
    rng = np.random.default_rng(seed)
    sample, rewards = rng.standard_normal((num, width)), rng.standard_normal(num)
    weights, error = project(sample, rewards)
    shifted, shifted_error = project(sample, rewards + constant)
    np.testing.assert_allclose(shifted, weights, rtol=0, atol=1e-9)
    assert shifted_error.supremum == pytest.approx(error.supremum, abs=1e-9)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_units_do_not_matter(unit):
    sample = events()
    rewards = sample @ [1.0, 2.0, 3.0] + np.abs(sample[:, 0])
    expected, expected_error = project(sample, rewards)
    weights, error = project(sample * [unit, 1.0, 1 / unit], rewards)
    np.testing.assert_allclose(weights * [unit, 1.0, 1 / unit], expected, rtol=1e-9)
    assert error.supremum == pytest.approx(expected_error.supremum, rel=1e-9)


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_extreme_rewards_do_not_overflow(size):
    sample = events()
    weights, error = project(sample, size * sample[:, 0])
    np.testing.assert_allclose(weights / size, [1.0, 0.0, 0.0], atol=1e-9)
    assert error.r_squared == pytest.approx(1.0)


def test_dependent_features_get_the_smallest_weights():
    # The third feature is the sum of the others in other units, the fourth never changes.
    base = events()[:, :2]
    sample = np.column_stack([base, 100 * base.sum(axis=1), np.full(len(base), 0.1 + 0.2)])
    rewards = sample[:, 0] + np.sin(sample[:, 1])
    weights, error = project(sample, rewards)
    centred = sample - sample.mean(axis=0)
    expected = np.linalg.lstsq(centred[:, :3], rewards - rewards.mean(), rcond=1e-12)[0]
    np.testing.assert_allclose(weights[:3], expected, rtol=0, atol=1e-10)
    assert weights[3] == 0.0
    _, residuals = least_squares(base, rewards)
    assert error.supremum == pytest.approx((residuals.max() - residuals.min()) / 2)


def test_what_is_always_true_of_the_features_is_constant():
    world = load_world("cartpole-swingup")
    with pytest.warns(UserWarning, match=r"'pole_cos\*\*2 \+ pole_sin\*\*2' is constant"):
        query = Query.formula("pole_cos**2 + pole_sin**2", world, num_events=256)
    assert not query.weights.any()
    assert query.error.r_squared == 1.0
    assert query.error.supremum < 1e-12


def test_a_poor_fit_warns_where_it_was_asked_for():
    with pytest.warns(
        UserWarning, match=r"400 events, .*'x\*y' is not linear \(R² = -?0\.\d\d\)"
    ) as record:
        Query.formula("x*y", NAMES, events=events())
    assert "richer features" in str(record[0].message)
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="is not linear") as record:
        Query.goal({"x": 0.0}, NAMES, events=events())
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="regression on 400 samples"):
        Query.samples(events(), events()[:, 0] ** 2, NAMES)


def test_a_good_fit_does_not_warn():
    query = Query.formula("x + 0.05*x**2", NAMES, events=events())
    assert 0.95 < query.error.r_squared < 1
    assert "x + 0.05*x**2 (projected unless a model can integrate it: R² 0.99" in str(query)
    assert str(query).endswith("on 400 events)")
    assert asdict(query.error)["num_events"] == 400


def test_overfitting_does_not_hide_a_poor_fit():
    # Pure noise on 60 features, 70 events: the plain R² is about 0.87, and means nothing.
    rng = np.random.default_rng(0)
    _, error = project(rng.standard_normal((70, 60)), rng.standard_normal(70))
    assert error.r_squared < 0.5


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "x.__class__",
        "x.real",
        "(lambda: 1)()",
        "lambda: x",
        "[x for x in (1, 2)]",
        "sum(x for x in y)",
        "{x: y}",
        "{x, y}",
        "[x, y]",
        "(x, y)",
        "x[0]",
        "x[0:1]",
        "x if y else z",
        "x and y",
        "not x",
        "x or y",
        "x is y",
        "x in y",
        "x < y < z",
        "~x",
        "x ^ 2",
        "x & y",
        "x | y",
        "x << 2",
        "x // y",
        "x % y",
        "x @ y",
        "'x'",
        "b'x'",
        "f'{x}'",
        "True",
        "None",
        "...",
        "1j",
        "1e400",
        "1" + "0" * 400,
        "(y := x)",
        "await x",
        "yield x",
        "*x",
        "eval('1')",
        "exec('1')",
        "open('secret')",
        "abs",
        "abs()",
        "abs(x, y)",
        "abs(*y)",
        "abs(x=1)",
        "abs(x, out=y)",
        "abs(x, **y)",
        "clip(x, 0)",
        "where(x > 0, y, z, 1)",
        "where(condition=x)",
        "np.abs(x)",
        "abs(x)(y)",
        "'%s' % x",
        "print(x)",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"formula|unknown feature"):
        Query.formula(text, NAMES, events=events())


@pytest.mark.parametrize(
    "text", ["", " ", "x +", "x y", "1 2", "x = 1", "x; y", "import os", "x\ny"]
)
def test_what_is_not_an_expression_is_refused(text):
    with pytest.raises(ValueError, match=r"the formula .* cannot be parsed"):
        Query.formula(text, NAMES)


def test_a_refusal_shows_the_piece_and_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"'x\[0\]' cannot be part of a formula; allowed: numbers"
    ) as e:
        Query.formula("1 + 2*abs(x[0])", NAMES)
    assert "abs sqrt exp log sin cos tanh" in str(e.value)
    with pytest.raises(ValueError, match="unknown feature 'speed'") as e:
        Query.formula("2*speed", ["spead", "y"])
    assert "did you mean ['spead']? available: ['spead', 'y']" in str(e.value)


AWKWARD = ("yield", "if", "None", "pain score", "to-target", "2nd", "x^2", "µg", "a`b", "é à")


@pytest.mark.parametrize("name", AWKWARD)
def test_any_feature_name_can_be_written_in_backquotes(name):
    expected = [3.0 * (other == name) for other in (*AWKWARD, "x")]
    expected[-1] = -1.0
    assert (quoted(name)[0], quoted(name)[-1]) == ("`", "`")
    query = Query.formula(f" 3*{quoted(name)} - x", (*AWKWARD, "x"))
    assert query.weights.tolist() == expected


def test_keywords_and_replaced_letters_need_no_backquotes():
    query = Query.formula("(yield\n- 2*if) + 3*None - µg/4", ["yield", "if", "None", "µg"])
    assert query.weights.tolist() == [1.0, -2.0, 3.0, -0.25]


def test_letters_with_separate_accents_need_no_backquotes():
    name = "e\N{COMBINING ACUTE ACCENT}"
    assert Query.formula(f"2*{name} - x", [name, "x"]).weights.tolist() == [2.0, -1.0]


def test_quoted_names_may_stand_in_functions():
    sample = events()[:, :1]
    query = quietly(lambda: Query.formula("abs(`a b`)", ["a b"], events=sample))
    expected, _ = project(sample, np.abs(sample[:, 0]))
    np.testing.assert_allclose(query.weights, expected)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("x + * y", "at character 5, '\\* y': invalid syntax"),
        ("(x\n  + * y)", "at character 8, '\\* y\\)'"),
        ("  x y", "at character 3, 'y'"),
        ("x +", "at its end"),
        ("`x` + `y", "at character 7, '`y'"),
        ("x`y`", "at character 2, '`y`'"),
    ],
)
def test_a_formula_that_cannot_be_parsed_says_where(text, place):
    with pytest.raises(ValueError, match=f"cannot be parsed {place}"):
        Query.formula(text, NAMES)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("pain score + x", "'pain score' in backquotes: `pain score`"),
        ("x - to-target", "'to-target' in backquotes: `to-target`"),
        ("2*x^2", "'x^2' in backquotes: `x^2`"),
        ("2nd", "'2nd' in backquotes: `2nd`"),
        ("x +", None),
        ("x - y", None),
        ("`pain score` + y", None),
        ("pain scores", None),
        ("to - target x", None),
    ],
)
def test_names_that_need_backquotes_are_pointed_out(text, advice):
    with pytest.raises(ValueError, match=r"cannot be parsed|unknown feature|cannot be part") as e:
        Query.formula(text, (*AWKWARD, "x"))
    if advice is None:
        assert "backquotes" not in str(e.value)
    else:
        assert str(e.value).endswith(f"; write the feature {advice}")


def test_a_refused_piece_is_shown_as_it_was_written():
    with pytest.raises(ValueError, match=r"^'`é à`\[yield\]' cannot be part of a formula"):
        Query.formula("2 * `é à`[yield]", AWKWARD)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("9**9**9", "3.8742e"),
        ("x**9**9", "3.8742e"),
        ("x**33", "33"),
        ("x**-33", "-33"),
        ("2**x", "features"),
        ("x**y", "features"),
        ("2**(x*y)", "features"),
        ("9**9**9**9**9**9", ""),
        ("x**32**32", ""),
    ],
)
def test_huge_powers_are_refused(text, got):
    with pytest.raises(ValueError, match=f"an exponent must be a number within ±32; got {got}"):
        Query.formula(text, NAMES)


@pytest.mark.parametrize("text", ["1/0", "x/0", "log(0)*x", "x + exp(999)", "1e299*1e299*x", "0/0"])
def test_numbers_that_are_not_finite_are_refused(text):
    with pytest.raises(ValueError, match="must be finite"):
        Query.formula(text, NAMES, events=events())


DEEP = [
    "(" * 1500 + "x" + ")" * 1500,
    "(" * 150 + "x" + ")" * 150 + "*y" * 150,
    "-" * 3999 + "x",
    "-" * 500 + "x",
    "x**" * 1300 + "x",
    "+".join("x" * 1999),
    "x<" * 1999 + "x",
    "abs(" * 150 + "x" + ")" * 150,
    "(x<" * 150 + "x" + "<x)" * 150,
    "[" * 3999,
    "lambda:" * 570 + "x",
    "not " * 999 + "x",
]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_deep_nesting_is_refused(text):
    assert len(text) <= 4000
    problems = []

    def attempt():
        try:
            Query.formula(text, NAMES)
        except ValueError as error:
            problems.append(error)

    attempt()
    thread = threading.Thread(target=attempt)  # whose stack may be smaller
    thread.start()
    thread.join()
    assert len(problems) == 2


def test_long_sums_are_allowed():
    names = [f"feature_{i}" for i in range(90)]
    query = Query.formula(" + ".join(f"2*{name}" for name in names), names)
    assert query.weights.tolist() == [2.0] * 90


@pytest.mark.parametrize("text", ["x" * 4001, "x" + "+x" * 10**6, None, 3, ["x"]])
def test_long_texts_and_other_things_are_refused(text):
    with pytest.raises(ValueError, match="a formula is text of up to 4000 characters; got") as e:
        Query.formula(text, NAMES)
    assert len(str(e.value)) < 200


@given(st.text(max_size=60))
def test_no_text_does_anything_but_compile_or_be_refused(text):
    try:
        query = formula(text)
    except ValueError:
        return
    assert np.isfinite(query.weights).all()


TOKENS = ["x", "y", "1", "2.5", "+", "-", "*", "/", "**", "(", ")", ",", "<", "==", "abs", "where"]
TOKENS += ["lambda", ".", "[", "]", "if", "else", "not", "0", "1e300", "clip", "log", " ", "`"]


@given(st.lists(st.sampled_from(TOKENS), max_size=14))
def test_no_tokens_do_either(tokens):
    try:
        query = formula(" ".join(tokens))
    except ValueError:
        return
    assert np.isfinite(query.weights).all()


def test_rewards_that_are_not_finite_are_counted():
    sample = events()
    num_bad = np.sum(sample[:, 0] <= 0)
    with pytest.raises(ValueError, match=f"{num_bad} of 400 events are not"):
        Query.formula("log(x) + y*y", NAMES, events=sample)
    sample[3, 1] = np.nan
    with pytest.raises(ValueError, match="finite; 1 of 400 events are not"):
        Query.formula("x*x", NAMES, events=sample)


def test_events_may_have_leading_axes():
    sample = events()
    flat = quietly(lambda: Query.formula("x*y + x", NAMES, events=sample))
    shaped = quietly(lambda: Query.formula("x*y + x", NAMES, events=sample.reshape(4, 10, 10, 3)))
    np.testing.assert_array_equal(shaped.weights, flat.weights)


def test_a_world_samples_its_own_events():
    text = "tanh(5*to_target_x) + velocity_shoulder"
    query = Query.formula(text, REACHER)
    sample = sample_events(REACHER, 4096)
    assert query.error.num_events == len(sample) == 4096
    expected, _ = least_squares(sample, np.tanh(5 * sample[:, 2]) + sample[:, 4])
    np.testing.assert_allclose(query.weights, expected, rtol=0, atol=1e-10)
    again = Query.formula(text, REACHER)
    np.testing.assert_array_equal(again.weights, query.weights)
    other = Query.formula(text, REACHER, seed=1, num_events=500)
    assert other.error.num_events == 512
    assert not np.array_equal(other.weights, query.weights)


@pytest.mark.parametrize("nuisance", [0, 64])
def test_squares_make_a_squared_distance_exact(nuisance):
    world = ExpandedWorld(REACHER, Squares())
    names = world.feature_names
    if nuisance:
        world = NuisanceWorld(world, Nuisance(dimension=nuisance))
    expected = Query.named({"to_target_x^2": -1.0, "to_target_y^2": -1.0}, world)
    assert len(names) == 12
    for query in (
        Query.formula("-(to_target_x**2 + to_target_y**2)", world),
        Query.goal({"to_target_x": 0, "to_target_y": 0}, world, squared=True),
    ):
        assert query.error.supremum < 1e-8
        assert query.error.r_squared == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(query.weights, expected.weights, rtol=0, atol=1e-8)


def test_products_make_a_bilinear_reward_exact():
    world = ExpandedWorld(load_world("cartpole-swingup"), Squares(), Products())
    query = Query.formula("pole_cos*cart_velocity - 0.1*cart_velocity**2", world, num_events=512)
    assert query.error.supremum < 1e-8


def test_waves_bring_a_smooth_reward_closer():
    text = "exp(-30*(to_target_x**2 + to_target_y**2))"
    plain = quietly(lambda: Query.formula(text, REACHER))
    world = ExpandedWorld(REACHER, Squares(), Products(), RandomFourier(100, scale=6.0))
    rich = Query.formula(text, world, num_events=2048)
    assert rich.error.r_squared > 0.95 > plain.error.r_squared + 0.3
    assert rich.error.supremum < plain.error.supremum / 2


def nuisance_world(seed=0):
    return NuisanceWorld(REACHER, Nuisance(dimension=8, seed=seed))


@given(st.integers(0, 2**32 - 1))
def test_native_names_on_a_nuisance_world_reward_the_native_part(seed):
    world, rng = nuisance_world(), np.random.default_rng(seed)
    native, nuisance = rng.standard_normal((5, 6)), rng.standard_normal((5, 8))
    mixed = world.mix(nuisance, native, world.feature_mixing)
    g = rng.standard_normal(6)
    by_name = dict(zip(REACHER.feature_names, g.tolist(), strict=True))
    text = " + ".join(f"({weight!r})*{name}" for name, weight in by_name.items())
    for query in (
        Query.direction(g, world),
        Query.named(by_name, world),
        Query.formula(text, world),
        Query.vector(world.mixed_weights(g), world),
    ):
        assert query.weights.shape == (14,)
        np.testing.assert_allclose(mixed @ query.weights, native @ g, rtol=0, atol=1e-11)


def test_projections_on_a_nuisance_world_are_native():
    world = nuisance_world()
    text = "tanh(5*to_target_x) + velocity_shoulder"
    native, mixed = Query.formula(text, REACHER), Query.formula(text, world)
    np.testing.assert_allclose(mixed.weights, world.mixed_weights(native.weights), atol=1e-12)
    assert mixed.error == native.error
    goal = quietly(lambda: Query.goal({"to_target_x": 0.1}, REACHER))
    mixed_goal = quietly(lambda: Query.goal({"to_target_x": 0.1}, world))
    np.testing.assert_allclose(mixed_goal.weights, world.mixed_weights(goal.weights), atol=1e-12)


def test_samples_of_a_nuisance_world_are_native_or_mixed():
    world, rng = nuisance_world(), np.random.default_rng(0)
    native, nuisance = rng.standard_normal((100, 6)), rng.standard_normal((100, 8))
    g = rng.standard_normal(6)
    mixed = world.mix(nuisance, native, world.feature_mixing)
    for sample in (native, mixed):
        query = Query.samples(sample, native @ g + 1.0, world)
        np.testing.assert_allclose(query.weights, world.mixed_weights(g), rtol=0, atol=1e-11)
        assert query.error.supremum < 1e-10


def test_mixed_names_are_not_native_ones():
    with pytest.raises(ValueError, match=r"unknown feature 'mixed_0'; available: \['position_sh"):
        Query.named({"mixed_0": 1.0}, nuisance_world())


def test_a_goal_is_minus_the_distance():
    sample = events()
    query = quietly(lambda: Query.goal({"z": 1.0, "x": -2.0}, NAMES, events=sample))
    distances = np.hypot(sample[:, 0] + 2, sample[:, 2] - 1)
    expected, residuals = least_squares(sample, -distances)
    np.testing.assert_allclose(query.weights, expected, rtol=0, atol=1e-12)
    assert query.error.supremum == pytest.approx(np.ptp(residuals) / 2)
    assert query.name == "-distance to z=1, x=-2"


def test_a_goal_may_be_a_whole_vector():
    sample = events()
    by_name = quietly(lambda: Query.goal({"x": 1, "y": 2, "z": 3}, NAMES, events=sample))
    whole = quietly(lambda: Query.goal([1, 2, 3], NAMES, events=sample))
    np.testing.assert_array_equal(whole.weights, by_name.weights)
    squared = quietly(lambda: Query.goal([1, 2, 3], NAMES, squared=True, events=sample))
    expected, _ = least_squares(sample, -((sample - [1, 2, 3]) ** 2).sum(axis=1))
    np.testing.assert_allclose(squared.weights, expected, rtol=0, atol=1e-11)
    assert squared.name.startswith("-squared distance to x=1")


def test_samples_are_a_regression():
    sample = events()
    rewards = sample @ [1.0, 0.0, -2.0] + 7.0 + 0.1 * np.sin(9 * sample[:, 1])
    query = Query.samples(sample.tolist(), rewards.tolist(), NAMES)
    expected, residuals = least_squares(sample, rewards)
    np.testing.assert_allclose(query.weights, expected, rtol=0, atol=1e-12)
    assert query.error.supremum == pytest.approx(np.ptp(residuals) / 2)
    assert query.name == "regression on 400 samples"


@pytest.mark.parametrize(
    ("make_query", "message"),
    [
        (
            lambda: Query.vector([1.0, 2.0], NAMES),
            r"weights must be \[3\], one per feature; got .*2,",
        ),
        (lambda: Query.vector(np.ones((3, 1)), NAMES), r"got shape \(3, 1\)"),
        (lambda: Query.vector([1.0, np.nan, 0.0], NAMES), "weights must be finite"),
        (
            lambda: Query.vector([1.0], "x"),
            "features must be a world, a data set, a fitted model or names",
        ),
        (lambda: Query.direction([1.0], NAMES), r"weights must be \[3\]"),
        (lambda: Query.direction(np.ones(14), nuisance_world()), r"weights must be \[6\]"),
        (lambda: Query.named({"X": 1.0}, NAMES), r"unknown feature 'X'; .*available: \['x', 'y'"),
        (lambda: Query.named({"x": np.inf}, NAMES), "must be a finite number"),
        (lambda: Query.formula("x*y", NAMES), "needs a world to sample events from, .*got tuple"),
        (lambda: Query.formula("x*y", NAMES, events=events()[:, :2]), r"got shape \(400, 2\)"),
        (lambda: Query.formula("x*y", NAMES, events=events()[0]), r"\('x', 'y', 'z'\); got shape"),
        (
            lambda: Query.formula("x*y", NAMES, events=events(4)),
            "4 events are too few to estimate the error",
        ),
        (lambda: Query.formula("x*y", NAMES, events=events(0)), "a projection needs events"),
        (lambda: Query.goal({}, NAMES, events=events()), "a goal needs a value for at least one"),
        (lambda: Query.goal({"w": 0}, NAMES, events=events()), "unknown feature 'w'"),
        (lambda: Query.goal([0.0], NAMES, events=events()), r"target must be \[3\]"),
        (lambda: Query.goal({"x": np.nan}, NAMES, events=events()), "must be a finite number"),
        (lambda: Query.samples(events(), np.ones(3), NAMES), r"got \[400, 3\] and \[3\]"),
        (lambda: Query.samples(np.ones((9, 2)), np.ones(9), NAMES), r"got shape \(9, 2\)"),
        (lambda: Query.samples(np.ones((9, 7)), np.ones(9), nuisance_world()), r"shape \(9, 7\)"),
        (lambda: Query.samples(events(), np.full(400, np.inf), NAMES), "400 of 400 events are not"),
    ],
)
def test_mistakes_are_explained(make_query, message):
    with pytest.raises(ValueError, match=message):
        make_query()


def test_the_bound_is_the_combined_one():
    error = ProjectionError(0.25, (0.1, 0.2, 0.24), 0.95, 100)
    query = Query(np.array([3.0, 4.0]), "r", error)
    for form in ("tight", "paper"):
        expected = combined_regret(5.0, [0.1, 0.2], 0.25, 0.9, 7, form=form)
        np.testing.assert_array_equal(query.regret_bound([0.1, 0.2], 0.9, 7, form), expected)
    exact = Query(np.array([3.0, 4.0]))
    np.testing.assert_allclose(exact.regret_bound(0.1, 0.9, None), 1.0)


def walk():
    """A noisy walk that actions push; features are where it gets to and the push."""
    return FunctionWorld(
        step=lambda x, u, e: 0.9 * x + u + e,
        initial=lambda num, rng: rng.uniform(-3, 3, (num, 1)),
        exogenous=lambda num, horizon, rng: 0.3 * rng.standard_normal((num, horizon, 1)),
        features=lambda x, u, e, following: np.stack([following[:, 0], u[:, 0]], axis=1),
        feature_names=["x", "u"],
        candidate_actions=[[-1.0], [-0.3], [0.0], [0.4], [1.0]],
        name="walk",
    )


@pytest.mark.parametrize("maps", [(), (Squares(),), (Squares(), RandomFourier(12, scale=0.7))])
def test_measured_regret_is_within_the_combined_bound(maps):
    world = ExpandedWorld(walk(), *maps) if maps else walk()
    num, draws, horizon, discount = 40, 30, 5, 0.9
    rng, num_actions = np.random.default_rng(1), len(world.candidate_actions)
    states, shape = world.reset(num, rng), (num, num_actions, draws)
    # Every action under the same noise and continuation, averaged over the draws.
    noise = world.sample_noise(num * draws, horizon, rng).reshape(num, 1, draws, horizon, -1)
    noise = np.broadcast_to(noise, (*shape, *noise.shape[3:]))
    actions = np.empty((*shape, horizon), int)
    actions[...] = rng.integers(num_actions, size=(num, 1, draws, horizon))
    actions[..., 0] = np.arange(num_actions)[None, :, None]
    rows = np.repeat(np.arange(num), num_actions * draws)
    controls = world.candidate_actions[actions.reshape(-1, horizon)]
    steps = world.rollout(take(states, rows), controls, noise.reshape(*controls.shape)).features
    steps = steps.reshape(*shape, horizon, -1)

    def reward(features):
        return -np.abs(features[..., 0] - 0.5) - 0.2 * features[..., 1] ** 2

    text = "-abs(x - 0.5) - 0.2*u**2"
    query = quietly(lambda: Query.formula(text, world, events=steps))
    recipe = Recipe(horizon=horizon, discount=discount)
    values = recipe.discounted(reward(steps)[..., None])[..., 0].mean(axis=2)
    outcomes = recipe.discounted(steps).mean(axis=2)
    effects = outcomes - outcomes.mean(axis=1, keepdims=True)
    for size in (0.0, 0.1, 1.0):
        noise = rng.standard_normal(effects.shape)
        noise *= size / np.linalg.norm(noise, axis=-1, keepdims=True)
        chosen = np.argmax((effects + noise) @ query.weights, axis=1)
        regret = values.max(axis=1) - values[np.arange(num), chosen]
        bound = query.regret_bound(size, discount, horizon)
        assert regret.max() <= bound + 1e-12
        assert bound <= query.regret_bound(size, discount, horizon, form="paper")
    # And the proposition underneath: each centred value is within 2·m_H·ε_r of the projected one.
    centred = values - values.mean(axis=1, keepdims=True)
    gap = np.abs(centred - effects @ query.weights).max()
    assert 0 < gap <= 2 * total_mass(discount, horizon) * query.error.supremum


def test_richer_features_lower_the_bound():
    text = "-abs(x - 0.5)"
    suprema = []
    for maps in ((), (Squares(),), (Squares(), RandomFourier(12, scale=0.7))):
        world = ExpandedWorld(walk(), *maps) if maps else walk()
        suprema.append(quietly(lambda w=world: Query.formula(text, w)).error.supremum)
    assert suprema == sorted(suprema, reverse=True)
    assert suprema[-1] < suprema[0] / 2
