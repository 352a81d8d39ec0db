"""The best control in a box, found by sampling and by following the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cqm import bounds
from cqm.models.controls import box_controls, codes_in_box

_CORNERS = 6  # most controls for which all corners of the box are tried
_EXACT = 3  # most controls for which the covering radius is computed exactly
_COVER_POINTS = 12  # otherwise, log2 of the number of points that it is estimated from
_STEPS = (0.3, 0.1, 0.03)  # distances at which the gradient is taken, as shares of the half-width
_LENGTHS = (1.0, 3.0, 10.0, 30.0)  # steps along the gradient, relative to those distances


@dataclass(frozen=True)
class BoxDecision:
    """The best control in each state, and what it gains over the candidate actions.

    A single state also has an axis `n`, of length 1.
    """

    controls: np.ndarray  # [n, controls]
    gain: np.ndarray  # [n], predicted advantage over the best candidate action; at least 0
    menu_action: np.ndarray  # [n], the best candidate action
    menu_bound: np.ndarray  # [n], Lipschitz estimate times covering radius
    """What the menu loses at most by the prototype-error proposition. The Lipschitz constant is
    estimated from differences between sampled controls and, in more than three dimensions, the
    covering radius from sampled points, so both are lower estimates."""
    radius: float | None = None  # error bound of a contrast; None if it is unknown

    @classmethod
    def joined(cls, parts: Sequence[BoxDecision], radius: float | None) -> BoxDecision:
        """Decisions on consecutive states, with the error bound that they share."""
        return cls(
            np.concatenate([part.controls for part in parts]),
            np.concatenate([part.gain for part in parts]),
            np.concatenate([part.menu_action for part in parts]),
            np.concatenate([part.menu_bound for part in parts]),
            radius,
        )

    @property
    def claimed(self) -> np.ndarray:
        """Whether the gain exceeds the model's error bound, `[n]`."""
        if self.radius is None:
            raise ValueError(
                "only a model that is calibrated on the box can say where its gain is larger than "
                "its error; call calibrate with at least 19 held-out families collected with "
                "actions='box'"
            )
        return self.gain > self.radius

    def __repr__(self) -> str:
        claims = "" if self.radius is None else f", {self.claimed.mean():.0%} beyond the error"
        return (
            f"BoxDecision({len(self.gain)} states, mean gain {self.gain.mean():.3g} over the menu"
            f"{claims})"
        )


def best_controls(
    values_fn: Callable[[np.ndarray], np.ndarray],
    num_states: int,
    box: np.ndarray,
    menu: np.ndarray,
    rule: np.ndarray,
) -> BoxDecision:
    """Search the box in every state.

    Args:
        values_fn: Maps codes `[actions, controls]`, or one set per state, to values
            `[n, actions]`, up to a shift per state and call.
        num_states: Number of states.
        box: Bounds of the controls, `[2, controls]`.
        menu: Codes of the candidate actions, `[actions, controls]`.
        rule: Codes of points spread over the box, `[points, controls]`.
    """
    size, limit = menu.shape[1], codes_in_box(np.ones(menu.shape[1]))
    anchor = np.zeros((1, size))  # the middle of the box makes calls comparable

    def values(codes: np.ndarray) -> np.ndarray:
        asked = np.broadcast_to(anchor, (*codes.shape[:-2], 1, size))
        found = values_fn(np.concatenate([asked, codes], axis=-2))
        return found[:, 1:] - found[:, :1]

    start = np.concatenate([menu, rule])
    if size <= _CORNERS:
        signs = np.stack(np.meshgrid(*[[-1.0, 1.0]] * size), axis=-1).reshape(-1, size)
        start = np.concatenate([start, limit * signs])
    found = values(start)
    best, highest = start[found.argmax(axis=1)], found.max(axis=1)

    def improve(codes: np.ndarray, found: np.ndarray) -> None:
        rows, chosen = np.arange(num_states), found.argmax(axis=1)
        better = found[rows, chosen] > highest
        best[better], highest[better] = codes[rows, chosen][better], found[rows, chosen][better]

    for share in _STEPS:
        offsets = share * limit * np.concatenate([np.eye(size), -np.eye(size)])
        probes = np.clip(best[:, None] + offsets, -limit, limit)
        around = values(probes)
        width = np.einsum("nkk->nk", probes[:, :size] - probes[:, size:])
        gradient = (around[:, :size] - around[:, size:]) / np.maximum(width, 1e-12)
        direction = gradient / np.maximum(np.abs(gradient).max(axis=1, keepdims=True), 1e-300)
        lengths = share * np.array(_LENGTHS)[:, None] * limit
        along = np.clip(best[:, None] + lengths * direction[:, None], -limit, limit)
        improve(probes, around)
        improve(along, values(along))
    on_menu, on_rule = found[:, : len(menu)], found[:, len(menu) : len(menu) + len(rule)]
    low, high = box
    lipschitz = _steepest(on_rule, box_controls(rule, box))
    covering = _covering_radius(box_controls(menu, box), low, high)
    return BoxDecision(
        box_controls(best, box),
        highest - on_menu.max(axis=1),
        on_menu.argmax(axis=1),
        bounds.prototype_error(lipschitz, covering),
    )


def _covering_radius(menu: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """How far a control can be from the menu; a lower estimate in more than three dimensions."""
    size = len(low)
    if size <= _EXACT:
        return bounds.covering_radius(menu, low, high)
    from scipy.stats import qmc  # slow to import, and rarely needed

    points = qmc.Sobol(size, rng=np.random.default_rng(0)).random_base2(_COVER_POINTS)
    points = low + (high - low) * np.concatenate([points, points.round()])  # and corners
    nearest = np.full(len(points), np.inf)
    for action in menu:
        nearest = np.minimum(nearest, np.linalg.norm(points - action, axis=1))
    return float(nearest.max())


def _steepest(values: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """The largest difference quotient between sampled controls in every state, `[n]`."""
    first, second = np.triu_indices(len(controls), 1)
    distances = np.linalg.norm(controls[first] - controls[second], axis=1)
    return np.max(np.abs(values[:, first] - values[:, second]) / distances, axis=1)
