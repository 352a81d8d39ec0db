"""The world contract: what a simulator must offer to be branched.

A world works on batches. Its states are a plain dictionary of arrays with one row a state,
opaque to everybody but the world that made them, so that a state is cloned by copying rows.
Everything random enters as an argument: `reset` takes a generator, `rollout` takes noise that was
drawn beforehand. The outcome of a branch is therefore a function of (state, controls, noise),
and branches that share noise differ by their controls alone.
"""

from __future__ import annotations

import abc
import enum
import json
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import numpy as np
import numpy.typing as npt

States = dict[str, np.ndarray]
T = TypeVar("T")


class Status(enum.IntEnum):
    """What became of one branch; anything but OK removes its whole family."""

    OK = 0
    DIVERGED = 1
    NOT_FINITE = 2
    RAISED = 3


@dataclass(frozen=True)
class Rollout:
    """The result of rolling out a batch."""

    features: np.ndarray  # [n, horizon, features]; unspecified where the status is not OK
    status: np.ndarray  # [n], of Status
    states: States  # after the last step; empty where they were not asked for
    error: str = ""  # what the first branch that RAISED did raise, to show somebody


class World(abc.ABC):
    """A simulator that can reset, clone and roll out a batch of states.

    `rollout` may be called from several threads at once.
    """

    name: str
    observation_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    control_low: np.ndarray  # [controls]
    control_high: np.ndarray  # [controls]
    candidate_actions: np.ndarray  # [actions, controls], the finite set that is compared
    cloning: str  # how a state is cloned, in a few words
    continuous: bool = True  # whether every control between the bounds is allowed

    @abc.abstractmethod
    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states."""

    @abc.abstractmethod
    def observe(self, states: States) -> np.ndarray:
        """Observations `[n, observations]` of states, which stay as they are."""

    @abc.abstractmethod
    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop; the given states stay as they are.

        Args:
            states: `n` states.
            controls: `[n, horizon, controls]`.
            noise: `[n, horizon, noise]` from `sample_noise`.
            final: Whether the states after the last step are wanted. Branches do not need
                them, and a simulator may be faster without.
        """

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON-able `name`, `kind`, parameters and versions; stored with every data set.

        Whatever determines the outcomes belongs into it, because worlds of equal identities may
        continue each other's sets. `kind` says what the world is made by, such as `gymnasium`.
        """

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """Exogenous noise for `num` rollouts, `[num, horizon, noise]`; none by default."""
        return np.empty((num, horizon, 0))

    def store(self, states: States) -> dict[str, np.ndarray]:
        """The part of the states that is kept on disk; enough for `restore`."""
        return states

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States from what `store` kept."""
        return dict(arrays)

    @final
    def step(self, states: States, controls: np.ndarray, noise: np.ndarray) -> Rollout:
        """Roll one step forward: controls `[n, controls]`, noise `[n, noise]`."""
        return self.rollout(states, controls[:, None], noise[:, None])


class PerThread(Generic[T]):
    """One object a thread, made on first use; a copy sent to another process starts empty."""

    def __init__(self, make_fn: Callable[[], T]):
        self._make_fn, self._local = make_fn, threading.local()

    def get(self) -> T:
        """This thread's object."""
        if not hasattr(self._local, "value"):
            self._local.value = self._make_fn()
        return self._local.value

    def __reduce__(self) -> tuple[Any, ...]:
        return PerThread, (self._make_fn,)


