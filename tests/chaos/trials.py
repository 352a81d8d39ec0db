"""What an experiment is, and the loop over its trials."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import cqm

from .materials import Materials


@dataclass(frozen=True)
class Result:
    """What a trial did, how it ended, and how the promise was broken, if it was."""

    what: str
    outcome: str
    failure: str = ""


@dataclass(frozen=True)
class Trial(Result):
    """A numbered result."""

    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Experiment:
    """A kind of trial: `run` does those with the given numbers, in order."""

    name: str
    title: str  # in the table
    trials: int  # at full size
    sample: int  # in the tests
    run: Callable[[Materials, int, Sequence[int]], Iterator[Result]]


def one_by_one(trial_fn) -> Callable[[Materials, int, Sequence[int]], Iterator[Result]]:
    """Run trials that each need a random generator and an empty directory."""

    def run(materials, seed, numbers):
        for number in numbers:
            with materials.scratch() as directory:
                yield trial_fn(materials, np.random.default_rng([seed, number]), directory)

    return run


def run_trials(
    experiment: Experiment, materials: Materials, seed: int, num: int, results: Path
) -> Iterator[Trial]:
    """Run the trials 0, …, num - 1 that are not in the results yet; yields all of them."""
    done = read_trials(results) if results.exists() else []
    yield from done
    known = {trial.number for trial in done}
    missing = [number for number in range(num) if number not in known]
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "a", encoding="utf-8") as file:
        started = time.monotonic()
        for number, result in zip(missing, experiment.run(materials, seed, missing), strict=True):
            seconds = time.monotonic() - started
            trial = Trial(**asdict(result), number=number, seconds=seconds)
            file.write(json.dumps(asdict(trial)) + "\n")
            file.flush()
            started = time.monotonic()
            yield trial


def results_file(materials: Materials, name: str, seed: int) -> Path:
    """Where the trials of an experiment are kept; other code has another file."""
    digest = hashlib.sha256()
    for package in (Path(cqm.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return materials.directory / "results" / f"{name}-{seed}-{digest.hexdigest()[:8]}.jsonl"


def read_trials(results: Path) -> list[Trial]:
    """The trials in a file; a torn last line is left out."""
    lines = results.read_text(encoding="utf-8").split("\n")[:-1]
    return [Trial(**json.loads(line)) for line in lines]
