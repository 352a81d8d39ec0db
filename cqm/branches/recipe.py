"""The recipe of a set of branches, and the law of the actions after the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from cqm.arguments import (
    choice,
    flag,
    function,
    mapping,
    number,
    real_numbers,
    shown,
    text,
    texts,
    whole_number,
)
from cqm.names import MAX_ACTIONS

BLOCK = 256  # states per set of random streams; also the rows mixed at a time when reading

Actions = Literal["menu", "box"]
"""Where first actions come from: the world's candidate actions, or its control box."""
PolicyFn = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Policy:
    """A continuation that depends on the state.

    The branches of a family share the policy's noise, not its actions: in different states the
    same noise may choose different actions.

    >>> policy = Policy("push back", lambda observations, uniforms: (observations[:, 0] < 0) * 1)
    >>> policy.act(np.array([[0.5], [-0.5]]), np.array([0.1, 0.9])).tolist()
    [0, 1]
    """

    name: str
    act: PolicyFn  # observations [n, observations], uniforms [n] -> candidate actions [n]

    def __post_init__(self) -> None:
        text("the name of a policy", self.name)
        function("act", self.act)


@dataclass(frozen=True)
class Continuation:
    """The law of the actions after the first.

    >>> Continuation.of([0.25, 0.75]).draw(np.array([0.1, 0.6]), num_actions=2).tolist()
    [0, 1]
    >>> Continuation.of(Policy("push left", lambda observations, uniforms: 0)).open_loop
    False
    """

    law: str | tuple[float, ...] = "uniform"
    """`uniform` on the candidate actions, `box` for uniform on the control box, one probability per
    candidate action, or the name of a policy."""
    policy: Policy | None = field(default=None, compare=False, repr=False)
    """The policy itself; None for open-loop laws and when only its name is known."""

    @classmethod
    def of(cls, law: str | Sequence[float] | Policy | Continuation) -> Continuation:
        """Make a continuation from `uniform`, `box`, probabilities or a policy."""
        if isinstance(law, Continuation):
            return law
        if isinstance(law, Policy):
            if law.name in ("uniform", "box"):
                raise ValueError(
                    f"a policy must not be named {law.name!r}, which is a reserved name"
                )
            return cls(law.name, law)
        values = _plain(law)
        probabilities = isinstance(values, tuple) and all(_is_number(value) for value in values)
        if not probabilities and not (isinstance(values, str) and values):
            raise ValueError(
                "continuation must be 'uniform', 'box', one probability per candidate action or "
                f"a Policy; got {shown(law)}"
            )
        return cls(values)

    @property
    def open_loop(self) -> bool:
        """Whether later actions are drawn from a known law, independently of the state."""
        return self.law in ("uniform", "box") or isinstance(self.law, tuple)

    @property
    def on_box(self) -> bool:
        """Whether later actions are controls from the whole box, not candidate actions."""
        return self.law == "box"

    def probabilities(self, num_actions: int) -> np.ndarray:
        """Probability of each candidate action, `[actions]`, for an open-loop law."""
        num_actions = whole_number("num_actions", num_actions, least=1, most=MAX_ACTIONS)
        if isinstance(self.law, tuple):
            law = np.array(self.law, float)
            if law.shape != (num_actions,) or not np.all(law >= 0) or abs(law.sum() - 1) > 1e-6:
                raise ValueError(
                    f"continuation must give {num_actions} probabilities that sum to 1; "
                    f"got {self.law}"
                )
            return law
        if self.law == "uniform":
            return np.full(num_actions, 1 / num_actions)
        if self.on_box:
            raise ValueError(
                "the continuation 'box' draws controls from the whole box, so candidate actions "
                "have no probabilities"
            )
        raise ValueError(
            f"the continuation {self.law!r} names a policy, and its actions are unknown "
            f"without the Policy object; pass it, 'uniform' or {num_actions} probabilities"
        )

    def draw(self, uniforms: np.ndarray, num_actions: int) -> np.ndarray:
        """Draw candidate actions from an open-loop law, given uniform random numbers."""
        uniforms = real_numbers("uniforms", uniforms)
        if self.law == "uniform":
            num_actions = whole_number("num_actions", num_actions, least=1)
            return (uniforms * num_actions).astype(int)
        return draw_actions(self.probabilities(num_actions), uniforms)

    def describe(self, action_names: Sequence[str]) -> str:
        """What follows the first action, in words.

        >>> Continuation().describe(["idle", "charge"])
        'uniformly random actions'
        >>> Continuation.of([0.25, 0.75]).describe(["idle", "charge"])
        'random actions (idle 25%, charge 75%)'
        >>> Continuation.of([0, 1]).describe(["idle", "charge"])
        'charge at every step'
        """
        if self.law == "uniform":
            return "uniformly random actions"
        if self.on_box:
            return "uniformly random controls from the box"
        if isinstance(self.law, tuple):
            if len(names := texts("action_names", action_names)) != len(self.law):
                raise ValueError(
                    f"action_names must be {len(self.law)} names, one per probability; got "
                    f"{shown(action_names)}"
                )
            pairs = [(name, p) for name, p in zip(names, self.law, strict=True) if p > 0]
            if len(pairs) == 1:
                return f"{pairs[0][0]} at every step"
            return f"random actions ({', '.join(f'{name} {100 * p:.3g}%' for name, p in pairs)})"
        return "the logged behaviour" if self.law == "behaviour" else f"the policy {self.law!r}"

    def __str__(self) -> str:
        return str(self.law)


