"""Certificates: what errors on calibration states guarantee for the errors in new states.

For one query, a model's errors in a state are the numbers e(a), true minus predicted value of each
action, and the chosen action is the one with the highest predicted value. Two scores summarise the
errors of a state:

- *one-sided*: max_b e(b) − e(chosen). The regret of the chosen action is at most this score minus
  its predicted lead over the second best.
- *widest*: max_b e(b) − min_b e(b), the largest error of any contrast between two actions.

Both are divided by a scale σ(s), which says how large errors are in states like s. It is fitted to
a random quarter of the calibration states; the others, which it has not seen, give the limits. If
calibration states and new states are exchangeable, the following holds, where *true* means the mean
of as many draws as the calibration states have.

- *Split conformal bounds.* With at least the stated confidence over calibration states and a new
  state, the score of the new state is at most its limit times σ(s). If there are several queries,
  this holds for the scores of all of them at once.
- *Selective guarantee.* A state is marked certain if its predicted lead is at least a threshold
  times σ(s). With a probability of at least 90% over the calibration states, the chosen action
  is wrong in at most a share of 1 − confidence of the marked states. The threshold is
  found by testing candidates in an order that the fitted quarter determines, until the first one
  fails (fixed-sequence testing), so the mark of a state does not depend on other states asked
  about. The threshold is never below two *typical errors*, medians of the size of the error in the
  lead, so that many easy states cannot mask errors in hard ones. If there are too few
  calibration states for the test, or no threshold passes it, a state is marked if its bound on the
  regret is zero. Then at most a share of 1 − confidence of all states is both marked and wrong.

Bounds are marginal: probabilities are over states, not for each state separately. For groups, the
limits come from the calibration states of the group, so they hold for its states separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

from cqm.arguments import number
from cqm.regression import fold_numbers, ridge

DOUBT = 0.1  # probability that the selective guarantee does not hold
FEWEST_SPLIT = 80  # fewest calibration states of which some are set aside for the scale
_MOST_FITTED = 500  # more are not needed to fit the scale
_FOLDS = 5
_MOST_INPUTS = 32  # inputs that the scale may depend on
_SMALLEST = 1e-3  # smaller errors and sizes, relative to typical ones, count as this
_THRESHOLDS = 50  # candidates
_TYPICAL_ERRORS = 2.0  # smaller leads are never certain
_ROUNDING = 1e-12  # values that differ by a smaller share of their spread are equal


@dataclass(frozen=True)
class Scale:
    """The scale σ(s) of the errors of one query, as a function of the state."""

    inputs: np.ndarray  # [inputs used], their positions
    least_size: float  # smaller spreads of predicted values count as this
    weights: np.ndarray  # [regressors], of log σ
    low: float  # range of log σ in the states that it was fitted to
    high: float

    @classmethod
    def constant(cls, value: float) -> Scale:
        """The same scale in every state."""
        log = math.log(value) if value > 0 else 0.0  # without errors any scale will do
        return cls(np.empty(0, int), 1.0, np.array([log]), log, log)

    @classmethod
    def fit(cls, errors: np.ndarray, values: np.ndarray, inputs: np.ndarray | None) -> Scale:
        """Regress the logarithm of the errors' size on the state.

        Regressors are the size of the predicted effects, the inputs and their squares. Unless they
        predict better than a constant, by more than a standard error across folds, the scale is
        constant.

        Args:
            errors: `[n, actions]`.
            values: Predicted values, `[n, actions]`.
            inputs: `[n, inputs]`; None if they are not known.
        """
        sizes = np.sqrt(np.mean((errors - errors.mean(axis=1, keepdims=True)) ** 2, axis=1))
        overall = float(np.sqrt(np.mean(sizes**2)))
        if overall <= _ROUNDING * float(np.abs(values).max(initial=0)):
            return cls.constant(overall)
        target = np.log(np.maximum(sizes, _SMALLEST * overall))
        spreads = np.ptp(values, axis=1)
        used = np.empty(0, int)
        if inputs is not None:
            spread = inputs.std(axis=0)
            used = np.sort(np.argsort(-spread, kind="stable")[:_MOST_INPUTS])
            used = used[spread[used] > 0]
        least = _SMALLEST * float(np.median(spreads)) or 1.0
        draft = cls(used, least, np.empty(0), 0.0, 0.0)
        folds = fold_numbers(len(target), _FOLDS)
        fitted = ridge(draft._regressors(values, inputs), target[:, None], folds)
        others = [target[folds != fold].mean() for fold in range(_FOLDS)]
        gains = (target - np.array(others)[folds]) ** 2 - (target - fitted.predictions[:, 0]) ** 2
        if gains.mean() <= gains.std() / math.sqrt(len(gains)):
            return cls.constant(float(np.exp(target.mean())))
        seen = fitted.predictions
        return cls(used, least, fitted.weights[:, 0], float(seen.min()), float(seen.max()))

    def __call__(self, values: np.ndarray, inputs: np.ndarray | None) -> np.ndarray:
        """The scale in states with predicted values `[n, actions]` and inputs `[n, inputs]`."""
        if len(self.weights) == 1:
            return np.full(len(values), math.exp(self.weights[0]))
        logs = self._regressors(values, inputs) @ self.weights
        return np.exp(np.clip(logs, self.low, self.high))

    def _regressors(self, values: np.ndarray, inputs: np.ndarray | None) -> np.ndarray:
        size = np.log(np.maximum(np.ptp(values, axis=1), self.least_size))
        columns = [np.ones((len(values), 1)), size[:, None]]
        if inputs is not None:
            columns += [inputs[:, self.inputs], inputs[:, self.inputs] ** 2]
        return np.concatenate(columns, axis=1)


@dataclass(frozen=True)
class Limits:
    """Limits on the errors of one query, in units of its scale."""

    scale: Scale
    typical: float  # median size of the error in the lead over the second best
    one_sided: float
    widest: float
    threshold: float  # the smallest lead that is certain
    tested: bool  # whether the test limits the share of wrong answers among certain ones
    needed: int  # number of calibration states that the test needs
    states: int  # number of calibration states

    @property
    def typical_errors(self) -> float:
        """The threshold in units of the typical error."""
        return self.threshold / self.typical if self.typical > 0 else math.inf

    def certain(self, leads: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Which leads, beyond the slack, are certain in states with these scales, `[n]`."""
        if not self.tested:
            return leads > self.threshold * scale
        return (leads >= self.threshold * scale) & (leads > 0)


