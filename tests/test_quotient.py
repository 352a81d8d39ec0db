import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from cqm.quotient import (
    ComparisonGraph,
    center,
    centered_loss,
    contrast,
    edge_loss,
    effect_rank,
    effect_spectrum,
    effects_from_differences,
    equivalent,
    inner_product,
    norm,
    pairwise_loss,
    recenter,
)

rng = np.random.default_rng(0)
OUTCOMES, OTHER = rng.normal(size=(2, 6, 4, 5))  # [states, actions, features]
FIXED = np.array([0.1, 0.2, 0.3, 0.4])
PER_STATE = 0.8 * rng.dirichlet(np.ones(4), size=6) + 0.05
INDICES = rng.integers(4, size=6)
CYCLE = ComparisonGraph(4, ((0, 1), (1, 2), (2, 3), (0, 3)))

WITH_REFERENCE = {
    "center": center,
    "recenter": lambda f, reference=None: recenter(center(f), reference),
    "inner_product": lambda f, reference=None: inner_product(f, f**3, reference),
    "norm": norm,
    "centered_loss": lambda f, reference=None: centered_loss(f**2, f, reference),
    "pairwise_loss": lambda f, reference=None: pairwise_loss(f**2, f, reference),
    "effects_from_differences": lambda f, reference=None: effects_from_differences(
        CYCLE, f, reference
    ),
}
WITHOUT_REFERENCE = {
    "equivalent": lambda f: equivalent(f, f + 1.3),
    "not equivalent": lambda f: equivalent(f, 1.01 * f),
    "contrast": lambda f: contrast(f, action=2, baseline=0),
    "effect_rank": lambda f: effect_rank(center(f)),
    "energies": lambda f: effect_spectrum(f).energies,
    "differences": CYCLE.differences,
    "edge_loss": lambda f: edge_loss(CYCLE, f**2, f),
}
ALL = WITH_REFERENCE | WITHOUT_REFERENCE


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (lambda: center([[1, 5], [3, 5]]), [[-1, 0], [1, 0]]),
        (lambda: center([[1], [3]], [0.75, 0.25]), [[-0.5], [1.5]]),
        (
            lambda: center([[[1], [3]], [[1], [3]]], [[0.75, 0.25], [0.5, 0.5]]),
            [[[-0.5], [1.5]], [[-1], [1]]],
        ),
        (lambda: recenter([[-1], [1]], [0.25, 0.75]), [[-1.5], [0.5]]),
        (lambda: equivalent([[[1], [3]]] * 2, [[[11], [13]], [[11], [14]]]), [True, False]),
        (lambda: equivalent([[1], [3]], [[2], [4.1]], tolerance=0.1), True),
        (lambda: equivalent([[0], [0]], [[1e6], [1e6 + 1e-4]]), True),  # tiny beside the larger
        (lambda: equivalent([[1e6], [1e6 + 1e-4]], [[0], [0]]), True),
        (lambda: contrast([[1, 5], [3, 5], [6, 1]], action=2, baseline=0), [5, -4]),
        (lambda: contrast([[[1], [3]]] * 2, action=[0, 1], baseline=[1, 1]), [[-2], [0]]),
        (lambda: inner_product([[1, 2], [3, 4]], [[1, 1], [2, 0]], [0.25, 0.75]), 5.25),
        (lambda: norm([[3, 4], [0, 0]]), np.sqrt(12.5)),
        (lambda: centered_loss([[0], [2]], [[5], [9]], [0.75, 0.25]), 0.75),
        (lambda: pairwise_loss([[0], [2]], [[5], [9]], [0.75, 0.25]), 0.75),
        (lambda: edge_loss(ComparisonGraph.path(3), [[0], [0], [0]], [[1], [3], [0]]), 6.5),
        (lambda: effect_rank([[[1, 2], [-1, -2]], [[0, 0], [0, 0]]]), [1, 0]),
        (lambda: effect_rank([[1, 0], [0, 0.01]], tolerance=0.1), 1),
    ],
)
def test_literal_cases(got, expected):
    assert_allclose(got(), expected, rtol=1e-14)


