"""Every regret and approximation bound of the paper as a function of its constants.

Each function takes the quantities named in the statement (scalars, or arrays that broadcast) and
returns the bound. Where the paper's constant can be improved, the docstring gives both;
`combined_regret` can return either.
"""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import spatial

from cqm.arguments import choice, number, real_numbers, whole_number_or_none
from cqm.quotient import as_reference

_SUMMED = 1_000_000  # steps up to which a total mass is summed as the outcomes are


def total_mass(discount: float, horizon: int | None) -> float:
    """m_H = Σ_{k<H} γᵏ, the mass of a successor measure; `horizon=None` means infinite.

    >>> total_mass(0.5, 2), total_mass(0.75, None), total_mass(1.0, 12)
    (1.5, 4.0, 12.0)
    """
    horizon = whole_number_or_none("horizon", horizon, least=1)
    if number("discount", discount, least=0, most=1) == 1 and horizon is None:
        raise ValueError(
            "discount must be in [0, 1), or 1 with a finite horizon; got 1.0 with horizon None"
        )
    if horizon is None:
        return 1 / (1 - discount)
    if horizon > _SUMMED:  # the powers of such a series are not worth adding up one by one
        return float(horizon) if discount == 1 else (1 - discount**horizon) / (1 - discount)
    return float(np.sum(discount ** np.arange(horizon)))


def total_variation(reference: ArrayLike, discount: float, horizon: int | None) -> np.ndarray:
    """2·m_H·(1 − ρ(a)): the largest total variation of an effect measure, `[..., actions]`.

    Sharper than the paper's 2·m_H, because M_a itself makes up a share ρ(a) of the measure it is
    compared with. Attained if every action leads to events that no other action can reach.

    >>> total_variation([0.75, 0.25], 0.5, 2).tolist()
    [0.75, 2.25]
    """
    reference = real_numbers("reference", reference)
    if reference.ndim < 1 or reference.shape[-1] < 2:
        raise ValueError(
            f"reference must be [..., at least 2 actions]; got shape {reference.shape}"
        )
    return 2 * total_mass(discount, horizon) * (1 - as_reference(reference, reference[..., None]))


def decision_regret(measure_error: ArrayLike) -> np.ndarray:
    """2ε: regret of the best-looking action if every action's measure is ε-close (thm. regret).

    >>> float(decision_regret(0.25))
    0.5
    """
    return 2 * _not_negative("measure error ε", measure_error)


def feature_regret(weight_norm: ArrayLike, effect_error: ArrayLike) -> np.ndarray:
    """2Wδ: regret for ‖w‖ ≤ W if every effect is δ-close (cor. feature-regret).

    >>> float(feature_regret(2.0, 0.25))
    1.0
    """
    return decision_regret(
        _not_negative("weight norm W", weight_norm) * _not_negative("effect error δ", effect_error)
    )


def reward_projection_error(
    reward_error: ArrayLike, discount: float, horizon: int | None
) -> np.ndarray:
    """2·m_H·ε_r: error of a centred value if the reward is ε_r from linear (prop. reward-error).

    >>> float(reward_projection_error(0.1, 0.75, None))
    0.8
    """
    return 2 * total_mass(discount, horizon) * _not_negative("reward error ε_r", reward_error)


def combined_regret(
    weight_norm: ArrayLike,
    effect_error: ArrayLike,
    reward_error: ArrayLike,
    discount: float,
    horizon: int | None,
    *,
    form: Literal["tight", "paper"] = "tight",
) -> np.ndarray:
    """Regret from estimation error and reward projection together (cor. combined-regret).

    The paper's form is 2Wδ + 4·m_H·ε_r. It counts the projection error twice, once for each of
    the two actions compared with the reference. Comparing the actions directly is sharper:
    K_a − K_b = M_a − M_b has total variation at most 2·m_H, so the tight form is 2Wδ + 2·m_H·ε_r.

    >>> float(combined_regret(1.0, 0.5, 0.1, 0.75, None))
    1.8
    >>> float(combined_regret(1.0, 0.5, 0.1, 0.75, None, form="paper"))
    2.6
    """
    choice("form", form, ("tight", "paper"))
    projection = reward_projection_error(reward_error, discount, horizon)
    return feature_regret(weight_norm, effect_error) + (2 if form == "paper" else 1) * projection


