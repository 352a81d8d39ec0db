"""Futures of a fitted model: paths of the features, sampled from its learned transition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import shown, whole_number
from cqm.measures import SampledMeasure
from cqm.models.box_effects import base_actions, codes_of, reference_weights
from cqm.models.controls import draw_later
from cqm.models.predictors import UnrolledPredictor, check_draws
from cqm.names import Action, action_indices, shortened
from cqm.quotient import center
from cqm.warn import warn_user

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

FUTURES = 256
"""Default number of sampled futures per action; rewards and events vary more than effects."""
_POOR = 1.25  # a transition whose error is higher than the lowest by this factor is poor
_GOOD = 0.01  # unless its error is below this, in units of the effects' size
_FACTORS = (1.0, 4.0)  # spread of the values that are tried, relative to the feature's own

ValuesFn = Callable[[np.ndarray], np.ndarray]
"""Maps futures `[..., horizon, features]` to values `[...]`."""


def centred_means(
    model: EffectModel, observations: ArrayLike, values_fn: ValuesFn, draws: int
) -> np.ndarray:
    """Centred means of a function of futures, `[n, actions]`."""
    _sampling(model, draws)
    states, codes = model._states(observations), None
    if model.box_ is not None:
        menu, (base, weights) = codes_of(model, None, states), base_actions(model)
        codes = np.concatenate([menu, base])
    means = mean_values(model, np.atleast_2d(states), values_fn, draws=draws, controls=codes)
    if model.box_ is None:
        values = center(means[..., None], model.reference)[..., 0]
    else:
        values = means[:, : len(menu)] - means[:, len(menu) :] @ weights[:, None]
    return values if states.ndim == 2 else values[0]


def mean_values(
    model: EffectModel,
    states: np.ndarray,
    values_fn: ValuesFn,
    *,
    draws: int = FUTURES,
    transition: UnrolledPredictor | None = None,
    controls: np.ndarray | None = None,
) -> np.ndarray:
    """Means of a function of futures, `[n, actions]`, by the model's transition or another."""
    transition = transition or model.transition_
    assert transition is not None
    names = () if model.world_.get("nuisance") else model.feature_names
    transition = _with_draws(model, transition, draws)
    blocks = _sampled(transition, states, values_fn, names, controls)
    return np.concatenate([values_fn(futures).mean(axis=1) for futures in blocks])


def effect_measure(
    model: EffectModel, observations: ArrayLike, action: Action, draws: int | None
) -> SampledMeasure:
    """Steps of the futures of one state, with weights; see `EffectModel.effect_measure`."""
    transition = _sampling(model, draws)
    state = model._states(observations)
    if state.ndim != 1:
        raise ValueError(
            f"effect_measure takes the observations of one state; got shape {state.shape}"
        )
    index, names = action_indices(action, model.action_names_), model.action_names_
    if index.ndim or not 0 <= index < len(names):
        raise ValueError(
            f"action must be the name or the index of one of {shortened(names)}; got "
            f"{shown(action)}"
        )
    codes = None
    if model.box_ is not None:
        codes = np.concatenate([codes_of(model, None, state), base_actions(model)[0]])
    [futures] = transition.futures(state[None], codes)
    _, num, num_actions, horizon, size = futures.shape
    assert transition.levels is not None
    futures[..., transition.levels.unknown > 0] = np.nan
    chosen = np.eye(num_actions)[int(index)]
    by_action = chosen - reference_weights(model, num_actions)
    weights = np.multiply.outer(by_action, model.recipe_.discounts) / num
    weights = np.broadcast_to(weights, (num, num_actions, horizon))
    return SampledMeasure(futures.reshape(-1, size), weights.reshape(-1))


def _sampling(model: EffectModel, draws: int | None) -> UnrolledPredictor:
    """The learned transition, if it can sample futures, with a number of draws if given."""
    model._fitted()
    transition = model.transition_
    if transition is None:
        raise ValueError(
            "only a model with a learned transition can sample futures; fit it to branches "
            "collected with per_step=True, with 'unrolled' among its candidates"
        )
    if transition.levels is None:
        raise ValueError(
            "the transition predicts only mean futures, because the world's noise is given "
            "as seeds or the model was saved by an earlier version of cqm; describe the noise "
            "as a signal (a FunctionWorld with exogenous=...), or fit the model again"
        )
    _warn_of_a_poor_transition(model)
    return transition if draws is None else _with_draws(model, transition, draws)


def _with_draws(model: EffectModel, transition: UnrolledPredictor, draws: int) -> UnrolledPredictor:
    """A transition that samples this number of futures."""
    draws = whole_number("draws", draws, least=1)
    horizon, law = model.recipe_.horizon, model.recipe_.continuation
    check_draws(draws, horizon, len(model.candidate_actions_), int(model.width))
    rng = np.random.default_rng([model.seed, 4])
    later = draw_later(law, (draws, horizon - 1), transition.controls, rng)
    return transition.with_continuations(later)


def _warn_of_a_poor_transition(model: EffectModel) -> None:
    errors = {row.candidate: row.error for row in model.comparison_ if np.isfinite(row.error)}
    lowest = min(errors.values(), default=np.nan)
    if errors.get("unrolled", 0.0) > max(_POOR * lowest, _GOOD):
        warn_user(
            f"on held-out families, the transition's error is {errors['unrolled']:.2g}, and "
            f"the lowest of all candidates is {lowest:.2g}; answers from its futures may "
            "mislead",
        )


def _sampled(
    transition: UnrolledPredictor,
    observations: np.ndarray,
    values_fn: ValuesFn,
    names: Sequence[str],
    controls: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Futures `[n, draws, actions, horizon, features]`, block by block of states.

    Raises `ValueError` if the function depends on features that the futures do not contain: then
    its value changes when these features take other values at random.

    Args:
        transition: A transition that can sample futures.
        observations: `[n, observations]`.
        values_fn: The function of such futures that is to be integrated.
        names: Names of the features, or none if they are unknown.
        controls: Codes of the first actions; those of the candidate actions by default.
    """
    assert transition.levels is not None
    unknown = transition.levels.unknown
    for futures in transition.futures(observations, controls):
        if not np.isfinite(futures).all():
            raise ValueError(
                "the predicted futures are not finite; the states may be far from those that the "
                "model learned from"
            )
        missing = np.flatnonzero(unknown)
        if len(missing) and _depends(values_fn, futures, unknown, missing):
            used = [i for i in missing if _depends(values_fn, futures, unknown, np.array([i]))]
            words = [names[int(i)] if names else f"number {i}" for i in used or missing]
            raise ValueError(
                f"the futures of the features {', '.join(words)} are not learned: no action moves "
                "them, or other features show their changes better, and effects hardly depend on "
                "them. A function that uses them cannot be integrated; make its value a "
                "feature of the world"
            )
        yield futures


def _depends(
    values_fn: ValuesFn,
    futures: np.ndarray,
    spread: np.ndarray,
    chosen: np.ndarray,
) -> bool:
    """Whether a function of futures depends on some features, tried with random values."""
    answer, rng = values_fn(futures), np.random.default_rng(0)
    for factor in _FACTORS:
        changed = futures.copy()
        shape = (*futures.shape[:-1], len(chosen))
        changed[..., chosen] += factor * spread[chosen] * rng.standard_normal(shape)
        if not np.array_equal(values_fn(changed), answer):
            return True
    return False
