"""The arrays of a saved model: their names and axes, and the check that they fit together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

Arrays = dict[str, np.ndarray]
TRANSITION = "transition."  # prefix of the arrays of a transition outside the predictor
HELD_OUT = "held_out."  # prefix of the arrays of the families that were held out
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
    "waves.weights": "members actions 1+inputs+waves+pairs coordinates",
}
_CELLS = {"cells.rows": "cells observations", "cells.deviations": "cells actions coordinates"}
_REGRESSION = {name: axes.replace("members", "1") for name, axes in _FOURIER.items()}
_DIRECT = {
    **_COMMON,
    **_layers("network.encoder", "inputs", "width", "width", "width"),
    **_layers("network.head", "width+embedding", "width", "width", "rank"),
    **_layers("network.decoder", "rank", "coordinates"),
}
_EMBEDDING = {"network.embedding": "members actions embedding"}
_CONTROLS = {"controls": "actions embedding"}
_GATE = _layers("network.gate", "width", "width")
_POLYNOMIAL = {
    **_COMMON,
    "controls": "actions controls",
    "polynomial.frequencies": "inputs waves",
    "polynomial.phases": "waves",
    "polynomial.weights": "monomials 1+inputs+waves coordinates",
}
_UNROLLED = {
    **_COMMON,
    "discounts": "horizon",
    "controls": "actions controls",
    "continuations": "draws later",
    "sizes": "2",
    "network.controls": "members controls width",
    **_layers("network.hidden", "width", "width", "width"),
}
_NOISE = {"noise": "draws horizon noise", "network.noise": "members noise width"}
_LEVELS = {
    "levels.shift": "native",
    "levels.matrix": "native steps",
    "levels.unknown": "native",
}
_PLAIN = {
    **_layers("network.first", "inputs", "width"),
    **_layers("network.last", "width", "steps"),
}
_LATENT = {
    **_layers("network.lift", "inputs", "states"),
    **_layers("network.first", "states+inputs", "width"),
    **_layers("network.last", "width", "states+steps"),
}
_BEHAVIOUR = _layers("behaviour.layers", "inputs", "hidden", "hidden", "actions", leading="")
_LOSSES = {"losses": "chunks"}
_CALIBRATION = {
    "calibration.residuals": "calibrated compared features",
    "calibration.draws": "1",
    "calibration.noise": "features",
    "calibration.size": "features",
}
_RULE = {"rule": "points controls"}
_CALIBRATION_VALUES = {"calibration.predicted": "calibrated compared features"}
_CALIBRATION_STATES = {
    "calibration.inputs": "calibrated inputs",
    "calibration.shift": "observations",
    "calibration.matrix": "observations inputs",
}
_CALIBRATION_STEPS = {
    "calibration.observations": "calibrated observations",
    "calibration.steps": "calibrated times actions horizon native",
}
_CALIBRATION_GROUPS = {"calibration.groups": "calibrated"}
_PROVENANCE = {"provenance.families": "runs 3", "provenance.observations": "rows"}
_HELD_OUT = {
    "observations": "kept observations",
    "steps": "kept draws actions horizon native",
    "later": "kept draws arms later",
    "families": "kept 2",
    "native": "features native",
    "effects": "kept actions features",
}


def part_prefix(number: int) -> str:
    """Prefix of the names of the arrays of one part of a stack."""
    return f"part.{number}."


def arrays_under(prefix: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The arrays whose names start with a prefix, without it."""
    return {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}


