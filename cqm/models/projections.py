"""Effects in single states from logs, with confidence intervals for their projection on a basis.

A flexible regression has no honest interval in a single state: what it smooths away is an error
that its data do not show. The closest function of a simple kind, such as a straight line in the
observations, does have one. It is estimated by least squares from doubly robust scores, which are
unbiased, noisy estimates of the effects in the state of each decision (Semenova and Chernozhukov
2021), and its covariance is that of sums over independent groups of decisions.

Where the true effects bend, the projection differs from them, and so may the interval. Intervals of
an action that is never taken in a part of the decisions are infinite (`cqm.logs.overlap`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from cqm import bounds, decisions
from cqm.arguments import choice, instance, number
from cqm.display import counted, data_frame, html_table, text_table
from cqm.logs.dataset import Logs
from cqm.models.averages import CrossFitted, cross_fitted, overlap_of, robust_scores
from cqm.models.preprocessing import input_coordinates
from cqm.names import Action, action_indices, shortened
from cqm.observations import as_observations
from cqm.queries import Query
from cqm.quotient import center
from cqm.regression import Table, one_thread, sums_by
from cqm.verdicts import NOTE_WIDTH, SHOWN_STATES, meaning_of_best

if TYPE_CHECKING:
    from cqm.models.log_estimator import LogEstimator

Basis = Literal["linear", "cells"]
_TARGETS = {
    "linear": (
        "the best approximation of the effects that is linear in the observations; where the "
        "effects are not linear, the true value may lie outside"
    ),
    "cells": "the effects in each distinct observation",
}
_FEWEST_UNITS = 20  # independent decisions or groups per function of the basis


@dataclass(frozen=True)
class ProjectedEffects:
    """Effects as a combination of a few functions of the state, with intervals."""

    basis: Basis
    functions_fn: Callable[[np.ndarray], np.ndarray]  # observations -> values [n, functions]
    weights: np.ndarray  # [functions, actions, outcomes]
    solver: np.ndarray  # [n, functions], influence of each decision's score on the weights
    errors: np.ndarray  # [n, actions, outcomes], of the fit to the scores
    identified: np.ndarray  # [functions, actions], whether the action overlaps where it is not 0
    logs: Logs

    def effect(self, observations: ArrayLike) -> np.ndarray:
        """Projected effects, centred uniformly over actions, `[n, actions, outcomes]`."""
        values = self.functions_fn(self._observations(observations))
        return center(np.tensordot(values, self.weights, 1))

    def effect_interval(
        self,
        observations: ArrayLike,
        query: Query | np.ndarray,
        *,
        action: Action,
        baseline: Action,
        confidence: float = 0.95,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits of a query's contrast between two actions, `[n]` each.

        In each state, the intervals for all pairs of actions hold together with the given
        confidence.
        """
        lead, reach = self._leads(observations, query, confidence)
        rows = np.arange(len(lead))
        one, other = (action_indices(each, self.logs.action_names) for each in (action, baseline))
        lead, reach = lead[rows, one, other], reach[rows, one, other]
        return lead - reach, lead + reach

    def certify(
        self,
        observations: ArrayLike,
        query: Query | np.ndarray,
        *,
        advantages: np.ndarray | None = None,
        confidence: float = 0.95,
    ) -> LogVerdict:
        """Choose an action in each state, with intervals for how far the others are behind.

        Args:
            observations: `[n, observations]`, or a table with the columns of the logs.
            query: The reward.
            advantages: Action values `[n, actions]` to choose by, such as those of a more flexible
                model; by default those of the projected effects.
            confidence: In each state, the probability that all its intervals hold.
        """
        query = decisions.single_query(query)
        if advantages is None:
            advantages = decisions.advantage(self.effect(observations), query)
        lead, reach = self._leads(observations, query, confidence)
        best, recipe = decisions.best(advantages), self.logs.recipe
        rows = np.arange(len(lead))
        lead, reach = lead[rows, best], reach[rows, best]
        return LogVerdict(
            advantages,
            best,
            np.stack([lead - reach, lead + reach], axis=-1),
            confidence,
            len(self.logs),
            self.logs.action_names,
            str(query),
            meaning_of_best(
                recipe.discount,
                recipe.horizon,
                recipe.continuation.describe(self.logs.action_names),
            ),
            _TARGETS[self.basis],
        )

    def _leads(
        self, observations: ArrayLike, query: Query | np.ndarray, confidence: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Leads of every action over every other, and half the widths of their intervals.

        Both are `[n, actions, actions]`.
        """
        query = decisions.single_query(query)
        confidence = number("confidence", confidence, above=0, below=1)
        values = self.functions_fn(self._observations(observations))
        advantages = np.tensordot(values, decisions.project(self.weights, query), 1)
        influence = self.solver[:, :, None] * (self.errors @ query.weights)[:, None]
        influence = sums_by(self.logs.groups, influence)  # [units, functions, actions]
        covariance = np.einsum("ufa,ugb->fgab", influence, influence, optimize=True)
        by_state = np.einsum("nf,ng,fgab->nab", values, values, covariance, optimize=True)
        own = np.einsum("naa->na", by_state)
        variances = own[:, :, None] + own[:, None] - 2 * by_state
        num_actions = len(self.logs.action_names)
        pairs = num_actions * (num_actions - 1) / 2
        multiplier = NormalDist().inv_cdf(1 - (1 - confidence) / 2 / pairs)
        recipe, error = self.logs.recipe, 0.0 if query.error is None else query.error.supremum
        nonlinear = bounds.reward_projection_error(error, recipe.discount, recipe.horizon)
        reach = multiplier * np.sqrt(np.maximum(variances, 0)) + float(nonlinear)
        lacking = (values != 0) @ ~self.identified  # [n, actions]
        other = ~np.eye(num_actions, dtype=bool)
        reach[(lacking[:, :, None] | lacking[:, None]) & other] = np.inf
        return advantages[:, :, None] - advantages[:, None], reach

    def _observations(self, given: ArrayLike) -> np.ndarray:
        names, columns = self.logs.observation_names, self.logs.columns
        return np.atleast_2d(as_observations(given, names, columns))


@dataclass(frozen=True)
class LogVerdict:
    """A decision for each state, and what logs say about it; prints as a table.

    It is not a certificate: that needs branches, whose effects can be checked.
    """

    advantages: np.ndarray  # [n, actions]
    action: np.ndarray  # [n], the best action
    behind: np.ndarray  # [n, actions, 2], limits of how far each action is behind the chosen one
    confidence: float  # in each state, probability that all its intervals hold
    decisions: int  # number of logged decisions
    action_names: tuple[str, ...]
    query: str  # the reward, in words
    meaning: str  # what "best" means, in one sentence
    target: str  # what the intervals are for, in words
    settled: ClassVar[str] = "clear"  # said of a state in which one action is the best

    @property
    def answers(self) -> tuple[str, ...]:
        """In words, what is known about the best action in each state."""
        return tuple(np.where(self.separable, self.settled, "cannot tell").tolist())

    @property
    def best(self) -> tuple[str, ...]:
        """The name of the best action in each state."""
        return tuple(self.action_names[action] for action in self.action)

    @property
    def separable(self) -> np.ndarray:
        """Whether all other actions are behind the chosen one, `[n]`."""
        return np.all(self._others[..., 0] > 0, axis=1)

    @property
    def regret_bound(self) -> np.ndarray:
        """How far the chosen action may be behind the best one, `[n]`."""
        return np.maximum(0.0, -self._others[..., 0].min(axis=1))

    @property
    def trust(self) -> str:
        """What the confidence means and what it rests on."""
        return (
            f"The intervals of a state hold together with {100 * self.confidence:g}% confidence "
            f"for {self.target}. Assumed: the observations contain everything that affected both "
            "action and outcome."
        )

    def summary(self) -> str:
        """In how many states one action is clearly best, in one sentence."""
        clear, num = int(self.separable.sum()), len(self.action)
        return f"One action is clearly the best in {clear} of {counted(num, 'state')}."

    def rows(self, most: int | None = None) -> list[dict[str, object]]:
        """The decisions as rows of a table; only the first `most` states if given."""
        order, answers = decisions.rank(self.advantages[:most]), self.answers
        rows = []
        for i, (first, second, *_) in enumerate(order):
            low, high = self.behind[i, second]
            rows.append(
                {
                    "state": i,
                    "best": self.action_names[first],
                    "second best": self.action_names[second],
                    "lead": f"{self.advantages[i, first] - self.advantages[i, second]:.3g}",
                    f"{100 * self.confidence:g}% interval": f"[{low:.3g}, {high:.3g}]",
                    "answer": answers[i],
                }
            )
        return rows

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per state."""
        limits = {
            f"behind_{end}.{name}": self.behind[:, i, j]
            for i, name in enumerate(self.action_names)
            for j, end in enumerate(("low", "high"))
        }
        return data_frame({"best": self.best, "clear": self.separable, **limits})

    def __str__(self) -> str:
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self._notes())
        return "\n".join([self._title(), text_table(self.rows(SHOWN_STATES)), *notes])

    def _repr_html_(self) -> str:
        return html_table(self.rows(SHOWN_STATES), title=self._title(), notes=self._notes())

    def _title(self) -> str:
        return f"Best first action for {self.query}, from {counted(self.decisions, 'decision')}"

    def _notes(self) -> list[str]:
        more = len(self.action) - SHOWN_STATES
        rest = [f"… and {counted(more, 'more state')}"] if more > 0 else []
        return [*rest, self.summary(), self.trust, self.meaning]

    @property
    def _others(self) -> np.ndarray:
        """Limits for the actions other than the chosen one, `[n, actions − 1, 2]`."""
        other = np.arange(len(self.action_names)) != self.action[:, None]
        return self.behind[other].reshape(len(self.action), -1, 2)


