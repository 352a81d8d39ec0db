"""Constructor parameters of models: read, changed, checked and stored."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import numpy as np

from cqm.arguments import (
    choice,
    flag,
    instance,
    whole_number,
    whole_number_or_none,
)
from cqm.models.training import MAX_SEED, Training
from cqm.quotient import ComparisonGraph


class Parameters:
    """Constructor parameters, following scikit-learn's conventions."""

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """Parameters of the constructor with their defaults."""
        signature = inspect.signature(cls)
        return {name: parameter.default for name, parameter in signature.parameters.items()}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Constructor parameters by name; `deep` has no effect and exists only for scikit-learn."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **params: Any) -> Self:
        """Change constructor parameters; they take effect at the next `fit`."""
        unknown = sorted(set(params) - set(self._defaults()))
        if unknown:
            raise ValueError(f"unknown parameters {unknown}; available: {list(self._defaults())}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = (
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if repr(value) != repr(self._defaults()[name])
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def _check_common(self) -> None:
        """Raise `ValueError` unless the parameters of all models are valid."""
        params = self.get_params()
        whole_number("seed", params["seed"], least=0, most=MAX_SEED)
        for name in ("width", "updates", "decoder_rank"):
            if not isinstance(params.get(name), Mapping):  # updates of every cycle
                whole_number_or_none(name, params.get(name), least=1, most=2**31 - 1)
        if params["members"] is not None or self._defaults()["members"] is not None:
            whole_number("members", params["members"], least=1)
        for name, value in params.items():
            if isinstance(self._defaults()[name], bool):
                flag(name, value)
        if params["training"] is not None:
            instance("training", params["training"], Training, "a cqm.Training or None")
        if params.get("graph") is not None:
            instance("graph", params["graph"], ComparisonGraph, "a ComparisonGraph or None")

    def _one_of(self, name: str, *allowed: str) -> None:
        """Raise `ValueError` unless a parameter has one of the allowed values."""
        choice(name, getattr(self, name), allowed)

    def _json_params(self) -> dict[str, Any]:
        return json_values(self.get_params())


def json_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON values."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        if hasattr(value, "predict"):  # a regressor is code, which is not stored
            return None
        return value

    return {name: plain(value) for name, value in params.items()}


def _current_effect_params(params: dict[str, Any]) -> dict[str, Any]:
    """The settings of an effect model of version 0.2, translated to the current names."""
    method = params.pop("method")
    params.pop("patience", None)
    if method != "auto":
        params["candidates"] = method
        params.setdefault("validation", 0.0)
    params.setdefault("conditioning", "effect")
    return params


def read_params(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor parameters from the settings in a saved model; raises if they are not valid."""
    params = dict(settings)
    if "rank" in params:  # its name in version 0.1
        params["decoder_rank"] = params.pop("rank")
    if "method" in params and "candidates" in defaults:  # an effect model of version 0.2
        params = _current_effect_params(params)
    if "corrected" in defaults:  # a hindsight model of version 0.2 has no correction
        params.setdefault("corrected", False)
    if unknown := sorted(set(params) - set(defaults)):
        raise ValueError(f"unknown settings {unknown}; available: {list(defaults)}")
    types: tuple[tuple[str, Any], ...] = (
        ("training", Training),
        ("graph", ComparisonGraph),
        ("reference", tuple),
        ("candidates", str | tuple[str, ...]),
        ("updates", int | dict[str, list[int]]),
    )
    for name, type_ in types:
        if params.get(name) is not None:
            try:
                params[name] = msgspec.convert(params[name], type_)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from error
    return params
