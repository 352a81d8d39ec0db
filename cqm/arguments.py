"""Checks of users' arguments; the errors say what was wrong, what was given and what is allowed.

Each public function checks what it is given once, at its door, so that a mistake is not reported by
whatever it reaches later. Each check returns the argument in the form that the library works with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

_SHOWN = 80  # characters of a value in a message
_NAME_BYTES = 255  # of a file, on all common systems


def shown(value: Any) -> str:
    """A value as messages show it: short, on one line, arrays by their shape.

    >>> shown(np.zeros((2, 3))), shown("x" * 100)[:9]
    ('a float64 array of shape [2, 3]', "'xxxxxxxx")
    """
    if isinstance(value, np.ndarray) and (value.ndim > 1 or value.size > 6):
        return f"a {value.dtype} array of shape {list(value.shape)}"
    try:
        text = " ".join((str if isinstance(value, np.ndarray) else repr)(value).split())
    except Exception:  # a user's own class may raise anything
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def whole_number(
    name: str, value: Any, *, least: int | None = None, most: int | None = None
) -> int:
    """A whole number within bounds; True and 2.0 are none, NumPy's integers are.

    >>> whole_number("states", np.int64(3), least=1)
    3
    >>> whole_number("states", True, least=1)
    Traceback (most recent call last):
    ValueError: states must be a whole number of at least 1; got True
    """
    sound = isinstance(value, Integral) and not isinstance(value, bool)
    if not sound or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} must be a whole number{_within(least, most)}; got {shown(value)}")
    return int(value)


def whole_number_or_none(
    name: str, value: Any, *, least: int | None = None, most: int | None = None
) -> int | None:
    """A whole number within bounds, or None."""
    try:
        return None if value is None else whole_number(name, value, least=least, most=most)
    except ValueError:
        raise ValueError(
            f"{name} must be a whole number{_within(least, most)}, or None; got {shown(value)}"
        ) from None


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """A finite real number within bounds, of which `above` and `below` are not allowed themselves.

    >>> number("discount", 1, least=0, most=1)
    1.0
    >>> number("validation", float("nan"), least=0, below=1)
    Traceback (most recent call last):
    ValueError: validation must be a number in [0, 1); got nan
    """
    sound = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    if sound:
        try:
            sound = math.isfinite(value)
        except OverflowError:  # a whole number beyond all floating-point numbers
            sound = False
    if (
        not sound
        or (least is not None and value < least)
        or (most is not None and value > most)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        allowed = _within(least, most, above, below)
        kind = f"a number{allowed}" if allowed else "a finite number"
        raise ValueError(f"{name} must be {kind}; got {shown(value)}")
    return float(value)


def _within(
    least: float | None,
    most: float | None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    """Bounds in words."""
    low, high = least if above is None else above, most if below is None else below
    if low is not None and high is not None:
        return f" in {'[' if above is None else '('}{low}, {high}{']' if below is None else ')'}"
    if low is not None:
        return f" of at least {low}" if above is None else f" above {low}"
    if high is not None:
        return f" of at most {high}" if below is None else f" below {high}"
    return ""


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False; got {shown(value)}")
    return bool(value)


def show_progress(value: Any) -> bool | None:
    """The argument `show_progress`, which many functions take."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"show_progress must be True, False or None; got {shown(value)}")
    return value


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of a few words."""
    *others, last = words = list(allowed)
    if not isinstance(value, str) or value not in words:
        listed = f"{', '.join(map(repr, others))} or {last!r}" if others else repr(last)
        raise ValueError(f"{name} must be {listed}; got {shown(value)}")
    return value


def text(name: str, value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text that is not empty; got {shown(value)}")
    return value


def different_texts(name: str, value: Any) -> tuple[str, ...]:
    """Several names of which no two are the same, as a tuple.

    >>> different_texts("feature_names", ["x", "y", "x"])
    Traceback (most recent call last):
    ValueError: feature_names must be different names; got 'x' more than once
    """
    found = texts(name, value)
    seen = set[str]()
    for each in found:
        if each in seen:
            raise ValueError(f"{name} must be different names; got {each!r} more than once")
        seen.add(each)
    return found


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Several names, as a tuple."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be several names, such as ['x', 'y']; got {shown(value)}")
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise ValueError(f"{name} must be several names, such as ['x', 'y']; got {shown(value)}")
    found = tuple(value)
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"{name} must be names, that is, texts; got {shown(list(found))}")
    return tuple(map(str, found))


def instance(name: str, value: Any, kind: Any, allowed: str) -> Any:
    """An object of one of our types; `allowed` says in words what it may be."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {allowed}; got {shown(value)}")
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    """Anything that can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function; got {shown(value)}")
    return value


def generator(name: str, value: Any) -> np.random.Generator:
    """A random generator."""
    return instance(name, value, np.random.Generator, "a generator from np.random.default_rng")


def mapping(name: str, value: Any, content: str) -> Mapping[Any, Any]:
    """A dictionary; `content` says in words what it maps to what."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary of {content}; got {shown(value)}")
    return value


