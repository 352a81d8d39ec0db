"""Sources of logs: Gymnasium environments recorded as they run, and Minari data sets.

Episodes are cut into windows of one length, each a decision and its outcome. Features are those of
`cqm.worlds.gym`: the next observation, the reward, and an indicator of termination. After a
termination the state is absorbing: zeros, with the indicator one.

The future after a time limit is unknown, so a window must start at least one horizon before it.
This also applies to windows that terminated in time: keeping them without those that the limit cuts
short would make late decisions look deadly. An unknown time limit is taken to be the length of the
longest truncated episode; truncation for other reasons cannot be distinguished from it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import function, number, real_numbers, shown
from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import BehaviourFn, Logs
from cqm.logs.shards import ShardedLogs
from cqm.logs.validate import NOT_IDENTIFIED
from cqm.logs.windows import Piece, gathered
from cqm.worlds.contract import World
from cqm.worlds.simulators import sim_extra

PATIENCE = 100  # consecutive episodes without a window after which recording gives up


@dataclass(frozen=True)
class Episode:
    """One episode of T steps."""

    observations: np.ndarray  # [T + 1, observations]
    actions: np.ndarray  # [T], candidate actions
    rewards: np.ndarray  # [T]
    terminated: bool  # whether the last step terminated the episode
    propensities: np.ndarray | None = None  # [T, actions]


@dataclass(frozen=True)
class Source:
    """Episodes and the environment they come from."""

    name: str
    episodes: Iterator[Episode]  # recorded while they are read, or read from a data set
    candidate_actions: np.ndarray  # [actions, controls]
    time_limit: int | None  # None if unknown
    endless: bool = False  # whether there is always another episode
    longest_fn: Callable[[], int] | None = None  # finds the length of the longest truncated episode


@contextlib.contextmanager
def recorded(
    env: Any, behaviour: BehaviourFn | None, candidate_actions: ArrayLike | None, seed: int
) -> Iterator[Source]:
    """Open a Gymnasium environment for recording; see `Logs.from_gymnasium`."""
    with sim_extra():
        import gymnasium

    if behaviour is not None:
        function("behaviour", behaviour)
    owned = isinstance(env, str)
    if owned:
        try:
            env = gymnasium.make(env)
        except Exception as error:  # an environment's own code may raise anything
            raise ValueError(f"Gymnasium cannot make {shown(env)}: {error}") from error
    elif not isinstance(env, gymnasium.Env):
        raise ValueError(f"env must be a gymnasium.Env or the id of one; got {shown(env)}")
    try:
        candidates, controls = _candidates(env.action_space, candidate_actions)
        uniform = np.full(len(candidates), 1 / len(candidates))
        behaviour = behaviour or (lambda observation: uniform)
        episodes = _record(env, controls, behaviour, np.random.default_rng(seed), seed)
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        limit = None if env.spec is None else env.spec.max_episode_steps
        yield Source(name, episodes, candidates, limit, endless=True)
    finally:
        if owned:
            env.close()


def read_minari(dataset: Any, candidate_actions: ArrayLike | None, tolerance: float) -> Source:
    """Open a Minari data set; see `Logs.from_minari`."""
    number("tolerance", tolerance, least=0)
    if isinstance(dataset, str):
        try:
            minari = importlib.import_module("minari")
        except ImportError as error:
            raise ImportError(
                "Minari data sets need the extra `logs`: pip install 'cqm[logs]'"
            ) from error
        try:
            dataset = minari.load_dataset(dataset)
        except Exception as error:  # Minari raises many kinds
            raise ValueError(
                f"Minari cannot load the data set {shown(dataset)}: {error}"
            ) from error
    if not hasattr(dataset, "iterate_episodes"):
        raise ValueError(f"dataset must be a Minari data set or its id; got {shown(dataset)}")
    from gymnasium import spaces

    candidates, _ = _candidates(dataset.action_space, candidate_actions)

    def episodes() -> Iterator[Episode]:
        for episode in dataset.iterate_episodes():
            steps = range(len(episode.rewards) + 1)
            rows = [_at(episode.observations, t) for t in steps]
            yield Episode(
                np.array([spaces.flatten(dataset.observation_space, row) for row in rows], float),
                _nearest(np.asarray(episode.actions), candidates, tolerance),
                np.asarray(episode.rewards, float),
                bool(episode.terminations[-1]),
            )

    def longest() -> int:
        truncated = (e for e in dataset.iterate_episodes() if not e.terminations[-1])
        return max((len(episode.rewards) for episode in truncated), default=0)

    limit = None if dataset.env_spec is None else dataset.env_spec.max_episode_steps
    return Source(dataset.spec.dataset_id, episodes(), candidates, limit, longest_fn=longest)


def windows(
    source: Source,
    trajectories: int | None,
    horizon: int,
    stride: int | None,
    discount: float,
    continuation: str | Sequence[float],
    world: World | None,
    action_names: Sequence[str] | None,
    seed: int,
    out: str | Path | None = None,
) -> Logs | ShardedLogs:
    """Cut episodes into windows; see `Logs.from_gymnasium` for the arguments."""
    name, candidates, limit = source.name, source.candidate_actions, source.time_limit
    if limit is not None and limit < horizon:
        raise ValueError(
            f"a window of {horizon} steps is longer than the time limit of {name}, {limit} steps"
        )
    if world is not None and not np.array_equal(world.candidate_actions, candidates):
        raise ValueError(
            "the world and the logs must have the same candidate actions; got "
            f"{world.candidate_actions.tolist()} and {candidates.tolist()}"
        )
    step = stride or horizon
    if out is None:
        chosen = _chosen(source, trajectories, horizon, step)
    else:
        chosen = _chosen_as_read(source, horizon, step)

    def make(**arrays: Any) -> Logs:
        names = [f"obs_{i}" for i in range(arrays["observations"].shape[1] - 1)]
        return Logs.from_arrays(
            **arrays,
            candidate_actions=candidates,
            action_names=world.action_names if world and action_names is None else action_names,
            continuation=continuation,
            discount=discount,
            observation_names=world.observation_names if world else [*names, "terminated"],
            feature_names=world.feature_names if world else [*names, "reward", "terminated"],
            world=world.identity() if world else {"name": name, "kind": "logs"},
        )

    rng = np.random.default_rng(seed)
    pieces = (_piece(*each, horizon, len(candidates), rng) for each in chosen)
    return gathered(
        pieces,
        make,
        out,
        most=trajectories,
        nothing=f"no episode of {name} has a window of {horizon} steps",
    )


Chosen = tuple[int, Episode, range]  # number of an episode, itself, and where windows start


def _chosen(source: Source, trajectories: int | None, horizon: int, step: int) -> Iterator[Chosen]:
    """The windows of all episodes, which are held in memory."""
    seen, counts = list[Episode](), Counter[int]()
    latest, truncated, found, idle = np.inf, 0, 0, 0
    for episode in source.episodes:
        seen.append(episode)
        counts.update(_starts(episode, horizon, step))
        if not episode.terminated:
            truncated = max(truncated, len(episode.actions))
        latest = (source.time_limit or truncated or np.inf) - horizon
        before, found = found, sum(num for start, num in counts.items() if start <= latest)
        if trajectories is not None and found >= trajectories:
            break
        idle = 0 if found > before else idle + 1
        if source.endless and idle == PATIENCE:
            raise ValueError(
                f"{PATIENCE} consecutive episodes of {source.name} have no window of {horizon} "
                f"steps; {_lengths(seen[-idle:], truncated)}"
            )
    if not found:
        raise ValueError(
            f"no episode of {source.name} has a window of {horizon} steps; "
            f"{_lengths(seen, truncated)}"
        )
    for i, episode in enumerate(seen):
        yield i, episode, _until(_starts(episode, horizon, step), latest)


def _chosen_as_read(source: Source, horizon: int, step: int) -> Iterator[Chosen]:
    """The same, one episode at a time; the time limit must be known, or be found beforehand."""
    limit = source.time_limit
    if limit is None and source.longest_fn is None:
        raise ValueError(
            f"the time limit of {source.name} is unknown, so windows cannot be chosen while "
            "episodes are recorded; wrap the environment in gymnasium.wrappers.TimeLimit, or leave "
            "out `out`"
        )
    if limit is None and source.longest_fn is not None:
        limit = source.longest_fn()
    latest, idle = (limit or np.inf) - horizon, list[Episode]()
    for i, episode in enumerate(source.episodes):
        starts = _until(_starts(episode, horizon, step), latest)
        idle = [] if starts else [*idle, episode]
        if source.endless and len(idle) == PATIENCE:
            raise ValueError(
                f"{PATIENCE} consecutive episodes of {source.name} have no window of {horizon} "
                f"steps; {_lengths(idle, limit or 0)}"
            )
        yield i, episode, starts


def _until(starts: range, latest: float) -> range:
    """The starts that are no later than `latest`."""
    return range(starts.start, int(min(starts.stop, latest + 1)), starts.step)


def _piece(
    number: int,
    episode: Episode,
    starts: range,
    horizon: int,
    num_actions: int,
    rng: np.random.Generator,
) -> Piece:
    """The windows of an episode, with an observation of whether it has terminated: never."""
    cut = [_window(episode, start, horizon, num_actions, rng) for start in starts]
    width = episode.observations.shape[1]
    observations = np.zeros((len(cut), width + 1))
    observations[:, :width] = episode.observations[list(starts)]
    known = episode.propensities
    return Piece(
        observations,
        np.array([actions for actions, _ in cut], int).reshape(-1, horizon),
        np.array([features for _, features in cut]).reshape(-1, horizon, width + 2),
        None if known is None else known[list(starts)],
        number,
    )


def _starts(episode: Episode, horizon: int, step: int) -> range:
    """Start steps of the windows in an episode whose outcomes are known."""
    length = len(episode.actions)
    return range(0, length if episode.terminated else length - horizon + 1, step)


def _window(
    episode: Episode, start: int, horizon: int, num_actions: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Actions `[horizon]`, random ones after a termination, and features of a window."""
    length, width = len(episode.actions), episode.observations.shape[1]
    stop = min(start + horizon, length)
    features = np.zeros((horizon, width + 2))
    features[: stop - start, :width] = episode.observations[start + 1 : stop + 1]
    features[: stop - start, width] = episode.rewards[start:stop]
    if episode.terminated:  # from the last step on
        features[length - 1 - start :, width + 1] = 1
    actions = rng.integers(num_actions, size=horizon)
    actions[: stop - start] = episode.actions[start:stop]
    return actions, features


