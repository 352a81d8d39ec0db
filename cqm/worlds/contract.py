"""The world contract: what a simulator must offer to be branched.

A world works on batches. Its states are a plain dictionary of arrays with one row per state, so
that copying rows clones states; only the world itself interprets the arrays. Everything random
enters as an argument: `reset` takes a generator, and `rollout` takes noise that was drawn
beforehand. The outcome of a branch is therefore a function of (state, controls, noise), and
branches that share noise differ only through their controls.

The state holds all memory: whatever a later step depends on, such as the current level of a
fluctuating demand, is part of it. Noise is only what is new at each step (the innovations), drawn
without looking at the state. `World.noise_kind` says whether its numbers mean anything.
"""

from __future__ import annotations

import abc
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, final

import numpy as np

from cqm.arguments import real_numbers, shown
from cqm.display import counted, html_facts
from cqm.names import counted_actions, numbered, shortened

if TYPE_CHECKING:
    from cqm.worlds.nuisance import Nuisance

States = dict[str, np.ndarray]
MAX_BATCH = 10**8  # states, or steps, of one call
T = TypeVar("T")

NoiseKind = Literal["none", "signal", "seeds"]
"""What the noise of a world is.

- `none`: there is no noise, or it changes nothing.
- `signal`: its numbers enter the step, such as demand, price or wind. Similar numbers have similar
  consequences, apart from thresholds, so a model can learn from them.
- `seeds`: its numbers seed a random generator and mean nothing themselves.
"""


class Status(enum.IntEnum):
    """How one branch ended; any status but OK removes the branch's whole family."""

    OK = 0
    DIVERGED = 1
    NOT_FINITE = 2
    RAISED = 3


@dataclass(frozen=True)
class Rollout:
    """The result of rolling out a batch of `n` states."""

    features: np.ndarray  # [n, horizon, features]; unspecified if the status is not OK
    status: np.ndarray  # [n], values of Status
    states: States  # after the last step; empty if they were not requested
    error: str = ""  # message of the first exception; empty if no branch raised one
    drew: np.ndarray | None = None  # [n], whether a generator seeded by noise was used, if known


VECTORISE = (
    "each function is called with many states at once, one row each, and must return as many "
    "rows: use np.where instead of if, np.maximum instead of max"
)
"""What to change in code that handles one state at a time."""
NOT_VECTORISED = (IndexError, TypeError, ValueError)  # what such code usually raises


class World(abc.ABC):
    """A simulator that can reset, clone and roll out a batch of states.

    `rollout` may be called from several threads at once.
    """

    name: str
    observation_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    control_low: np.ndarray  # [controls]
    control_high: np.ndarray  # [controls]
    candidate_actions: np.ndarray  # [actions, controls], the controls being compared
    cloning: str  # how states are cloned, in a few words
    continuous: bool = True  # whether every control between the bounds is allowed
    runs_python: bool | None = None  # whether it runs Python code for every state; None if unknown
    noise_kind: NoiseKind = "none"  # must be set by a world that samples noise
    fixed_noise: bool = False  # whether all rollouts are meant to have the same noise
    nuisance: Nuisance | None = None  # the process mixed into observations and features
    mixing: Mapping[str, np.ndarray] | None = None  # its matrices for "observations" and "features"

    @functools.cached_property
    def action_names(self) -> tuple[str, ...]:
        """Names of the candidate actions; their indices unless a world sets this attribute.

        Names do not determine outcomes, so they are not part of the identity.
        """
        return numbered(len(self.candidate_actions))

    @property
    def native(self) -> World:
        """The world without its nuisance; a world without a nuisance is its own native world."""
        return self

    @abc.abstractmethod
    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states."""

    @abc.abstractmethod
    def observe(self, states: States) -> np.ndarray:
        """Observations of the states, `[n, observations]`; the states are not changed."""

    @abc.abstractmethod
    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop; the given states are not changed.

        Args:
            states: `n` states.
            controls: `[n, horizon, controls]`.
            noise: `[n, horizon, noise]` from `sample_noise`.
            final: Whether to return the states after the last step. Branching does not need them,
                and a simulator may be faster without them.
        """

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON-able `name`, `kind`, parameters and versions; stored with every data set.

        It must contain everything that determines the outcomes, because any world with the
        same identity may add to the data set. `kind` names the source, such as `gymnasium`.
        """

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """Exogenous noise for `num` rollouts, `[num, horizon, noise]`; none by default.

        A world that has noise declares what it is: `noise_kind` is `signal` or `seeds`. Undeclared
        noise is treated as seeds, and `check_world` reports it.
        """
        return np.empty((num, horizon, 0))

    def store(self, states: States) -> dict[str, np.ndarray]:
        """The arrays to keep on disk, from which `restore` rebuilds the states."""
        return states

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States rebuilt from the arrays that `store` returned."""
        return dict(arrays)

    def mixed_weights(self, direction: np.ndarray) -> np.ndarray:
        """Convert weights on the native features, `[..., native]`, to weights on the features."""
        direction = real_numbers("direction", direction)
        names = self.native.feature_names
        if direction.shape[-1:] != (len(names),):
            raise ValueError(
                f"a native direction has {len(names)} entries, one per native feature; "
                f"got shape {direction.shape}"
            )
        return direction

    def native_effects(self, effects: np.ndarray) -> np.ndarray:
        """Convert effects on the features to effects on the native features."""
        return effects

    def native_observations(self, observations: np.ndarray) -> np.ndarray:
        """Convert observations of this world to observations of the native world."""
        return observations

    @final
    def step(self, states: States, controls: np.ndarray, noise: np.ndarray) -> Rollout:
        """Roll every state one step forward: controls `[n, controls]`, noise `[n, noise]`."""
        controls = real_numbers("controls", controls, ("n", "controls"))
        noise = real_numbers("noise", noise, ("...", "noise"))  # a world's own may have more axes
        return self.rollout(states, controls[:, None], noise[:, None])

    def __repr__(self) -> str:
        if not hasattr(self, "candidate_actions"):  # in a debugger, before a world is complete
            return super().__repr__()
        observations = counted(len(self.observation_names), "observation")
        if self.nuisance is None:
            observations += f" ({shortened(self.observation_names)})"
        return (
            f"{type(self).__name__}({self.name}, {observations}, "
            f"{counted_actions(self.action_names)}, cloning: {self.cloning})"
        )

    def _repr_html_(self) -> str:
        controls = zip(self.action_names, self.candidate_actions.round(3).tolist(), strict=True)
        facts = {
            counted(len(names), what): shortened(names)
            for what, names in {
                "observation": self.observation_names,
                "feature": self.feature_names,
                "action": [f"{name} {control}" for name, control in controls],
            }.items()
        }
        return html_facts(f"World {self.name}", {**facts, "cloning": self.cloning})


