"""What logs refuse: arrays that cannot be trajectories, with the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cqm.branches.recipe import Continuation

if TYPE_CHECKING:
    from cqm.logs.dataset import Logs

MAX_ACTIONS = 2**15  # which are as many as the numbers on disk can tell apart


def check_candidates(
    actions: np.ndarray, num_actions: int | None, candidate_actions: ArrayLike | None
) -> np.ndarray:
    """Candidate actions `[actions, controls]`: as given, or the numbers of those that occur."""
    if num_actions is not None and not isinstance(num_actions, Integral):
        raise ValueError(f"num_actions must be a whole number; got {num_actions!r}")
    if candidate_actions is None:
        num = int(actions.max(initial=0)) + 1 if num_actions is None else int(num_actions)
        _check_number(num)
        return np.arange(num, dtype=float)[:, None]
    candidates = np.asarray(candidate_actions, float)
    if candidates.ndim != 2:
        raise ValueError(
            f"candidate_actions must be [actions, controls]; got shape {list(candidates.shape)}"
        )
    if num_actions is not None and num_actions != len(candidates):
        raise ValueError(
            f"num_actions is {num_actions}, but there are {len(candidates)} candidate actions; "
            "leave one of them out"
        )
    return candidates


def check_law(continuation: str | Sequence[float], num_actions: int) -> Continuation:
    """The law of the later actions: a name, or probabilities of the candidate actions."""
    law = Continuation.of(continuation)
    if law.open_loop:
        law.probabilities(num_actions)
    return law


def full_propensities(propensities: ArrayLike, num: int, num_actions: int) -> np.ndarray:
    """Propensities `[n, actions]`, from those of every decision or one row for all."""
    given = np.asarray(propensities, float)
    if given.shape not in ((num_actions,), (num, num_actions)):
        raise ValueError(
            f"propensities must be [n, actions] = {[num, num_actions]}, or [actions] for all, the "
            "probabilities of all candidate actions and not only of the one taken; "
            f"got {list(given.shape)}"
        )
    return np.array(np.broadcast_to(given, (num, num_actions)))


def check_shapes(logs: Logs) -> None:
    """Raise where the arrays of logs do not fit each other."""
    for name, axes in (
        ("observations", ("n", "observations")),
        ("actions", ("n", "horizon")),
        ("features", ("n", "horizon", "features")),
        ("propensities", ("n", "actions")),
        ("groups", ("n",)),
    ):
        values = getattr(logs, name)
        if values is not None and values.ndim != len(axes):
            raise ValueError(f"{name} must be [{', '.join(axes)}]; got shape {list(values.shape)}")
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
    _check_number(logs.num_actions)
    if not np.isfinite(logs.candidate_actions).all():
        raise ValueError(f"candidate_actions must be finite; got {logs.candidate_actions.tolist()}")
    if logs.features.shape[2] == 0:
        raise ValueError("logs need at least one feature, or nothing could be an effect; got none")
    missing = sorted({"name", "kind"} - set(logs.world))
    if missing:
        raise ValueError(f"the identity of a world needs a name and a kind; got no {missing}")
    shape = (num, logs.num_actions)
    if logs.propensities is not None and logs.propensities.shape != shape:
        raise ValueError(
            f"propensities must be [n, actions] = {list(shape)}; "
            f"got {list(logs.propensities.shape)}"
        )
    for name in ("observation", "feature"):
        values, names = getattr(logs, f"{name}s"), getattr(logs, f"{name}_names")
        if values.shape[-1] != len(names):
            raise ValueError(f"{values.shape[-1]} {name}s need as many names; got {len(names)}")


def _check_number(num_actions: int) -> None:
    if num_actions > MAX_ACTIONS:
        raise ValueError(f"logs compare at most {MAX_ACTIONS} actions; got {num_actions}")


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