@one_thread()
def projected_effects(
    model: LogEstimator, logs: Logs, *, basis: Basis = "linear", made: CrossFitted | None = None
) -> ProjectedEffects:
    """Project the effects of every action on a basis.

    Args:
        model: The estimator whose settings are used for the cross-fitted regressions. It need not
            be fitted, and is not changed.
        logs: The decisions to learn from; they may be those that the model learned from.
        basis: `linear` for a constant and a slope per observation, `cells` for one value per
            distinct observation, which must then repeat.
        made: What `cross_fitted` made of the model and logs, if there are several questions.
    """
    instance("logs", logs, Logs, "Logs")
    choice("basis", basis, get_args(Basis))
    functions_fn = _functions(basis, logs.observations)
    values = functions_fn(logs.observations)
    units = len(logs) if logs.groups is None else len(np.unique(logs.groups))
    if units < _FEWEST_UNITS * values.shape[1]:
        what = "decisions" if logs.groups is None else "groups of decisions"
        raise ValueError(
            f"intervals with the basis {basis!r} need at least {_FEWEST_UNITS} independent {what} "
            f"per function; got {units} for {values.shape[1]} functions; use fewer observations, "
            "or ask for average effects"
        )
    made = made or cross_fitted(model, logs)
    overlap = overlap_of(logs, made)
    # A line through all decisions needs overlap in all of them, the effect in a cell only there.
    lacking = np.zeros((values.shape[1], logs.num_actions))
    if basis == "linear":
        lacking[0] = overlap.lacking()
        overlap.warn({"": lacking[0]})
    else:
        cells = [np.flatnonzero(column) for column in values.T]
        lacking[:] = [overlap.lacking(rows) for rows in cells]
        names = [_place(logs, rows[0]) for rows in cells]
        overlap.warn(dict(zip(names, lacking, strict=True)))
    scores = robust_scores(logs, made)
    flat = scores.reshape(len(logs), -1)
    solver = np.linalg.pinv(values)  # [functions, n]
    fitted = solver @ flat
    leverage = np.einsum("nf,fn->n", values, solver)
    errors = (flat - values @ fitted) / np.maximum(1 - leverage, 0.5)[:, None]
    shape = (-1, *scores.shape[1:])
    return ProjectedEffects(
        basis,
        functions_fn,
        fitted.reshape(shape),
        solver.T,
        errors.reshape(shape),
        lacking == 0,
        logs,
    )


def _place(logs: Logs, row: int) -> str:
    """The observation of a decision, in words."""
    pairs = zip(logs.observation_names, logs.observations[row], strict=True)
    return f" with {shortened([f'{name} = {value:g}' for name, value in pairs])}"


def _functions(basis: Basis, observations: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The functions of a basis, as a map from observations to their values `[n, functions]`."""
    if basis == "cells":
        table = Table.of(observations)
        return lambda given: np.eye(len(table.rows))[table.find(given)]
    coordinates = input_coordinates("whiten", observations, None)
    return lambda given: np.concatenate([np.ones((len(given), 1)), coordinates(given)], axis=1)
