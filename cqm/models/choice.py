"""The choice between candidates: compared on held-out families, the best fitted again to all.

Every candidate is scored on the same held-out families, in units of the effects' own size, so that
differences between candidates are paired. The standard errors shown are those of the scores; noise
in the held-out outcomes is common to all candidates and raises every score alike.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cqm.arguments import number
from cqm.branches.dataset import Branches
from cqm.models.candidates import CANDIDATES, Candidate, ClosedForm, Task, Trained, Unrolled
from cqm.models.frame import Frame
from cqm.models.predictors import Predictor
from cqm.models.training import expected_seconds, train_members
from cqm.progress import duration, say

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

_SHARE = 0.1  # of the families is held out,
_FEWEST, _LARGEST_SHARE = 500, 0.25  # but at least so many, up to this share
_COMPARED = 1_000  # held-out families that candidates are compared on
_FEWEST_UPDATES = 100  # a network that has time for fewer is left out
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Comparison:
    """How one candidate did on the held-out families."""

    candidate: str
    error: float  # squared error in units of the effects' size; NaN if it was not fitted
    standard_error: float
    seconds: float  # to fit and score; NaN in a loaded model
    note: str  # whether it was chosen, or why not


def seconds_of(budget: str | float) -> float:
    """A budget in seconds.

    >>> seconds_of("5min"), seconds_of(90)
    (300.0, 90.0)
    """
    found = (
        re.fullmatch(r"\s*([0-9.]+)\s*(s|min|h)\s*", budget) if isinstance(budget, str) else None
    )
    if isinstance(budget, str) and (found is None or found[1].count(".") > 1):
        raise ValueError(f"budget must be a time such as '60s', '5min' or '2h'; got {budget!r}")
    if found:
        return number("budget", float(found[1]), above=0) * _UNITS[found[2]]
    return number("budget", budget, above=0)


def choose(model: EffectModel, branches: Branches, options: Mapping[str, Any]) -> Predictor:
    """Fit the model's candidates and return the best, fitted to all families."""
    return _Choice(model, branches, options).predictor()


class _Attempt:
    """A candidate, and what came out of fitting it."""

    def __init__(self, candidate: Candidate):
        self.candidate, self.seconds, self.note = candidate, 0.0, ""
        self.errors: np.ndarray | None = None  # [families]
        self.predictor: Predictor | None = None
        self.before: Any = None  # the networks before the best cycle
        self.best_cycle: int | None = None

    @property
    def score(self) -> float:
        return np.inf if self.errors is None else float(self.errors.mean())


