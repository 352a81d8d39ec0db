"""Logs from episodes: Gymnasium environments recorded as they run, and Minari data sets.

Episodes are cut into windows of one length, each a decision and what followed. Features are those
of `cqm.worlds.gym`: the next observation, the reward, and an indicator of termination. After a
termination the state is absorbing: zeros, the indicator one.

What would have followed a time limit is unknown, so a window must start a whole horizon before it.
That holds for windows that terminated in time too: kept without those that the limit cuts short,
they would make late decisions look deadly. Where the limit is unknown it is taken to be the length
of the longest episode that was truncated; truncation for other reasons cannot be told from it.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cqm.logs.dataset import Logs, draw_rows
from cqm.worlds.contract import World

PATIENCE = 100  # episodes in a row without a window, after which recording gives up
BehaviourFn = Callable[[np.ndarray], np.ndarray]  # an observation [d] -> probabilities [actions]


@dataclass(frozen=True)
class Episode:
    """One episode of T steps."""

    observations: np.ndarray  # [T + 1, observations]
    actions: np.ndarray  # [T], candidate actions
    rewards: np.ndarray  # [T]
    terminated: bool  # whether the last step ended it for good
    propensities: np.ndarray | None = None  # [T, actions]


def from_gymnasium(
    env: Any,
    *,
    trajectories: int,
    horizon: int,
    behaviour: BehaviourFn | None = None,
    candidate_actions: ArrayLike | None = None,
    stride: int | None = None,
    discount: float = 0.95,
    world: World | None = None,
    seed: int = 0,
) -> Logs:
    """Record a Gymnasium environment; nothing of it is cloned.

    Args:
        env: An environment, or the id of a registered one.
        trajectories: Windows to record.
        horizon: Steps a window.
        behaviour: Probabilities of the candidate actions for a flat observation; uniform by
            default. They are kept as propensities.
        candidate_actions: `[actions, controls]`; all of a Discrete space by default.
        stride: Steps between windows of an episode; the horizon by default, so that they do
            not overlap.
        discount: Of the outcome.
        world: The same environment as a world, whose branches can then calibrate a model; the logs
            take its identity and its names.
        seed: Of the environment and the actions.
    """
    import gymnasium

    owned = isinstance(env, str)
    env = gymnasium.make(env) if owned else env
    try:
        candidates, controls = _candidates(env.action_space, candidate_actions)
        uniform = np.full(len(candidates), 1 / len(candidates))
        chances_fn = behaviour or (lambda observation: uniform)
        episodes = _record(env, controls, chances_fn, np.random.default_rng(seed), seed)
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        return windows(
            episodes,
            candidates,
            trajectories=trajectories,
            horizon=horizon,
            stride=stride,
            discount=discount,
            continuation="uniform" if behaviour is None else "behaviour",
            name=name,
            seed=seed,
            world=world,
            limit=None if env.spec is None else env.spec.max_episode_steps,
            patience=PATIENCE,
        )
    finally:
        if owned:
            env.close()


def from_minari(
    dataset: Any,
    *,
    horizon: int,
    candidate_actions: ArrayLike | None = None,
    tolerance: float = 1e-6,
    trajectories: int | None = None,
    stride: int | None = None,
    discount: float = 0.95,
    continuation: str = "behaviour",
    world: World | None = None,
    seed: int = 0,
) -> Logs:
    """Logs from a Minari data set, whose propensities are unknown.

    Args:
        dataset: A data set, or the id of a local one.
        horizon: Steps a window.
        candidate_actions: `[actions, controls]`; all of a Discrete space by default. A continuous
            action belongs to the nearest candidate within the tolerance; any other is an error,
            because it is none of the actions that are compared.
        tolerance: The largest distance of a logged action from its candidate. A large one makes
            each candidate stand for a neighbourhood, and the effect is then of the neighbourhood.
        trajectories: At most so many windows; all by default.
        stride: Steps between windows of an episode; the horizon by default.
        discount: Of the outcome.
        continuation: See `Logs.from_arrays`.
        world: See `from_gymnasium`.
        seed: Of what stands for actions after a termination, where they change nothing.
    """
    if isinstance(dataset, str):
        dataset = _minari().load_dataset(dataset)
    candidates, _ = _candidates(dataset.action_space, candidate_actions)
    from gymnasium import spaces

    space = dataset.observation_space

    def episodes() -> Iterator[Episode]:
        for episode in dataset.iterate_episodes():
            seen = _unstacked(episode.observations, len(episode.rewards) + 1)
            yield Episode(
                np.array([spaces.flatten(space, row) for row in seen], float),
                _nearest(np.asarray(episode.actions), candidates, tolerance),
                np.asarray(episode.rewards, float),
                bool(episode.terminations[-1]),
            )

    return windows(
        episodes(),
        candidates,
        trajectories=trajectories,
        horizon=horizon,
        stride=stride,
        discount=discount,
        continuation=continuation,
        name=dataset.spec.dataset_id,
        seed=seed,
        world=world,
        limit=None if dataset.env_spec is None else dataset.env_spec.max_episode_steps,
    )


def windows(
    episodes: Iterable[Episode],
    candidates: np.ndarray,
    *,
    trajectories: int | None,
    horizon: int,
    stride: int | None,
    discount: float,
    continuation: str,
    name: str,
    seed: int,
    world: World | None = None,
    limit: int | None = None,
    patience: int | None = None,
) -> Logs:
    """Windows of episodes as logs; see `from_gymnasium` for the arguments.

    `limit` is the time limit where it is known. So many episodes in a row as `patience` says, none
    with a window, are an error, because episodes that are recorded never end.
    """
    for what, value in (("horizon", horizon), ("stride", stride), ("trajectories", trajectories)):
        if value is not None and value < 1:
            raise ValueError(f"{what} must be at least 1; got {value}")
    if limit is not None and limit < horizon:
        raise ValueError(f"a window of {horizon} steps is longer than {name}'s limit of {limit}")
    step, seen, counts = stride or horizon, list[Episode](), Counter[int]()
    latest, truncated, found, idle = np.inf, 0, 0, 0
    for episode in episodes:
        seen.append(episode)
        counts.update(_begins(episode, horizon, step))
        if not episode.terminated:
            truncated = max(truncated, len(episode.actions))
        latest = (limit or truncated or np.inf) - horizon
        before, found = found, sum(num for begin, num in counts.items() if begin <= latest)
        if trajectories is not None and found >= trajectories:
            break
        idle = 0 if found > before else idle + 1
        if idle == patience:
            raise ValueError(
                f"{patience} episodes of {name} in a row have no window of {horizon} steps; the "
                f"longest of them has {_longest(seen[-idle:])}, and the longest that was "
                f"truncated {truncated}"
            )
    places = [(i, b) for i, e in enumerate(seen) for b in _begins(e, horizon, step) if b <= latest]
    if not places:
        raise ValueError(
            f"no episode of {name} has a window of {horizon} steps; the longest has "
            f"{_longest(seen)}, and the longest that was truncated {truncated}"
        )
    places, rng = places[:trajectories], np.random.default_rng(seed)
    cut = [_window(seen[i], begin, horizon, len(candidates), rng) for i, begin in places]
    chances = [p[begin] for i, begin in places if (p := seen[i].propensities) is not None]
    names = [f"obs_{i}" for i in range(seen[0].observations.shape[1])]
    if world is not None and not np.array_equal(world.candidate_actions, candidates):
        raise ValueError(
            f"the world's candidate actions are {world.candidate_actions.tolist()}; the logs have "
            f"{candidates.tolist()}; give the same to both"
        )
    return Logs.from_arrays(
        np.stack([np.append(seen[i].observations[begin], 0.0) for i, begin in places]),
        np.stack([actions for actions, _ in cut]),
        np.stack([features for _, features in cut]),
        candidate_actions=candidates,
        propensities=np.stack(chances) if len(chances) == len(places) else None,
        groups=[i for i, _ in places],
        continuation=continuation,
        discount=discount,
        observation_names=world.observation_names if world else [*names, "terminated"],
        feature_names=world.feature_names if world else [*names, "reward", "terminated"],
        world=world.identity() if world else {"name": name, "kind": "logs"},
    )


def _begins(episode: Episode, horizon: int, step: int) -> range:
    """Where windows of an episode begin whose outcome is known."""
    length = len(episode.actions)
    return range(0, length if episode.terminated else length - horizon + 1, step)


def _window(
    episode: Episode, begin: int, horizon: int, num_actions: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Actions `[horizon]`, arbitrary ones after a termination, and features of a window."""
    length, width = len(episode.actions), episode.observations.shape[1]
    stop = min(begin + horizon, length)
    features = np.zeros((horizon, width + 2))
    features[: stop - begin, :width] = episode.observations[begin + 1 : stop + 1]
    features[: stop - begin, width] = episode.rewards[begin:stop]
    if episode.terminated:  # from the last step on
        features[length - 1 - begin :, width + 1] = 1
    actions = rng.integers(num_actions, size=horizon)
    actions[: stop - begin] = episode.actions[begin:stop]
    return actions, features