def limits_of(
    errors: np.ndarray,
    values: np.ndarray | None,
    inputs: np.ndarray | None,
    confidence: float,
    slack: np.ndarray,
    *,
    rows: np.ndarray | None = None,
    where: str = "",
) -> tuple[Limits, ...]:
    """Limits of the errors of several queries, which hold together.

    Args:
        errors: True minus predicted values in the calibration states, `[n, actions, queries]`.
        values: Predicted values, `[n, actions, queries]`; None if they are not known.
        inputs: Inputs of the calibration states, `[n, inputs]`; None if they are not known.
        confidence: Probability that the limits hold.
        slack: How far the true lead must exceed zero for an answer to be right, `[queries]`.
        rows: Which calibration states the limits are computed from, `[n]`; by default all.
        where: Description of these states, for error messages.
    """
    confidence = number("confidence", confidence, above=0, below=1)
    num, num_queries = len(errors), errors.shape[2]
    rows = np.ones(num, bool) if rows is None else rows
    fitted = np.zeros(num, bool)
    if values is not None:
        fitted[_set_aside(num)] = True
    if not fitted.any() and num_queries > 1:
        raise ValueError(
            f"bounds that hold for several queries at once need at least {FEWEST_SPLIT} "
            f"calibration states; got {num}; ask one by one"
        )
    kept = rows & ~fitted
    if kept.sum() < _fewest(confidence) <= rows.sum() and num_queries == 1:
        fitted[:], kept = False, rows  # too few to set any aside
    elif fitted.any():
        where += ", besides those used to fit the scale"
    doubt = DOUBT / num_queries
    least = math.ceil(math.log(doubt) / math.log(confidence))
    found, worst = [], np.zeros((2, int(kept.sum())))
    for i in range(num_queries):
        own = errors[..., i]
        value = np.zeros_like(own) if values is None else values[..., i]
        scale = Scale.constant(1.0)
        if fitted.any():
            scale = Scale.fit(
                own[fitted], value[fitted], None if inputs is None else inputs[fitted]
            )
        sigma = scale(value, inputs)
        scores = np.stack(
            [
                np.ptp(own, axis=1) if values is None else _one_sided(own, value),
                np.ptp(own, axis=1),
            ]
        )
        scores = scores / sigma
        # Quantiles in the fitted states make the scores of different queries comparable.
        units = np.quantile(scores[:, fitted], confidence, axis=1) if fitted.any() else np.ones(2)
        units = np.where(units > 0, units, 1.0)
        worst = np.maximum(worst, scores[:, kept] / units[:, None])
        lead_errors = scores[1] if values is None else _lead_errors(own, value) / sigma
        typical = float(np.median(lead_errors[fitted if fitted.any() else kept]))
        threshold = math.inf
        if fitted.any() and kept.sum() >= least:
            leads, wrong = _leads(own, value, float(slack[i]))
            floor = _TYPICAL_ERRORS * typical
            threshold = _threshold(leads / sigma, wrong, fitted, kept, floor, confidence, doubt)
        found.append((scale, units, typical, threshold))
    one_sided, widest = (conformal(each, confidence, where=where) for each in worst)
    needed = max(FEWEST_SPLIT, _needed(least))
    limits = []
    for scale, units, typical, threshold in found:
        own_limit = float(one_sided * units[0])
        limits.append(
            Limits(
                scale,
                typical,
                one_sided=own_limit,
                widest=float(widest * units[1]),
                threshold=min(threshold, own_limit),
                tested=threshold <= own_limit,
                needed=needed,
                states=int(rows.sum()),
            )
        )
    return tuple(limits)