def prototype_error(lipschitz: ArrayLike, radius: ArrayLike) -> np.ndarray:
    """L·ε: value lost to an ε-cover of a continuous action set (prop. prototype-error).

    >>> float(prototype_error(3.0, 0.5))
    1.5
    """
    return _not_negative("Lipschitz constant L", lipschitz) * _not_negative("radius ε", radius)


def covering_radius(candidates: ArrayLike, low: ArrayLike, high: ArrayLike) -> float:
    """The smallest ε for which the candidates are an ε-cover of the box, in Euclidean distance.

    The result is exact. The point of the box farthest from all candidates is a vertex of one of the
    candidates' Voronoi cells within the box, so the vertices of all cells are enumerated. Their
    number grows exponentially with the dimension; at most 8 dimensions are accepted.

    >>> covering_radius([[-1.0], [0.0], [1.0]], [-1.0], [1.0])
    0.5
    """
    points = np.atleast_2d(real_numbers("candidates", candidates))
    low, high = (
        np.atleast_1d(real_numbers(name, bound)) for name, bound in (("low", low), ("high", high))
    )
    if points.ndim != 2 or not points.shape[1:] == low.shape == high.shape or not points.size:
        raise ValueError(
            "candidates must be [candidates, controls] with low and high [controls]; "
            f"got shapes {points.shape}, {low.shape}, {high.shape}"
        )
    if not (np.isfinite(points).all() and np.isfinite([low, high]).all() and np.all(low < high)):
        raise ValueError(
            "candidates and a box with low < high must be finite; "
            f"got candidates {points.tolist()}, low {low.tolist()}, high {high.tolist()}"
        )
    if np.any(points < low) or np.any(points > high):
        raise ValueError(f"candidates must lie in the box; got {points.tolist()}")
    # Candidates that differ only by rounding error count as one: the plane between them is
    # undefined.
    _, first = np.unique(((points - low) / (high - low)).round(12), axis=0, return_index=True)
    points = points[first]
    if low.size > 8:
        raise ValueError(f"covering_radius takes at most 8 control dimensions; got {low.size}")
    if low.size == 1:
        gaps = np.diff(points[:, 0]) / 2
        return float(max(points[0, 0] - low[0], high[0] - points[-1, 0], *gaps))
    return max(_farthest_in_cell(points, i, low, high) for i in range(len(points)))


def _farthest_in_cell(points: np.ndarray, i: int, low: np.ndarray, high: np.ndarray) -> float:
    """The largest distance from a candidate to a point of its Voronoi cell within the box."""
    if len(points) == 1:
        corners = np.array(list(itertools.product(*zip(low, high, strict=True))))
        return float(np.linalg.norm(corners - points[0], axis=1).max())
    point, others = points[i], np.delete(points, i, axis=0)
    # The cell is the intersection of half-spaces, bounded by the planes half way to the others.
    normals = (others - point) / np.linalg.norm(others - point, axis=1, keepdims=True)
    limits = (normals * (others + point) / 2).sum(axis=1)
    # Scaling the axes keeps the vertices, and Qhull works best in the cube [-1, 1].
    middle, half = (low + high) / 2, (high - low) / 2
    normals, limits = normals * half, limits - normals @ middle
    sizes = np.linalg.norm(normals, axis=1)
    normals, limits = normals / sizes[:, None], limits / sizes
    # Qhull needs a point strictly inside. The candidate may lie on the edge of the box, so it is
    # moved towards the middle, at most half way to the first plane.
    start = (point - middle) / half
    speeds = -normals @ start
    with np.errstate(divide="ignore"):
        step = np.where(speeds > 0, (limits + speeds) / speeds, 1.0).min()
    eye = np.eye(low.size)
    halfspaces = np.column_stack(
        [
            np.concatenate([normals, eye, -eye]),
            -np.concatenate([limits, np.ones(2 * low.size)]),
        ]
    )
    cell = spatial.HalfspaceIntersection(halfspaces, (1 - min(step, 1.0) / 2) * start)
    return float(np.linalg.norm(cell.intersections * half + middle - point, axis=1).max())


def _not_negative(name: str, value: ArrayLike) -> np.ndarray:
    value = real_numbers(name, value)
    if not np.all(value >= 0):
        raise ValueError(f"{name} must not be negative or NaN; got {value}")
    return value