@pytest.mark.parametrize("convert", [np.ndarray.tolist, np.float32, np.int64])
def test_numpy_is_computed_in_float64(convert):
    outcomes, reference = np.array([[1.0, 5.0], [4.0, 5.0]]), [0.5, 0.5]
    for result in (
        center(convert(outcomes)),
        center(convert(outcomes), np.float32(reference)),
        norm(convert(outcomes), reference),
        contrast(convert(outcomes), action=1, baseline=0),
        effect_spectrum(convert(outcomes)).energies,
        centered_loss(convert(outcomes), convert(outcomes)),
        effects_from_differences(ComparisonGraph.path(3), convert(outcomes)),
    ):
        assert isinstance(result, np.ndarray | np.generic)
        assert result.dtype == np.float64
    assert_allclose(center(convert(outcomes)), [[-1.5, 0], [1.5, 0]], rtol=1e-15)


def test_a_reference_rounded_to_float32_still_centres():
    effects = center(OUTCOMES, np.float32(FIXED))
    weights = np.float64(np.float32(FIXED))
    assert_allclose(np.einsum("a,nad", weights / weights.sum(), effects), 0, atol=1e-15)


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_jax_agrees_with_numpy(name, x64):
    def check(got, expected):
        assert isinstance(got, jax.Array)
        if got.dtype.kind == "f":
            assert got.dtype == (np.float64 if x64 else np.float32)
        size = max(np.abs(expected).max(), 1)
        assert_allclose(got, expected, rtol=0, atol=size * (1e-12 if x64 else 1e-6))

    fn, with_reference = ALL[name], name in WITH_REFERENCE
    with jax.enable_x64(x64):
        f = jnp.asarray(OUTCOMES)
        for reference in (None, FIXED, PER_STATE) if with_reference else ():
            check(fn(f, reference), fn(OUTCOMES, reference))
        args = (PER_STATE,) if with_reference else ()
        check(jax.jit(fn)(f, *args), fn(OUTCOMES, *args))
        each = [fn(OUTCOMES[i], *(arg[i] for arg in args)) for i in range(len(OUTCOMES))]
        check(jax.vmap(fn)(f, *map(jnp.asarray, args)), np.stack(each))
        if with_reference:
            check(fn(OUTCOMES, jnp.asarray(PER_STATE)), fn(OUTCOMES, PER_STATE))
            check(jax.jit(lambda traced: fn(OUTCOMES, traced))(PER_STATE), fn(OUTCOMES, PER_STATE))
            check(jax.jit(lambda traced: fn(traced, FIXED))(f), fn(OUTCOMES, FIXED))


@pytest.mark.parametrize("x64", [True, False])
def test_jax_details(x64):
    with jax.enable_x64(x64):
        f = jnp.asarray(OUTCOMES)
        assert center(jnp.array([[1], [4]])).tolist() == [[-1.5], [1.5]]  # JAX integers
        half = center(f.astype(jnp.bfloat16), FIXED)
        assert half.dtype == jnp.bfloat16
        for mixed in (centered_loss(f, OTHER), centered_loss(OUTCOMES, jnp.asarray(OTHER))):
            assert isinstance(mixed, jax.Array)
            assert_allclose(mixed, centered_loss(OUTCOMES, OTHER), rtol=1e-6)
        expected = contrast(OUTCOMES, action=INDICES, baseline=0)
        for effects in (OUTCOMES, f):
            traced = jax.jit(lambda a, e=effects: contrast(e, action=a, baseline=0))(INDICES)
            assert_allclose(traced, expected, rtol=1e-6)
        per_state = jax.vmap(lambda e, a: contrast(e, action=a, baseline=0))(f, INDICES)
        assert_allclose(per_state, expected, rtol=1e-6)
        # The rounding of short floats is neither a rank nor a difference.
        assert set(effect_rank(center(f, FIXED)).tolist()) == {3}
        assert effect_spectrum(center(f[:1])).rank() == 3
        assert equivalent(f, f + 1.3).all()


