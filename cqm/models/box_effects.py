"""Effects of any control in the box, of models that learned from controls in the whole box."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from cqm import decisions
from cqm.calibration import FEWEST_SCORES
from cqm.models.box import BoxDecision, best_controls
from cqm.models.controls import box_codes, box_rule, checked_controls
from cqm.models.predictors import UnrolledPredictor, with_menu
from cqm.names import checked_action_names
from cqm.queries import Query
from cqm.quotient import as_reference
from cqm.worlds.actions import checked_actions

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

_STATES = 1024  # states in which the box is searched at once
_CLAIM = 0.95  # confidence with which a control is said to be better than the menu

Model = TypeVar("Model", bound="EffectModel")


def box_of(model: EffectModel) -> np.ndarray:
    """Bounds of the controls, `[2, controls]`; an error if the model knows only a menu."""
    model._fitted()
    if model.box_ is None:
        raise ValueError(
            "the model knows only its candidate actions; to ask about any control, fit it to "
            "branches collected with actions='box'"
        )
    return model.box_


def codes_of(model: EffectModel, actions: ArrayLike | None, states: np.ndarray) -> np.ndarray:
    """Codes of the controls asked about, or of the candidate actions."""
    box = box_of(model)
    if actions is None:
        return box_codes(model.candidate_actions_, box)
    return box_codes(checked_controls(actions, box, len(np.atleast_2d(states))), box)


def base_actions(model: EffectModel) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the actions at which effects are centred, and their weights."""
    assert model.rule_ is not None
    if model.reference is None:
        return model.rule_, np.full(len(model.rule_), 1 / len(model.rule_))
    menu = codes_of(model, None, np.empty((0, 1)))
    return menu, np.asarray(as_reference(model.reference, np.empty((len(menu), 1))))


def reference_weights(model: EffectModel, num_actions: int) -> np.ndarray:
    """Weights of the reference; for a box, of candidate actions and base actions together."""
    if model.box_ is None:
        return np.asarray(as_reference(model.reference, np.empty((num_actions, 1))))
    _, weights = base_actions(model)
    return np.concatenate([np.zeros(num_actions - len(weights)), weights])


def member_effects(
    model: EffectModel, observations: ArrayLike, actions: ArrayLike | None
) -> np.ndarray:
    """Effects of controls predicted by each member, `[members, n, actions, features]`."""
    predictor, states = model._fitted(), model._states(observations)
    rows, asked = np.atleast_2d(states), codes_of(model, actions, states)
    base, weights = base_actions(model)
    num, parts = asked.shape[-2], []
    for start in range(0, max(1, len(rows)), _STATES):
        block = slice(start, start + _STATES)
        own = asked if asked.ndim == 2 else asked[block]
        effects = predictor(rows[block], _side_by_side(own, base))
        mean = np.einsum("a,mnaf->mnf", weights, effects[:, :, num:])
        parts.append(effects[:, :, :num] - mean[:, :, None])
    effects = np.concatenate(parts, axis=1)
    return effects if states.ndim == 2 else effects[:, 0]


def comparable_effects(model: EffectModel, observations: ArrayLike) -> np.ndarray:
    """Effects of the candidate actions up to a shift that they share, `[n, actions, features]`."""
    states = model._states(observations)
    effects = model._fitted()(np.atleast_2d(states), codes_of(model, None, states)).mean(axis=0)
    return effects if states.ndim == 2 else effects[0]


def best_in_box(model: EffectModel, states: np.ndarray, query: Query) -> BoxDecision:
    """The best control in the box, for states `[n, observations]`."""
    predictor, box = model._fitted(), box_of(model)
    assert model.rule_ is not None
    menu = box_codes(model.candidate_actions_, box)
    found = []
    for start in range(0, max(1, len(states)), _STATES):
        rows = states[start : start + _STATES]

        def values(codes: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
            return predictor(rows, codes).mean(axis=0) @ query.weights

        found.append(best_controls(values, len(rows), box, menu, model.rule_))
    return BoxDecision.joined(found, _claim_radius(model, query))


def with_actions(model: Model, actions: ArrayLike, names: Sequence[str] | None) -> Model:
    """The same model with other candidate actions; see `EffectModel.with_actions`."""
    predictor, box = model._fitted(), box_of(model)
    if model.reference is not None:
        raise ValueError(
            "the reference is a distribution over the old actions; call recenter(None) first"
        )
    law = model.recipe_.continuation
    unrolled = model.transition_ is not None or not law.open_loop
    if not law.on_box and (unrolled or isinstance(law.law, tuple)):
        raise ValueError(
            f"the later actions of this model ({law}) are from its old menu, so the menu "
            "cannot change; fit the model to branches collected with continuation='box'"
        )
    controls = checked_actions(actions, *box)
    changed = copy.copy(model)
    if "candidate_actions" in model.world_:
        changed.world_ = {**model.world_, "candidate_actions": controls.tolist()}
    changed.candidate_actions_, changed.calibration_ = controls, None
    changed.action_names_ = checked_action_names(names, len(controls))
    codes = box_codes(controls, box)
    changed.predictor_ = with_menu(predictor, codes)
    if model.transition_ is not None:
        changed.transition_ = replace(model.transition_, controls=codes)
        parts = zip(model._parts(), changed._parts(), strict=True)
        for new in (new for old, new in parts if old is model.transition_):
            assert isinstance(new, UnrolledPredictor)
            changed.transition_ = new  # so that it is saved only once
    return changed


def centering_gap(model: EffectModel, observations: ArrayLike) -> float:
    """How well the rule represents the box; see `EffectModel.centering_gap`."""
    box_of(model)
    other = copy.copy(model)
    assert model.rule_ is not None
    other.rule_ = box_rule(model.rule_.shape[1], seed=1)
    effects = model.effect(observations)
    change = other.effect(observations) - effects
    return float(np.sqrt(np.mean(change**2) / max(np.mean(effects**2), 1e-300)))


def _claim_radius(model: EffectModel, query: Query) -> float | None:
    """Bound on the error of a contrast between controls; None without enough calibration."""
    if model.calibration_ is None or model.calibrated_on_ != "box":
        return None
    if len(model.calibration_.residuals) < FEWEST_SCORES:
        return None
    slack = decisions.projection_slack(query, model.recipe_.discount, model.recipe_.horizon)
    return model.calibration_.radius(query.weights, _CLAIM) + slack


def _side_by_side(asked: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Codes of the controls asked about, followed by those of the reference, for every state."""
    return np.concatenate([asked, np.broadcast_to(base, (*asked.shape[:-2], *base.shape))], axis=-2)
