"""The model card: what an effect model is, from what data, how good, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cqm.decisions import Calibration
from cqm.models.network import num_parameters

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

_METHODS = {
    "direct": "centred outcomes regressed on the state",
    "unrolled": "steps unrolled under the continuation, averaged over fresh continuations",
}


def write_card(model: EffectModel) -> str:
    """A page in Markdown for people to read."""
    recipe, settings, world = model.recipe_, model.settings, model.world_
    nuisance = world.get("nuisance")
    mixed = f", {nuisance['dimension']} nuisance dimensions mixed in" if nuisance else ""
    parameters = num_parameters(model.network_) // settings.members
    sections = {
        "World": [
            f"{world['name']}: {len(model.observation_names)} observations, "
            f"{len(model.feature_names)} features, {len(model.candidate_actions_)} actions{mixed}"
        ],
        "Data": [
            f"learned from {model.num_families_:,} branch families (horizon {recipe.horizon}, "
            f"discount {recipe.discount}, draws a state: {recipe.draws}, continuation "
            f"`{recipe.continuation}`, seed {recipe.seed})"
        ],
        "Model": [
            f"method `{model.method_}`: {_METHODS[model.method_]}",
            f"input conditioning `{settings.conditioning}`, networks: {settings.members} of "
            f"{parameters:,} parameters, final loss {model.losses_[-1]:.4g}",
            *(_training(name, record) for name, record in model.training_.items()),
        ],
        "Scores": _scores(model.calibration_, () if nuisance else model.feature_names),
        "Limits": [
            "for states like those it was trained on, and for the effect of a first action that "
            "is followed by the continuation above; it says nothing of other states or policies",
            "rewards that are not linear in the features add their projection error",
            "guarantees are marginal over states exchangeable with the calibration states",
        ],
        "Versions": [", ".join(f"{name} {number}" for name, number in model.versions_.items())],
    }
    text = f"# Effect model of {world['name']}\n"
    for title, lines in sections.items():
        text += f"\n## {title}\n" + "".join(f"- {line}\n" for line in lines)
    return text


def _training(name: str, record: dict[str, Any]) -> str:
    text = (
        f"training `{name}`: {record['updates_made']:,} of {record['updates']:,} updates, batches "
        f"of {record['batch_size']}, learning rate {record['learning_rate']:g} "
        f"({record['schedule']}), seed {record['seed']}"
    )
    if "validation_loss" in record:
        text += f"; kept at its best validation loss {record['validation_loss']:.4g}"
    return text


def _scores(calibration: Calibration | None, feature_names: Sequence[str]) -> list[str]:
    if calibration is None:
        return ["not calibrated, so nothing is known of its error; see `calibrate`"]
    states = f"on {len(calibration.residuals):,} held-out states with {calibration.draws} draws"
    lines = [
        f"excess error {calibration.excess_error:.4g} {states}: the squared error in the expected "
        "effects as a share of their size; 0 is perfect, 1 is predicting nothing",
        f"NMSE against single draws {calibration.nmse:.4g}; no model can do better than "
        f"{calibration.noise_floor:.4g}, the share of a draw that is noise",
    ]
    errors = dict(zip(feature_names, calibration.feature_errors, strict=False))
    told = sorted((name for name in errors if not math.isnan(errors[name])), key=errors.__getitem__)
    if len(told) > 1:
        least, most = (f"{errors[name]:.4g} ({name})" for name in (told[0], told[-1]))
        lines.append(
            f"excess error by feature: from {least} to {most}; all are learned in the units they "
            "have, so those with small numbers are learned least"
        )
    return lines