def test_effect_spectrum():
    spectrum = effect_spectrum(OUTCOMES)
    pooled = OUTCOMES.reshape(-1, 5)
    assert_allclose(spectrum.energies, np.linalg.eigvalsh(pooled.T @ pooled / 24)[::-1], rtol=1e-12)
    assert spectrum.pointwise_bound == 3
    literal = effect_spectrum([[3, 0, 0, 0, 0], [0, 0, 0, 4, 0]])  # fewer rows than features
    assert_allclose(literal.energies, [8, 4.5, 0, 0, 0], atol=1e-15)
    assert_allclose(literal.directions @ literal.directions.T, np.eye(5), atol=1e-15)
    assert_allclose(np.abs(literal.directions[:2]), np.eye(5)[[3, 0]], atol=1e-15)
    assert (literal.rank(), literal.rank(tolerance=0.6)) == (2, 1)
    assert_allclose([literal.captured(r) for r in (0, 1, 2, 9)], [0, 0.64, 1, 1], rtol=1e-14)
    nothing = effect_spectrum(np.zeros((3, 2, 2)))
    assert (nothing.rank(), nothing.captured(1)) == (0, 1.0)  # nothing is left to capture


def test_graph_constructors():
    assert ComparisonGraph.complete(3).edges == ((0, 1), (0, 2), (1, 2))
    assert ComparisonGraph.star(4, hub=2).edges == ((0, 2), (1, 2), (2, 3))
    assert ComparisonGraph.path(4).edges == ((0, 1), (1, 2), (2, 3))
    assert repr(ComparisonGraph(3, tuple(map(tuple, np.array([[2, 0]]))))).endswith("((2, 0),))")
    families = ComparisonGraph.from_families(5, np.array([[3, 0], [0, 3], [1, 4]]))
    assert families.edges == ((0, 3), (1, 4))
    assert ComparisonGraph.from_families(4, [[2, 0, 1]]).edges == ((0, 1), (0, 2), (1, 2))
    united = ComparisonGraph.union([families, ComparisonGraph(5, ((3, 4), (0, 3)))])
    assert united.edges == ((0, 3), (1, 4), (3, 4))
    assert united.arms == (0, 1, 3, 4)
    assert united.components() == [(0, 1, 3, 4), (2,)]
    assert families.components() == [(0, 3), (1, 4), (2,)]


def test_edges_stay_in_the_order_and_orientation_given():
    edges = ((2, 1), (0, 1), (2, 0))
    graph = ComparisonGraph(3, edges)
    assert graph.edges == edges
    assert graph == ComparisonGraph(3, [[2, 1], [0, 1], [2, 0]])  # as JSON holds them
    assert graph != ComparisonGraph.complete(3)  # its differences are other numbers
    assert graph.differences([[1.0], [10.0], [100.0]]).tolist() == [[90.0], [-9.0], [99.0]]


def test_contradictory_differences_are_reconciled_in_the_callers_order():
    # a − b = 1 and b − c = 1, yet a − c = 5: least squares moves each by a third of the excess.
    graph = ComparisonGraph(3, ((0, 1), (1, 2), (0, 2)))
    got = effects_from_differences(graph, [[1.0], [1.0], [5.0]])
    assert_allclose(got, [[2.0], [0.0], [-2.0]], atol=1e-15)
    incidence = np.array([[1, -1, 0], [0, 1, -1], [1, 0, -1]])
    differences = np.random.default_rng(2).normal(size=(3, 4))
    for turned in (np.array([1, 1, 1]), np.array([1, -1, -1])):  # two edges turned round
        edges = tuple(
            edge if sign > 0 else edge[::-1] for edge, sign in zip(graph.edges, turned, strict=True)
        )
        solved = np.linalg.lstsq(incidence * turned[:, None], differences)[0]
        got = effects_from_differences(ComparisonGraph(3, edges), differences)
        assert_allclose(got, center(solved), atol=1e-14)


