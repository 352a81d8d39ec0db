"""The log of a training run: JSON lines, and TensorBoard events if TensorBoard is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cqm import storage

EVENTS = "tensorboard"  # directory next to the JSON file, one subdirectory per training run


class TrainingLog:
    """Writes the metrics of one training run."""

    def __init__(self, directory: Path, name: str):
        self.path = storage.inside(directory, f"{name}.metrics.jsonl")
        self.events = directory / EVENTS / name
        self._writer: Any = None
        self._tried = False

    def resume(self, step: int) -> None:
        """Drop what was logged after the last checkpoint, which is at `step`, before a kill."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (at := _step(line)) is not None and at <= step]
        if kept != lines:
            storage.write_pieces(self.path, kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics after a number of updates."""
        storage.append_line(self.path, {"step": step, **values})
        if not self._tried:  # not earlier, so that a finished run leaves no empty file
            self._writer, self._tried = _event_writer(self.events), True
        if self._writer is not None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            scalars = [Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()]
            summary = Summary(value=scalars)
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def _step(line: bytes) -> int | None:
    """The number of updates in a line of the log; None if the line is incomplete."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError):
        return None


def _event_writer(directory: Path) -> Any:
    """TensorBoard's own writer, which needs neither TensorFlow nor PyTorch; None if missing."""
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        return None
    return EventFileWriter(str(directory))
