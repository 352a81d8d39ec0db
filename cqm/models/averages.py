"""Average effects from logs, with confidence intervals.

The mean outcome of an action, had it been taken in all decisions, is estimated by augmented inverse
propensity weighting (Robins, Rotnitzky and Zhao 1994): the mean prediction of an outcome
regression, plus the weighted mean of its errors in the decisions in which the action was taken.
Regressions and propensities are cross-fitted, so each decision is judged by a model that has not
seen it, and the errors of both enter only as a product. The weights of each action are normalised.

Intervals are simultaneous: with the stated confidence, all contrasts between actions, on all
outcomes and in all subgroups of one table, lie in theirs. They assume that the observations contain
everything that affected both the action and the outcome, and that decisions (or episodes, if logs
have groups) are independent. Where an action is never taken in a part of the decisions, its
contrasts are not identified, and their intervals are infinite (`cqm.logs.overlap`).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import instance, number
from cqm.display import counted, data_frame, html_table, text_table
from cqm.logs.dataset import Logs
from cqm.logs.overlap import Overlap, few_values, measure_overlap
from cqm.models.preprocessing import input_coordinates
from cqm.models.propensities import (
    estimated_propensities,
    inverse_propensities,
    taken_actions,
)
from cqm.models.regressors import fitted_columns, predictions
from cqm.names import action_indices, shortened, unknown
from cqm.regression import RandomFourierFeatures, fold_numbers, one_thread, ridge, sums_by
from cqm.warn import warn_user

if TYPE_CHECKING:
    from cqm.models.log_estimator import LogEstimator

EVERYWHERE = "all"
NO_OVERLAP = "no overlap"  # said of the sign of a contrast that is not identified
_FEWEST = 30  # decisions with an action in a subgroup, below which normal intervals are unreliable
_LARGEST_WEIGHT = 50.0  # weights of single decisions above which an average is fragile
_SIMULATIONS = 20_000  # draws for the quantile of the largest deviation
_MOST_GROUPS = 100
_WAVES = 64  # random Fourier features of the regression on the state


@dataclass(frozen=True)
class AverageEffects:
    """Average effects of actions on outcomes, by subgroup."""

    means: np.ndarray  # [groups, actions, outcomes], mean outcome had all taken the action
    covariances: np.ndarray  # [groups, actions · outcomes, actions · outcomes], of the means
    identified: np.ndarray  # [groups, actions], whether the action overlaps with the others
    sizes: np.ndarray  # [groups], number of decisions
    groups: tuple[str, ...]
    action_names: tuple[str, ...]
    outcome_names: tuple[str, ...]
    confidence: float
    multiplier: float  # half-width of a simultaneous interval, in standard errors

    def contrast(
        self, action: int | str, baseline: int | str, group: str = EVERYWHERE
    ) -> tuple[np.ndarray, np.ndarray]:
        """The average effect of one action relative to another, and its standard error.

        Without overlap, they are NaN and infinite.

        Args:
            action: The action, by index or name.
            baseline: The action to compare it with.
            group: Name of the subgroup.

        Returns:
            Two arrays `[outcomes]`.
        """
        one, other = action_indices([action, baseline], self.action_names)
        if group not in self.groups:
            raise unknown("subgroup", group, self.groups)
        place, num = self.groups.index(group), len(self.outcome_names)
        if one != other and not self.identified[place, [one, other]].all():
            return np.full(num, np.nan), np.full(num, np.inf)
        size = len(self.action_names) * num
        difference = np.zeros((num, size))
        difference[range(num), one * num + np.arange(num)] += 1
        difference[range(num), other * num + np.arange(num)] -= 1
        variances = np.einsum("ij,jk,ik->i", difference, self.covariances[place], difference)
        estimate = self.means[place, one] - self.means[place, other]
        return estimate, np.sqrt(np.maximum(variances, 0))

    def interval(
        self, action: int | str, baseline: int | str, group: str = EVERYWHERE
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the simultaneous intervals, `[outcomes]` each."""
        estimate, error = self.contrast(action, baseline, group)
        if np.isinf(error).all():
            return -error, error
        return estimate - self.multiplier * error, estimate + self.multiplier * error

    def rows(self) -> list[dict[str, Any]]:
        """One row per subgroup, pair of actions and outcome."""
        rows = []
        pairs = [(b, a) for a, b in itertools.combinations(self.action_names, 2)]
        for group, (action, baseline) in itertools.product(self.groups, pairs):
            estimate, error = self.contrast(action, baseline, group)
            low, high = self.interval(action, baseline, group)
            for i, outcome in enumerate(self.outcome_names):
                rows.append(
                    {
                        "group": group,
                        "action": action,
                        "baseline": baseline,
                        "outcome": outcome,
                        "effect": float(estimate[i]),
                        "standard_error": float(error[i]),
                        "low": float(low[i]),
                        "high": float(high[i]),
                        "sign": _sign(low[i], high[i]),
                    }
                )
        return rows

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`."""
        rows = self.rows()
        return data_frame({name: [row[name] for row in rows] for name in rows[0]})

    def __str__(self) -> str:
        return "\n".join([self._title, text_table(self._shown()), *self._notes])

    def _repr_html_(self) -> str:
        return html_table(self._shown(), title=self._title, notes=self._notes)

    @property
    def _title(self) -> str:
        return f"Average effects of the first action, from {counted(self.sizes[0], 'decision')}"

    @property
    def _notes(self) -> list[str]:
        return [
            f"With {self.confidence:.0%} confidence, all intervals hold at once.",
            "Assumed: the observations contain everything that affected both action and outcome.",
        ]

    def _shown(self) -> list[dict[str, str]]:
        percent = f"{self.confidence:.0%} interval"
        shown = []
        for row in self.rows():
            cells = {"group": row["group"]} if len(self.groups) > 1 else {}
            shown.append(
                cells
                | {
                    "outcome": row["outcome"],
                    "action": f"{row['action']} instead of {row['baseline']}",
                    "average effect": "?" if row["sign"] == NO_OVERLAP else f"{row['effect']:+.4g}",
                    percent: f"[{row['low']:.4g}, {row['high']:.4g}]",
                    "sign": row["sign"],
                }
            )
        return shown


@one_thread()
def average_effects(
    model: LogEstimator,
    logs: Logs,
    *,
    by: ArrayLike | str | None = None,
    confidence: float = 0.95,
    made: CrossFitted | None = None,
) -> AverageEffects:
    """Average effects of every action, in all decisions and in subgroups of them.

    Args:
        model: The estimator whose settings are used for the cross-fitted regressions. It need not
            be fitted, and is not changed.
        logs: The decisions to average over; they may be those that the model learned from.
        by: Subgroups: one label per decision, or the name of an observation with few values or of
            a column of text.
        confidence: Confidence level of the simultaneous intervals.
        made: What `cross_fitted` made of the model and logs, if there are several questions.
    """
    instance("logs", logs, Logs, "Logs")
    confidence = number("confidence", confidence, above=0, below=1)
    groups = _subgroups(logs, by)
    made = made or cross_fitted(model, logs)
    predicted, taken = made.outcomes, taken_actions(logs)
    if missing := [logs.action_names[i] for i in np.flatnonzero(~taken.any(axis=0))]:
        raise ValueError(
            f"actions [{shortened(missing)}] never occur, so their mean outcomes cannot be "
            "estimated; leave them out of the candidate actions"
        )
    weights = taken / made.propensities
    overlap = overlap_of(logs, made)
    lacking = {name: overlap.lacking(rows) for name, rows in groups.items()}
    overlap.warn({_where(name): shares for name, shares in lacking.items()})
    identified = np.stack(list(lacking.values())) == 0
    _warn_about_weights(weights, taken, groups, identified, logs)
    errors = weights[..., None] * (logs.outcomes[:, None] - predicted)  # [n, actions, outcomes]
    means, covariances = [], []
    for rows in groups.values():
        # An action's weights in a subgroup are scaled to sum to the number of its decisions.
        totals = weights[rows].sum(axis=0)
        scale = (len(rows) / np.where(totals > 0, totals, 1))[:, None]
        terms = predicted[rows] + scale * errors[rows]
        mean = terms.mean(axis=0)
        correction = scale * errors[rows].mean(axis=0)
        # Influence of each decision, the normalisation included.
        own = (terms - mean) - (scale[:, 0] * weights[rows] - 1)[..., None] * correction
        means.append(mean)
        covariances.append(_covariance(own.reshape(len(rows), -1), logs.groups, rows))
    sizes = np.array([len(rows) for rows in groups.values()])
    multiplier = _multiplier(covariances, identified, confidence)
    return AverageEffects(
        np.stack(means),
        np.stack(covariances),
        identified,
        sizes,
        tuple(groups),
        logs.action_names,
        logs.feature_names,
        confidence,
        multiplier,
    )


@dataclass(frozen=True)
class CrossFitted:
    """What is predicted for each decision from the other folds."""

    outcomes: np.ndarray  # [n, actions, outcomes]
    propensities: np.ndarray  # [n, actions]


@one_thread()
def cross_fitted(model: LogEstimator, logs: Logs) -> CrossFitted:
    """Outcomes of every action and propensities, predicted for each decision.

    Each decision is predicted from the other folds. The estimator's effects are subtracted from
    their outcomes, and a regression on the state predicts what remains. Neither depends on the
    propensities, which correct the errors of both.
    """
    observations, outcomes = logs.observations, logs.outcomes
    folds = fold_numbers(len(logs), model.folds, logs.groups)
    seen = input_coordinates("whiten", observations, None)(observations)
    propensities = logs.propensities
    if propensities is None:
        rows = logs.folded_rows(model.folds).having(inputs=seen)
        propensities = rows.array(estimated_propensities(rows, model.seed))
    regressors = np.ones((len(logs), 1))
    if seen.shape[1]:
        rng = np.random.default_rng(model.seed)
        regressors = RandomFourierFeatures.draw(seen, _WAVES, rng)(seen)
    predicted = np.empty((len(logs), logs.num_actions, outcomes.shape[1]))
    for fold in range(folds.max() + 1):
        own, others = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit to all logs gives the same warnings once
            fitted = type(model)(**model.get_params()).fit(logs[others], show_progress=False)
        effects = fitted.effect(observations)
        rest = outcomes[others] - effects[others, logs.first_actions[others]]
        if (regressor := getattr(model, "baseline_regressor", None)) is not None:
            columns = fitted_columns(regressor, observations[others], rest)
            predicted[own] = predictions(columns, observations[own])[:, None] + effects[own]
            continue
        inner = np.unique(folds[others], return_inverse=True)[1]
        if inner.max() == 0:  # two folds leave a single one
            groups = None if logs.groups is None else logs.groups[others]
            inner = fold_numbers(len(others), model.folds, groups)
        state = ridge(regressors[others], rest, inner, free=range(1 + seen.shape[1]))
        predicted[own] = (regressors[own] @ state.weights)[:, None] + effects[own]
    return CrossFitted(predicted, propensities)


def overlap_of(logs: Logs, made: CrossFitted) -> Overlap:
    """In which decisions of the logs actions are rarely taken."""
    rows = logs.rows().having(propensities=made.propensities)
    values = few_values(rows, logs.observation_names, logs.columns)
    return measure_overlap(rows, logs.action_names, values, known=logs.propensities is not None)


def robust_scores(logs: Logs, made: CrossFitted) -> np.ndarray:
    """Unbiased, noisy estimates of all actions' outcomes per decision, `[n, actions, outcomes]`."""
    weights = inverse_propensities(taken_actions(logs), made.propensities)
    return made.outcomes + weights[..., None] * (logs.outcomes[:, None] - made.outcomes)


def _subgroups(logs: Logs, by: ArrayLike | str | None) -> dict[str, np.ndarray]:
    """Row numbers of all decisions and of every subgroup, by name."""
    groups = {EVERYWHERE: np.arange(len(logs))}
    if by is None:
        return groups
    name, labels = "", np.asarray(by)
    if isinstance(by, str):
        name, labels = f"{by} = ", _labels(logs, by)
    if labels.shape != (len(logs),):
        raise ValueError(
            f"by must be one label per decision, {len(logs)} in all, or the name of an "
            f"observation; got shape {list(labels.shape)}"
        )
    values = np.unique(labels)
    if len(values) > _MOST_GROUPS:
        raise ValueError(
            f"by has {len(values)} different values; at most {_MOST_GROUPS} subgroups are allowed. "
            "Pass labels of a few ranges instead, such as observations > threshold"
        )
    for value in values:
        label = f"{value:g}" if labels.dtype.kind == "f" else str(value)
        groups[name + label] = np.flatnonzero(labels == value)
    return groups


def _labels(logs: Logs, name: str) -> np.ndarray:
    """The values of an observation, or the categories of a column of text, `[n]`."""
    texts = [column.name for column in logs.columns if column.categories]
    if name in texts:
        found = few_values(logs.rows(), logs.observation_names, logs.columns)[name]
        return np.array(found.names)[found.find_fn(logs.observations)]
    if name not in logs.observation_names:
        raise unknown("observation", name, [*logs.observation_names, *texts])
    return logs.observations[:, logs.observation_names.index(name)]


def _where(group: str) -> str:
    return "" if group == EVERYWHERE else f" in the subgroup {group}"


def _sign(low: float, high: float) -> str:
    if np.isinf(high):
        return NO_OVERLAP
    return "uncertain" if low <= 0 <= high else "certain"


def _warn_about_weights(
    weights: np.ndarray,
    taken: np.ndarray,
    groups: dict[str, np.ndarray],
    identified: np.ndarray,
    logs: Logs,
) -> None:
    """Warn if an average that is identified would rest on very few decisions."""
    for (name, rows), known in zip(groups.items(), identified, strict=True):
        counts = np.where(known, taken[rows].sum(axis=0), np.inf)
        action = int(counts.argmin())
        if counts[action] < _FEWEST:
            warn_user(
                f"action {logs.action_names[action]} was taken only {int(counts[action])} times"
                f"{_where(name)}; its intervals may be too short",
            )
    weights = weights * identified[0]
    row = int(weights.max(axis=1).argmax())
    if weights[row].max() > _LARGEST_WEIGHT:
        warn_user(
            f"decision {row} stands for {weights[row].max():.0f} decisions, because its action "
            f"{logs.action_names[logs.first_actions[row]]} is unlikely in its state; averages over "
            "states in which an action is hardly ever taken are poorly estimated",
        )


def _covariance(influence: np.ndarray, groups: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Covariance of a mean from the influence of every decision; episodes are independent."""
    num = len(influence)
    influence = sums_by(None if groups is None else groups[rows], influence)
    units = len(influence)
    return influence.T @ influence / num**2 * units / max(1, units - 1)


def _multiplier(
    covariances: Sequence[np.ndarray], identified: np.ndarray, confidence: float
) -> float:
    """The quantile of the largest deviation, in standard errors, over all identified contrasts.

    Subgroups are simulated independently of each other, which makes the intervals slightly longer
    than needed if they overlap.
    """
    rng = np.random.default_rng(0)
    largest = np.zeros(_SIMULATIONS)
    for covariance, known_actions in zip(covariances, identified, strict=True):
        values, axes = np.linalg.eigh(covariance)
        root = axes * np.sqrt(np.maximum(values, 0))
        drawn = rng.standard_normal((_SIMULATIONS, len(root))) @ root.T
        drawn = drawn.reshape(_SIMULATIONS, len(known_actions), -1)
        for one, other in itertools.combinations(np.flatnonzero(known_actions), 2):
            difference = drawn[:, one] - drawn[:, other]
            spread = difference.std(axis=0)
            known = spread > 0
            if known.any():
                deviation = np.abs(difference[:, known] / spread[known]).max(axis=1)
                largest = np.maximum(largest, deviation)
    return float(np.quantile(largest, confidence))
