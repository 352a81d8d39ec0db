"""Windows: episodes of any length cut into trajectories of one length, in memory or into shards.

Windows are gathered into parts of limited size, so that the number and the length of the episodes
do not matter if the logs are written to a directory. Rerunning an interrupted call compares what is
stored with what it cuts again, and goes on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cqm.arguments import mapping, real_numbers, shown
from cqm.logs.dataset import Logs
from cqm.logs.shards import SHARD_ROWS, LogWriter, ShardedLogs
from cqm.logs.validate import discrete_actions

_MOST_ROWS, _MOST_BYTES = 50_000, 2**28  # of a part
_NEEDED, _OPTIONAL = ("observations", "actions", "features"), ("propensities",)


@dataclass(frozen=True)
class Piece:
    """The windows of one episode."""

    observations: np.ndarray  # [windows, observations], at the decision
    actions: np.ndarray  # [windows, horizon]
    features: np.ndarray  # [windows, horizon, features]
    propensities: np.ndarray | None  # [windows, actions], of the decision
    episode: int  # its number

    def __len__(self) -> int:
        return len(self.observations)

    def __getitem__(self, rows: slice) -> Piece:
        known = None if self.propensities is None else self.propensities[rows]
        return Piece(
            self.observations[rows], self.actions[rows], self.features[rows], known, self.episode
        )


MakeFn = Callable[..., Logs]  # makes logs of arrays, given by name as in `Logs.from_arrays`


def cut(episodes: Iterable[Mapping[str, Any]], horizon: int, stride: int) -> Iterator[Piece]:
    """The windows of episodes that are given as mappings; see `Logs.from_episodes`."""
    for number, episode in enumerate(episodes):
        where = f"episode {number}"
        given = mapping(where, episode, f"arrays named {', '.join(_NEEDED)}")
        if missing := [name for name in _NEEDED if name not in given]:
            raise ValueError(f"{where} lacks {missing}; it has {sorted(map(str, given))}")
        if unknown := sorted(set(given) - {*_NEEDED, *_OPTIONAL}):
            raise ValueError(
                f"{where} has unknown entries {unknown}; allowed: {_NEEDED + _OPTIONAL}"
            )
        arrays = {
            "observations": real_numbers(f"observations of {where}", given["observations"]),
            "actions": np.asarray(given["actions"]),
            "features": real_numbers(f"features of {where}", given["features"]),
        }
        if given.get("propensities") is not None:
            arrays["propensities"] = real_numbers(f"propensities of {where}", given["propensities"])
        if arrays["actions"].ndim > 1:
            discrete_actions(arrays["actions"][None])  # raises, and says why
        for name, values in arrays.items():
            axes = 1 if name == "actions" else 2
            if values.ndim != axes or len(values) != len(arrays["features"]):
                raise ValueError(
                    f"{name} of {where} must have {axes} axes and one entry per step, "
                    f"{len(arrays['features'])}; got {shown(given[name])}"
                )
        starts = np.arange(0, len(arrays["features"]) - horizon + 1, stride)
        if not len(starts):
            continue
        steps = starts[:, None] + np.arange(horizon)
        known = arrays.get("propensities")
        yield Piece(
            arrays["observations"][starts],
            arrays["actions"][steps],
            arrays["features"][steps],
            None if known is None else known[starts],
            number,
        )


def gathered(
    pieces: Iterable[Piece],
    make_fn: MakeFn,
    out: str | Path | None,
    *,
    most: int | None = None,
    shard_rows: int = SHARD_ROWS,
    nothing: str = "no episode has a window",
) -> Logs | ShardedLogs:
    """Logs of windows, in memory or in shards.

    Args:
        pieces: The windows, episode by episode.
        make_fn: Makes logs of their arrays.
        out: Directory to write to; None to hold the logs in memory.
        most: Stop after so many windows; None for all.
        shard_rows: Windows per shard.
        nothing: Message if there are none.
    """
    parts = _parts(pieces, make_fn, most, limited=out is not None)
    if out is None:
        logs = next(parts, None)
        if logs is None:
            raise ValueError(nothing)
        return logs
    with LogWriter(out, shard_rows=shard_rows) as writer:
        stored, start = len(writer), 0
        before = ShardedLogs.open(out) if stored else None
        for part in parts:
            known = min(len(part), max(0, stored - start))
            if before is not None and known:
                _check_same(before, part[:known], start, out)
            start += len(part)
            if known < len(part):
                writer.append(part[known:])
        if start < stored:
            raise ValueError(
                f"{out} contains {stored:,} windows, but these episodes have {start:,}; choose "
                "another directory"
            )
        if not start:
            raise ValueError(nothing)
    return ShardedLogs.open(out)


def _parts(
    pieces: Iterable[Piece], make_fn: MakeFn, most: int | None, *, limited: bool
) -> Iterator[Logs]:
    """Logs of the windows: all of them, or parts of limited size."""
    waiting, num, total = list[Piece](), 0, 0
    for piece in pieces:
        if most is not None:
            piece = piece[: most - total]
        total += len(piece)
        rows = _MOST_ROWS
        if limited and len(piece):
            rows = max(1, min(rows, _MOST_BYTES // piece.features[0].nbytes))
        while limited and num + len(piece) >= rows:
            waiting.append(piece[: rows - num])
            piece = piece[rows - num :]
            yield _joined(waiting, make_fn)
            waiting, num = [], 0
        if len(piece):
            waiting.append(piece)
            num += len(piece)
        if total == most:
            break
    if waiting:
        yield _joined(waiting, make_fn)


def _joined(pieces: list[Piece], make_fn: MakeFn) -> Logs:
    propensities = [piece.propensities for piece in pieces]
    known = [each for each in propensities if each is not None]
    if known and len(known) < len(propensities):
        raise ValueError("either all episodes must have propensities or none; got some that have")
    return make_fn(
        observations=np.concatenate([piece.observations for piece in pieces]),
        actions=np.concatenate([piece.actions for piece in pieces]),
        features=np.concatenate([piece.features for piece in pieces]),
        propensities=np.concatenate(known) if known else None,
        groups=np.repeat([piece.episode for piece in pieces], [len(piece) for piece in pieces]),
    )


def _check_same(before: ShardedLogs, part: Logs, start: int, out: str | Path) -> None:
    """Raise unless the stored windows from `start` on are those of a part."""
    for name, values in part.row_arrays().items():
        if name not in before.array_names() or not np.array_equal(
            before.read(name, start, start + len(part)), values
        ):
            raise ValueError(
                f"{out} contains the windows of other episodes: their {name} differ; choose "
                "another directory"
            )