@pytest.mark.parametrize("num_actions", [2, 3, 5, 9])
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_random_graphs_are_connected(num_actions, extra):
    generator = np.random.default_rng(num_actions + extra)
    graphs = [ComparisonGraph.random(num_actions, generator, extra_edges=extra) for _ in range(20)]
    for graph in graphs:
        graph.check_connected()
        limit = num_actions * (num_actions - 1) // 2
        assert len(graph.edges) == min(num_actions - 1 + extra, limit)
    if num_actions == 9:
        assert len(set(graphs)) > 15


def test_check_connected():
    graph = ComparisonGraph(5, ((0, 1), (2, 3)))
    with pytest.raises(ValueError, match=r"not connected: components \(0, 1\), \(2, 3\), \(4,\);"):
        graph.check_connected()
    with pytest.raises(ValueError, match=r"not connected: components \(0, 1\), \(2, 3\);"):
        graph.check_connected(among=graph.arms)
    graph.check_connected(among=[2, 3])
    ComparisonGraph(5, ((0, 1), (1, 3))).check_connected(among=(0, 3))
    with pytest.raises(ValueError, match=r"in 0\.\.4; got \[7\]"):
        graph.check_connected(among=[0, 7])


GRAPHS = {
    "complete": ComparisonGraph.complete(4),
    "star": ComparisonGraph.star(4, hub=1),
    "path": ComparisonGraph.path(4),
    "cycle": CYCLE,
    "random": ComparisonGraph.random(4, np.random.default_rng(3), extra_edges=1),
    "families": ComparisonGraph.from_families(4, [[0, 1, 2], [2, 3, 1]]),
    "union": ComparisonGraph.union([ComparisonGraph(4, ((0, 3), (1, 2))), CYCLE]),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("reference", [None, FIXED, PER_STATE])
def test_effects_from_differences(graph, reference):
    differences = np.stack([OUTCOMES[:, a] - OUTCOMES[:, b] for a, b in graph.edges], axis=1)
    assert_allclose(graph.differences(OUTCOMES), differences, rtol=1e-14)
    got = effects_from_differences(graph, differences, reference)
    assert_allclose(got, center(OUTCOMES, reference), atol=1e-13)
    # Contradictory differences are reconciled by least squares.
    noisy = differences + np.random.default_rng(1).normal(size=differences.shape)
    incidence = np.zeros((len(graph.edges), 4))
    for row, (a, b) in enumerate(graph.edges):
        incidence[row, [a, b]] = 1, -1
    solved = np.stack([np.linalg.lstsq(incidence, rows)[0] for rows in noisy])
    expected = center(solved, reference)
    assert_allclose(effects_from_differences(graph, noisy, reference), expected, atol=1e-13)
    if reference is FIXED:
        jitted = jax.jit(lambda x: effects_from_differences(graph, x, FIXED))
        assert_allclose(jitted(noisy), expected, atol=1e-6 * abs(noisy).max())


@pytest.mark.parametrize("num_actions", [2, 3, 4])
def test_edge_loss_on_the_complete_graph_is_the_centered_loss_scaled(num_actions):
    f, g = OUTCOMES[:, :num_actions], OTHER[:, :num_actions]
    factor = 2 * num_actions / (num_actions - 1)
    loss = edge_loss(ComparisonGraph.complete(num_actions), f, g)
    assert_allclose(loss, factor * centered_loss(f, g), rtol=1e-13)


PAIR = [[1.0], [3.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: center(PAIR, [0.0, 1.0]), r"reference .*above 0; got .* 0\.0"),
        (lambda: center(PAIR, [-0.5, 1.5]), r"reference .*above 0; got .* -0\.5"),
        (lambda: center(PAIR, [0.5, 0.4]), r"reference must sum to 1 .*got 0\.9"),
        (lambda: center([PAIR] * 2, [[0.5, 0.5], [0.5, 0.7]]), r"sum to 1 .*got 1\.2"),
        (lambda: center(PAIR, [0.5, np.nan]), "reference must not contain NaN; got 1"),
        (lambda: center(PAIR, [0.2, 0.3, 0.5]), r"reference must be \[2\].*got shape \(3,\)"),
        (lambda: center(PAIR, 0.5), r"reference must be \[2\].*got shape \(\)"),
        (lambda: norm(PAIR, [[0.5, 0.5]] * 3), r"reference must be \[2\].*got shape \(3, 2\)"),
        (lambda: center([[1.0, 2.0]]), r"at least 2 actions.*got shape \(1, 2\)"),
        (lambda: center([1.0, 2.0]), r"at least 2 actions.*got shape \(2,\)"),
        (lambda: center([[1.0], [np.nan]]), "outcomes must not contain NaN; got 1"),
        (lambda: center(jnp.array([[1.0], [jnp.nan]])), "outcomes must not contain NaN; got 1"),
        (lambda: jax.jit(center)(jnp.ones((1, 2))), r"at least 2 actions.*got shape \(1, 2\)"),
        (lambda: jax.jit(lambda f: center(f, [0.5, 0.4]))(jnp.ones((2, 1))), r"got 0\.9"),
        (lambda: equivalent(PAIR, [[1.0]] * 3), r"same shape; got \(2, 1\) and \(3, 1\)"),
        (lambda: centered_loss(PAIR, [[1.0, 1.0]] * 2), r"predicted and outcomes .*\(2, 2\)"),
        (lambda: pairwise_loss([[1.0]], [[1.0]]), r"predicted .*at least 2 actions"),
        (lambda: contrast(PAIR, action=2, baseline=0), r"action .*0\.\.1; got 2"),
        (lambda: contrast(PAIR, action=0, baseline=-1), r"baseline .*0\.\.1; got -1"),
        (lambda: contrast(PAIR, action=0.0, baseline=1), r"action .*indices.*got 0\.0"),
        (lambda: contrast([PAIR], action=[0, 1], baseline=0), r"action .*\[1\].*got shape \(2,\)"),
        (lambda: effect_spectrum(PAIR).captured(-1), "rank .*got -1"),
        (lambda: ComparisonGraph(1, ()), r"num_actions must be .*\[2, 32768\]; got 1"),
        (lambda: ComparisonGraph(3, ((1, 1),)), r"different actions in 0\.\.2; got \[\(1, 1\)\]"),
        (lambda: ComparisonGraph(3, ((2, 0), (0, 2))), r"each pair .*once.*got .*\[\(0, 2\)\]"),
        (lambda: ComparisonGraph(3, ((0, 3),)), r"in 0\.\.2; got \[\(0, 3\)\]"),
        (lambda: ComparisonGraph(3, ((0, 0.5),)), r"pairs of actions.*got \(\(0, 0\.5\),\)"),
        (lambda: ComparisonGraph.from_families(3, [0, 1]), r"arms must be .*got shape \[2\]"),
        (lambda: ComparisonGraph.from_families(3, [[0, -1]]), r"in 0\.\.2; got \[\(-1, 0\)\]"),
        (lambda: ComparisonGraph.random(4, rng, extra_edges=-1), "extra_edges .*got -1"),
        (lambda: ComparisonGraph.union([]), r"got num_actions \[\]"),
        (lambda: ComparisonGraph.union([GRAPHS["path"], ComparisonGraph.path(3)]), r"\[4, 3\]"),
        (lambda: CYCLE.differences(PAIR), r"compares 4 actions; got outcomes of 2"),
        (lambda: effects_from_differences(CYCLE, PAIR), r"\[\.\.\., 4 edges, .*shape \(2, 1\)"),
        (
            lambda: effects_from_differences(ComparisonGraph(4, ((0, 1), (2, 3))), PAIR),
            r"not connected: components \(0, 1\), \(2, 3\)",
        ),
        (lambda: edge_loss(ComparisonGraph(2, ()), PAIR, PAIR), "no edges.*at least one"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
