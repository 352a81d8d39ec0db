"""The model card: what a model is, which data it learned from, how good it is, and its limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cqm.display import counted
from cqm.models.network import num_members, num_parameters
from cqm.names import counted_actions, shortened

if TYPE_CHECKING:
    from cqm.models.estimator import Estimator


def hub_metadata(model: Estimator) -> str:
    """Front matter of the card, in the YAML that model hubs read."""
    tags = ("cqm", "counterfactual", "effect-estimation", model.kind)
    return "---\nlibrary_name: cqm\ntags:\n" + "".join(f"- {tag}\n" for tag in tags) + "---\n"


def write_card(model: Estimator, *, timed: bool = True) -> str:
    """The card of a fitted model, in Markdown.

    Args:
        model: The model.
        timed: Whether to show how long the candidates took, which varies from run to run.
    """
    recipe, world = model.recipe_, model.world_
    nuisance = world.get("nuisance")
    mixed = f", {counted(nuisance['dimension'], 'nuisance dimension')} mixed in" if nuisance else ""
    drawn = f"draws per state: {recipe.draws}, " if recipe.warmup is not None else ""
    seed = f", seed {recipe.seed}" if recipe.warmup is not None else ""
    sections = {
        "World": [
            f"{world['name']}: {counted(len(model.observation_names), 'observation')}, "
            f"{counted(len(model.feature_names), 'feature')}, "
            f"{counted_actions(model.action_names_)}{mixed}"
        ],
        "Data": [
            f"learned from {model.num_examples_:,} {model.examples} (horizon {recipe.horizon}, "
            f"discount {recipe.discount}, {drawn}continuation `{recipe.continuation}`{seed})"
        ],
        "Model": [
            f"`{model!r}`, method `{model.method_}`",
            *_network(model),
            *_comparison(model, timed),
            *(_training(name, record) for name, record in model.training_.items()),
            *model.notes_,
        ],
        "Scores": _scores(model, () if nuisance else model.feature_names),
        "Limits": [
            "valid for states like those in the training data, and for the effect of a first "
            "action followed by the continuation above; not for other states or policies",
            "a reward that is not linear in the features is approximated, which adds to the error",
            "guarantees need calibration; they hold with the chosen confidence over states like "
            "the calibration states, not for each state separately; `certify` warns of others",
        ],
        "Versions": [", ".join(f"{name} {number}" for name, number in model.versions_.items())],
    }
    text = f"# {model.title} of {world['name']}\n"
    for title, lines in sections.items():
        text += f"\n## {title}\n" + "".join(f"- {line}\n" for line in lines)
    return text


def model_facts(model: Estimator) -> dict[str, object]:
    """What a fitted model is about and how good it is, in a few lines."""
    calibration, error = model.calibration_, "unknown; measure it with calibrate"
    if calibration is not None:
        error = (
            f"{calibration.excess_error:.3g} on {len(calibration.residuals):,} held-out states "
            "(0 is perfect; 1 is no better than predicting no effect)"
        )
    return {
        "world": model.world_["name"],
        "actions": shortened(model.action_names_),
        "features": shortened(model.feature_names),
        "learned from": f"{model.num_examples_:,} {model.examples}",
        "method": model.method_,
        "excess error": error,
    }


def _network(model: Estimator) -> list[str]:
    network = getattr(model.predictor_, "network", None)
    if network is None:
        return []
    members = num_members(network)
    parameters = num_parameters(network) // members
    loss = f", final loss {model.losses_[-1]:.4g}" if model.losses_.size else ""
    each = " each" if members > 1 else ""
    return [f"{counted(members, 'network')} with {parameters:,} parameters{each}{loss}"]


def _comparison(model: Estimator, timed: bool) -> list[str]:
    """How the candidates of an effect model compared on held-out families."""
    lines = []
    for row in getattr(model, "comparison_", ()):
        known = not math.isnan(row.standard_error)
        error = f"held-out error {row.error:.4g}" + (
            f" ± {row.standard_error:.2g}" if known else ""
        )
        error = "" if math.isnan(row.error) else error
        seconds = "" if math.isnan(row.seconds) or not timed else f"{row.seconds:.0f} s"
        parts = ", ".join(part for part in (error, seconds, row.note) if part)
        lines.append(f"candidate `{row.candidate}`: {parts}")
    return lines


def _training(name: str, record: dict[str, Any]) -> str:
    text = (
        f"training `{name}`: {record['updates_made']:,} of {record['updates']:,} updates, batches "
        f"of {record['batch_size']}, learning rate {record['learning_rate']:g} "
        f"({record['schedule']}), seed {record['seed']}"
    )
    if "validation_loss" in record:
        text += (
            f"; kept the network with the lowest validation loss, {record['validation_loss']:.4g}"
        )
    return text


def _scores(model: Estimator, feature_names: Sequence[str]) -> list[str]:
    if (calibration := model.calibration_) is None:
        unknown = "not calibrated, so its error is unknown; measure it with `calibrate`"
        return [f"{unknown}{model.without_branches}"]
    states = (
        f"on {len(calibration.residuals):,} held-out states with {calibration.draws} draws each"
    )
    lines = [
        f"excess error {calibration.excess_error:.4g} {states}: squared error of the predictions "
        "against the expected effects, relative to the size of those effects; 0 is perfect, 1 is "
        "no better than predicting no effect",
        f"normalised squared error against single draws {calibration.nmse:.4g}; no model can score "
        f"below {calibration.noise_floor:.4g}, the share that is due to noise",
    ]
    errors = dict(zip(feature_names, calibration.feature_errors, strict=False))
    known = sorted((n for n in errors if not math.isnan(errors[n])), key=errors.__getitem__)
    if len(known) > 1:
        least, most = (f"{errors[name]:.4g} ({name})" for name in (known[0], known[-1]))
        lines.append(f"excess error by feature: from {least} to {most}")
    return lines