def stored_identity(world: World) -> dict[str, Any]:
    """A world's identity as it is read back from a file, where a tuple is a list."""
    identity = world.identity()
    missing = [key for key in ("name", "kind") if key not in identity]
    if missing:
        raise ValueError(f"the identity of a world needs {missing}; got {identity}")
    try:
        return json.loads(json.dumps(identity, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the identity of a world must be JSON-able: {error}") from error


def num_states(states: Mapping[str, np.ndarray]) -> int:
    """The number of rows of a batch of states."""
    return len(next(iter(states.values())))


def take(states: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> States:
    """Clone chosen rows; a row may be taken several times.

    >>> take({"x": np.array([1.0, 2.0])}, np.array([1, 1, 0]))
    {'x': array([2., 2., 1.])}
    """
    return {name: values[rows] for name, values in states.items()}


def concatenate(batches: Sequence[Mapping[str, np.ndarray]]) -> States:
    """Join batches of states of one world."""
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def prototype_actions(
    low: np.ndarray, high: np.ndarray, *, name: str = "", seed: int = 0
) -> np.ndarray:
    """The paper's candidate actions for a control box, `[actions, controls]`.

    One control dimension gets its bounds and their middle. More get the middle and two
    random directions with their antithetic negatives, each scaled until its largest component
    reaches the bound. The second direction is drawn again while it is within 45° of the line of
    the first, since nearly equal actions compare nothing. World's name and seed fix them.

    >>> prototype_actions(np.array([-1.0]), np.array([1.0])).ravel().tolist()
    [-1.0, 0.0, 1.0]
    """
    low, high = np.asarray(low, float), np.asarray(high, float)
    flat = low.shape == high.shape and low.ndim == 1 and low.size > 0
    if not flat or not np.all(np.isfinite([low, high])):
        raise ValueError(
            f"prototype actions need a bounded control box; got low={low}, high={high}; "
            "give candidate actions explicitly"
        )
    middle, reach = (low + high) / 2, (high - low) / 2
    if low.size == 1:
        return np.stack([low, middle, high])
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    first, second = rng.standard_normal((2, low.size))
    while abs(first @ second) > np.sqrt(0.5) * np.linalg.norm(first) * np.linalg.norm(second):
        second = rng.standard_normal(low.size)
    directions = np.stack([first, second])
    directions /= np.abs(directions).max(axis=1, keepdims=True)
    return middle + reach * np.concatenate([np.zeros((1, low.size)), directions, -directions])


def checked_actions(
    given: npt.ArrayLike, low: np.ndarray, high: np.ndarray, *, continuous: bool = True
) -> np.ndarray:
    """A user's candidate actions, `[actions, controls]`, or a `ValueError` that says what may be.

    >>> checked_actions([[0], [1]], np.array([-1.0]), np.array([1.0])).tolist()
    [[0.0], [1.0]]
    """
    actions = np.array(given, float)
    shaped = actions.ndim == 2 and len(actions) > 1 and actions.shape[1] == len(low)
    inside = shaped and np.all(np.isfinite(actions) & (actions >= low) & (actions <= high))
    if not inside or (not continuous and np.any(actions % 1)):
        kind = "numbers" if continuous else "whole numbers"
        raise ValueError(
            f"candidate_actions cannot be {actions.tolist()}; allowed: at least 2 rows of "
            f"{len(low)} {kind} from {low.tolist()} to {high.tolist()}"
        )
    return actions


def candidate_actions(
    given: npt.ArrayLike | None,
    low: np.ndarray,
    high: np.ndarray,
    *,
    name: str,
    seed: int,
    continuous: bool = True,
) -> np.ndarray:
    """The candidate actions that a user gave, checked, or else the paper's for the control box."""
    if given is None:
        return prototype_actions(low, high, name=name, seed=seed)
    return checked_actions(given, low, high, continuous=continuous)


@dataclass(frozen=True)
class Check:
    """One line of a report."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """What some checks found; prints as a table, is true when every check passed."""

    title: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [self.title]
        for check in self.checks:
            mark = "ok  " if check.passed else "FAIL"
            lines.append(f"  {mark}  {check.name:<{width}}  {check.detail}".rstrip())
        return "\n".join(lines)


def check_world(world: World, *, num: int = 6, horizon: int = 5, seed: int = 0) -> Report:
    """Run the world contract on anybody's world.

    A world that passes can be branched: the same state, noise and controls give the same
    features bit for bit, whatever was simulated in between, in whichever order and thread.

    Args:
        world: The world to check.
        num: States to check on.
        horizon: Steps to roll.
        seed: Of the states, controls and noise.
    """
    checks: list[Check] = []

    def record(name: str, check_fn: Callable[[], str]) -> None:
        # A world under test may raise anything at all; the report is where that belongs.
        try:
            problem = check_fn()
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        checks.append(Check(name, not problem, problem))

    def rng(purpose: int) -> np.random.Generator:
        return np.random.default_rng([seed, purpose])

    record("declaration", lambda: _declaration_problem(world))
    if not checks[-1].passed:
        return Report(getattr(world, "name", type(world).__name__), tuple(checks))

    title = f"{world.name} (cloned by {world.cloning})"
    try:
        states = world.reset(num, rng(0))
        actions = rng(1).integers(len(world.candidate_actions), size=(num, horizon))
        controls = world.candidate_actions[actions]
        noise = world.sample_noise(num, horizon, rng(2))
        original = world.rollout(states, controls, noise)
    except Exception as error:
        checks.append(Check("runs", False, f"raised {type(error).__name__}: {error}"))
        return Report(title, tuple(checks))

    def runs() -> str:
        expected = (num, horizon, len(world.feature_names))
        if original.features.shape != expected:
            return f"features have shape {original.features.shape}, expected {expected}"
        if np.any(original.status != Status.OK):
            failed = f"{np.sum(original.status != Status.OK)} of {num} branches failed"
            return f"{failed}; one raised {original.error}" if original.error else failed
        if not np.all(np.isfinite(original.features)):
            return "features are not finite although every branch reports success"
        observations = world.observe(states)
        if observations.shape != (num, len(world.observation_names)):
            return (
                f"observations have shape {observations.shape}, "
                f"expected {(num, len(world.observation_names))}"
            )
        return ""

    def seeded_reset() -> str:
        again = world.observe(world.reset(num, rng(0)))
        return _difference("observations after the same reset", world.observe(states), again)

    def clone_fidelity() -> str:
        world.rollout(world.reset(num, rng(3)), controls[::-1], noise[::-1])
        again = world.rollout(states, controls, noise)
        return _difference("features rolled out a second time", original.features, again.features)

    def observing_is_passive() -> str:
        before = world.observe(states)
        world.rollout(states, controls, noise)
        return _difference("observations after a rollout", before, world.observe(states))

    def complete_state() -> str:
        # Steps of different states interleaved: whatever a state forgets, another leaves behind.
        features = np.empty_like(original.features)
        current = [take(states, slice(i, i + 1)) for i in range(num)]
        for t in range(horizon):
            for i in range(num):
                one = world.step(current[i], controls[i : i + 1, t], noise[i : i + 1, t])
                features[i, t], current[i] = one.features[0, 0], one.states
        problem = _difference("features stepped one by one", original.features, features)
        why = "the state may lack a variable, or rounding depends on batch or horizon"
        return problem and f"{problem}: {why}"

    def storage() -> str:
        kept = {name: np.array(values) for name, values in world.store(states).items()}
        opaque = [name for name, values in kept.items() if values.dtype == object]
        if opaque:
            return f"stored arrays {opaque} hold Python objects; only numbers can be stored"
        again = world.rollout(world.restore(kept), controls, noise)
        return _difference(
            "features rolled out from stored states", original.features, again.features
        )

    def duplicate_arms() -> str:
        twice = np.repeat(np.arange(num), 2)
        both = world.rollout(take(states, twice), controls[twice], noise[twice]).features
        return _difference("features of a duplicated arm", both[::2], both[1::2])

    def order_independence() -> str:
        order = rng(4).permutation(num)
        other = world.rollout(take(states, order), controls[order], noise[order])
        return _difference("features in another order", original.features[order], other.features)

    def thread_independence() -> str:
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(world.rollout, states, controls, noise) for _ in range(4)]
            results = [job.result() for job in jobs]
        problems = [
            _difference("features from threads", original.features, r.features) for r in results
        ]
        return next(filter(None, problems), "")

    def features_without_states() -> str:
        bare = world.rollout(states, controls, noise, final=False)
        return _difference(
            "features rolled out without final states", original.features, bare.features
        )

    record("runs", runs)
    record("reset follows its generator", seeded_reset)
    record("clone fidelity and shared noise", clone_fidelity)
    record("observing changes nothing", observing_is_passive)
    record("state is complete", complete_state)
    record("final states may be skipped", features_without_states)
    record("stored states roll out alike", storage)
    record("duplicate arms are identical", duplicate_arms)
    record("batch order does not matter", order_independence)
    record("threads do not matter", thread_independence)
    return Report(title, tuple(checks))


def _declaration_problem(world: World) -> str:
    """What is wrong with the world's declared names, bounds and actions, or nothing."""
    fields = World.__annotations__
    missing = [name for name in fields if not hasattr(world, name)]
    if missing:
        return f"attributes {missing} are missing"
    try:
        stored_identity(world)
    except ValueError as error:
        return str(error)
    low, high, actions = world.control_low, world.control_high, world.candidate_actions
    if actions.ndim != 2 or actions.shape[1] != len(low) or len(actions) < 2:
        return f"candidate_actions have shape {actions.shape}, need [at least 2, {len(low)}]"
    if np.any(actions < low) or np.any(actions > high):
        return "candidate_actions lie outside the control bounds"
    for field in ("observation_names", "feature_names"):
        names = getattr(world, field)
        if len(set(names)) != len(names):
            return f"{field} repeat: {sorted({n for n in names if names.count(n) > 1})}"
    return ""


def _difference(what: str, expected: np.ndarray, got: np.ndarray) -> str:
    """A sentence when two arrays are not equal bit for bit, otherwise nothing."""
    if expected.shape != got.shape:
        return f"{what} have shape {got.shape}, expected {expected.shape}"
    if np.array_equal(expected, got, equal_nan=True):
        return ""
    gap = np.abs(expected - got)[~(np.isnan(expected) & np.isnan(got))]
    return f"{what} differ by up to {gap.max():.3g}"
