import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import optimize

from cqm import bounds
from cqm.bounds import covering_radius


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (lambda: bounds.total_mass(0.5, 3), 1.75),
        (lambda: bounds.total_mass(0.0, 7), 1),
        (lambda: bounds.total_mass(1, 12), 12),
        (lambda: bounds.total_mass(0.9, 1), 1),
        (lambda: bounds.total_mass(0.95, None), 20),
        (lambda: bounds.total_mass(0.0, None), 1),
        (lambda: bounds.total_mass(0.9, np.int64(400)), bounds.total_mass(0.9, None)),
        (lambda: bounds.total_variation([0.75, 0.25], 0.5, 2), [0.75, 2.25]),
        (
            lambda: bounds.total_variation([[0.5, 0.5], [0.9, 0.1]], 0.75, None),
            [[4, 4], [0.8, 7.2]],
        ),
        (lambda: bounds.decision_regret(0.25), 0.5),
        (lambda: bounds.decision_regret([0.0, 1.0]), [0, 2]),
        (lambda: bounds.feature_regret(2.0, [0.25, 0.5]), [1, 2]),
        (lambda: bounds.reward_projection_error(0.1, 0.5, 2), 0.3),
        (lambda: bounds.reward_projection_error([0.1, 0.2], 0.75, None), [0.8, 1.6]),
        (lambda: bounds.combined_regret(3.0, 0.5, 0.1, 0.5, 2), 3.3),
        (lambda: bounds.combined_regret(3.0, 0.5, 0.1, 0.5, 2, form="paper"), 3.6),
        (lambda: bounds.combined_regret(1.0, 0.5, [0.0, 0.1], 0.75, None), [1, 1.8]),
        (lambda: bounds.combined_regret(1.0, 0.5, 0.1, 0.75, None, form="paper"), 2.6),
        (lambda: bounds.combined_regret(1.0, 0.5, 0.1, 1.0, 12), 3.4),
        (lambda: bounds.prototype_error(3.0, [0.5, 0.0]), [1.5, 0]),
    ],
)
def test_literal_bounds(got, expected):
    assert_allclose(got(), expected, rtol=1e-14)


def corners(dimension):
    return np.array(list(itertools.product([0.0, 1.0], repeat=dimension)))


@pytest.mark.parametrize(
    ("candidates", "low", "high", "expected"),
    [
        # One dimension: half the widest gap, or the distance to an end.
        ([[0.0]], [-1], [1], 1),
        ([[-1.0], [0.0], [1.0]], [-1], [1], 0.5),
        ([[0.9], [-0.5], [0.1]], [-1], [1], 0.5),
        ([[0.0], [0.25]], [0], [1], 0.75),
        ([[0.5], [0.5]], 0, 1, 0.5),
        # Several: from the centre, a corner, all corners; along a diagonal and an edge.
        ([[0.5, 0.5]], [0, 0], [1, 1], np.sqrt(0.5)),
        ([[0, 0]], [0, 0], [1, 1], np.sqrt(2)),
        ([[0.2, 0.1]], [0, 0], [2, 1], np.hypot(1.8, 0.9)),
        (corners(2), [0, 0], [1, 1], np.sqrt(0.5)),
        (corners(3), [0] * 3, [1] * 3, np.sqrt(0.75)),
        (corners(2) * [3, 4], [0, 0], [3, 4], 2.5),
        ([[0, 0], [1, 1]], [0, 0], [1, 1], 1),
        ([[0, 0.5], [1, 0.5]], [0, 0], [1, 1], np.sqrt(0.5)),
        ([[0.25, 0.5], [0.75, 0.5]], [0, 0], [1, 1], np.sqrt(5) / 4),
        (np.concatenate([corners(2), [[0.5, 0.5]]]), [0, 0], [1, 1], 0.5),
        # Rest and full throttle each way in every control.
        (np.concatenate([np.zeros((1, 4)), np.eye(4), -np.eye(4)]), [-1] * 4, [1] * 4, np.sqrt(3)),
        # Repeated candidates, exactly and up to rounding.
        (np.repeat(corners(2), 2, axis=0), [0, 0], [1, 1], np.sqrt(0.5)),
        ([[0.3, 0.3], [0.1 + 0.2, 0.3]], [0, 0], [1, 1], np.sqrt(0.98)),
    ],
)
def test_covering_radius_of_known_cases(candidates, low, high, expected):
    radius = covering_radius(candidates, low, high)
    assert isinstance(radius, float)
    assert_allclose(radius, expected, rtol=1e-12)
    assert_allclose(covering_radius(np.array(candidates)[::-1], low, high), expected, rtol=1e-12)


