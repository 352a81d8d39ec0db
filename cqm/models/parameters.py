"""Constructor parameters of models as JSON values, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cqm.models.training import Training
from cqm.quotient import ComparisonGraph


def json_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON values."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        return value

    return {name: plain(value) for name, value in params.items()}


def read_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor parameters from a saved model's description."""
    params = dict(config["settings"])
    if "rank" in params:  # its name in version 0.1
        params["decoder_rank"] = params.pop("rank")
    if params.get("training") is not None:
        params["training"] = Training(**params["training"])
    if params.get("graph") is not None:
        edges = tuple((a, b) for a, b in params["graph"]["edges"])
        params["graph"] = ComparisonGraph(params["graph"]["num_actions"], edges)
    # Version 0.1 kept the reference of a recentred model apart from its parameters.
    reference = config.get("reference", params["reference"])
    return {**params, "reference": None if reference is None else tuple(reference)}
