"""Candidate actions: the finite set of controls that branches compare."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from cqm.arguments import real_numbers, shown
from cqm.names import MAX_ACTIONS


def prototype_actions(
    low: np.ndarray, high: np.ndarray, *, name: str = "", seed: int = 0
) -> np.ndarray:
    """The paper's candidate actions for a control box, `[actions, controls]`.

    For one control, these are its bounds and their midpoint. For several, they are the midpoint
    and two random directions with their negatives, each scaled until its largest component reaches
    the bound. The second direction is redrawn while it is within 45° of the line through the first,
    because comparing nearly equal actions is uninformative. The actions depend only on the box, the
    world's name and the seed.

    >>> prototype_actions(np.array([-1.0]), np.array([1.0])).ravel().tolist()
    [-1.0, 0.0, 1.0]
    """
    low, high = np.asarray(low, float), np.asarray(high, float)
    flat = low.shape == high.shape and low.ndim == 1 and low.size > 0
    if not flat or not np.all(np.isfinite([low, high])):
        raise ValueError(
            f"prototype actions need a bounded control box; got low={low}, high={high}; "
            "pass candidate_actions instead"
        )
    middle, reach = (low + high) / 2, (high - low) / 2
    if low.size == 1:
        return np.stack([low, middle, high])
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    first, second = rng.standard_normal((2, low.size))
    while abs(first @ second) > np.sqrt(0.5) * np.linalg.norm(first) * np.linalg.norm(second):
        second = rng.standard_normal(low.size)
    directions = np.stack([first, second])
    directions /= np.abs(directions).max(axis=1, keepdims=True)
    return middle + reach * np.concatenate([np.zeros((1, low.size)), directions, -directions])


def checked_actions(
    given: npt.ArrayLike, low: np.ndarray, high: np.ndarray, *, continuous: bool = True
) -> np.ndarray:
    """Check a user's candidate actions, `[actions, controls]`; raises `ValueError` if invalid.

    >>> checked_actions([[0], [1]], np.array([-1.0]), np.array([1.0])).tolist()
    [[0.0], [1.0]]
    """
    actions = real_numbers("candidate_actions", given).copy()
    shaped = actions.ndim == 2 and len(actions) > 1 and actions.shape[1] == len(low)
    inside = shaped and np.all(np.isfinite(actions) & (actions >= low) & (actions <= high))
    if not inside or (not continuous and np.any(actions % 1)):
        kind = "numbers" if continuous else "whole numbers"
        raise ValueError(
            f"candidate_actions cannot be {shown(actions.tolist())}; allowed: at least 2 rows of "
            f"{len(low)} {kind} from {low.tolist()} to {high.tolist()}"
        )
    return actions


def candidate_actions(
    given: npt.ArrayLike | None,
    low: np.ndarray,
    high: np.ndarray,
    *,
    name: str,
    seed: int,
    continuous: bool = True,
) -> np.ndarray:
    """The given candidate actions, checked; by default the paper's for the control box.

    If the controls are not continuous, the default is every whole number within the bounds.
    """
    if given is not None:
        return checked_actions(given, low, high, continuous=continuous)
    if continuous:
        return prototype_actions(low, high, name=name, seed=seed)
    num = int(high[0] - low[0]) + 1
    if num > MAX_ACTIONS:
        raise ValueError(
            f"at most {MAX_ACTIONS:,} actions can be compared; {name} has {num:,}; pass "
            "candidate_actions"
        )
    return np.arange(low[0], high[0] + 1)[:, None]