def _lengths(episodes: list[Episode], truncated: int) -> str:
    """Lengths of the longest episode and of the longest truncated one, in words."""
    longest = max((len(episode.actions) for episode in episodes), default=0)
    return f"the longest has {longest} steps, the longest truncated one {truncated}"


def _record(
    env: Any,
    controls: list[Any],
    behaviour: BehaviourFn,
    rng: np.random.Generator,
    seed: int,
) -> Iterator[Episode]:
    """An endless sequence of episodes."""
    from gymnasium import spaces

    while True:
        observation, _ = env.reset(seed=seed)
        seed = int(rng.integers(2**31))
        seen = [np.asarray(spaces.flatten(env.observation_space, observation), float)]
        actions, rewards, propensities = list[int](), list[float](), list[np.ndarray]()
        terminated = truncated = False
        while not (terminated or truncated):
            try:
                given = behaviour(seen[-1])
            except Exception as error:  # a user's function may raise anything
                raise ValueError(f"behaviour raised {type(error).__name__}: {error}") from error
            propensities.append(_probabilities(given, len(controls)))
            actions.append(int(draw_actions(propensities[-1][None], rng.random(1))[0]))
            observation, reward, terminated, truncated, _ = env.step(controls[actions[-1]])
            seen.append(np.asarray(spaces.flatten(env.observation_space, observation), float))
            rewards.append(float(reward))
        yield Episode(
            np.stack(seen), np.array(actions), np.array(rewards), terminated, np.stack(propensities)
        )


