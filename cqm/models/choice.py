"""Choosing candidates: all are compared on held-out families, and the best are refitted to all.

Every candidate is scored on the same held-out families, in units of the effects' own size, so that
differences between candidates are paired. The standard errors shown are those of the scores; noise
in the held-out outcomes is common to all candidates and raises every score alike. Candidates that
these families cannot tell apart are averaged: the mean is better than a choice made by chance.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from cqm.arguments import number
from cqm.branches.dataset import Branches, combine
from cqm.models.averaging import averaging_weights, standard_error
from cqm.models.candidates import Candidate, Task, Trained
from cqm.models.closed_form import ClosedForm, Constant, RidgeRegression
from cqm.models.controls import codes_in_box, first_codes
from cqm.models.direct import Direct, Distilled, Lessons
from cqm.models.frame import Frame
from cqm.models.held_out import HeldOut, num_kept
from cqm.models.predictors import Predictor, StackedPredictor, UnrolledPredictor
from cqm.models.training import Training, expected_seconds, train_members
from cqm.models.unrolled import Explanation, Unrolled
from cqm.progress import duration, say
from cqm.quotient import center
from cqm.warn import warn_user

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

CANDIDATES: dict[str, type[Candidate]] = {
    kind.name: kind for kind in (Constant, RidgeRegression, Unrolled, Direct)
}
"""The candidates by name, in the order in which they are fitted."""
CLEANED = " on cleaned labels"
"""Suffix of the name of a candidate that learned from cleaned labels."""
_SHARE = 0.1  # share of the families that is held out
_FEWEST, _LARGEST_SHARE = 500, 0.25  # at least this many, but at most this share
_FEWEST_PIECES = 16  # a set is shuffled in at least so many pieces before some is held out
_COMPARED = 1_000  # held-out families that candidates are compared on
_WORTH_CLEANING = 0.9  # labels are cleaned if at most this share of their noise is left
_TOLERANCE = 0.001  # by how much the error may be higher, in own units, if that avoids unrolling
_TOLERATED_SHARE = 0.02  # or by this share of what the candidates gain, whichever is larger
_LESSONS = 3  # sets of other controls per family whose effects are distilled
_SECONDS_PER_TRAINING = 2.5  # of a whole training run, relative to its cycles alone
_CHECKED = 32  # states for which a refitted candidate's predictions are checked
_FEWEST_UPDATES = 100  # a network that has time for fewer is left out
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_FAILURES = (
    ValueError,
    MemoryError,
    jax.errors.JaxRuntimeError,
)  # exceptions that leave out one candidate
_ROUNDING = 1e-12  # squared errors below this, in own units, are due to rounding


@dataclass(frozen=True)
class Comparison:
    """How one candidate did on the held-out families."""

    candidate: str
    error: float  # squared error in units of the effects' size; NaN if it was not fitted
    standard_error: float  # NaN if unknown
    seconds: float  # time to fit and score it; NaN in a loaded model
    note: str  # whether it was chosen, or why not

    def to_json(self) -> dict[str, Any]:
        """What is saved with a model; numbers that are not known are null."""
        error, spread = (
            value if np.isfinite(value) else None for value in (self.error, self.standard_error)
        )
        own = {"candidate": self.candidate, "error": error}
        return {**own, "standard_error": spread, "note": self.note}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Comparison:
        """The row that `to_json` returned."""
        error, spread = (
            np.nan if row[name] is None else row[name] for name in ("error", "standard_error")
        )
        return cls(row["candidate"], error, spread, np.nan, row["note"])


def seconds_of(budget: str | float) -> float:
    """A budget in seconds.

    >>> seconds_of("5min"), seconds_of(90)
    (300.0, 90.0)
    """
    if not isinstance(budget, str):
        return number("budget", budget, above=0)
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(s|min|h)\s*", budget)
    if found is None:
        raise ValueError(f"budget must be a time such as '60s', '5min' or '2h'; got {budget!r}")
    return number("budget", float(found[1]), above=0) * _UNITS[found[2]]


@dataclass
class Attempt:
    """A candidate and the result of fitting it."""

    candidate: Candidate
    name: str
    seconds: float = 0.0
    note: str = ""
    predictor: Predictor | None = None
    predicted: np.ndarray | None = None  # effects of the held-out families
    errors: np.ndarray | None = None  # their squared errors, `[families]`
    before: Any = None  # the networks before the best cycle
    cycle: Training | None = None  # the best cycle
    refitted: bool = False  # whether the predictor learned from all families
    cpu_seconds: float = 0.0

    @property
    def score(self) -> float:
        """The mean error; infinite before it is known."""
        return np.inf if self.errors is None else float(self.errors.mean())


class Combination:
    """One attempt, or the weighted mean of several.

    Args:
        attempts: The attempts.
        weights: Their weights, with sum 1; a single attempt needs none.
        errors: Squared errors on the held-out families; those of a single attempt by default.
    """

    def __init__(
        self,
        attempts: tuple[Attempt, ...],
        weights: np.ndarray | None = None,
        errors: np.ndarray | None = None,
    ):
        self.attempts = attempts
        self.weights = np.ones(1) if weights is None else weights
        own = attempts[0].errors if errors is None else errors
        self.errors = np.empty(0) if own is None else own

    @property
    def weighted(self) -> list[tuple[Attempt, float]]:
        """The attempts with their weights."""
        return list(zip(self.attempts, self.weights, strict=True))

    @property
    def is_slow(self) -> bool:
        """Whether the answer needs unrolling."""
        return any(isinstance(attempt.candidate, Unrolled) for attempt in self.attempts)


class Choice:
    """Chooses between the candidates of one model, and remembers every attempt.

    Args:
        model: The model to fit; its `comparison_`, `updates_` and `transition_` are set.
        branches: All families.
        options: Options of the training loop.
    """

    def __init__(self, model: EffectModel, branches: Branches, options: Mapping[str, Any]):
        self.model, self.show = model, options["show_progress"]
        self.started = time.monotonic()
        self.budget = None if model.budget is None else seconds_of(model.budget)
        if self.budget is not None:
            options = {**options, "directory": None}  # a resumed fit would plan differently
        num = self._num_held_out(len(branches))
        branches = _shuffled(branches, int(model.seed)) if num else branches
        families, held_out = branches[: len(branches) - num], branches[len(branches) - num :]
        self.held_out = held_out[:_COMPARED] if num else None
        frame = Frame(families, seed=int(model.seed))
        self.task = Task(model, families, branches, frame, branches.fingerprint(), options)
        self.attempts: list[Attempt] = []
        self.explanation: Explanation | None = None  # of the labels, by the transition

    def _num_held_out(self, num: int) -> int:
        share = self.model.validation
        held_out = min(max(round(_SHARE * num), _FEWEST), round(_LARGEST_SHARE * num))
        if share is not None:
            held_out = round(float(share) * num)
        if len(self.model.names_of_candidates) > 1:
            held_out = max(held_out, 1)
        if held_out >= num:
            raise ValueError(
                f"there are too few families ({num}) to hold some out and compare candidates; "
                "collect more, or pass one candidate and validation=0"
            )
        return held_out

    def predictor(self) -> Predictor:
        """Fit all candidates, cheap ones first, and refit the best one or the best combination."""
        for name in CANDIDATES:
            if name in self.model.names_of_candidates:
                self._attempt(CANDIDATES[name](self.task))
            if name == "unrolled" and self.attempts and self._clean_labels():
                for earlier in self.attempts:
                    self._rescore(earlier)
                if "ridge" in self.model.names_of_candidates:
                    self._attempt(CANDIDATES["ridge"](self.task))
        if not self._fitted:
            reasons = "; ".join(f"{a.name} {a.note}" for a in self.attempts)
            raise ValueError(f"no candidate can be fitted: {reasons}")
        if self.held_out is None:
            [attempt] = self._fitted
            assert attempt.predictor is not None
            self._record(Combination((attempt,)))
            return attempt.predictor
        self._distil()
        chosen = self._fast_enough()
        names = [attempt.name for attempt in chosen.attempts]
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        self._keep_held_out(chosen)
        say(f"Chosen: {listed}; fitting to all families", self.show)
        parts = tuple(map(self.refitted, chosen.attempts))
        self._record(chosen)
        return parts[0] if len(parts) == 1 else StackedPredictor(parts, chosen.weights)

    @property
    def _fitted(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.predictor is not None]

    def _keep_held_out(self, chosen: Combination) -> None:
        """Keep some held-out families with the predictions made before learning from them."""
        held_out = self.held_out
        if held_out is None or not (held_out.recipe.per_step and self.task.frame.complete):
            return
        if held_out.recipe.continuation.on_box:  # the ways are compared for candidate actions
            return
        effects = np.zeros(())
        for attempt, weight in chosen.weighted:
            assert attempt.predicted is not None
            effects = effects + weight * center(attempt.predicted)
        held_out, transition, noise = held_out[: num_kept(held_out)], None, None
        for attempt in self._fitted:
            predictor, candidate = attempt.predictor, attempt.candidate
            if isinstance(predictor, UnrolledPredictor) and predictor.levels is not None:
                transition = predictor
                if isinstance(candidate, Unrolled) and candidate.has_signal:
                    noise = candidate.standardised(held_out.noise)
        self.model.held_out_ = HeldOut.of(held_out, effects, transition, noise)

    def _fast_enough(self) -> Combination:
        """The best combination; one without unrolling, which is slow, if it is good enough.

        It is good enough if its error, plus one standard error of the difference, is hardly higher
        than that of the best single candidate, relative to the gain over the worst. The errors
        themselves would be no measure, because noise in the outcomes raises all of them.
        """
        fast = [a for a in self._fitted if not isinstance(a.candidate, Unrolled)]
        if not fast or not self.teacher.is_slow:
            return self.teacher
        second = self._combined(fast)
        single = Combination((min(self._fitted, key=lambda attempt: attempt.score),))
        loss = second.errors - single.errors
        gain = max(attempt.score for attempt in self._fitted) - single.errors.mean()
        tolerated = max(_TOLERANCE, _TOLERATED_SHARE * gain)
        good_enough = loss.mean() + standard_error(loss) <= tolerated
        return second if good_enough else self.teacher

    def _distil(self) -> None:
        """If the best answers need unrolling, teach them to direct networks, which are faster."""
        self.teacher = self._combined(self._fitted)
        wanted = "direct" in self.model.names_of_candidates and self.task.frame.centred_alone
        if wanted and self.teacher.is_slow and self.explanation is not None:
            with self._optional("distilling"):
                taught, lessons = self._taught(self.explanation), self._lessons()
                self._attempt(Distilled(taught, lessons, self._direct))

    @property
    def _direct(self) -> Direct | None:
        """The direct network that learned from labels, if any."""
        learned = (a.candidate for a in self.attempts if isinstance(a.candidate, Direct))
        return next(learned, None)

    def _taught(self, explanation: Explanation) -> Task:
        """The task of learning the teacher's answers, for all families."""
        frame, everything = self.task.frame, self.task.all_families
        known, start = np.empty(explanation.effects.shape, np.float32), 0
        for part in everything.batches():
            labels = frame.observed(part) @ frame.targets
            rows = slice(start, start + len(labels))
            for attempt, weight in self.teacher.weighted:
                if isinstance(attempt.candidate, Unrolled):
                    labels -= weight * explanation.effects[rows]
                elif attempt.predictor is not None:
                    effects = center(of_families(attempt.predictor, part))
                    labels -= weight * effects @ frame.targets
            known[rows], start = labels, rows.stop
        return replace(self.task, corrections=known)

    def _lessons(self) -> Lessons | None:
        """The teacher's answers for other controls from the box; None if actions are on a menu."""
        frame, families = self.task.frame, self.task.all_families
        if families.has_menu:
            return None
        rng = np.random.default_rng([self.model.seed, 7])
        arms, num_controls = families.num_arms, self.task.controls.shape[1]
        codes = codes_in_box(rng.random((len(families), _LESSONS * arms, num_controls)))
        answers: Any = 0.0
        for attempt, weight in self.teacher.weighted:
            candidate, predictor = attempt.candidate, attempt.predictor
            assert predictor is not None
            if isinstance(candidate, Unrolled) and isinstance(predictor, UnrolledPredictor):
                answers = answers + weight * candidate.answers(predictor.network, codes)
                continue
            parts, start = [], 0
            for part in families.batches():
                asked = codes[start : start + len(part)]
                effects = predictor(part.observations, asked).mean(axis=0)
                parts.append(effects @ frame.targets)
                start += len(part)
            answers = answers + weight * np.concatenate(parts)
        codes, answers = (v.reshape(len(v), _LESSONS, arms, -1) for v in (codes, answers))
        return Lessons(codes, center(answers))

    @contextlib.contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        """Warn if this optional step fails, and go on without it."""
        try:
            yield
        except _FAILURES as error:
            warn_user(f"{what} failed: {error}")

    def _attempt(self, candidate: Candidate) -> None:
        """Fit a candidate to the training families; if it fails, leave it out."""
        cleaned = self.task.corrections is not None and not isinstance(candidate, Distilled)
        name = candidate.name + (CLEANED if cleaned else "")
        attempt, started = Attempt(candidate, name, note=candidate.obstacle()), time.monotonic()
        cpu_started = time.process_time()
        self.attempts.append(attempt)
        if attempt.note:
            say(f"{name}: {attempt.note}", self.show)
            return
        try:
            if isinstance(candidate, ClosedForm):
                self._score(attempt, candidate.fit(self.task.families))
            elif isinstance(candidate, Trained):
                self._train(attempt, candidate)
        except _FAILURES as error:
            if len(self.model.names_of_candidates) == 1:
                raise
            attempt.predictor = attempt.errors = None
            attempt.note = f"failed: {error}"
            warn_user(f"the candidate {name} {attempt.note}")
        attempt.seconds = time.monotonic() - started
        attempt.cpu_seconds = time.process_time() - cpu_started
        if attempt.note:
            say(f"{name}: {attempt.note}", self.show)
        elif attempt.errors is not None:
            taken = duration(attempt.seconds)
            say(f"{name}: error {_with_error(attempt.errors)} in {taken}", self.show)

    def _score(self, attempt: Attempt, predictor: Predictor) -> None:
        """Keep a predictor, with its predictions for the held-out families and their errors."""
        attempt.predictor, attempt.predicted = predictor, self._predicted(predictor)
        attempt.errors = self._errors(attempt.predicted)

    def _predicted(self, predictor: Predictor) -> np.ndarray | None:
        """Predicted effects of the held-out families; None if there are none."""
        return None if self.held_out is None else _finite(of_families(predictor, self.held_out))

    def _errors(self, predicted: np.ndarray | None) -> np.ndarray | None:
        """Squared errors of effects predicted for the held-out families, `[families]`."""
        if predicted is None:
            return None
        return self.task.frame.errors(predicted, self._observed, self._arms)

    @functools.cached_property
    def _arms(self) -> np.ndarray | None:
        """Arms of the held-out families; None if their first actions are controls from the box."""
        assert self.held_out is not None
        return self.held_out.arms if self.held_out.has_menu else None

    @functools.cached_property
    def _observations(self) -> np.ndarray:
        assert self.held_out is not None
        return self.held_out.observations

    @functools.cached_property
    def _observed(self) -> np.ndarray:
        """Observed effects of the held-out families, cleaned if labels are cleaned."""
        assert self.held_out is not None
        observed = self.task.frame.observed(self.held_out)
        if self.task.corrections is None:
            return observed
        start = len(self.task.families)
        known = self.task.corrections[start : start + len(observed)]
        return observed - known @ self.task.frame.outputs.T

    def _clean_labels(self) -> bool:
        """If it helps, subtract from all labels the noise that the transition explains."""
        if self.held_out is None or not set(self.model.names_of_candidates) & {"ridge", "direct"}:
            return False
        attempt = self.attempts[-1]
        if attempt.predicted is None or not isinstance(attempt.candidate, Unrolled):
            return False
        assert isinstance(attempt.predictor, UnrolledPredictor)
        with self._optional("explaining the noise in the labels"):
            self.explanation = attempt.candidate.explanation(attempt.predictor.network)
        if self.explanation is None:
            return False
        known = self.explanation.noise
        frame, start = self.task.frame, len(self.task.families)
        own = frame.in_own_units(known[start : start + len(self.held_out)] @ frame.outputs.T)
        best = min(self._fitted, key=lambda each: each.score)
        assert best.predicted is not None
        misses = frame.in_own_units(self._observed)
        misses = misses - frame.in_own_units(best.predicted, self._arms)
        if np.sum(misses**2) <= _ROUNDING * misses.size:  # also if no action moves anything
            return False
        # The share of the explained noise to subtract is the one that leaves the least noise.
        share = float(np.clip(np.sum(own * misses) / max(np.sum(own**2), 1e-300), 0, 1))
        left = np.sum((misses - share * own) ** 2) / max(np.sum(misses**2), 1e-300)
        say(f"The transition explains {1 - left:.0%} of the noise in the labels", self.show)
        if left > _WORTH_CLEANING:
            return False
        self.task = replace(self.task, corrections=np.asarray(share * known, np.float32))
        del self._observed
        return True

    def _rescore(self, attempt: Attempt) -> None:
        """Score an earlier attempt on the cleaned labels."""
        attempt.errors = self._errors(attempt.predicted)

    def _train(self, attempt: Attempt, candidate: Trained) -> None:
        """Train cycle by cycle, until one does not clearly help."""
        network = candidate.initial()
        cycles = self._planned(candidate, network)
        if not cycles:
            attempt.note = "left out: the budget is too short"
            if self.budget is None:
                attempt.note = "left out: `updates` has no entry for it"
            return
        network, everything = candidate.pretrain(network, cycles), self.held_out is None
        best, least = network, None
        for i, training in enumerate(cycles, start=1):
            before, later = network, cycles[i:]
            network = candidate.train(before, str(i), training, everything=everything, later=later)
            errors = self._errors(self._predicted(candidate.compared(network)))
            gain = None if least is None or errors is None else least - errors
            if gain is not None and gain.mean() <= 0:
                break
            best, least = network, errors
            attempt.before, attempt.cycle = before, training
            if gain is not None and gain.mean() < standard_error(gain):
                break
        self._score(attempt, candidate.predictor(best))
        self.model.updates_[candidate.name] = [training.updates for training in cycles]

    def _seconds_left(self) -> float:
        assert self.budget is not None
        return self.budget - (time.monotonic() - self.started)

    def _planned(self, candidate: Trained, network: Any) -> list[Training]:
        """The cycles to run; with fewer updates if the budget is too short for all of them."""
        cycles, given = candidate.cycles(), self.model.updates
        if isinstance(given, Mapping):
            return candidate.cycles(given.get(candidate.name, []))
        if self.budget is None:
            return cycles
        if self._seconds_left() <= 0:
            return []
        total = replace(candidate.settings, updates=sum(cycle.updates for cycle in cycles))
        source, started = candidate.source(everything=False), time.monotonic()
        seconds = expected_seconds(train_members, network, candidate.objective, source, total)
        compiling = time.monotonic() - started
        left = self._seconds_left() - compiling  # the stages before the first cycle compile again
        share = min(1.0, left / (_SECONDS_PER_TRAINING * max(seconds, 1e-9)))
        if share < 1 and share * total.updates < _FEWEST_UPDATES:
            return []
        return [replace(c, updates=max(1, int(share * c.updates))) for c in cycles]

    def _combined(self, fitted: Sequence[Attempt]) -> Combination:
        """The candidates that may be the best, averaged; other weights if clearly better."""
        exact = [attempt for attempt in fitted if attempt.score <= _ROUNDING]
        if exact:
            return Combination((exact[0],))
        misses = self._misses(fitted)
        weights = averaging_weights(misses)
        used = np.flatnonzero(weights)
        attempts = tuple(fitted[int(i)] for i in used)
        if len(used) == 1:
            return Combination(attempts)
        errors = np.mean(np.tensordot(weights, misses, 1) ** 2, axis=(1, 2))
        return Combination(attempts, weights[used], errors)

    def _misses(self, fitted: Sequence[Attempt]) -> np.ndarray:
        """Errors on the held-out families in own units, `[attempts, families, arms, features]`."""
        assert self.held_out is not None
        frame, arms = self.task.frame, self._arms
        effects = [a.predicted for a in fitted if a.predicted is not None]
        observed = frame.in_own_units(self._observed)
        return np.stack([frame.in_own_units(each, arms) for each in effects]) - observed

    def refitted(self, attempt: Attempt) -> Predictor:
        """A candidate refitted to all families; unchanged if refitting fails."""
        started = time.process_time()
        if not attempt.refitted:
            try:
                attempt.predictor = self._refit(attempt)
            except _FAILURES as error:
                text = f"{attempt.name} did not learn from the held-out families: {error}"
                self.model.notes_.append(text)
                warn_user(text)
        attempt.refitted = True
        attempt.cpu_seconds += time.process_time() - started
        assert attempt.predictor is not None
        return attempt.predictor

    def _refit(self, attempt: Attempt) -> Predictor:
        """Fit a candidate to all families; a network repeats its best cycle on them."""
        candidate = attempt.candidate
        if isinstance(candidate, ClosedForm):
            predictor = candidate.fit(self.task.all_families)
        else:
            assert isinstance(candidate, Trained)
            assert attempt.cycle is not None
            if isinstance(candidate, Distilled):
                candidate = Distilled(self._taught_anew(), self._lessons(), self._direct)
            network = candidate.train(attempt.before, "all", attempt.cycle, everything=True)
            predictor = candidate.predictor(network)
        _finite(predictor(self._observations[:_CHECKED]))
        return predictor

    def _taught_anew(self) -> Task:
        """The task of learning what the teacher answers once it has learned from all families."""
        explanation = None
        for part in self.teacher.attempts:
            predictor = self.refitted(part)
            if isinstance(part.candidate, Unrolled) and isinstance(predictor, UnrolledPredictor):
                explanation = part.candidate.explanation(predictor.network)
        assert explanation is not None
        return self._taught(explanation)

    def _record(self, chosen: Combination) -> None:
        """Record on the model which candidates were tried, and the outcome of each."""
        model, rows, alone = self.model, [], len(chosen.attempts) == 1
        model.method_ = chosen.attempts[0].name if alone else "stack"
        best = min(chosen.attempts, key=lambda attempt: attempt.score)
        for attempt in self.attempts:
            error = spread = np.nan
            note = attempt.note
            if attempt.errors is not None and best.errors is not None:
                error, spread = _mean_and_error(attempt.errors)
                excess = attempt.errors - best.errors
                word = "higher" if excess.mean() > 0 else "lower"
                note = f"error {word} by {_with_error(np.sign(excess.mean()) * excess)}"
                if abs(excess.mean()) <= _ROUNDING:
                    note = "as good, but not simpler"
                elif isinstance(attempt.candidate, Unrolled) and not chosen.is_slow:
                    note += "; unrolling is slow"
            for part, weight in chosen.weighted:
                if part is attempt:
                    note = "chosen" if alone else f"in the stack, weight {weight:.2f}"
            rows.append(Comparison(attempt.name, error, spread, attempt.seconds, note))
            if isinstance(attempt.predictor, UnrolledPredictor):
                model.transition_ = attempt.predictor
        if not alone:
            error, spread = _mean_and_error(chosen.errors)
            rows.append(Comparison("stack", error, spread, 0.0, "chosen"))
        if not any(isinstance(attempt.candidate, Trained) for attempt in chosen.attempts):
            model.losses_ = np.empty(0)
        model.comparison_ = tuple(rows)


