"""Refuters: attempts to show that effects from logs are wrong.

Some change the logs so that the answer is known, and estimate average effects again with the
model's own settings: actions that do nothing, an outcome that no action moves, an observation that
causes nothing, halves that must agree. Others look for leaks (`cqm.models.leaks`). The last one
says how strong a hidden cause must be to overturn the best action (`cqm.models.sensitivity`).

Each p-value is compared with 0.1 %, so that sound logs pass all tests together in about 99 % of all
cases.
"""

from __future__ import annotations

import itertools
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from cqm import decisions
from cqm.arguments import instance, show_progress as checked_show_progress, texts, whole_number
from cqm.branches.recipe import draw_actions
from cqm.display import counted
from cqm.logs.dataset import Logs
from cqm.models.averages import average_effects
from cqm.models.leaks import (
    EXACT,
    closest_copy,
    decides_action,
    imbalances,
    is_of_action_alone,
    noisy_copies,
    repeated_rows,
    told_actions,
)
from cqm.models.log_bases import bases_of, drawn_waves, on_state, regress, repeated_cells
from cqm.models.preprocessing import input_coordinates
from cqm.models.propensities import estimated_propensities, taken_actions
from cqm.models.refutations import Refutation, Refutations, Verdict
from cqm.models.sensitivity import observed_strengths, robustness
from cqm.models.subspace import later_regressors
from cqm.names import shortened, unknown
from cqm.progress import progress
from cqm.queries import Query
from cqm.regression import fold_numbers, one_thread
from cqm.rows import Rows

if TYPE_CHECKING:
    from cqm.models.log_estimator import LogEstimator

# Five refuters have a p-value, which may be half of what it should be if there are few decisions;
# together, they fail sound logs in one of a hundred cases.
LEVEL = 0.001
_MOVED = 2.0  # standard errors by which a random observation may move effects
_NEGLIGIBLE = 0.02  # standard deviations of an outcome below which no difference is counted
_UNTOLD = 0.1  # share of the action's variance that observations must leave open
_FEWEST = 200  # independent decisions or groups
_FOLDS = 5
_WAVES = 64
_NO_ACTION = "the method 'steps' learns from later actions, which stay as they were"
_NOT_NEXT = "the method 'steps' needs features that are the next observation"