def _probabilities(given: ArrayLike, num_actions: int) -> np.ndarray:
    """What a behaviour returned, checked to be a distribution over the candidate actions."""
    values = real_numbers("the result of behaviour", given)
    sound = values.shape == (num_actions,) and np.all(values >= 0)
    if not sound or abs(values.sum() - 1) > 1e-6:
        raise ValueError(
            f"behaviour must return {num_actions} probabilities that sum to 1; got {shown(values)}"
        )
    return values


def _candidates(space: Any, given: ArrayLike | None) -> tuple[np.ndarray, list[Any]]:
    """Candidate actions `[actions, controls]`, and the same in the environment's own form."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        last = start + int(space.n) - 1
        numbers = np.arange(start, last + 1, dtype=float)
        if given is not None:
            numbers = real_numbers("candidate_actions", given)
        if not np.isin(numbers, np.arange(start, last + 1)).all() or not numbers.size:
            raise ValueError(
                f"candidate_actions must be whole numbers in [{start}, {last}]; got {shown(given)}"
            )
        return numbers.reshape(-1, 1), [int(number) for number in numbers.ravel()]
    if not isinstance(space, spaces.Box):
        raise ValueError(f"unsupported action space {space}; allowed: Discrete, Box")
    if given is None:
        raise ValueError(
            f"the actions of {space} are continuous; pass candidate_actions [actions, controls], "
            f"the actions to compare; {NOT_IDENTIFIED}"
        )
    candidates = real_numbers("candidate_actions", given, finite=True)
    if candidates.ndim != 2 or candidates.shape[1] != int(np.prod(space.shape)):
        raise ValueError(
            f"candidate_actions must be [actions, {int(np.prod(space.shape))}]; "
            f"got {list(candidates.shape)}"
        )
    return candidates, [row.reshape(space.shape).astype(space.dtype) for row in candidates]


def _nearest(actions: np.ndarray, candidates: np.ndarray, tolerance: float) -> np.ndarray:
    """Candidate of each action, `[n]`."""
    flat = actions.reshape(len(actions), -1).astype(float)
    distances = np.linalg.norm(flat[:, None] - candidates, axis=-1)
    nearest = distances.min(axis=1)
    far = nearest > tolerance
    if far.any():
        raise ValueError(
            f"{far.sum()} of the {len(far)} logged actions of an episode are further than "
            f"{tolerance:g} from all {len(candidates)} candidate actions, the first, "
            f"{flat[far][0].tolist()}, by {nearest[far][0]:.3g}; pass other candidate_actions or a "
            "larger tolerance"
        )
    return distances.argmin(axis=1)


def _at(observations: Any, t: int) -> Any:
    """The observation at one time; handles dictionaries and tuples of arrays too."""
    if isinstance(observations, dict):
        return {key: _at(part, t) for key, part in observations.items()}
    if isinstance(observations, tuple):
        return tuple(_at(part, t) for part in observations)
    return observations[t]
