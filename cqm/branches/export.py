"""Branches as tables for other tools: one row per branch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cqm import storage
from cqm.display import named_columns

if TYPE_CHECKING:
    from cqm.branches.dataset import Branches


def branch_columns(branches: Branches) -> dict[str, np.ndarray]:
    """Columns of a table with one row per state, draw and first action.

    `state`, `draw` and `action` identify the branch, with one column per control instead of the
    action if first actions are controls from the box; `observation.NAME` and `outcome.NAME` hold
    the observation of the state and the discounted features of the branch.
    """
    outcomes = branches.outcomes
    num, draws, num_arms = outcomes.shape[:3]

    def per_branch(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values, (num, draws, num_arms, *values.shape[3:]))

    if branches.has_menu:
        action = per_branch(branches.arms[:, None]).ravel()
        first = {"action": action, "action_name": np.array(branches.action_names)[action]}
    else:
        names = [str(i) for i in range(branches.candidate_actions.shape[1])]
        first = named_columns("control", names, per_branch(branches.first_controls[:, None]))
    observations = per_branch(branches.observations[:, None, None])
    return {
        "state": per_branch(branches.index[:, None, None]).ravel(),
        "draw": per_branch(np.arange(draws)[:, None]).ravel(),
        **first,
        **named_columns("observation", branches.observation_names, observations),
        **named_columns("outcome", branches.feature_names, outcomes),
    }


def write_parquet(branches: Branches, path: str | Path) -> None:
    """Write the table as a Parquet file, batch by batch."""
    try:
        from pyarrow import parquet, table
    except ImportError as error:
        raise ImportError("to_parquet needs pyarrow: pip install 'cqm[parquet]'") from error
    first = table(branch_columns(branches[:1]))
    with (
        storage.atomic_file(path) as file,
        parquet.ParquetWriter(file, first.schema) as writer,
    ):
        for part in branches.batches():
            writer.write_table(table(branch_columns(part), schema=first.schema))