def _longest(episodes: list[Episode]) -> int:
    return max((len(episode.actions) for episode in episodes), default=0)


def _record(
    env: Any,
    controls: list[Any],
    chances_fn: BehaviourFn,
    rng: np.random.Generator,
    seed: int,
) -> Iterator[Episode]:
    """Episodes without end."""
    from gymnasium import spaces

    while True:
        observation, _ = env.reset(seed=seed)
        seed, done = int(rng.integers(2**31)), False
        seen = [np.asarray(spaces.flatten(env.observation_space, observation), float)]
        actions, rewards, chances = list[int](), list[float](), list[np.ndarray]()
        terminated = False
        while not done:
            chances.append(np.asarray(chances_fn(seen[-1]), float))
            actions.append(int(draw_rows(chances[-1][None], rng.random(1))[0]))
            observation, reward, terminated, truncated, _ = env.step(controls[actions[-1]])
            seen.append(np.asarray(spaces.flatten(env.observation_space, observation), float))
            rewards.append(float(reward))
            done = terminated or truncated
        yield Episode(
            np.stack(seen), np.array(actions), np.array(rewards), terminated, np.stack(chances)
        )


def _candidates(space: Any, given: ArrayLike | None) -> tuple[np.ndarray, list[Any]]:
    """Candidate actions `[actions, controls]`, and as what the environment takes."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        numbers = np.arange(start, start + int(space.n)) if given is None else np.asarray(given)
        return numbers.reshape(-1, 1).astype(float), [int(number) for number in numbers.ravel()]
    if not isinstance(space, spaces.Box):
        raise ValueError(f"unsupported action space {space}; allowed: Discrete, Box")
    if given is None:
        raise ValueError(
            f"the actions of {space} are continuous; give candidate_actions [actions, controls] to "
            "say which of them are compared"
        )
    candidates = np.asarray(given, float)
    if candidates.ndim != 2 or candidates.shape[1] != int(np.prod(space.shape)):
        raise ValueError(
            f"candidate_actions must be [actions, {int(np.prod(space.shape))}]; "
            f"got {list(candidates.shape)}"
        )
    return candidates, [row.reshape(space.shape).astype(space.dtype) for row in candidates]


def _nearest(actions: np.ndarray, candidates: np.ndarray, tolerance: float) -> np.ndarray:
    """The candidate of each action, `[n]`."""
    flat = actions.reshape(len(actions), -1).astype(float)
    distances = np.linalg.norm(flat[:, None] - candidates, axis=-1)
    far = distances.min(axis=1) > tolerance
    if far.any():
        raise ValueError(
            f"{far.sum()} of {len(far)} logged actions of an episode are none of the "
            f"{len(candidates)} candidates, the first {flat[far][0].tolist()} at a distance of "
            f"{distances.min(axis=1)[far][0]:.3g}; give other candidate_actions or a larger "
            f"tolerance than {tolerance:g}"
        )
    return distances.argmin(axis=1)


def _unstacked(observations: Any, length: int) -> Iterator[Any]:
    """The observations of an episode one by one, also where they are dictionaries or tuples."""
    for t in range(length):
        yield _at(observations, t)


def _at(values: Any, t: int) -> Any:
    if isinstance(values, dict):
        return {key: _at(part, t) for key, part in values.items()}
    if isinstance(values, tuple):
        return tuple(_at(part, t) for part in values)
    return values[t]


def _minari() -> Any:
    try:
        return importlib.import_module("minari")
    except ImportError as error:
        raise ImportError(
            "reading Minari data sets needs the extra `logs`: pip install 'cqm[logs]'"
        ) from error
