"""Counterfactual Quotient Models: learn what actions change, not what the world does."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names by the module they live in. They load on first use, because the simulators and the
# compiler behind some of them take seconds to import.
_PUBLIC = {
    "branches": ("Branches", "Recipe", "combine"),
    "collection": ("collect",),
    "coupling": ("audit",),
    "logs": ("Logs",),
    "models.effect": ("EffectModel",),
    "models.hindsight": ("HindsightModel",),
    "models.residual": ("ResidualModel",),
    "models.training": ("Training",),
    "queries": ("Query",),
    "quotient": (
        "ComparisonGraph",
        "EffectSpectrum",
        "center",
        "centered_loss",
        "contrast",
        "edge_loss",
        "effect_rank",
        "effect_spectrum",
        "effects_from_differences",
        "equivalent",
        "inner_product",
        "norm",
        "pairwise_loss",
        "recenter",
    ),
    "simulation": ("Policy",),
    "worlds": ("World", "check_world", "load_world"),
}
_MODULES = ("bounds", "decisions", "measures", "quotient", "worlds")
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"cqm.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"cqm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'cqm' has no attribute {name!r}; available: {__all__}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
