"""Constructor parameters of models: read, changed, checked and stored."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec
import numpy as np

from cqm.models.training import Training
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

    def _at_least(self, **least: int) -> None:
        """Raise `ValueError` for a parameter below its smallest allowed value; None is allowed."""
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}; got {value}")

    def _one_of(self, name: str, allowed: Iterable[str]) -> None:
        """Raise `ValueError` unless a parameter has one of the allowed values."""
        if getattr(self, name) not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, allowed))}; "
                f"got {getattr(self, name)!r}"
            )

    def _json_params(self) -> dict[str, Any]:
        return json_values(self.get_params())


def json_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON values."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        return value

    return {name: plain(value) for name, value in params.items()}


def read_params(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor parameters from the settings in a saved model; raises if they are not valid."""
    params = dict(settings)
    if "rank" in params:  # its name in version 0.1
        params["decoder_rank"] = params.pop("rank")
    if unknown := sorted(set(params) - set(defaults)):
        raise ValueError(f"unknown settings {unknown}; available: {list(defaults)}")
    types = (("training", Training), ("graph", ComparisonGraph), ("reference", tuple))
    for name, type_ in types:
        if params.get(name) is not None:
            try:
                params[name] = msgspec.convert(params[name], type_)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from error
    return params
