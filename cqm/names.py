"""Names of actions, features and observations: checked, looked up, and shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import shown

Action: TypeAlias = str | ArrayLike  # a name, an index, or an array of either
MAX_ACTIONS = 2**15  # files store actions in 16 bits


def numbered(num: int) -> tuple[str, ...]:
    """Default names of candidate actions: their indices.

    >>> numbered(3)
    ('0', '1', '2')
    """
    return tuple(map(str, range(num)))


def checked_action_names(given: Sequence[str] | None, num: int) -> tuple[str, ...]:
    """The names of `num` candidate actions, by default their indices; raises if invalid.

    A name must not be the index of another action, so that text is never ambiguous.

    >>> checked_action_names(["idle", "charge"], 2)
    ('idle', 'charge')
    """
    if num > MAX_ACTIONS:
        raise ValueError(f"at most {MAX_ACTIONS:,} actions can be compared; got {num:,}")
    if given is None:
        return numbered(num)
    listed = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    listed = listed and getattr(given, "ndim", 1) == 1
    names = tuple(given) if listed else ()
    sound = listed and all(isinstance(name, str) and name.strip() for name in names)
    if not sound or len(set(names)) != num or len(names) != num:
        raise ValueError(
            f"action_names cannot be {shown(given)}; allowed: {num} different names, "
            "one per candidate action, none of them empty"
        )
    numbers = numbered(num)
    for i, name in enumerate(names):
        if name in numbers and name != numbers[i]:
            raise ValueError(
                f"action_names cannot be {shown(given)}: action {i} has the number of another "
                "action as its name"
            )
    return tuple(map(str, names))


def action_indices(actions: Action, names: Sequence[str]) -> np.ndarray:
    """Indices of actions given by name, by index, or as an array of either.

    Only names are looked up; the caller checks the range of indices.

    >>> action_indices("charge", ("idle", "charge")).tolist()
    1
    >>> action_indices([0, "charge"], ("idle", "charge")).tolist()
    [0, 1]
    """
    try:
        array = np.asarray(actions)
        if array.dtype.kind in "iu":
            return array
        array = np.asarray(actions, object)
    except Exception:  # conversion runs the object's own code
        array = np.array([None])
    positions = {text: i for i, text in enumerate(numbered(len(names)))}
    positions |= {name: i for i, name in enumerate(names)}

    def index(action: Any) -> Any:
        if isinstance(action, str):
            if action not in positions:
                raise unknown("action", action, names)
            return positions[action]
        if not isinstance(action, Integral) or isinstance(action, bool) or abs(int(action)) > 2**31:
            raise ValueError(
                f"actions must be names or indices of {shortened(names)}; got {shown(actions)}"
            )
        return action

    return np.array([index(action) for action in array.ravel()], int).reshape(array.shape)


def unknown(what: str, name: str, available: Sequence[str]) -> ValueError:
    """The error for an unknown name; it lists similar names and all available ones.

    >>> print(unknown("action", "charg", ["idle", "charge"]))
    unknown action 'charg'; did you mean ['charge']? available: ['idle', 'charge']
    """
    hint = did_you_mean(name, available)
    return ValueError(f"unknown {what} {shown(name)}; {hint}available: {list(available)}")


def did_you_mean(name: str, available: Sequence[str]) -> str:
    """A question that suggests similar names, followed by a space; nothing if there are none.

    >>> did_you_mean("charg", ["idle", "charge"])
    "did you mean ['charge']? "
    """
    close = difflib.get_close_matches(str(name), available)
    return f"did you mean {close}? " if close else ""


def shortened(names: Sequence[str]) -> str:
    """Names on one line; the middle of a long list is left out.

    >>> shortened([f"x{i}" for i in range(9)])
    'x0, x1, x2, x3, x4, … x8'
    """
    return ", ".join(names) if len(names) <= 6 else ", ".join([*names[:5], f"… {names[-1]}"])


def quoted(name: str) -> str:
    """A feature's name as a formula can contain it, whatever its characters.

    >>> quoted("pain score")
    '`pain score`'
    """
    return "`" + name.replace("`", "``") + "`"


def counted_actions(names: Sequence[str]) -> str:
    """The number of actions, followed by their names if they have any.

    >>> counted_actions(["idle", "charge"]), counted_actions(["0", "1"])
    ('2 actions (idle, charge)', '2 actions')
    """
    return f"{len(names)} actions{bracketed(names)}"


def stored_action_names(names: Sequence[str]) -> dict[str, list[str]]:
    """The entry for a file's description; none if the actions have no names, as in version 0.1.

    >>> stored_action_names(["idle", "charge"]), stored_action_names(["0", "1"])
    ({'action_names': ['idle', 'charge']}, {})
    """
    return {} if tuple(names) == numbered(len(names)) else {"action_names": list(names)}


def bracketed(names: Sequence[str]) -> str:
    """The names of actions in brackets, after a space; nothing if they have none."""
    return "" if tuple(names) == numbered(len(names)) else f" ({shortened(names)})"