class _Choice:
    def __init__(self, model: EffectModel, branches: Branches, options: Mapping[str, Any]):
        self.model, self.options, self.show = model, options, options["show_progress"]
        self.started = time.monotonic()
        self.budget = None if model.budget is None else seconds_of(model.budget)
        held_out = self._num_held_out(len(branches))
        families = branches[: len(branches) - held_out]
        self.held_out = branches[len(branches) - held_out :][:_COMPARED] if held_out else None
        frame = Frame(families, seed=int(model.seed))
        task = Task(model, families, branches, frame, branches.fingerprint(), options)
        self.task, self.attempts = task, list[_Attempt]()

    def _num_held_out(self, num: int) -> int:
        share = self.model.validation
        if share is not None:
            return round(float(share) * num)
        return min(max(round(_SHARE * num), _FEWEST), round(_LARGEST_SHARE * num))

    def predictor(self) -> Predictor:
        """Fit all candidates, cheap ones first, and refit the best."""
        for name in CANDIDATES:
            if name in self.model.names_of_candidates:
                self._attempt(CANDIDATES[name](self.task))
        fitted = [attempt for attempt in self.attempts if attempt.predictor is not None]
        if not fitted:
            reasons = "; ".join(f"{a.candidate.name} {a.note}" for a in self.attempts)
            raise ValueError(f"no candidate can be fitted: {reasons}")
        best = min(fitted, key=lambda attempt: attempt.score)
        self._refit(best)
        self._record(best)
        assert best.predictor is not None
        return best.predictor

    def _attempt(self, candidate: Candidate) -> None:
        """Fit a candidate to the families to learn from; one that fails is left out."""
        attempt, started = _Attempt(candidate), time.monotonic()
        self.attempts.append(attempt)
        attempt.note = candidate.obstacle()
        if attempt.note:
            return
        try:
            if isinstance(candidate, ClosedForm):
                attempt.predictor = candidate.fit(self.task.families)
                attempt.errors = self._errors(attempt.predictor)
            elif isinstance(candidate, Trained):
                self._train(attempt, candidate)
        except (ValueError, np.linalg.LinAlgError) as error:
            if len(self.model.names_of_candidates) == 1:
                raise
            attempt.predictor, attempt.errors = None, None
            attempt.note = f"failed: {error}"
            warnings.warn(f"the candidate {candidate.name} {attempt.note}", stacklevel=6)
        attempt.seconds = time.monotonic() - started
        if attempt.errors is not None:
            say(
                f"{candidate.name}: held-out error {_with_error(attempt.errors)} after "
                f"{duration(attempt.seconds)}",
                self.show,
            )

    def _train(self, attempt: _Attempt, candidate: Trained) -> None:
        """Train cycle by cycle, until one does not help."""
        network = candidate.initial()
        cycles = self._planned(candidate, network)
        if not cycles:
            attempt.note = "left out: the budget has no time for it"
            return
        network = candidate.pretrain(network)
        for i, training in enumerate(cycles):
            before = network
            network = candidate.train(
                before, str(i + 1), training, everything=self.held_out is None
            )
            predictor = candidate.predictor(network)
            errors = self._errors(predictor)
            if errors is not None and not np.isfinite(errors.mean()):
                raise ValueError("its predictions are not finite")
            if errors is not None and errors.mean() >= attempt.score:
                break
            attempt.predictor, attempt.errors = predictor, errors
            attempt.before, attempt.best_cycle = before, i
        self.model.updates_[candidate.name] = [training.updates for training in cycles]
        candidate.cycles_made = cycles

    def _planned(self, candidate: Trained, network: Any) -> list[Any]:
        """The cycles to run; fewer updates if the budget does not have time for all of them."""
        cycles = candidate.cycles()
        given = self.model.updates
        if isinstance(given, Mapping):
            own = given.get(candidate.name, [])
            return [replace(cycles[0], updates=int(num)) for num in own]
        if self.budget is None:
            return cycles
        left = self.budget - (time.monotonic() - self.started)
        source = candidate.source(everything=False)
        total = replace(candidate.settings, updates=sum(c.updates for c in cycles))
        # The best cycle is run once more on all families, and predictions take time too.
        needed = 1.8 * expected_seconds(train_members, network, candidate.loss(), source, total)
        left = min(left, self.budget - (time.monotonic() - self.started))
        share = min(1.0, max(0.0, left) / max(needed, 1e-9))
        if share * total.updates < _FEWEST_UPDATES:
            return []
        return [replace(c, updates=max(1, int(share * c.updates))) for c in cycles]

    def _errors(self, predictor: Predictor) -> np.ndarray | None:
        if self.held_out is None:
            return None
        if not hasattr(self, "_observed"):
            self._observed = self.held_out.observations
        return self.task.frame.errors(predictor(self._observed).mean(axis=0), self.held_out)

    def _refit(self, best: _Attempt) -> None:
        """Fit the best candidate to all families; a network repeats its best cycle on them."""
        if self.held_out is None:
            return
        candidate = best.candidate
        say(f"Chosen: {candidate.name}; fitting it to all families", self.show)
        if isinstance(candidate, ClosedForm):
            best.predictor = candidate.fit(self.task.all_families)
        elif isinstance(candidate, Trained):
            assert best.best_cycle is not None
            training = candidate.cycles_made[best.best_cycle]
            network = candidate.train(best.before, "all", training, everything=True)
            best.predictor = candidate.predictor(network)

    def _record(self, best: _Attempt) -> None:
        model = self.model
        model.method_ = best.candidate.name
        least = best.errors
        rows = []
        for attempt in self.attempts:
            error, spread, note = np.nan, np.nan, attempt.note
            if attempt.errors is not None:
                error = float(attempt.errors.mean())
                spread = float(attempt.errors.std() / np.sqrt(len(attempt.errors)))
            if attempt is best:
                note = "chosen"
            elif attempt.errors is not None and least is not None:
                excess = attempt.errors - least
                note = f"worse by {_with_error(excess)}"
            rows.append(Comparison(attempt.candidate.name, error, spread, attempt.seconds, note))
            if isinstance(attempt.candidate, Unrolled) and attempt is not best:
                model.transition_ = attempt.predictor
        model.comparison_ = tuple(rows)


def _with_error(values: np.ndarray) -> str:
    return f"{values.mean():.3g} ± {values.std() / np.sqrt(len(values)):.2g}"