def sequence(name: str, value: Any, content: str) -> Sequence[Any]:
    """A list or a tuple; `content` says in words what of."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of {content}; got {shown(value)}")
    return value


def path(name: str, value: Any) -> Path:
    """A path, which need not exist."""
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise ValueError(f"{name} must be a path, as text or pathlib.Path; got {shown(value)}")
    if any(len(os.fsencode(part)) > _NAME_BYTES for part in Path(given).parts):
        raise ValueError(
            f"{name} must be a path with names of at most {_NAME_BYTES} bytes; got {shown(value)}"
        )
    return Path(given)


def output_directory(name: str, value: Any) -> Path:
    """The path of a directory to write to, which need not exist."""
    directory = path(name, value)
    for place in (directory, *directory.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                raise ValueError(
                    f"{name} must be a directory, but {place} is a file; choose another directory"
                )
            break
    return directory


def real_numbers(
    name: str, value: Any, axes: Sequence[str] | None = None, *, finite: bool = False
) -> np.ndarray:
    """Real numbers as a float64 array.

    Args:
        name: Name of the argument.
        value: An array, a number, nested lists, or a table from pandas.
        axes: Names of the axes that the array must have; a first axis `...` stands for any number.
        finite: Whether to refuse NaN and infinity.

    >>> real_numbers("weights", [1, 2], ["features"])
    array([1., 2.])
    >>> real_numbers("weights", [[1, 2]], ["features"])
    Traceback (most recent call last):
    ValueError: weights must be numbers [features]; got shape [1, 2]
    """
    if type(value) is np.ndarray and value.dtype == np.float64:
        array = value
    else:
        converted = _converted(value)
        if converted is None:
            wanted = f" [{', '.join(axes)}]" if axes else ""
            raise ValueError(f"{name} must be numbers{wanted}; got {shown(value)}")
        array = converted
    if axes is not None:
        open_ended = list(axes[:1]) == ["..."]
        if array.ndim != len(axes) if not open_ended else array.ndim < len(axes) - 1:
            raise ValueError(
                f"{name} must be numbers [{', '.join(axes)}]; got shape {list(array.shape)}"
            )
    if finite:
        bad = array.size - np.count_nonzero(np.isfinite(array))
        if bad:
            raise ValueError(
                f"{name} must be finite; got NaN or infinity in {bad} of {array.size} entries"
            )
    return array


def _converted(value: Any) -> np.ndarray | None:
    """The value as float64; None if it does not consist of real numbers."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        return None
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O" and not all(isinstance(each, Real) for each in array.flat):
            return None
        return array.astype(float) if array.dtype.kind in "biufO" else None
    except Exception:  # conversion runs the object's own code
        return None


def indices(name: str, value: Any) -> list[int]:
    """Whole numbers in a list, a tuple, a range or an array with one axis."""
    try:
        return [whole_number(name, each) for each in value]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be whole numbers; got {shown(value)}") from None
