"""Functions of the features: rewards of single steps and events of whole paths, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from cqm.arguments import function, real_numbers
from cqm.models.predictors import UnrolledPredictor
from cqm.queries import RewardFn

EventFn: TypeAlias = Callable[
    [np.ndarray], np.ndarray
]  # paths [..., horizon, d] -> whether it happens [...]
_FACTORS = (1.0, 4.0)  # spread of the values that are tried, relative to the feature's own


def rewards_of(reward_fn: RewardFn, features: np.ndarray) -> np.ndarray:
    """Rewards `[...]` of features `[..., features]`; a clear error if the function fails.

    >>> rewards_of(lambda features: features[..., 0] ** 2, np.array([[3.0, 1.0], [2.0, 0.0]]))
    array([9., 4.])
    """
    rewards = real_numbers("the result of reward_fn", _called("reward_fn", reward_fn, features))
    if rewards.shape != features.shape[:-1] or not np.isfinite(rewards).all():
        raise ValueError(
            f"reward_fn must return finite rewards of shape {features.shape[:-1]} for features of "
            f"shape {features.shape}; got shape {rewards.shape} with "
            f"{np.size(rewards) - np.isfinite(rewards).sum()} not finite"
        )
    return rewards


def happens(event_fn: EventFn, paths: np.ndarray) -> np.ndarray:
    """Whether an event happens on each path, `[...]`, for paths `[..., horizon, features]`.

    >>> happens(lambda paths: (paths[..., 0] > 2).any(axis=-1), np.arange(4.0).reshape(2, 2, 1))
    array([False,  True])
    """
    found = np.asarray(_called("event_fn", event_fn, paths))
    if found.dtype != bool or found.shape != paths.shape[:-2]:
        raise ValueError(
            f"event_fn must return booleans of shape {paths.shape[:-2]} for paths of shape "
            f"{paths.shape}; got {found.dtype} of shape {found.shape}"
        )
    return found


def sampled_futures(
    transition: UnrolledPredictor,
    observations: np.ndarray,
    values_fn: Callable[[np.ndarray], np.ndarray],
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
                "them, or only in directions that other features show better, and effects hardly "
                "depend on them. A function that uses them cannot be integrated; make its value a "
                "feature of the world"
            )
        yield futures


def _depends(
    values_fn: Callable[[np.ndarray], np.ndarray],
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


def _called(name: str, fn: Callable[[np.ndarray], Any], features: np.ndarray) -> Any:
    function(name, fn)
    try:
        return fn(features)
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"{name} raised {type(error).__name__}: {error}; it is called with features of shape "
            f"{features.shape}"
        ) from error
