"""Functions of the features: rewards of single steps and events of whole paths, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cqm.arguments import function, real_numbers
from cqm.models.predictors import UnrolledPredictor
from cqm.queries import RewardFn

EventFn = Callable[[np.ndarray], np.ndarray]  # paths [..., horizon, d] -> whether it happens [...]
_PROBED = 4  # states on which a function is probed for what it depends on


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
    depends_fn: Callable[[np.ndarray], np.ndarray],
    names: Sequence[str],
) -> Iterator[np.ndarray]:
    """Futures `[n, draws, actions, horizon, features]`, block by block of states.

    Raises `ValueError` if the function depends on features that the futures do not contain.

    Args:
        transition: A transition that can sample futures.
        observations: `[n, observations]`.
        depends_fn: A function of such futures.
        names: Names of the features, or none if they are unknown.
    """
    assert transition.levels is not None
    unknown = transition.levels.unknown
    for i, futures in enumerate(transition.futures(observations)):
        if i == 0:
            probe = futures[:_PROBED]
            answer = depends_fn(probe)
            used = []
            for feature in np.flatnonzero(unknown):
                changed = probe.copy()
                changed[..., feature] += unknown[feature]
                if not np.array_equal(depends_fn(changed), answer):
                    used.append(names[int(feature)] if names else f"number {feature}")
            if used:
                raise ValueError(
                    f"the futures of the features {', '.join(used)} are not learned, because no "
                    "action moves them and effects hardly depend on them; a function that uses "
                    "them cannot be integrated. Make the reward itself a feature of the world"
                )
        yield futures


def _called(name: str, fn: Callable[[np.ndarray], Any], features: np.ndarray) -> Any:
    try:
        return function(name, fn)(features)
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"{name} raised {type(error).__name__}: {error}; it is called with features of shape "
            f"{features.shape}"
        ) from error
