"""The arrays of a saved model: their names and axes, and the check that they fit together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

Axes = dict[str, str]  # axes by the name of an array; an axis is a name, a number or a sum of them


def _layers(name: str, *sizes: str, leading: str = "members ") -> Axes:
    """Axes of consecutive affine maps, from each size to the next."""
    axes: Axes = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        number = f".{i}" if len(sizes) > 2 else ""
        axes[f"{name}{number}.weight"] = f"{leading}{inputs} {outputs}"
        axes[f"{name}{number}.bias"] = f"{leading}{outputs}"
    return axes


_INPUTS = {"inputs.shift": "observations", "inputs.matrix": "observations inputs"}
_COMMON = {**_INPUTS, "basis": "features coordinates"}
_TABLE = {"table.rows": "states observations", "table.effects": "states actions features"}
_FOURIER = {
    **_COMMON,
    "waves.frequencies": "members inputs waves",
    "waves.phases": "members waves",
    "waves.weights": "members actions 1+inputs+waves coordinates",
}
_DIRECT = {
    **_COMMON,
    "network.embedding": "members actions embedding",
    **_layers("network.encoder", "inputs", "width", "width", "width"),
    **_layers("network.head", "width+embedding", "width", "width", "rank"),
    **_layers("network.decoder", "rank", "coordinates"),
}
_UNROLLED = {
    **_COMMON,
    "scales": "coordinates",
    "discounts": "horizon",
    "continuations": "draws later",
    "network.embedding": "members actions width",
    **_layers("network.hidden", "width", "width", "width"),
}
_PLAIN = {
    **_layers("network.first", "inputs", "width"),
    **_layers("network.last", "width", "coordinates"),
}
_LATENT = {
    **_layers("network.lift", "inputs", "coordinates+latent"),
    **_layers("network.first", "coordinates+latent+inputs", "width"),
    **_layers("network.last", "width", "coordinates+latent"),
}
_BEHAVIOUR = _layers("behaviour.layers", "inputs", "hidden", "hidden", "actions", leading="")
_LOSSES = {"losses": "chunks"}
_CALIBRATION = {
    "calibration.residuals": "calibrated actions features",
    "calibration.draws": "1",
    "calibration.noise": "features",
    "calibration.size": "features",
}
_PROVENANCE = {"provenance.families": "runs 3", "provenance.observations": "rows"}


def check_arrays(kind: str, arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> None:
    """Raise `ValueError` unless these are the arrays of one model.

    Args:
        kind: The kind of model; an `effect` model is always a network.
        arrays: The arrays, by name.
        sizes: The sizes of `observations`, `actions`, `features`, `members` and `horizon`.
    """
    axes = _expected(kind, arrays)
    if set(arrays) != set(axes):
        missing, extra = sorted(set(axes) - set(arrays)), sorted(set(arrays) - set(axes))
        raise ValueError(f"the arrays do not form a model: missing {missing}, unknown {extra}")
    known = {**sizes, "later": sizes["horizon"] - 1}
    for name in axes:
        _check_shape(name, arrays[name], axes[name].split(), known)
        _check_numbers(name, arrays, known["actions"])


def _expected(kind: str, arrays: Mapping[str, np.ndarray]) -> Axes:
    """Axes of all arrays of the model that has some of these."""
    extra: Axes = {}
    for optional in (_LOSSES, _CALIBRATION, _PROVENANCE):
        extra |= optional if set(optional) & set(arrays) else {}
    if "network.decoder.weight" in arrays:
        return _DIRECT | extra
    if kind != "effect":
        if "table.rows" in arrays:
            return _TABLE | extra
        if "waves.weights" in arrays:
            return _FOURIER | extra
        extra |= _BEHAVIOUR if "behaviour.layers.0.weight" in arrays else {}
    return _UNROLLED | (_LATENT if "network.lift.weight" in arrays else _PLAIN) | extra


def _check_shape(name: str, values: np.ndarray, axes: list[str], known: dict[str, int]) -> None:
    """Compare a shape with its axes; sizes that are not known yet become known."""
    expected = []
    for axis, size in zip(axes, values.shape, strict=False):
        terms = axis.split("+")
        unknown = [term for term in terms if not term.isdigit() and term not in known]
        total = sum(int(t) if t.isdigit() else known[t] for t in terms if t not in unknown)
        if len(unknown) == 1 and size >= total:
            known[unknown[0]] = size - total
            total = size
        expected.append(total)
    if list(values.shape) != expected or len(axes) != values.ndim:
        terms = sorted({term for axis in axes for term in axis.split("+") if term in known})
        sizes = ", ".join(f"{known[term]} {term}" for term in terms)
        raise ValueError(
            f"the array {name!r} must be [{', '.join(axes)}] ({sizes}); "
            f"got shape {list(values.shape)}"
        )


def _check_numbers(name: str, arrays: Mapping[str, np.ndarray], num_actions: int) -> None:
    values = arrays[name]
    whole, least, most = False, -np.inf, np.inf
    if name == "calibration.draws":
        whole, least = True, 2
    elif name in _PROVENANCE:
        whole = True
    elif name == "continuations":  # actions, or uniform numbers from which a behaviour draws them
        whole = "behaviour.layers.0.weight" not in arrays
        least, most = 0, num_actions - 1 if whole else 1
    if (
        values.dtype.kind not in ("iu" if whole else "f")
        or not (np.isfinite(values) & (values >= least) & (values <= most)).all()
    ):
        raise ValueError(
            f"the array {name!r} must consist of finite {'whole' if whole else 'real'} numbers"
            + (f" from {least} to {most}" if np.isfinite(least) else "")
        )
