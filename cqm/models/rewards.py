"""Functions of the features: rewards of single steps and events of whole paths, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cqm.arguments import function, real_numbers
from cqm.queries import RewardFn

EventFn: TypeAlias = Callable[
    [np.ndarray], np.ndarray
]  # paths [..., horizon, d] -> whether it happens [...]


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


def _called(name: str, fn: Callable[[np.ndarray], Any], features: np.ndarray) -> Any:
    function(name, fn)
    try:
        return fn(features)
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"{name} raised {type(error).__name__}: {error}; it is called with features of shape "
            f"{features.shape}"
        ) from error