def _shuffled(branches: Branches, seed: int) -> Branches:
    """The same families, piece by piece in random order.

    Sets may be ordered, for example because they were combined, and a part of a set must be like
    the whole.
    """
    starts = branches.block_starts()
    if len(starts) < _FEWEST_PIECES:
        starts = np.unique(np.linspace(0, len(branches), _FEWEST_PIECES, endpoint=False, dtype=int))
    ends = [*starts[1:], len(branches)]
    pieces = [branches[int(a) : int(b)] for a, b in zip(starts, ends, strict=True)]
    order = np.random.default_rng([seed, 3]).permutation(len(pieces))
    return combine([pieces[i] for i in order])


def of_families(predictor: Predictor, families: Branches) -> np.ndarray:
    """Predicted effects of all actions, or of the controls that each family tried."""
    codes = None if families.has_menu else first_codes(families)
    effects = predictor(families.observations, codes).mean(axis=0)
    return effects if families.has_menu else center(effects)


def _finite(effects: np.ndarray) -> np.ndarray:
    if not np.isfinite(effects).all():
        raise ValueError("its predictions are not finite; lower the learning rate")
    return effects


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """A mean and its standard error, which is NaN if it is unknown."""
    error = standard_error(values)
    return float(values.mean()), error if np.isfinite(error) else np.nan


def _with_error(values: np.ndarray) -> str:
    error = standard_error(values)
    shown = f"± {error:.2g}" if np.isfinite(error) else "(standard error unknown)"
    return f"{values.mean():.3g} {shown}"
