"""One job of the benchmark: fit a method and score it on held-out states."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cqm.branches.dataset import Branches
from cqm.decisions import advantage
from cqm.experiments import metrics
from cqm.experiments.methods import Method, Predictor, Task, method_of
from cqm.experiments.protocol import CEILINGS, Job, Protocol
from cqm.experiments.results import SCORES
from cqm.models.checkpoint import Checkpoint
from cqm.quotient import center
from cqm.worlds import reload_world


def do_job(
    protocol: Protocol, job: Job, sets: Mapping[str, Branches], directory: Path
) -> dict[str, Any]:
    """The record of a job: rows for each of the benchmark's CSV files, and its timings."""
    world = reload_world(sets["test"].world)
    training, held_out = (
        world.mixed_weights(directions)
        for directions in protocol.rewards(len(world.native.feature_names))
    )
    clock = Clock()
    if job.method == CEILINGS:
        record = ceilings(sets, held_out)
        return {**record, "seconds": clock.lap("evaluation").seconds}
    method, conditioning = method_of(job.method)
    task = Task(
        branches=sets["training"],
        rewards=training,
        training=replace(protocol.training, seed=job.seed),
        conditioning=conditioning,
        directory=directory,
        show_progress=False,
    )
    predictor = method.fit(task)
    clock.lap("training")
    record = score(method, predictor, sets, held_out)
    record["curves"] = _curve(directory)
    record["parameters"] = [{"parameters": predictor.num_parameters}]
    return {**record, "seconds": clock.lap("evaluation").seconds}


def ceilings(sets: Mapping[str, Branches], weights: np.ndarray) -> dict[str, Any]:
    """Rows of the best achievable scores, and of the spectrum of the effects."""
    many = sets["ceiling"]
    effects = many.effects()
    values = advantage(sets["test"].outcomes[:, 0], weights)
    best = metrics.ceilings(effects, values, weights)
    size = {"actions": many.num_actions, "states": len(many), "draws": many.recipe.draws}
    energies = metrics.spectrum(effects[:, 0])
    return {
        "ceilings": [{**size, **asdict(best)}],
        "spectrum": [
            {"index": i + 1, "energy": float(energy)}
            for i, energy in enumerate(energies)
            if energy > 1e-12
        ],
    }


def score(
    method: Method, predictor: Predictor, sets: Mapping[str, Branches], weights: np.ndarray
) -> dict[str, Any]:
    """Rows of a fitted method for the benchmark's CSV files, with held-out reward weights."""
    test, many = sets["test"], sets["ceiling"]
    outcomes, effects, draws = test.outcomes[:, 0], test.effects()[:, 0], many.effects()
    values, truth = advantage(outcomes, weights), advantage(effects, weights)
    expected = advantage(draws.mean(axis=1), weights)
    vectors, predicted = _predict(predictor, test, weights)
    vectors_of_many, answers = _predict(predictor, many, weights)
    row: dict[str, float] = dict.fromkeys(SCORES, np.nan)
    row["accuracy"] = metrics.accuracy(predicted, truth)
    row["regret"] = metrics.normalised_regret(predicted, truth, values)
    row["correlation"] = metrics.correlation(predicted, truth)
    row["expected_accuracy"] = metrics.accuracy(answers, expected)
    row["expected_regret"] = metrics.normalised_regret(answers, expected, values)
    if vectors is not None and vectors_of_many is not None:
        row["effect_nmse"] = metrics.nmse(center(vectors), effects)
        row["excess_error"] = metrics.excess_error(vectors_of_many, draws)
        if method.predicts == "outcomes":
            row["absolute_nmse"] = metrics.nmse(vectors, outcomes)
    centres = (metrics.ALIGNMENT_EDGES[1:] + metrics.ALIGNMENT_EDGES[:-1]) / 2
    shares = metrics.regret_cdf(predicted, truth, values)
    return {
        # A prediction that overflowed has no score; it is shown as undefined.
        "scores": [{name: x if np.isfinite(x) else None for name, x in row.items()}],
        "regret_cdf": [
            {"regret": float(regret), "share": share}
            for regret, share in zip(metrics.REGRET_GRID, shares, strict=True)
        ],
        "alignment": [
            {"oracle": float(centres[i]), "predicted": float(centres[j]), "count": count}
            for i, j, count in metrics.alignment(predicted, truth)
        ],
    }


def _predict(
    predictor: Predictor, branches: Branches, weights: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """Predicted vectors, if any, and scores `[n, queries, actions]`."""
    vectors = predictor.vectors(branches)
    if vectors is None:
        return None, predictor.values(branches, weights)
    return vectors, advantage(vectors, weights)


def _curve(directory: Path) -> list[dict[str, Any]]:
    """The training loss by update, from the latest checkpoint."""
    paths = sorted(directory.glob("*.checkpoint.safetensors"), key=lambda p: p.stat().st_mtime_ns)
    if not paths:
        return []
    checkpoint = Checkpoint.read(paths[-1])
    losses = checkpoint.losses
    steps = np.linspace(0, checkpoint.step, len(losses) + 1)[1:].astype(int)
    return [{"step": int(step), "loss": loss} for step, loss in zip(steps, losses, strict=True)]


class Clock:
    """Seconds spent on each part of a job; compilation counts as a part of its own."""

    def __init__(self) -> None:
        self.seconds = {"compilation": 0.0, "training": 0.0, "evaluation": 0.0}
        self._last, self._counted = time.monotonic(), _compilation.seconds

    def lap(self, part: str) -> Clock:
        """Count the time since the last lap as time of a part."""
        now, compiled = time.monotonic(), _compilation.seconds
        spent = now - self._last - (compiled - self._counted)
        self.seconds[part] = self.seconds.get(part, 0.0) + spent
        self.seconds["compilation"] += compiled - self._counted
        self._last, self._counted = now, compiled
        return self


class _Compilation:
    """Seconds that this process has spent compiling."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _COMPILING:
            self.seconds += duration_secs


_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_compilation = _Compilation()
