"""The methods compared, by name; a new one is a file and a line here."""

from collections.abc import Callable

from cqm.experiments.methods.base import Lesson, Predictor
from cqm.experiments.methods.chance import RandomChoice
from cqm.experiments.methods.cocoa import Cocoa
from cqm.experiments.methods.direct_value import DirectValue
from cqm.experiments.methods.oracle import Oracle
from cqm.experiments.methods.quotient_model import (
    DefaultModel,
    FullRankModel,
    QuotientModel,
)
from cqm.experiments.methods.successor_features import SuccessorFeatures
from cqm.experiments.methods.task_td import TaskTD
from cqm.experiments.methods.world_ensemble import WorldEnsemble
from cqm.experiments.methods.world_model import WorldModel
from cqm.experiments.methods.zero import ZeroEffect

METHODS: dict[str, Callable[[Lesson], Predictor]] = {
    "cqm": QuotientModel,
    "cqm-full-rank": FullRankModel,
    "world": WorldModel,
    "sf": SuccessorFeatures,
    "direct": DirectValue,
    "task-td": TaskTD,
    "cocoa": Cocoa,
    "oracle": Oracle,
    "zero": ZeroEffect,
    "random": RandomChoice,
    "default": DefaultModel,
    "world-ensemble": WorldEnsemble,
}

OWN_INPUT = ("default", "oracle", "zero", "random")
"""Methods that no conditioning of the input reaches."""

__all__ = ["METHODS", "OWN_INPUT", "Lesson", "Predictor"]
