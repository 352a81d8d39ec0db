"""HindsightModel (CQM-H): effects from logs, by inferring which action led to an outcome.

If first actions are drawn from μ, the density ratio of an event z is p_μ(a | s, z)/μ(a | s) − 1
(eq. hindsight-ratio). A classifier estimates the numerator. The features times this ratio, summed
over the discounted events that follow a state, estimate the effect κ(s, a) centred at μ; the
discounts sum to m_H, the total mass of the measure. The estimates are distilled into a model of the
state. Centring its effects again gives the effects for any other reference.

The ratio of an imperfect classifier is biased. The exact ratio is the conditional mean of
1{A = a}/μ(a | s) − 1 given state and event, so the difference between the two, times the features,
has mean zero in every state if the ratio is exact; regressed on the state, it estimates the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import number
from cqm.bounds import total_mass
from cqm.logs.dataset import Logs
from cqm.logs.shards import in_memory
from cqm.logs.trajectories import Trajectories
from cqm.models.log_bases import drawn_waves
from cqm.models.log_estimator import MEMBERS, LogEstimator, check_cells
from cqm.models.predictors import FourierPredictor, Predictor, TablePredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.propensities import inverse_propensity_fn
from cqm.models.ratios import Reliability, fit_ratios, with_events
from cqm.models.rewards import rewards_of
from cqm.models.training import Training
from cqm.observations import as_observations
from cqm.queries import RewardFn
from cqm.quotient import Reference, center
from cqm.regression import RowsRidge, Table, mean_by, one_thread, ridges_of_rows
from cqm.rows import Block, ColumnFn, Rows
from cqm.warn import warn_user

_WAVES = 64  # number of random Fourier features of the effects
ValuesFn = Callable[[np.ndarray], np.ndarray]  # features [..., features] -> values [..., d]


class HindsightModel(LogEstimator):
    """Learns what actions change by classifying which action led to an outcome.

    Args:
        method: `network` trains a classifier on events, that is, features together with their
            delay; `tabular` uses event counts instead, which is exact for finitely many
            observations and events.
        baseline: Subtract the part of the features that the state explains. The exact density
            ratio has mean zero in every state, so this changes only the noise of the estimate.
        corrected: Estimate the bias that an imperfect classifier causes, and remove it; False for
            the paper's estimator. It makes no difference to `tabular`, whose ratios are exact.
        width: Width of the hidden layers of `network`; 256 by default.
        largest_ratio: Density ratios p_μ(a | s, z)/μ(a | s) above this are clipped, which trades
            noise for bias; `corrected` estimates this bias too. None for no limit.
        members: Number of sets of random Fourier features to average; eight by default.
        folds: Number of folds; the ratio of a trajectory comes from a classifier trained on the
            other folds.
        weighting: Keep only directions in which effects stand out from the noise.
        reference: Reference distribution over actions, for centring; uniform by default.
        training: Settings of the training loop of `network`; by default those that suit it.
        updates: Number of gradient steps per training run; by default as in `training`.
        memory_gb: Memory for the rows that the classifier learns from, in gigabytes; of larger logs
            it sees a moving window (see `cqm.models.stream`).
        seed: Random seed.

    After `fit`, `reliability_` compares the classifier's probabilities with frequencies on
    trajectories that it did not learn from; see `cqm.models.ratios.Reliability`.

    >>> rng = np.random.default_rng(0)
    >>> states, actions = rng.integers(2, size=(400, 1)), rng.integers(2, size=400)
    >>> outcomes = 5.0 * states + (1 + states) * actions[:, None]
    >>> logs = Logs.from_arrays(states, actions, outcomes[:, None], discount=1.0)
    >>> model = HindsightModel(method="tabular").fit(logs)
    >>> model.effect([[0.0], [1.0]], action=1, baseline=0).round(6).tolist()
    [[1.0], [2.0]]
    """

    kind, title, network_methods = "hindsight", "Hindsight model", ("network",)
    streamed_method = "network"
    reliability_: Reliability | None = None

    def __init__(
        self,
        *,
        method: Literal["network", "tabular"] = "network",
        baseline: bool = True,
        corrected: bool = True,
        largest_ratio: float | None = None,
        width: int | None = None,
        members: int | None = None,
        folds: int = 2,
        weighting: bool = True,
        reference: Reference = None,
        training: Training | None = None,
        updates: int | None = None,
        memory_gb: float = 2.0,
        seed: int = 0,
    ):
        self.method = method
        self.baseline = baseline
        self.corrected = corrected
        self.largest_ratio = largest_ratio
        self.width = width
        self.members = members
        self.folds = folds
        self.weighting = weighting
        self.reference = reference
        self.training = training
        self.updates = updates
        self.memory_gb = memory_gb
        self.seed = seed

    def _check_params(self) -> None:
        self._one_of("method", "network", "tabular")
        super()._check_params()
        number("memory_gb", self.memory_gb, above=0)
        if self.largest_ratio is not None:
            number("largest_ratio", self.largest_ratio, above=1)
            if self.method == "tabular":
                raise ValueError(
                    "largest_ratio is for method='network'; the ratios of 'tabular' are exact"
                )

    def _learn(self, logs: Trajectories, options: Mapping[str, Any]) -> Predictor:
        self._distil_fn: Callable[[ValuesFn], Predictor]
        if self.method == "tabular":
            logs = in_memory(logs, "method='tabular'")
            logs.coverage().check()
            return self._learn_table(logs)
        rows = self._rows(logs, options)
        logs.coverage(rows.with_prefix("coverage-")).check()
        predictor = self._learn_network(logs, rows, options)
        if rows.checkpoints is not None:
            rows.checkpoints.remove()
        return predictor

    def reward_advantage(self, observations: ArrayLike, reward_fn: RewardFn) -> np.ndarray:
        """Centred values of any reward, linear in the features or not, `[n, actions]`.

        The integral ∫ r h dM̄ of the reward r times the density ratio h is estimated from the logged
        events, which are samples from the reference measure M̄, and distilled into a function of
        the state. This needs the logs and the ratios of their events, which a fitted model keeps in
        a temporary file but does not save. With `weighting`, the classifier distinguishes events
        only along directions in which actions change the mean; effects on the spread along the
        others are left to the correction.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            reward_fn: Maps features `[..., features]` to rewards `[...]`.
        """
        self._fitted()
        if not hasattr(self, "_distil_fn"):
            raise ValueError(
                "a loaded model has no ratios of logged events; fit it again, or use a Query"
            )
        states = as_observations(observations, self.observation_names, self.columns_)
        if self._kept < len(self.feature_names) and not self.corrected:
            warn_user(
                f"events are distinguished along {self._kept} of {len(self.feature_names)} "
                "directions, those in which actions change the mean; effects on the spread along "
                "the others are visible only with corrected=True or weighting=False",
            )
        with one_thread():
            predictor = self._distil_fn(lambda seen: rewards_of(reward_fn, seen)[..., None])
        values = center(predictor(np.atleast_2d(states))[0], self.reference)[..., 0]
        return values if states.ndim == 2 else values[0]

    def _learn_table(self, logs: Logs) -> Predictor:
        states, events = Table.of(logs.observations), Table.of(_flat(logs.features))
        cells, num_actions = states.find(logs.observations), logs.num_actions
        check_cells(cells, len(states.rows), logs)
        propensities = self._table_propensities(logs, cells, states)
        mu = mean_by(cells, len(states.rows), propensities)
        seen = events.find(_flat(logs.features)).reshape(logs.actions.shape)
        joint = np.zeros((len(states.rows), num_actions, len(events.rows)))
        for k, discount in enumerate(logs.recipe.discounts):
            np.add.at(joint, (cells, logs.first_actions, seen[:, k]), discount)
        measure = joint.sum(axis=1)  # the reference measure times the number of decisions
        posterior = joint / np.where(measure > 0, measure, 1)[:, None]
        ratio = posterior / mu[..., None] - 1
        share = measure / measure.sum(axis=1, keepdims=True)
        mass = float(total_mass(logs.recipe.discount, logs.recipe.horizon))
        if self.baseline:
            ratio = ratio - (share[:, None] * ratio).sum(axis=-1, keepdims=True)

        def distil(values: np.ndarray) -> TablePredictor:
            by_event = mean_by(seen.ravel(), len(events.rows), _flat(values))
            if self.baseline:  # a normalised ratio allows any shift of the integrand
                by_event = by_event[None] - (share @ by_event)[:, None]
            weights = mass * share[:, None] * ratio
            shape = (len(states.rows), *by_event.shape[-2:])
            effects = weights @ np.broadcast_to(by_event, shape)
            return TablePredictor(states, center(effects))

        self.notes_.append(f"{len(events.rows)} distinct events, counted per state and action")
        self._distil_fn = lambda values_fn: distil(values_fn(logs.features))
        self._kept = len(logs.feature_names)
        return distil(logs.features)

    def _learn_network(
        self, logs: Trajectories, rows: Rows, options: Mapping[str, Any]
    ) -> Predictor:
        subspace, inputs, rows = self._prepared(logs, rows)
        waves = drawn_waves(rows, 2 * _WAVES, 1, np.random.default_rng(self.seed))[0]
        horizon, discounts = logs.recipe.horizon, logs.recipe.discounts

        def regressors(block: Block) -> np.ndarray:
            return waves(block["inputs"])

        rows = with_events(rows, subspace.measures, horizon, regressors)
        digest = "" if options["directory"] is None else logs.digest()
        found = fit_ratios(self, rows, discounts, digest, options)
        self.notes_ += found.notes
        self.reliability_ = found.reliability
        # An exact ratio has mean zero in every state.
        known = ridges_of_rows(
            rows, "ratios", [regressors], lambda block: _by_row(found.ratio_fn(block))
        )[0]

        def ratio(block: Block) -> np.ndarray:
            raw = found.ratio_fn(block)
            return raw - known.predict_fn(block).reshape(raw.shape)

        weights_fn = inverse_propensity_fn(rows) if self.corrected else None

        def distil(
            values_fn: ValuesFn, basis: np.ndarray | None = None, rows: Rows = rows
        ) -> FourierPredictor:
            baseline = None
            if self.baseline:
                baseline = ridges_of_rows(
                    rows,
                    "values",
                    [regressors],
                    lambda block: _by_row(values_fn(block["features"])),
                )[0]

            def targets(block: Block) -> np.ndarray:
                values, own = values_fn(block["features"]), ratio(block)
                if baseline is not None:
                    values = values - baseline.predict_fn(block).reshape(values.shape)
                parts = [own]
                if weights_fn is not None:
                    parts.append(weights_fn(block)[:, None] - 1 - own)
                sums = [np.einsum("k,nka,nkd->nad", discounts, each, values) for each in parts]
                return _by_row(np.stack([center(each) for each in sums], axis=1))

            return self._distilled(rows, inputs, targets, logs.num_actions, basis)

        predictor = distil(lambda seen: seen @ subspace.measures, subspace.reconstruction)
        # Rewards that are asked later have no checkpoints.
        without = replace(rows, checkpoints=None, show_progress=False)
        self._distil_fn = lambda values_fn: distil(values_fn, rows=without)
        self._kept = len(subspace)
        return predictor

    def _distilled(
        self,
        rows: Rows,
        inputs: Coordinates,
        target_fn: ColumnFn,
        num_actions: int,
        basis: np.ndarray | None,
    ) -> FourierPredictor:
        """A model of the state from the noisy effects of every trajectory.

        Args:
            rows: The trajectories, with a column `inputs`.
            inputs: The map to these inputs.
            target_fn: The effects `[n, actions × d]` and, if they are corrected, as many values to
                add to them. The correction may be all noise; it is shrunk to what other folds
                confirm of it.
            num_actions: Number of actions.
            basis: From the d values to features, `[features, d]`; None if they are the features.
        """
        num = self.members or MEMBERS
        waves = drawn_waves(rows, _WAVES, num, np.random.default_rng(self.seed + 1))
        # Functions with default arguments, because a closure would see the last of the waves only.
        designs = [lambda block, own=own: own(block["inputs"]) for own in waves]
        members = []
        for own, fitted in zip(
            waves, ridges_of_rows(rows, "effects", designs, target_fn), strict=True
        ):
            parts = 2 if self.corrected else 1
            weights = fitted.weights.reshape(len(fitted.weights), parts, num_actions, -1)
            total = weights[:, 0]
            if self.corrected:
                total = total + weights[:, 1] * _confirmed(fitted, num_actions)
            members.append((own, np.moveaxis(total, 0, 1)))
        size = members[0][1].shape[-1]
        return FourierPredictor.of_members(
            inputs, members, np.eye(size) if basis is None else basis
        )


def _confirmed(fitted: RowsRidge, num_actions: int) -> np.ndarray:
    """The factor between 0 and 1 for each value of a correction that suits other folds best."""
    both, squares = (sums.reshape(2, num_actions, -1)[1].sum(axis=0) for sums in fitted.agreement())
    return np.clip(both / np.where(squares > 0, squares, 1), 0, 1)


def _by_row(values: np.ndarray) -> np.ndarray:
    """Values of one row in one axis, `[n, values]`."""
    return values.reshape(len(values), -1)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1])