@dataclass(frozen=True)
class _Case:
    """A model and logs, and what several refuters need of them."""

    model: LogEstimator
    logs: Logs
    query: Query | None

    @cached_property
    def weights(self) -> np.ndarray:
        """What is tested: the reward, or every outcome, as weights `[outcomes, tested]`."""
        size = len(self.logs.feature_names)
        if self.query is None:
            return np.eye(size)
        weights = decisions.project(np.eye(size), self.query)[:, None]
        return weights / (np.abs(weights).max() or 1.0)  # no finding depends on the unit

    @property
    def names(self) -> tuple[str, ...]:
        """What is tested, by name."""
        return self.logs.feature_names if self.query is None else ("the reward",)

    @cached_property
    def outcomes(self) -> np.ndarray:
        """What is tested, `[n, tested]`."""
        return self.logs.outcomes @ self.weights

    @cached_property
    def taken(self) -> np.ndarray:
        """Indicators of the actions taken, `[n, actions]`."""
        return taken_actions(self.logs)

    @cached_property
    def propensities(self) -> np.ndarray:
        """Known or estimated propensities, `[n, actions]`."""
        return self.propensities_of(self.logs)

    @cached_property
    def explained(self) -> np.ndarray:
        """What the state explains of all outcomes, cross-fitted, `[n, outcomes]`."""
        return self.explain(self.logs.outcomes)

    def explain(self, outcomes: np.ndarray) -> np.ndarray:
        """What the state explains of outcomes `[n, outcomes]`, cross-fitted."""
        logs, rng = self.logs, np.random.default_rng(self.model.seed)
        rows = _rows(logs).having(targets=outcomes)
        rows = rows.having(main_inputs=lambda block: block["inputs"])
        waves = drawn_waves(rows, _WAVES, 1, rng)
        bases = bases_of(rows.shape("inputs")[0], waves, repeated_cells(rows))
        design = on_state(later_regressors(logs, len(logs)))
        return rows.array(regress(bases, design, rows, lambda block: block["targets"]).predict_fn)

    @cached_property
    def skipped_copies(self) -> np.ndarray:
        """Pairs of an observation and an outcome that may be alike, `[observations, tested]`.

        An observation may stay as it is, so if features are the next observation, their copies in
        the current one are no leak.
        """
        logs = self.logs
        shape = (len(logs.observation_names), self.weights.shape[1])
        if not logs.features_are_next_observation:
            return np.zeros(shape, bool)
        return np.abs(self.weights) > 0

    def detached(self) -> Logs:
        """The logs with features that nothing takes for the next observation."""
        if not self.logs.features_are_next_observation:
            return self.logs
        names = tuple(f"next {name}" for name in self.logs.feature_names)
        return replace(self.logs, feature_names=names)

    def propensities_of(self, logs: Logs) -> np.ndarray:
        """Known or estimated propensities of other logs, `[n, actions]`."""
        if logs.propensities is not None:
            return logs.propensities
        rows = _rows(logs)
        return rows.array(estimated_propensities(rows, self.model.seed))

    def contrasts(self, logs: Logs) -> tuple[np.ndarray, np.ndarray]:
        """Average contrasts of all pairs of actions and their standard errors.

        Pairs without overlap are left out. The model's own regressions are fitted again, in two
        folds and with a single set of random Fourier features, which averages hardly notice. No
        standard error is smaller than a difference that would not matter, because outcomes without
        noise have next to none.
        """
        params = self.model.get_params() | {"folds": 2, "members": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fitting the model has given the same warnings
            logs = replace(logs, propensities=self.propensities_of(logs))  # once for all folds
            found = average_effects(type(self.model)(**params), logs)
        num = logs.num_actions
        rows = [
            np.kron((np.arange(num) == one) * 1.0 - (np.arange(num) == other), column)
            for one, other in itertools.combinations(np.flatnonzero(found.identified[0]), 2)
            for column in self.weights.T
        ]
        if not rows:
            raise ValueError("no two actions overlap")
        pairs = np.stack(rows)
        variances = np.einsum("ij,jk,ik->i", pairs, found.covariances[0], pairs)
        least = _NEGLIGIBLE * np.tile(self.outcomes.std(axis=0), len(rows) // len(self.names))
        return pairs @ found.means[0].ravel(), np.maximum(np.sqrt(np.maximum(variances, 0)), least)


@dataclass(frozen=True)
class _Finding:
    """A row of the table, without what all findings of its refuter share."""

    value: float
    found: str
    verdict: Verdict
    note: str = ""


Refuter = Callable[[_Case, np.random.Generator], _Finding]


def _placebo(case: _Case, rng: np.random.Generator) -> _Finding:
    """Actions that do nothing, drawn from the same propensities, must have no effect."""
    if case.model.method == "steps":
        return _skipped(_NO_ACTION)
    actions = case.logs.actions.copy()
    actions[:, 0] = draw_actions(case.propensities, rng.random(len(actions)))
    logs = replace(case.logs, actions=actions, propensities=case.propensities)
    return _tested(
        *case.contrasts(logs),
        "no effect",
        "an effect",
        "actions that do nothing seem to have effects, so the estimates are noisier than their "
        "standard errors say. Look for outcomes with rare, enormous values and for actions that "
        "are hardly ever taken.",
    )


def _dummy(case: _Case, rng: np.random.Generator) -> _Finding:
    """An outcome with the same dependence on the state, which no action moves."""
    if case.model.method == "steps":
        return _skipped(_NOT_NEXT)
    logs = case.logs
    # Average effects are subtracted first: what the state explains depends on the actions of the
    # other folds, which differ from those of a decision's own fold.
    moved, residuals = case.taken - case.propensities, logs.outcomes - case.explained
    effects = np.linalg.lstsq(moved, residuals, rcond=None)[0]
    unmoved = logs.outcomes - (case.taken - case.taken.mean(axis=0)) @ effects
    explained = case.explain(unmoved)
    features = np.zeros(logs.features.shape)
    features[:, 0] = explained + (unmoved - explained)[rng.permutation(len(logs))]
    logs = replace(case.detached(), features=features, propensities=case.propensities)
    return _tested(
        *case.contrasts(logs),
        "no effect",
        "an effect",
        "actions seem to move an outcome that depends on the state alone: what drives the choice "
        "of the action is not fully removed. Check the propensities, or try doubly_robust=True or "
        "another regressor.",
    )


def _random_cause(case: _Case, rng: np.random.Generator) -> _Finding:
    """An observation that causes nothing must not change the answer."""
    if case.model.method == "steps":
        return _skipped(_NOT_NEXT)
    logs = case.detached()
    shape = (len(logs), 1)
    tabular = case.model.method == "tabular"  # which needs few values
    cause = rng.integers(2, size=shape) * 1.0 if tabular else rng.standard_normal(shape)
    more = replace(
        logs,
        observations=np.concatenate([logs.observations, cause], axis=1),
        observation_names=(*logs.observation_names, "a random cause"),
        columns=(),
    )
    before, errors = case.contrasts(replace(logs, propensities=case.propensities))
    after, _ = case.contrasts(more)
    if len(before) != len(after):
        return _skipped("overlap changes")
    moved = float(np.max(np.abs(after - before) / np.maximum(errors, 1e-300)))
    return _Finding(
        moved,
        f"effects move by {moved:.2g} standard errors",
        "pass" if moved < _MOVED else "FAIL",
        ""
        if moved < _MOVED
        else "a meaningless observation changes the answer, so the regressions are unstable: use "
        "more decisions, fewer observations or a simpler regressor.",
    )


def _halves(case: _Case, rng: np.random.Generator) -> _Finding:
    """Two random halves must agree."""
    logs = case.logs.with_propensities(case.propensities)
    inside = fold_numbers(len(logs), 2, logs.groups, seed=int(rng.integers(2**31))) == 0
    one, error = case.contrasts(logs[inside])
    other, its_error = case.contrasts(logs[~inside])
    if len(one) != len(other):
        return _skipped("overlap changes")
    return _tested(
        one - other,
        np.hypot(error, its_error),
        "the halves agree",
        "the halves differ",
        "two random halves of the decisions give different effects, so intervals are too short. "
        "Look for outcomes with rare, enormous values and for actions that are hardly ever taken.",
    )


def _balance(case: _Case, rng: np.random.Generator) -> _Finding:
    """Beyond what known propensities say, nothing observed before the action can depend on it."""
    if case.logs.propensities is None:
        return _skipped("propensities are unknown")
    values = imbalances(case.logs.observations, case.taken, case.propensities)
    worst, num = int(values.argmin()), len(values)
    value = _several(float(values[worst]), num)
    name = case.logs.observation_names[worst]
    if value >= LEVEL:
        return _Finding(value, f"balanced ({_p(value)})", "pass")
    return _Finding(
        value,
        f"{name} is not ({_p(value)})",
        "FAIL",
        f"{name} depends on the action more than the propensities allow. Either it was recorded "
        "after the action (leave it out), or the propensities are not those of the policy.",
    )


def _outcome_copy(case: _Case, rng: np.random.Generator) -> _Finding:
    """No observation may be a copy of the outcome."""
    logs = case.logs
    closest = closest_copy(logs.observations, case.outcomes, case.skipped_copies)
    found = [closest] if closest.share > EXACT else []
    if not found and logs.propensities is None:  # otherwise balance has tested more
        found = noisy_copies(logs.observations, case.taken, case.outcomes, case.skipped_copies)
    if not found:
        name = logs.observation_names[closest.observation]
        return _Finding(closest.share, f"none; closest is {name} ({closest.share:.0%})", "pass")
    worst = max(found, key=lambda each: each.share)
    name, outcome = logs.observation_names[worst.observation], case.names[worst.outcome]
    return _Finding(
        worst.share,
        f"{name} copies {outcome} ({worst.share:.0%})",
        "FAIL",
        f"{name} looks like {outcome}, recorded after the action: given it, little or nothing is "
        "left for the action to change. Leave it out, unless you know that it came first.",
    )


def _action_copy(case: _Case, rng: np.random.Generator) -> _Finding:
    """The observations must not tell which action was taken."""
    if case.logs.propensities is not None:
        return _skipped("propensities are known")
    shares = case.taken.mean(axis=0)
    open_share = ((case.taken - case.propensities) ** 2).sum(axis=1).mean()
    told = max(0.0, 1 - float(open_share) / float(1 - shares @ shares))
    found = f"{told:.0%} of the action is predictable"
    if told <= 1 - _UNTOLD:
        return _Finding(told, found, "pass")
    alone = told_actions(case.logs.observations, case.taken)
    name = case.logs.observation_names[int(alone.argmax())]
    return _Finding(
        told,
        found,
        "FAIL",
        f"the observations tell which action was taken, above all {name} ({alone.max():.0%} by "
        "itself). Either it is a record of the action (leave it out), or the policy tries too "
        "little for logs to show effects.",
    )


def _row_copies(case: _Case, rng: np.random.Generator) -> _Finding:
    """Decisions must not have been copied."""
    logs = case.logs
    copies, value = repeated_rows(
        logs.observations, logs.actions, logs.features, case.propensities, logs.groups
    )
    if value >= LEVEL:
        return _Finding(value, f"no more than by chance ({_p(value)})", "pass")
    return _Finding(
        value,
        f"{counted(copies, 'copy')} ({_p(value)})",
        "FAIL",
        f"{counted(copies, 'decision')} repeat observation, action and outcome of another one, "
        "more than chance allows. Copies make intervals too short: drop them, or give all rows of "
        "one decision the same group.",
    )


def _mirror(case: _Case, rng: np.random.Generator) -> _Finding:
    """The outcome must not decide the action."""
    actions = case.logs.first_actions
    first = [decides_action(column, actions) for column in case.outcomes.T]
    # The cost of an action is a sound outcome of the action alone; all outcomes should not be.
    alone = all(is_of_action_alone(column, actions) for column in case.outcomes.T)
    if not alone and not any(first):
        return _Finding(0.0, "no outcome decides the action", "pass")
    name = case.names[first.index(True) if any(first) else 0]
    how = (
        "depends on nothing but the action"
        if alone
        else "decides the action: each action has a range of outcomes of its own, without gaps"
    )
    return _Finding(
        1.0,
        f"{name} mirrors the action",
        "FAIL",
        f"{name} {how}. Check that it was recorded after the action, and that it is not the "
        "action itself.",
    )


def _hidden_cause(case: _Case, rng: np.random.Generator) -> _Finding:
    """How strong a hidden cause must be for another action to overtake the best one."""
    if case.weights.shape[1] != 1:
        return _skipped("pass a query that says what is best")
    logs = case.logs
    residuals = ((logs.outcomes - case.explained) @ case.weights)[:, 0]
    moved = case.taken - case.propensities
    found = robustness(residuals, moved, logs.groups)
    best, rival = (logs.action_names[i] for i in (found.best, found.rival))
    seen = observed_strengths(
        logs.observations, case.taken, case.outcomes[:, 0], found.best, found.rival
    )
    strongest = int(seen.min(axis=1).argmax())
    action, outcome = seen[strongest]
    name = logs.observation_names[strongest]
    if found.value > 0:
        note = (
            f"{best} is the best action on average, unless a hidden cause explains at least "
            f"{found.value:.0%} of what the observations leave open of the outcome or of the "
            f"choice between {best} and {rival}, and enough of both"
        )
    else:
        note = f"noise alone may explain why {best} looks better on average than {rival}"
    return _Finding(
        found.value,
        f"{found.value:.0%} of action and outcome",
        "measured",
        f"{note}. For comparison, {name} explains {action:.0%} of this choice and {outcome:.0%} of "
        "the outcome beyond all other observations.",
    )


REFUTERS: dict[str, tuple[str, Refuter]] = {
    "placebo": ("actions drawn anew from propensities", _placebo),
    "dummy-outcome": ("an outcome that no action moves", _dummy),
    "random-cause": ("a random observation added", _random_cause),
    "halves": ("two random halves compared", _halves),
    "balance": ("observations compared by action", _balance),
    "outcome-copy": ("the outcome among the observations?", _outcome_copy),
    "action-copy": ("the action among the observations?", _action_copy),
    "row-copies": ("the same decision more than once?", _row_copies),
    "mirror": ("the action made from the outcome?", _mirror),
    "hidden-cause": ("what would overturn the best action?", _hidden_cause),
}


@one_thread()
def refute(
    model: LogEstimator,
    logs: Logs,
    query: Query | np.ndarray | None = None,
    *,
    refuters: Sequence[str] | None = None,
    seed: int = 0,
    show_progress: bool | None = None,
) -> Refutations:
    """Try to refute the effects that a model estimates from logs; see `LogEstimator.refute`."""
    instance("logs", logs, Logs, "Logs")
    whole_number("seed", seed, least=0)
    checked_show_progress(show_progress)
    names = list(REFUTERS) if refuters is None else list(texts("refuters", refuters))
    for name in names:
        if name not in REFUTERS:
            raise unknown("refuter", name, list(REFUTERS))
    if not names:
        raise ValueError(f"refuters must not be empty; available: {list(REFUTERS)}")
    case = _Case(model, logs, None if query is None else decisions.single_query(query))
    _ = case.weights  # raises if the query does not fit
    units = len(logs) if logs.groups is None else len(np.unique(logs.groups))
    if units < _FEWEST:
        what = "decisions" if logs.groups is None else "groups of decisions"
        raise ValueError(f"refuting needs at least {_FEWEST} independent {what}; got {units}")
    if missing := [logs.action_names[i] for i in np.flatnonzero(~case.taken.any(axis=0))]:
        raise ValueError(
            f"actions [{shortened(missing)}] never occur, so nothing can be said of their effects; "
            "leave them out of the candidate actions"
        )
    rows = []
    with progress("Refuting", len(names), unit="refuters", show=show_progress) as advance:
        for name in dict.fromkeys(names):
            done, refuter = REFUTERS[name]
            # Seeds that end in zeros give the numbers of the seed without them, which may have
            # made the logs.
            rng = np.random.default_rng([seed, 1 + list(REFUTERS).index(name)])
            try:
                found = refuter(case, rng)
            except ValueError as error:  # an action is missing in a part of the logs, for instance
                found = _skipped(str(error))
            rows.append(Refutation(name, done, found.value, found.found, found.verdict, found.note))
            advance(1)
    return Refutations(tuple(rows), model.title.lower(), len(logs))


def _rows(logs: Logs) -> Rows:
    """The decisions in folds, with their observations in coordinates of unit scale as `inputs`."""
    seen = input_coordinates("whiten", logs.observations, None)(logs.observations)
    return logs.folded_rows(_FOLDS).having(inputs=seen)


def _tested(
    estimates: np.ndarray, errors: np.ndarray, within: str, beyond: str, note: str
) -> _Finding:
    """Whether chance explains estimates whose true values are zero."""
    sizes = np.abs(estimates) / np.maximum(errors, 1e-300)
    sizes = np.where(np.abs(estimates) <= 1e-12 * np.abs(estimates).max(initial=1.0), 0.0, sizes)
    value = _several(2 * NormalDist().cdf(-float(sizes.max())), len(sizes))
    if value >= LEVEL:
        return _Finding(value, f"{within} ({_p(value)})", "pass")
    return _Finding(value, f"{beyond} ({_p(value)})", "FAIL", note)


def _several(value: float, num: int) -> float:
    """The smallest of several p-values, allowing for their number."""
    return min(1.0, num * value)


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def _skipped(reason: str) -> _Finding:
    short = textwrap.shorten(reason, 40, placeholder=" …")
    return _Finding(float("nan"), short, "skipped", "" if short == reason else f"{reason}.")