def conformal(scores: np.ndarray, confidence: float, *, where: str = "") -> float:
    """The smallest bound that a new, exchangeable score respects with the given probability."""
    confidence = number("confidence", confidence, above=0, below=1)
    needed = math.ceil((len(scores) + 1) * confidence)
    if needed > len(scores):
        raise ValueError(
            f"a confidence of {confidence} needs at least {_fewest(confidence)} calibration "
            f"states{where}; got {len(scores)}"
        )
    return float(np.sort(scores)[needed - 1])


def _fewest(confidence: float) -> int:
    """The smallest number of scores of which one can serve as the bound."""
    return math.ceil(confidence / (1 - confidence) - 1e-9)


def _set_aside(num: int) -> np.ndarray:
    """Indices of the states used to fit the scale: a random quarter, or none if there are few."""
    size = min(num // 4, _MOST_FITTED) if num >= FEWEST_SPLIT else 0
    return np.random.default_rng(0).permutation(num)[:size]


def _needed(least: int) -> int:
    """The number of calibration states that leaves at least `least` after some are set aside."""
    quarter = math.ceil(least * 4 / 3)
    return quarter if quarter // 4 <= _MOST_FITTED else least + _MOST_FITTED


def _one_sided(errors: np.ndarray, values: np.ndarray) -> np.ndarray:
    """By how much some action is underrated relative to the chosen one, `[n]`."""
    chosen = np.take_along_axis(errors, values.argmax(axis=1)[:, None], axis=1)[:, 0]
    return errors.max(axis=1) - chosen


def _lead_errors(errors: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Size of the error in the chosen action's lead over the second best, `[n]`."""
    order = np.argsort(-values, axis=1, kind="stable")[:, :2]
    return np.abs(np.diff(np.take_along_axis(errors, order, axis=1), axis=1)[:, 0])


def _leads(errors: np.ndarray, values: np.ndarray, slack: float) -> tuple[np.ndarray, np.ndarray]:
    """Predicted leads of the chosen actions beyond the slack, and which ones are wrong, `[n]`."""
    ordered = np.sort(values, axis=1)
    true = values + errors
    chosen = values.argmax(axis=1)[:, None]
    others = np.arange(values.shape[1]) != chosen
    second = np.where(others, true, -np.inf).max(axis=1)
    lead = np.take_along_axis(true, chosen, axis=1)[:, 0] - second
    wrong = lead < slack - _ROUNDING * np.abs(true).max(axis=1)
    return ordered[:, -1] - ordered[:, -2] - slack, wrong


def _threshold(
    leads: np.ndarray,
    wrong: np.ndarray,
    fitted: np.ndarray,
    kept: np.ndarray,
    least: float,
    confidence: float,
    doubt: float,
) -> float:
    """The smallest lead above which few enough choices are wrong; infinite if there is none.

    The first candidate is the one for which the fitted states have the strongest evidence; smaller
    ones follow until one fails.
    """
    own, own_wrong = leads[fitted], wrong[fitted]
    candidates = np.quantile(own, np.linspace(0.98, 0.0, _THRESHOLDS))
    candidates = np.unique(np.maximum([*candidates, least], max(least, 0.0)))[::-1]
    marked = (own >= candidates[:, None]) & (own > 0)
    evidence = bdtr((marked & own_wrong).sum(axis=1), marked.sum(axis=1), 1 - confidence)
    accepted = math.inf
    for candidate in candidates[int(np.argmin(evidence)) :]:
        marks = kept & (leads >= candidate) & (leads > 0)
        if not marks.any() or bdtr(wrong[marks].sum(), marks.sum(), 1 - confidence) > doubt:
            break
        accepted = float(candidate)
    return accepted
