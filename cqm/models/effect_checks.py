"""Checks before an effect model is fitted: its parameters, and whether families compare actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cqm.arguments import choice, instance, number, shown, whole_number
from cqm.branches.dataset import Branches
from cqm.models.choice import CANDIDATES, seconds_of
from cqm.models.direct import Distilled
from cqm.quotient import ComparisonGraph, Reference

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel


def check_params(model: EffectModel) -> None:
    """Raise `ValueError` unless the parameters that only an effect model has are valid."""
    names = model.names_of_candidates
    if not names or len(set(names)) < len(names) or not set(names) <= set(CANDIDATES):
        raise ValueError(
            f"candidates must be distinct names out of {list(CANDIDATES)}; got "
            f"{shown(model.candidates)}"
        )
    model._one_of("conditioning", "none", "whiten", "effect", "project", "learned")
    whole_number("width", model.width, least=1)
    whole_number("draws", model.draws, least=1)
    number("memory_gb", model.memory_gb, above=0)
    if isinstance(model.updates, Mapping):
        for name, cycles in model.updates.items():
            choice("a name in updates", name, (*CANDIDATES, Distilled.name))
            what = "a list of numbers for each candidate"
            for num in instance("updates", cycles, Sequence, what):
                whole_number("the number of updates in a cycle", num, least=1, most=2**31 - 1)
    if model.budget is not None:
        seconds_of(model.budget)
    if model.validation is not None:
        number("validation", model.validation, least=0, below=1)
        if model.validation == 0 and len(names) > 1:
            raise ValueError(
                f"validation=0 leaves no families to compare {len(names)} candidates on; pass "
                "a single candidate, or a validation above 0"
            )


def check_comparisons(
    branches: Branches, graph: ComparisonGraph | None, reference: Reference
) -> None:
    """Refuse families or a graph that leave some actions uncompared."""
    num_actions = branches.num_actions
    if not branches.has_menu:
        if graph is not None or reference is not None:
            given = "graph" if graph is not None else "reference"
            raise ValueError(
                f"a {given} is over candidate actions, but the first actions are controls from "
                f"the box; leave it out{', and recenter the model' * (graph is None)}"
            )
        return
    compared = [
        ComparisonGraph.from_families(num_actions, part.arms) for part in branches.batches()
    ]
    ComparisonGraph.union(compared).check_connected()
    if graph is None:
        return
    if graph.num_actions != num_actions or branches.num_arms < num_actions:
        raise ValueError(
            f"a graph of {graph.num_actions} actions needs families that branch all of them; "
            f"got {branches.num_arms} of {num_actions}"
        )
    graph.check_connected()