@pytest.mark.parametrize("unit", [1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9])
def test_covering_radius_does_not_depend_on_units(unit):
    candidates = np.random.default_rng(0).uniform(-1, 1, (5, 3))
    low, high = -np.ones(3), np.ones(3)
    expected = covering_radius(candidates, low, high)
    assert_allclose(covering_radius(unit * candidates, unit * low, unit * high) / unit, expected)
    # A control that hardly moves leaves the radius of the others.
    scale = unit * np.array([1e-9, 1, 1])
    flat = covering_radius(candidates[:, 1:], low[1:], high[1:])
    assert_allclose(covering_radius(scale * candidates, scale * low, scale * high) / unit, flat)


@pytest.mark.parametrize("place", ["inside", "boundary", "corners"])
@pytest.mark.parametrize("seed", range(2))
def test_covering_radius_in_six_dimensions(place, seed):
    rng = np.random.default_rng(seed)
    low, high = -np.ones(6), rng.uniform(0.5, 2, 6)
    candidates = rng.uniform(low, high, (5, 6))
    if place == "boundary":
        candidates[np.arange(5), rng.integers(6, size=5)] = -1
    elif place == "corners":
        candidates = np.where(rng.random((5, 6)) < 0.5, low, high)
    exact = covering_radius(candidates, low, high)

    # From below: random points, and random corners and edges, where the farthest point tends to be.
    points = rng.uniform(low, high, (100_000, 6))
    clipped = rng.random(points.shape) < 0.6
    points[1::2][clipped[1::2]] = np.where(points > (low + high) / 2, high, low)[1::2][
        clipped[1::2]
    ]
    squares = sum((points[:, None, i] - candidates[:, i]) ** 2 for i in range(6)).min(axis=1)
    sampled = np.sqrt(squares.max())
    assert sampled <= exact + 1e-9

    # Then uphill from the best: maximise t with t ≤ |x − candidate|² for every candidate.
    def gaps(z):
        return ((z[:6] - candidates) ** 2).sum(axis=1) - z[6]

    refined = sampled
    for best in np.argsort(squares)[-30:]:
        result = optimize.minimize(
            lambda z: -z[6],
            np.append(points[best], squares[best]),
            jac=lambda z: -np.eye(7)[6],
            method="SLSQP",
            bounds=[*zip(low, high, strict=True), (0, None)],
            constraints={
                "type": "ineq",
                "fun": gaps,
                "jac": lambda z: np.column_stack([2 * (z[:6] - candidates), -np.ones(5)]),
            },
            options={"ftol": 1e-14, "maxiter": 200},
        )
        x = np.clip(result.x[:6], low, high)
        refined = max(refined, np.sqrt(((x - candidates) ** 2).sum(axis=1).min()))
    assert refined <= exact + 1e-9
    assert exact <= refined + 1e-6


