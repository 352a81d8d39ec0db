"""Checks of the arrays given as logs, with errors that say what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import (
    instance,
    mapping,
    real_numbers,
    shown,
    texts,
    whole_number,
)
from cqm.branches.recipe import Recipe
from cqm.columns import check_columns
from cqm.names import MAX_ACTIONS, action_indices

if TYPE_CHECKING:
    from cqm.logs.dataset import Logs

AXES = {
    "observations": ("n", "observations"),
    "actions": ("n", "horizon"),
    "features": ("n", "horizon", "features"),
    "propensities": ("n", "actions"),
    "groups": ("n",),
    "families": ("n", "2"),
}
NOT_IDENTIFIED = (
    "logs alone do not identify the effects of continuous actions: the residual loss does not "
    "change if a function of the state is added to them, and what would exclude that, a mean of "
    "zero under the behaviour, takes a density of the actions that is not known"
)


def check_axes(**arrays: np.ndarray | None) -> None:
    """Raise if an array has the wrong axes, or if the arrays differ in length."""
    given = {name: values for name, values in arrays.items() if values is not None}
    for name, values in given.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be an array of numbers; got {shown(values)}")
        if values.ndim != len(AXES[name]):
            axes = ", ".join(AXES[name])
            raise ValueError(f"{name} must be [{axes}]; got shape {list(values.shape)}")
    lengths = {name: len(values) for name, values in given.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the arrays must have the same length; got {lengths}")


def check_logs(logs: Logs) -> None:
    """Raise if the parts of logs do not fit together."""
    for name in ("observations", "actions", "features"):
        if getattr(logs, name) is None:
            raise ValueError(f"{name} must be an array of numbers; got None")
    check_axes(**{name: getattr(logs, name) for name in AXES})
    candidates = real_numbers(
        "candidate_actions", logs.candidate_actions, ("actions", "controls"), finite=True
    )
    if logs.actions.dtype.kind not in "iu":
        raise ValueError(f"actions must be whole numbers; got {shown(logs.actions)}")
    instance("recipe", logs.recipe, Recipe, "a Recipe")
    mapping("world", logs.world, "the identity of the recorded system: its name, its kind, ...")
    num, horizon = logs.actions.shape
    if num == 0:
        raise ValueError("the logs contain no trajectories")
    if logs.features.shape[1] != horizon or horizon < 1:
        raise ValueError(
            f"every trajectory needs one action and one row of features per step; got {horizon} "
            f"actions and {logs.features.shape[1]} rows of features"
        )
    if len(candidates) < 2:
        raise ValueError(f"a comparison needs at least 2 actions; got {len(candidates)}")
    _check_num_actions(len(candidates))
    if logs.features.shape[2] == 0:
        raise ValueError("logs need at least one feature, on which effects are measured; got none")
    missing = sorted({"name", "kind"} - set(logs.world))
    if missing:
        raise ValueError(f"the identity of a world needs a name and a kind; {missing} is missing")
    for name in ("observation", "feature"):
        values = getattr(logs, f"{name}s")
        names = texts(f"{name}_names", getattr(logs, f"{name}_names"))
        if values.shape[-1] != len(names):
            raise ValueError(f"{name}_names must be {values.shape[-1]} names; got {len(names)}")
        bad = ~np.isfinite(values).reshape(num, -1).all(axis=1)
        if bad.any():
            raise ValueError(
                f"{name}s must be finite; got NaN or infinity in {bad.sum()} of {num} "
                f"trajectories, the first in row {np.flatnonzero(bad)[0]}; leave them out"
            )
    wrong = (logs.actions < 0) | (logs.actions >= logs.num_actions)
    if wrong.any():
        raise ValueError(
            f"actions must be candidate actions in 0..{logs.num_actions - 1}; "
            f"got {logs.actions[wrong][0]} ({wrong.sum()} entries out of range)"
        )
    if logs.families is not None and (
        logs.families.shape[1] != 2 or logs.families.dtype != np.int64
    ):
        raise ValueError(
            "families must be [n, 2], integers for the seed and index of each row's family; got "
            f"{logs.families.dtype} {list(logs.families.shape)}"
        )
    check_columns(logs.columns, logs.observation_names)
    if logs.propensities is not None:
        check_propensities(logs.propensities, num, logs.num_actions)


def check_propensities(propensities: np.ndarray, num: int, num_actions: int) -> None:
    """Raise unless rows `[n, actions]` are probabilities, all of them positive."""
    if propensities.shape != (num, num_actions):
        raise ValueError(
            f"propensities must be [n, actions] = {[num, num_actions]}; "
            f"got {list(propensities.shape)}"
        )
    wrong = ~((propensities > 0) & (propensities <= 1))  # includes NaN
    if wrong.any():
        raise ValueError(
            "propensities must be in (0, 1], because the effect of an action that is never taken "
            f"cannot be learned; got {propensities[wrong][0]} ({wrong.sum()} entries out of range)"
        )
    off = np.abs(propensities.sum(axis=-1) - 1)
    if off.max(initial=0) > 1e-6:
        raise ValueError(
            f"the propensities of a decision must sum to 1; row {off.argmax()} sums to "
            f"{propensities[off.argmax()].sum():.6g}"
        )


def propensity_rows(propensities: ArrayLike, num: int, num_actions: int) -> np.ndarray:
    """Propensities of every decision, `[n, actions]`, also from one row for all decisions."""
    given = real_numbers("propensities", propensities)
    if given.shape not in ((num_actions,), (num, num_actions)):
        raise ValueError(
            f"propensities must be [n, actions] = {[num, num_actions]}, or [actions] if all "
            "decisions share them: the probabilities of all candidate actions, not only of the "
            f"one taken; got {list(given.shape)}"
        )
    return np.array(np.broadcast_to(given, (num, num_actions)))


def candidate_rows(
    actions: np.ndarray, num_actions: int | None, candidate_actions: ArrayLike | None
) -> np.ndarray:
    """Candidate actions, `[actions, controls]`: as given, or the numbers of those that occur."""
    if num_actions is not None:
        num_actions = whole_number("num_actions", num_actions, least=2, most=MAX_ACTIONS)
    if candidate_actions is None:
        num = int(actions.max(initial=0)) + 1 if num_actions is None else int(num_actions)
        _check_num_actions(num)
        return np.arange(num, dtype=float)[:, None]
    candidates = real_numbers("candidate_actions", candidate_actions)
    if candidates.ndim != 2:
        raise ValueError(
            f"candidate_actions must be [actions, controls]; got shape {list(candidates.shape)}"
        )
    if num_actions is not None and num_actions != len(candidates):
        raise ValueError(
            f"num_actions is {num_actions}, but there are {len(candidates)} candidate actions; "
            "pass only one of the two"
        )
    return candidates


def named_actions(
    actions: np.ndarray, names: Sequence[str] | None
) -> tuple[np.ndarray, Sequence[str] | None]:
    """Indices of actions that may be given by name, and the names; all that occur by default."""
    if actions.dtype.kind not in "OUT":
        return actions, names
    if names is not None:
        names = texts("action_names", names)
    if names is None:
        found = {action for action in actions.ravel().tolist() if isinstance(action, str)}
        if all(name.isdecimal() for name in found):
            whole = [int(a) if isinstance(a, str) else a for a in actions.ravel().tolist()]
            return np.array(whole).reshape(actions.shape), None
        names = sorted(found)
    return action_indices(actions, names), names


def discrete_actions(actions: np.ndarray) -> np.ndarray:
    """Actions that were given as numbers, as integers; raises if they are continuous controls."""
    fractions = actions.dtype.kind == "f" and bool((actions[np.isfinite(actions)] % 1 != 0).any())
    if actions.ndim > 2 or fractions:
        what = "controls [n, horizon, controls]" if actions.ndim > 2 else "numbers with fractions"
        raise ValueError(
            f"actions must be indices or names of candidate actions, [n, horizon]; got {what}, "
            f"shape {list(actions.shape)}; {NOT_IDENTIFIED}; pass the number of the nearest "
            "candidate action instead, or collect branches with actions='box'"
        )
    return integers("actions", actions)


def equal_steps(name: str, values: Any) -> np.ndarray:
    """One array from trajectories, which must have the same number of steps."""
    if not isinstance(values, np.ndarray) and isinstance(values, Sequence):
        try:
            lengths = {np.shape(value)[:1] for value in values}
        except ValueError:  # rows of different lengths within a trajectory
            raise ValueError(
                f"{name} must be an array, with as many entries per step in every trajectory; "
                f"got {shown(values)}"
            ) from None
        if len(lengths) > 1:
            sizes = sorted(length[0] if length else 0 for length in lengths)
            raise ValueError(
                f"the {name} of all trajectories must have the same number of steps; got "
                f"{sizes[0]} to {sizes[-1]} steps; cut the trajectories into windows of one length"
            )
    try:
        return np.asarray(values)
    except Exception as error:  # conversion runs the object's own code
        raise ValueError(f"{name} must be an array; got {shown(values)}") from error


def integers(name: str, values: np.ndarray) -> np.ndarray:
    """The values as integers; raises if they are not whole numbers."""
    if values.dtype.kind not in "iu":
        values = real_numbers(name, values)
        wrong = ~np.isfinite(values) | (values != np.floor(values))
        if wrong.any():
            raise ValueError(f"{name} must be whole numbers; got {values[wrong][0]}")
    return values.astype(np.int64)


def _check_num_actions(num_actions: int) -> None:
    if num_actions > MAX_ACTIONS:
        raise ValueError(f"logs compare at most {MAX_ACTIONS} actions; got {num_actions}")