class PerThread(Generic[T]):
    """One object per thread, made on first use; a copy sent to another process starts empty."""

    def __init__(self, make_fn: Callable[[], T]):
        self._make_fn, self._local = make_fn, threading.local()

    def get(self) -> T:
        """This thread's object."""
        if not hasattr(self._local, "value"):
            self._local.value = self._make_fn()
        return self._local.value

    def __reduce__(self) -> tuple[Any, ...]:
        return PerThread, (self._make_fn,)


def check_states(states: Mapping[str, np.ndarray], needed: Iterable[str]) -> int:
    """The number of states in a batch; raises unless it has the arrays that a world needs."""
    wanted = sorted(needed)
    if (
        not isinstance(states, Mapping)
        or not set(wanted) <= set(states)
        or not all(isinstance(values, np.ndarray) and values.ndim for values in states.values())
        or len({len(values) for values in states.values()}) != 1
    ):
        raise ValueError(
            f"states must be a dictionary of arrays {wanted} with one row per state, as `reset` "
            f"and `restore` return it; got {shown(states)}"
        )
    return num_states(states)


def check_inputs(
    states: Mapping[str, np.ndarray],
    needed: Iterable[str],
    controls: np.ndarray,
    noise: np.ndarray,
    widths: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Controls and noise of a rollout as arrays; raises unless they fit the states."""
    num = check_states(states, needed)
    axes = ("n", "horizon")
    controls = real_numbers("controls", controls, (*axes, "controls"))
    noise = real_numbers("noise", noise, (*axes, "noise"))
    horizon = controls.shape[1]
    if controls.shape != (num, horizon, widths[0]) or noise.shape != (num, horizon, widths[1]):
        raise ValueError(
            f"got controls {list(controls.shape)} and noise {list(noise.shape)}; allowed for "
            f"{num} states: [{num}, horizon, {widths[0]}] and [{num}, horizon, {widths[1]}]"
        )
    if horizon == 0:
        raise ValueError("a rollout needs at least 1 step; got controls of 0 steps")
    return controls, noise


def num_states(states: Mapping[str, np.ndarray]) -> int:
    """The number of states in a batch."""
    return len(next(iter(states.values())))


def take(states: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> States:
    """Clone the chosen rows; a row may be taken several times.

    >>> take({"x": np.array([1.0, 2.0])}, np.array([1, 1, 0]))
    {'x': array([2., 2., 1.])}
    """
    return {name: values[rows] for name, values in states.items()}


def padded_blocks(num: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The row numbers of each block, and the same numbers repeated to fill the block.

    The rounding of many computations depends on the number of rows, so all blocks have the same
    size. The result for a row then does not depend on how many other rows there are.

    >>> [(rows.tolist(), filled.tolist()) for rows, filled in padded_blocks(5, 3)]
    [([0, 1, 2], [0, 1, 2]), ([3, 4], [3, 4, 3])]
    """
    for start in range(0, num, size):
        rows = np.arange(start, min(start + size, num))
        yield rows, np.resize(rows, size)


def concatenate(batches: Sequence[Mapping[str, np.ndarray]]) -> States:
    """Join batches of states of the same world."""
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