@dataclass(frozen=True)
class Recipe:
    """How to collect a set of branches; the recipe and the world determine every stored byte."""

    states: int = 20_000
    """Number of states to branch; a state is dropped and reported if one of its branches fails."""
    horizon: int = 12
    """Steps per branch, including the first action."""
    discount: float = 0.95
    """Discount factor of the outcome, the discounted sum of the features."""
    draws: int = 1
    """Number of times to draw the noise and the later actions in each state."""
    arms: int | Sequence[Sequence[int]] | None = None
    """How many actions to branch per state, chosen at random; or (in Python) a list of subsets, one
    of which is chosen at random per state. None branches all actions; with `actions="box"`, as many
    controls as there are candidate actions."""
    warmup: tuple[int, int] | None = (0, 20)  # None if unknown, as in logs
    """Minimum and maximum number of random controls applied to a state before it is branched."""
    continuation: Continuation = Continuation()
    """How to draw later actions: `uniform` on the candidate actions, `box` for uniform on the
    control box, one probability per action, or (in Python) a Policy."""
    per_step: bool = False
    """Keep the features of every step, not only those of the first step and the discounted sum."""
    seed: int = 0
    """Random seed for the collection."""
    actions: Actions = "menu"
    """First actions: `menu` for the candidate actions, or `box` for random controls from the whole
    control box, which differ from state to state."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            converted = Continuation.of(value) if name == "continuation" else _plain(value)
            object.__setattr__(self, name, converted)
        for name in ("states", "horizon", "draws"):
            whole_number(name, getattr(self, name), least=1)
        number("discount", self.discount, least=0, most=1)
        flag("per_step", self.per_step)
        whole_number("seed", self.seed, least=0)
        choice("actions", self.actions, get_args(Actions))
        if self.arms is not None:
            object.__setattr__(self, "arms", _checked_arms(self.arms))
        if self.actions == "box" and isinstance(self.arms, tuple):
            raise ValueError(
                "with actions='box', arms must be the number of controls per state; got subsets"
            )
        if self.warmup is not None and (
            not isinstance(self.warmup, tuple)
            or len(self.warmup) != 2
            or not all(type(length) is int for length in self.warmup)
            or not 0 <= self.warmup[0] <= self.warmup[1]
        ):
            raise ValueError(
                "warmup must be (minimum, maximum) with 0 <= minimum <= maximum; "
                f"got {shown(self.warmup)}"
            )

    @property
    def discounts(self) -> np.ndarray:
        """γᵏ for every step, `[horizon]`.

        >>> Recipe(horizon=3, discount=0.5).discounts.tolist()
        [1.0, 0.5, 0.25]
        """
        return self.discount ** np.arange(self.horizon)

    def discounted(self, steps: np.ndarray) -> np.ndarray:
        """Discounted sum over the steps, Σₖ γᵏ steps[..., k, :].

        The steps are added in order, so the bits of a row do not depend on the other rows.
        """
        total = np.zeros((*steps.shape[:-2], steps.shape[-1]))
        for k, weight in enumerate(self.discounts):
            total += weight * steps[..., k, :]
        return total

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON values, as manifests store it."""
        values = {**vars(self), "continuation": self.continuation.law}
        if self.actions == "menu":  # as in manifests from before `actions` existed
            del values["actions"]
        return json.loads(json.dumps(values))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` wrote; fields that older files lack take their defaults."""
        known = [each.name for each in fields(cls)]
        unknown = sorted(
            map(str, set(mapping("a recipe", values, "settings by name")) - set(known))
        )
        if unknown:
            raise ValueError(f"a recipe has no {unknown}; its fields are {known}")
        return cls(**values)


class RecipeFields(msgspec.Struct, forbid_unknown_fields=True):
    """Entries of a stored recipe; older files lack some. `Recipe` checks their values."""

    states: int
    horizon: int
    discount: float
    draws: int = 1
    arms: int | list[list[int]] | None = None
    warmup: tuple[int, int] | None = None
    continuation: str | list[float] = "uniform"
    per_step: bool = False
    seed: int = 0
    actions: str = "menu"


class WorldFields(msgspec.Struct):
    """Entries that every stored identity of a world has."""

    name: str
    kind: str


def draw_actions(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw actions with probabilities `[..., actions]`, given uniform random numbers `[...]`.

    >>> draw_actions(np.array([[0.2, 0.8], [0.2, 0.8]]), np.array([0.1, 0.3])).tolist()
    [0, 1]
    """
    return (uniforms[..., None] >= np.cumsum(probabilities, axis=-1)[..., :-1]).sum(axis=-1)


def _checked_arms(arms: Any) -> int | tuple[tuple[int, ...], ...]:
    """A number of arms, or sorted subsets of the actions."""
    if isinstance(arms, tuple):
        if not arms or not all(
            isinstance(subset, tuple) and all(type(action) is int for action in subset)
            for subset in arms
        ):
            raise ValueError(f"arms must be a number, or subsets of the actions; got {shown(arms)}")
        return tuple(tuple(sorted(subset)) for subset in arms)
    return whole_number("arms", arms, least=2)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Python numbers and tuples in place of NumPy's numbers, arrays and lists."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
