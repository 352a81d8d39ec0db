"""What an effect model saves besides its predictor: comparison, box, transition and families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cqm.models.choice import Comparison
from cqm.models.held_out import HeldOut
from cqm.models.known_answers import CalibrationSteps, KnownAnswers
from cqm.models.layout import TRANSITION, arrays_under
from cqm.models.predictors import UnrolledPredictor, restore_predictor

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel


def extra_arrays(model: EffectModel) -> dict[str, np.ndarray]:
    """Arrays of the rule for a box, the held-out families, and a transition kept aside."""
    arrays = {} if model.rule_ is None else {"rule": model.rule_}
    if model.calibration_steps_ is not None:
        arrays |= model.calibration_steps_.arrays()
    if model.held_out_ is not None:
        arrays |= model.held_out_.arrays(model.transition_)
    if model.transition_ is not None and not any(
        part is model.transition_ for part in model._parts()
    ):
        own = model.transition_.arrays()
        arrays |= {f"{TRANSITION}{name}": values for name, values in own.items()}
    return arrays


def extra_entries(model: EffectModel) -> dict[str, Any]:
    """Entries of the description: the comparison, the updates and the box."""
    rows = [row.to_json() for row in model.comparison_]
    entries = {"comparison": rows, "updates": model.updates_}
    if model.box_ is None:
        return entries
    box = model.box_.tolist()
    return {**entries, "box": box, "calibrated_on": model.calibrated_on_}


def restore_extras(
    model: EffectModel, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Set what `extra_arrays` and `extra_entries` returned."""
    model.comparison_ = tuple(map(Comparison.from_json, config.get("comparison", [])))
    model.updates_ = config.get("updates", {})
    model.rule_ = arrays.get("rule")
    model.box_ = np.array(config["box"], float) if config.get("box") else None
    model.calibrated_on_ = config.get("calibrated_on", "menu")
    if (model.box_ is None) != (model.rule_ is None):
        raise ValueError("a model of controls needs both a box and a rule")
    aside = arrays_under(TRANSITION, arrays)
    found = (restore_predictor(aside),) if aside else model._parts()
    model.transition_ = next((p for p in found if isinstance(p, UnrolledPredictor)), None)
    model.held_out_ = HeldOut.from_arrays(arrays, model.transition_)
    model.calibration_steps_ = CalibrationSteps.from_arrays(arrays)
    model._known = KnownAnswers()
