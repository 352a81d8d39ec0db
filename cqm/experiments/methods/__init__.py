"""The methods the benchmark compares: a new one is a file here and a line in the registry."""

from typing import cast

from cqm.experiments.methods.base import Method, Predictor, Task
from cqm.models.preprocessing import Conditioning

_OF_EFFECT_MODELS: tuple[Conditioning, ...] = ("effect", "whiten", "project", "learned")
_ALL = (
    # Okabe and Ito's colours, which colour-blind readers can tell apart; the two lightest darkened.
    Method(
        "cqm",
        "CQM-B",
        ".quotient_model:QuotientModel",
        "effects",
        "paper",
        "#0c7bc4",
        "-",
        conditionings=_OF_EFFECT_MODELS,
    ),
    Method("world", "World", ".world_model:WorldModel", "outcomes", "paper", "#d55e00", "--"),
    Method(
        "sf", "SF", ".successor_features:SuccessorFeatures", "outcomes", "paper", "#c68a00", "-."
    ),
    Method(
        "direct", "Direct value", ".direct_value:DirectValue", "scores", "paper", "#009e73", "-"
    ),
    Method("task-td", "Task-TD", ".task_td:TaskTD", "scores", "paper", "#45a5dd", "--"),
    Method("cocoa", "COCOA", ".cocoa:Cocoa", "scores", "paper", "#c76fa1"),
    Method("oracle", "Oracle", ".oracle:Oracle", "effects", "limit", conditionings=()),
    Method("zero", "Zero effect", ".zero:ZeroEffect", "effects", "limit", conditionings=()),
    Method("random", "Random", ".chance:RandomChoice", "scores", "limit", conditionings=()),
    Method(
        "default",
        "Default model",
        ".quotient_model:DefaultModel",
        "effects",
        colour="#7a5fd0",
        conditionings=(),
    ),
    Method(
        "world-ensemble",
        "World ensemble",
        ".world_ensemble:WorldEnsemble",
        "outcomes",
        colour="#a8552a",
    ),
    Method(
        "cqm-full-rank",
        "CQM-B, full rank",
        ".quotient_model:FullRankModel",
        "effects",
        conditionings=_OF_EFFECT_MODELS,
    ),
    Method("one-step-fb", "One-step FB", ".one_step_fb:OneStepFB", "outcomes"),
    Method("dae", "Direct advantage", ".direct_advantage:DirectAdvantage", "effects"),
    Method("latent-world", "Latent world", ".latent_world:LatentWorld", "outcomes"),
    Method("recurrent-world", "Recurrent world", ".recurrent_world:RecurrentWorld", "outcomes"),
    Method("paired-sf", "Paired SF", ".paired_sf:PairedSuccessorFeatures", "outcomes"),
    Method("ridge", "Ridge", ".closed_form:Ridge", "effects"),
    Method("fourier-ridge", "Fourier ridge", ".closed_form:FourierRidge", "effects"),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
RIVALS = (
    "ridge",
    "fourier-ridge",
    "paired-sf",
    "one-step-fb",
    "dae",
    "latent-world",
    "recurrent-world",
)
"""The nearest published methods that the paper leaves out, and closed forms; the fastest first."""
CONDITIONINGS = tuple(dict.fromkeys(kind for method in _ALL for kind in method.conditionings))
"""Conditionings of the input, appended to a method's name as in `world+effect`."""


def method_of(name: str) -> tuple[Method, Conditioning]:
    """A method and the conditioning of its input, from a name such as `world+effect`.

    >>> method, conditioning = method_of("world+effect")
    >>> method.title, conditioning, method_of("world")[1]
    ('World', 'effect', 'none')
    """
    base, plus, conditioning = name.partition("+")
    method = METHODS.get(base)
    if method is None or (plus and conditioning not in method.conditionings):
        suffixes = (
            f"+{kind} after {sorted(m.name for m in _ALL if kind in m.conditionings)}"
            for kind in CONDITIONINGS
        )
        raise ValueError(
            f"unknown method {name!r}; available: {sorted(METHODS)}, with {', '.join(suffixes)}"
        )
    return method, cast(Conditioning, conditioning or "none")


__all__ = ["CONDITIONINGS", "METHODS", "RIVALS", "Method", "Predictor", "Task", "method_of"]
