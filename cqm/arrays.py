"""Checks and conversions for NumPy and JAX arrays, used by `cqm.quotient`."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np

from cqm.arguments import real_numbers, shown

Array: TypeAlias = Any  # a NumPy or JAX array


def floats(name: str, values: Array) -> Array:
    """The values as a floating-point array of the same kind; NaN in concrete values is refused."""
    if namespace(values) is np:
        values = real_numbers(name, values)
    elif values.dtype.kind in "biu":
        values = values.astype(float)
    concrete = known_values(name, values)
    if concrete is not None and np.isnan(concrete).any():
        raise ValueError(f"{name} must not contain NaN; got {np.isnan(concrete).sum()} of them")
    return values


def namespace(*values: Any) -> Any:
    """`jax.numpy` if any value is a JAX array or tracer, else NumPy; JAX is never imported."""
    jax = sys.modules.get("jax")
    return jax.numpy if jax and any(isinstance(x, jax.Array) for x in values) else np


def known_values(name: str, values: Any) -> np.ndarray | None:
    """The values as a NumPy array, or None if they are traced and have no values yet."""
    jax = sys.modules.get("jax")
    if jax and isinstance(values, jax.core.Tracer):
        return None
    try:
        return np.asarray(values)
    except Exception as error:  # conversion runs the object's own code
        raise ValueError(f"{name} must be numbers; got {shown(values)}") from error


def resolution(values: Array) -> float:
    """The relative difference that may be rounding: 1e-9, or more for low-precision floats."""
    jax = sys.modules.get("jax")
    finfo = jax.numpy.finfo if jax else np.finfo  # JAX's also knows bfloat16
    return max(1e-9, 16 * float(finfo(values.dtype).eps))


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of this shape broadcasts to the target shape."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