def current_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The arrays of a saved model, with those of an unrolled model of version 0.2 renamed.

    That version gave each action an embedding, which equals a matrix applied to indicator vectors,
    and stored the basis and the scales of the coordinates separately.
    """
    current = dict(arrays)
    if not {"network.embedding", "scales", "basis"} <= set(current):
        return current
    embedding, basis, scales = (current.pop(n) for n in ("network.embedding", "basis", "scales"))
    if embedding.ndim != 3 or basis.ndim != 2 or scales.shape != basis.shape[1:]:
        return dict(arrays)  # the check of the layout says what is wrong
    lift = current.get("network.lift.bias", scales[None])
    current |= {"network.controls": embedding, "controls": np.eye(embedding.shape[1])}
    return current | {"basis": basis * scales, "sizes": np.array([lift.shape[-1], len(scales)])}


def check_arrays(kind: str, arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> None:
    """Raise `ValueError` unless these are the arrays of one model.

    Args:
        kind: The kind of model.
        arrays: The arrays, by name.
        sizes: The sizes of `observations`, `actions`, `features` and `horizon`, and of `members`
            unless the model lets the candidates choose.
    """
    remaining, known = dict(arrays), {**sizes, "later": sizes["horizon"] - 1}
    calibration = dict(_CALIBRATION)
    for more in (
        _CALIBRATION_VALUES,
        _CALIBRATION_STATES,
        _CALIBRATION_STEPS,
        _CALIBRATION_GROUPS,
    ):
        calibration |= more if set(more) & set(arrays) else {}  # since schema 5
    for optional in (_LOSSES, calibration, _PROVENANCE, _RULE):
        if set(optional) & set(arrays):
            own = {name: remaining.pop(name) for name in optional if name in remaining}
            _check_all(own, optional, known)
    if held_out := arrays_under(HELD_OUT, remaining):
        remaining = {n: v for n, v in remaining.items() if not n.startswith(HELD_OUT)}
        _check_held_out(held_out, known)
    if transition := arrays_under(TRANSITION, remaining):
        remaining = {n: v for n, v in remaining.items() if not n.startswith(TRANSITION)}
        _check_all(transition, _unrolled(transition), dict(known))
    if "stack.weights" in remaining:
        weights = remaining.pop("stack.weights")
        _check_all({"stack.weights": weights}, {"stack.weights": "parts"}, dict(known))
        if not (len(weights) and (weights > 0).all() and abs(weights.sum() - 1) < 1e-6):
            raise ValueError("the weights of a stack must be positive, with sum 1")
        for i in range(len(weights)):
            part = arrays_under(part_prefix(i), remaining)
            remaining = {n: v for n, v in remaining.items() if not n.startswith(part_prefix(i))}
            _check_all(part, _expected(kind, part), dict(known))
        if remaining:
            raise ValueError(f"the arrays {sorted(remaining)} belong to no part of the stack")
        return
    _check_all(remaining, _expected(kind, remaining), known)


def _check_held_out(arrays: Mapping[str, np.ndarray], known: dict[str, int]) -> None:
    """Raise `ValueError` unless these are held-out families, with or without a transition."""
    transition = arrays_under(TRANSITION, arrays)
    own = {name: values for name, values in arrays.items() if not name.startswith(TRANSITION)}
    axes = _HELD_OUT | ({"noise": "kept draws horizon noise"} if "noise" in own else {})
    _check_all(own, axes, dict(known))
    if own["later"].shape[2] not in (1, known["actions"]):
        raise ValueError(f"the later actions of {own['later'].shape[2]} arms do not fit the others")
    if transition:
        _check_all(transition, _unrolled(transition), dict(known))
        shift = transition.get("levels.shift")
        if shift is None or len(shift) != own["native"].shape[1]:
            raise ValueError("the transition does not predict the features that were held out")


def _check_all(arrays: Mapping[str, np.ndarray], axes: Axes, known: dict[str, int]) -> None:
    """Raise `ValueError` unless these are exactly the arrays with these axes."""
    if set(arrays) != set(axes):
        missing, extra = sorted(set(axes) - set(arrays)), sorted(set(arrays) - set(axes))
        raise ValueError(f"the arrays do not form a model: missing {missing}, unknown {extra}")
    sizes = dict(known)
    for name in axes:
        _check_shape(name, arrays[name], axes[name].split(), sizes)
        _check_numbers(name, arrays, known["actions"])
    if "pairs" in sizes and sizes["pairs"] not in (0, sizes["inputs"] * (sizes["inputs"] + 1) // 2):
        raise ValueError(f"the array 'waves.weights' has weights for {sizes['pairs']} products")
    if (
        "monomials" in sizes
        and sizes["monomials"] != sizes["controls"] * (3 + sizes["controls"]) // 2
    ):
        raise ValueError(f"the array 'polynomial.weights' has {sizes['monomials']} monomials")
    if "sizes" in arrays:
        states, moved = map(int, arrays["sizes"])
        latent = "states" in sizes
        readouts = sizes["steps"] if latent else sizes["steps"] - states
        most = sizes["states"] if latent else min(sizes["inputs"], sizes["steps"])
        fits = states == most if latent else states <= most
        if not fits or moved > states or moved + readouts != sizes["coordinates"]:
            raise ValueError(f"the array 'sizes', {[states, moved]}, does not fit the others")


def _expected(kind: str, arrays: Mapping[str, np.ndarray]) -> Axes:
    """Axes of all arrays that the predictor must have; its type follows from the arrays given."""
    if "network.decoder.weight" in arrays:
        if "network.gate.weight" in arrays:  # since version 0.3
            return _DIRECT | _CONTROLS | _GATE
        return _DIRECT | (_CONTROLS if "controls" in arrays else _EMBEDDING)
    if "polynomial.weights" in arrays:
        return _POLYNOMIAL
    if "waves.weights" in arrays:
        if kind == "effect":
            return _REGRESSION
        return _FOURIER | (_CELLS if set(_CELLS) & set(arrays) else {})
    if kind != "effect" and "table.rows" in arrays:
        return _TABLE
    return _unrolled(arrays)


def _unrolled(arrays: Mapping[str, np.ndarray]) -> Axes:
    axes = _UNROLLED | (_LATENT if "network.lift.weight" in arrays else _PLAIN)
    axes |= _NOISE if "noise" in arrays else {}
    axes |= {"bound": "1"} if "bound" in arrays else {}
    if arrays.get("continuations", np.empty(0)).ndim == 3:  # controls from the box
        axes |= {"continuations": "draws later controls"}
    if "levels.shift" in arrays:
        axes |= _LEVELS
        axes |= {"levels.noise": "paths horizon noise"} if "noise" in arrays else {}
    if "behaviour.layers.0.weight" in arrays and "network.lift.weight" in arrays:
        raise ValueError("a model with a latent state cannot have a behaviour policy")
    return axes | (_BEHAVIOUR if "behaviour.layers.0.weight" in arrays else {})


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
    elif name == "calibration.groups":
        whole, least = True, 0
    elif name in _PROVENANCE or name in ("sizes", "families"):
        whole, least = True, 0 if name == "sizes" else -np.inf
    elif name == "bound":
        least = 0
    elif name == "later":
        whole, least, most = True, 0, num_actions - 1
    elif name == "continuations" and values.ndim < 3:  # actions, or numbers that determine them
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