UNIT = ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.total_mass(1.0, None), r"\[0, 1\).*got 1\.0 with horizon None"),
        (lambda: bounds.total_mass(-0.1, 3), r"discount .*got -0\.1"),
        (lambda: bounds.total_mass(1.1, 3), r"discount .*got 1\.1"),
        (lambda: bounds.total_mass(np.nan, 3), "discount .*got nan"),
        (lambda: bounds.total_mass(0.5, 0), "horizon .*at least 1, or None; got 0"),
        (lambda: bounds.total_mass(0.5, -3), "horizon .*got -3"),
        (lambda: bounds.total_mass(0.5, 2.5), r"horizon .*whole.*got 2\.5"),
        (lambda: bounds.total_mass(0.5, np.nan), "horizon .*got nan"),
        (lambda: bounds.total_mass(0.5, np.inf), "horizon .*or None; got inf"),
        (lambda: bounds.total_mass(0.5, "long"), "horizon .*got 'long'"),
        (lambda: bounds.total_variation([0.0, 1.0], 0.5, 2), r"reference .*above 0; got .*0\.0"),
        (lambda: bounds.total_variation([-0.5, 1.5], 0.5, 2), r"above 0; got .*-0\.5"),
        (lambda: bounds.total_variation([0.5, 0.6], 0.5, 2), r"sum to 1 .*got 1\.1"),
        (lambda: bounds.total_variation([0.5, np.nan], 0.5, 2), "reference .*NaN"),
        (lambda: bounds.total_variation([1.0], 0.5, 2), r"at least 2 actions.*got shape \(1,\)"),
        (lambda: bounds.total_variation(0.5, 0.5, 2), r"at least 2 actions.*got shape \(\)"),
        (lambda: bounds.total_variation([0.5, 0.5], 1.0, None), r"discount .*got 1\.0"),
        (lambda: bounds.decision_regret(-0.1), r"measure error.*negative.*got -0\.1"),
        (lambda: bounds.decision_regret([0.1, np.nan]), "measure error.*NaN; got .*nan"),
        (lambda: bounds.feature_regret(-1.0, -1.0), r"weight norm.*got -1\.0"),
        (lambda: bounds.feature_regret(1.0, -1.0), r"effect error.*got -1\.0"),
        (lambda: bounds.reward_projection_error(-0.1, 0.5, 2), r"reward error.*got -0\.1"),
        (lambda: bounds.reward_projection_error(0.1, 0.5, 0), "horizon .*got 0"),
        (lambda: bounds.combined_regret(1, 1, 1, 0.5, 2, form="loose"), "'paper'; got 'loose'"),
        (lambda: bounds.combined_regret(1, -1, 1, 0.5, 2), r"effect error.*got -1"),
        (lambda: bounds.prototype_error(-1.0, 1.0), r"Lipschitz.*got -1\.0"),
        (lambda: bounds.prototype_error(1.0, np.nan), "radius.*got nan"),
        (lambda: covering_radius([[0.5]], *UNIT), r"\[candidates, controls\].*\(1, 1\), \(2,\)"),
        (
            lambda: covering_radius([[0.5, 0.5]], [0, 0], [1]),
            r"got shapes \(1, 2\), \(2,\), \(1,\)",
        ),
        (lambda: covering_radius([], *UNIT), r"got shapes \(1, 0\)"),
        (lambda: covering_radius(np.zeros((1, 1, 2)), *UNIT), r"got shapes \(1, 1, 2\)"),
        (lambda: covering_radius([[0.5, np.nan]], *UNIT), "finite.*got .*nan"),
        (lambda: covering_radius([[0.5]], [0], [np.inf]), "finite.*got .*inf"),
        (lambda: covering_radius([[0.5]], [1], [0]), r"low < high.*got .*1\.0"),
        (lambda: covering_radius([[0.5]], [0.5], [0.5]), r"low < high.*got .*0\.5"),
        (lambda: covering_radius([[0.5, 1.5]], *UNIT), r"in the box.*got .*1\.5"),
        (lambda: covering_radius(np.zeros((2, 9)), [-1] * 9, [1] * 9), "at most 8 .*got 9"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
