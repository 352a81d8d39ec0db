"""What logs refuse: arrays that cannot be trajectories, with the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cqm.logs import Logs


def check_shapes(logs: Logs) -> None:
    """Raise where the arrays of logs do not fit each other."""
    num, horizon = logs.actions.shape
    lengths = {name: len(getattr(logs, name)) for name in ("observations", "actions", "features")}
    for name in ("propensities", "groups"):
        if getattr(logs, name) is not None:
            lengths[name] = len(getattr(logs, name))
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the arrays of logs must be equally long; got {lengths}")
    if num == 0:
        raise ValueError("there are no trajectories in the logs")
    if logs.features.shape[1] != horizon or horizon < 1:
        raise ValueError(
            f"every trajectory needs one action and one row of features a step; got {horizon} "
            f"actions and {logs.features.shape[1]} rows of features"
        )
    if logs.num_actions < 2:
        raise ValueError(f"effects compare at least 2 actions; got {logs.num_actions}")
    shape = (num, logs.num_actions)
    if logs.propensities is not None and logs.propensities.shape != shape:
        raise ValueError(
            f"propensities must be [n, actions] = {list(shape)}; "
            f"got {list(logs.propensities.shape)}"
        )
    if logs.groups is not None and logs.groups.ndim != 1:
        raise ValueError(f"groups must be [n], a number a row; got {list(logs.groups.shape)}")
    for name in ("observation", "feature"):
        values, names = getattr(logs, f"{name}s"), getattr(logs, f"{name}_names")
        if values.shape[-1] != len(names):
            raise ValueError(f"{values.shape[-1]} {name}s need as many names; got {len(names)}")


def check_propensities(propensities: np.ndarray) -> None:
    """Raise where rows `[n, actions]` are not probabilities of actions that can all occur."""
    wrong = ~((propensities > 0) & (propensities <= 1))  # NaN too
    if wrong.any():
        raise ValueError(
            f"propensities must be in (0, 1], because an action that is never taken cannot be "
            f"learned about; got {propensities[wrong][0]} ({wrong.sum()} such places)"
        )
    off = np.abs(propensities.sum(axis=-1) - 1)
    if off.max(initial=0) > 1e-6:
        raise ValueError(
            f"the propensities of a decision must sum to 1; row {off.argmax()} sums to "
            f"{propensities[off.argmax()].sum():.6g}"
        )


def stacked(name: str, values: Any) -> np.ndarray:
    """One array from trajectories, which must be equally long."""
    if not isinstance(values, np.ndarray) and isinstance(values, Sequence):
        lengths = {np.shape(value)[:1] for value in values}
        if len(lengths) > 1:
            sizes = sorted(length[0] if length else 0 for length in lengths)
            raise ValueError(
                f"{name} of trajectories must be equally long; got {sizes[0]} to {sizes[-1]} "
                "steps; cut them to windows of one length"
            )
    return np.asarray(values)


def whole(name: str, values: np.ndarray) -> np.ndarray:
    """The values as whole numbers, which they must be."""
    if not np.issubdtype(values.dtype, np.integer):
        numbers = np.asarray(values, float)
        if not np.isfinite(numbers).all() or np.any(numbers % 1):
            raise ValueError(
                f"{name} must be whole numbers; got "
                f"{numbers[~(np.isfinite(numbers) & (numbers % 1 == 0))][0]}"
            )
        values = numbers
    return values.astype(np.int64)
