"""Calibration: a model's errors on held-out states, measured against the mean of several draws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cqm.arguments import real_numbers, shown
from cqm.certificates import Limits, conformal, limits_of
from cqm.quotient import center
from cqm.shift import KnownStates

FEWEST_DRAWS = 16  # draws per state for guarantees
FEWEST_SCORES = 19  # states that a confidence of 95% needs
UNLEARNED = 0.5  # excess error above which a feature counts as not learned
Groups = Sequence[Any] | np.ndarray | Callable[[np.ndarray], Any]
"""One label per state, or a function that maps observations `[n, observations]` to labels."""


@dataclass(frozen=True)
class Calibration:
    """A model's errors on held-out states, measured against the mean of several draws."""

    residuals: np.ndarray  # [n, actions, features], expected minus predicted effects
    draws: int  # number of draws averaged to estimate the expected effects
    # Per feature `[features]`, summed over actions and averaged over states:
    noise: np.ndarray  # squared distance of one draw's effects from the expected effects
    size: np.ndarray  # squared size of the expected effects
    # Models saved by earlier versions lack these:
    predicted: np.ndarray | None = None  # [n, actions, features], centred
    states: KnownStates | None = None
    groups: np.ndarray | None = None  # [n], labels

    @classmethod
    def from_draws(
        cls,
        predicted: np.ndarray,
        draws: np.ndarray,
        *,
        states: KnownStates | None = None,
        groups: Groups | None = None,
    ) -> Calibration:
        """Calibrate with predicted effects `[n, actions, d]` and draws `[n, draws, actions, d]`.

        Two draws per state are enough here; `calibrate`, which is for guarantees, needs 16.
        """
        predicted, draws = _checked_draws(predicted, draws)
        if draws.shape[1] < 2:
            raise ValueError(
                "at least 2 draws per state are needed to separate noise from error; "
                f"got {draws.shape[1]}; collect with draws=2 or more"
            )
        if states is not None and len(states.inputs) != len(predicted):
            raise ValueError(
                f"observations must be those of the {len(predicted)} calibration states; got "
                f"{len(states.inputs)}"
            )
        labels = None if groups is None else group_labels(groups, len(predicted))
        draws, num_draws = center(draws), draws.shape[1]
        expected, predicted = draws.mean(axis=1), center(predicted)
        noise = np.mean(np.sum(draws.var(axis=1, ddof=1), axis=1), axis=0)
        size = np.mean(np.sum(expected**2, axis=1), axis=0) - noise / num_draws
        return cls(expected - predicted, num_draws, noise, size, predicted, states, labels)

    @property
    def excess_error(self) -> float:
        """Squared error against the expected effects, as a share of their size; 0 is perfect.

        The noise left in the mean of the draws is subtracted, so the value may fall below 0.
        """
        return float(self._errors().sum() / self.size.sum())

    @functools.cached_property
    def feature_errors(self) -> np.ndarray:
        """`excess_error` per feature; NaN if its effects are indistinguishable from noise."""
        visible = self.size > self.noise / self.draws
        return self._errors() / np.where(visible, self.size, np.nan)

    def unlearned(self, weights: np.ndarray) -> np.ndarray:
        """Indices of the poorly learned features that matter for weights `[..., features]`.

        Their excess error is above 0.5, and their weighted effects are at least 1% as large as
        those of the feature that matters most.
        """
        weights = self.checked_weights(weights)
        share = np.abs(weights) * np.sqrt(np.maximum(self.size, 0))
        weighed = (share > 0) & (share >= 0.01 * share.max(axis=-1, keepdims=True))
        weighed = weighed.reshape(-1, len(self.size)).any(axis=0)
        return np.flatnonzero(weighed & (self.feature_errors > UNLEARNED))

    def _errors(self) -> np.ndarray:
        """Squared errors in the expected effects, `[features]`."""
        return np.mean(np.sum(self.residuals**2, axis=1), axis=0) - self.noise / self.draws

    @property
    def noise_floor(self) -> float:
        """The smallest NMSE against single draws that any function of the state can reach."""
        noise = float(self.noise.sum())
        total = float(self.size.sum()) + noise
        return noise / total if total else 0.0  # without any effect there is no noise in them

    @property
    def nmse(self) -> float:
        """Squared error against single draws, as a share of their size."""
        return self.noise_floor + self.excess_error * (1 - self.noise_floor)

    # Guarantees.

    def radius(self, weights: np.ndarray, confidence: float) -> float:
        """With the given probability, a bound on the errors of a query's contrasts in a state.

        It is the same in every state; `limits` adapts to the state.
        """
        errors = self.residuals @ self.checked_weights(weights)
        return conformal(np.ptp(errors, axis=1), confidence)

    def effect_error(self, confidence: float) -> float:
        """δ: with the given probability, a bound on the norms of all effect errors in a state."""
        return conformal(np.linalg.norm(self.residuals, axis=-1).max(axis=1), confidence)

    def limits(
        self,
        weights: np.ndarray,
        confidence: float,
        *,
        slack: np.ndarray | None = None,
        group: str | None = None,
    ) -> tuple[Limits, ...]:
        """Limits of the errors of queries, which hold together; see `cqm.certificates`.

        Args:
            weights: `[queries, features]`.
            confidence: Probability that the limits hold.
            slack: Errors of the queries themselves, `[queries]`; by default none.
            group: Only for states with this label.
        """
        weights = np.atleast_2d(self.checked_weights(weights))
        rows = None
        if group is not None:
            known = self.group_names
            if group not in known:
                hint = f"one of {known}" if known else "None, because calibration had no groups"
                raise ValueError(f"group must be {hint}; got {group!r}")
            rows = np.asarray(self.groups) == group
        return limits_of(
            self.residuals @ weights.T,
            None if self.predicted is None else self.predicted @ weights.T,
            None if self.states is None else self.states.inputs,
            confidence,
            np.zeros(len(weights)) if slack is None else slack,
            rows=rows,
            where="" if group is None else f" in group {group!r}",
        )

    @property
    def group_names(self) -> list[str]:
        """The labels of the calibration states, sorted; none without groups."""
        return [] if self.groups is None else sorted(set(self.groups.tolist()))

    def checked_weights(self, weights: np.ndarray) -> np.ndarray:
        """Weights `[..., features]`, one per feature."""
        weights = real_numbers("weights", weights, ("...", "features"), finite=True)
        if weights.shape[-1] != (num := self.residuals.shape[-1]):
            raise ValueError(
                f"weights must be [..., {num}], one per feature; got shape {list(weights.shape)}"
            )
        return weights

    # Files.

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to save with a model; see `from_arrays`. Labels are numbers there."""
        arrays = {
            "calibration.residuals": self.residuals,
            "calibration.draws": np.array([self.draws]),
            "calibration.noise": self.noise,
            "calibration.size": self.size,
        }
        if self.predicted is not None:
            arrays["calibration.predicted"] = self.predicted
        if self.states is not None:
            arrays |= self.states.to_arrays()
        if self.groups is not None:
            arrays["calibration.groups"] = np.searchsorted(self.group_names, self.groups)
        return arrays

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], group_names: Sequence[str] = ()
    ) -> Calibration | None:
        """The calibration in the arrays of a saved model; None if it was not calibrated."""
        if "calibration.residuals" not in arrays:
            return None
        residuals, draws, noise, size = (
            arrays[f"calibration.{name}"] for name in ("residuals", "draws", "noise", "size")
        )
        numbers, labels = arrays.get("calibration.groups"), None
        if numbers is not None:
            if set(numbers.tolist()) != set(range(len(group_names))):
                raise ValueError(
                    f"calibration groups must be numbers below {len(group_names)}, each used"
                )
            labels = np.array(group_names)[numbers]
        return cls(
            residuals,
            int(draws[0]),
            noise,
            size,
            arrays.get("calibration.predicted"),
            KnownStates.from_arrays(arrays),
            labels,
        )


def calibrate(
    predicted: np.ndarray,
    draws: np.ndarray,
    *,
    states: KnownStates | None = None,
    groups: Groups | None = None,
) -> Calibration:
    """Calibrate for guarantees: `Calibration.from_draws` with at least 16 draws per state."""
    predicted, draws = _checked_draws(predicted, draws)
    if draws.shape[1] < FEWEST_DRAWS:
        raise ValueError(
            f"calibration needs at least {FEWEST_DRAWS} draws per state, so that their mean is "
            f"close to the expected effect; got {draws.shape[1]}; collect with "
            f"draws={FEWEST_DRAWS} or more"
        )
    return Calibration.from_draws(predicted, draws, states=states, groups=groups)


def group_labels(groups: Groups, num: int, observations: np.ndarray | None = None) -> np.ndarray:
    """One label per state, as text, `[n]`.

    >>> group_labels([True, False], 2).tolist()
    ['True', 'False']
    """
    given = groups
    if callable(groups):
        if observations is None:
            raise ValueError("groups must be labels, not a function, if there are no observations")
        given = groups(observations)
    labels = np.asarray(given)
    # Rounded numbers make poor labels, and lists of lists become arrays of objects.
    plain = labels.dtype.kind in "biuUS" or (
        labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.ravel())
    )
    if not plain or labels.shape != (num,):
        raise ValueError(
            f"groups must be {num} labels, one per state: strings, integers or booleans; got "
            f"{shown(given)}"
        )
    return labels.astype(str)


def _checked_draws(predicted: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predicted effects and draws that fit together."""
    predicted = real_numbers("predicted", predicted, ("n", "actions", "features"), finite=True)
    draws = real_numbers("draws", draws, ("n", "draws", "actions", "features"), finite=True)
    num, _, num_actions, size = draws.shape
    if predicted.shape != (num, num_actions, size) or num == 0 or num_actions < 2:
        raise ValueError(
            "predicted effects [n, actions, features] and draws [n, draws, actions, features] "
            "must have the same states (at least 1) and actions (at least 2); got shapes "
            f"{list(predicted.shape)} and {list(draws.shape)}"
        )
    return predicted, draws
