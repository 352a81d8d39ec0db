"""Queries: rewards as weights on features, with an error estimate if a reward is not linear.

Adding a constant to a reward changes nothing, because an effect measure has total mass zero: the
constant of a formula is dropped, and so is the intercept of a projection. Formulas use
the simulator's feature names even if a world mixes a nuisance into its features; the weights are
then on the mixed features.
"""

from __future__ import annotations

import ast
import keyword
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from cqm import bounds
from cqm.arguments import (
    flag,
    function,
    instance,
    mapping,
    number,
    real_numbers,
    shown,
    texts,
    whole_number,
)
from cqm.display import html_facts
from cqm.names import quoted, unknown
from cqm.warn import warn_user
from cqm.worlds.contract import World
from cqm.worlds.features import sample_events, varies


class Named(Protocol):
    """Anything with named features: a world, branches, logs or a fitted model."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names, in the order of the features."""


Features: TypeAlias = Named | Sequence[str]  # something with named features, or the names
RewardFn: TypeAlias = Callable[[np.ndarray], np.ndarray]  # features [..., d] -> rewards [...]
Target: TypeAlias = Mapping[str, float] | ArrayLike  # values of some features by name, or of all

_ROUNDING = 1e-9  # unexplained share of the variance that is due to rounding
_POOR_FIT = 0.9  # R² below which projecting a reward warns
_MAX_EVENTS = 10_000_000  # to sample for a projection
_MAX_LENGTH, _MAX_DEPTH, _MAX_EXPONENT = 4000, 100, 32  # in a formula
_ARGUMENTS = {1: "abs sqrt exp log sin cos tanh", 2: "minimum maximum", 3: "clip where"}
_FUNCTIONS = {name: num for num, names in _ARGUMENTS.items() for name in names.split()}
_OPERATORS: dict[type, Callable[..., Any]] = {
    **{ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide},
    **{ast.Pow: np.power, ast.USub: np.negative, ast.UAdd: np.positive},
    **{ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal},
    **{ast.Eq: np.equal, ast.NotEq: np.not_equal},
}
_QUOTED = r"(?<!\w)`((?:[^`]|``)+)`(?!\w)"  # a name in a formula; a backquote in it is doubled
_Expression = float | str | tuple[Any, ...]  # a number, a name, or a NumPy function and arguments


@dataclass(frozen=True)
class ProjectionError:
    """How far a reward is from being linear in the features, on a sample of events.

    An error is `|r − wᵀφ − c|`, with the constant c that minimises the largest error.
    """

    supremum: float  # the largest error in the sample: a lower estimate of ε_r
    quantiles: tuple[float, ...]  # 50, 90 and 99 % quantiles of the errors
    r_squared: float  # share of the variance explained, adjusted for the number of weights
    num_events: int

    @property
    def is_negligible(self) -> bool:
        """Whether the reward is linear up to rounding."""
        return 1 - self.r_squared <= _ROUNDING

    def __str__(self) -> str:
        return (
            f"R² {self.r_squared:.3f}, median error {self.quantiles[0]:.2g}, largest "
            f"{self.supremum:.2g} on {self.num_events} events"
        )


@dataclass(frozen=True, eq=False)
class Query:
    """A reward as weights on features.

    >>> print(Query.named({"x": -1.0, "speed": 0.5}, ["x", "y", "speed"]))
    -1*x + 0.5*speed (linear in the features)
    """

    weights: np.ndarray  # [features], float64
    name: str = "query"
    error: ProjectionError | None = None  # None if the reward is linear in the features
    reward_fn: RewardFn | None = None  # what is projected; None if it is linear or not known

    def __post_init__(self) -> None:
        weights = real_numbers("weights", self.weights, ("features",), finite=True).copy()
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a query must be text; got {shown(self.name)}")
        if self.error is not None:
            instance("error", self.error, ProjectionError, "a ProjectionError or None")
        if self.reward_fn is not None:
            function("reward_fn", self.reward_fn)
            if self.error is None:
                raise ValueError(
                    "a query with a reward_fn also needs the error of its projection; make it with "
                    "Query.formula or Query.goal"
                )
        weights.setflags(write=False)
        object.__setattr__(self, "weights", weights)

    def __str__(self) -> str:
        return f"{self.name} ({self._precision()})"

    def __repr__(self) -> str:
        return f"Query({str(self)!r}, weights on {self._weighted()})"

    def _repr_html_(self) -> str:
        facts = {"precision": self._precision(), "weights on": self._weighted()}
        return html_facts(f"Query: {self.name}", facts)

    def _precision(self) -> str:
        if self.error is None:
            return "linear in the features"
        other_ways = self.reward_fn is not None and not self.error.is_negligible
        return f"projected{' unless a model can integrate it' if other_ways else ''}: {self.error}"

    def _weighted(self) -> str:
        return f"{np.count_nonzero(self.weights)} of {len(self.weights)} features"

    @classmethod
    def vector(cls, weights: ArrayLike, features: Features, *, name: str = "vector") -> Query:
        """Plain weights, one per feature; on the mixed features if the world has a nuisance.

        >>> Query.vector([1.0, 0.0], ["x", "y"]).weights
        array([1., 0.])
        """
        return cls(_vector("weights", weights, _names(features)), name)

    @classmethod
    def direction(cls, weights: ArrayLike, features: Features, *, name: str = "direction") -> Query:
        """Weights on the native features, whether or not a nuisance is mixed into them.

        >>> from cqm.worlds import load_world
        >>> Query.direction(np.ones(6), load_world("reacher-easy", nuisance=64)).weights.shape
        (70,)
        """
        native = _vector("weights", weights, _names(_native(features)))
        return cls(features.mixed_weights(native) if isinstance(features, World) else native, name)

    @classmethod
    def named(cls, weights: Mapping[str, float], features: Features) -> Query:
        """Weights on some features by name; all others get zero.

        >>> Query.named({"y": 2.0}, ["x", "y"]).weights
        array([0., 2.])
        """
        names = _names(_native(features))
        weights = _values("weights", weights, names)
        direction = np.zeros(len(names))
        direction[_columns(weights, names)] = [*weights.values()]
        name = " + ".join(f"{weight:g}*{feature}" for feature, weight in weights.items())
        return cls.direction(direction, features, name=name)

    @classmethod
    def formula(
        cls,
        text: str,
        features: Features,
        *,
        events: ArrayLike | None = None,
        num_events: int = 4096,
        seed: int = 0,
    ) -> Query:
        """A reward written as a formula over named features.

        A linear formula is exact. Any other is projected onto the features by least squares, and a
        model that can evaluate the formula itself does so; see `EffectModel.answer`.

        Args:
            text: The formula, such as `"0.5*height - 0.1*abs(velocity_rootx)"`. It may contain
                numbers, feature names, parentheses, `+ - * / **`, comparisons (which give 1 or 0),
                abs, sqrt, exp, log, sin, cos, tanh, minimum, maximum, clip and where. Exponents
                must be numbers. A name with spaces or punctuation is written in backquotes.
            features: The world. If the formula is linear or `events` are given, it can also be any
                object with feature names, or the names themselves.
            events: Steps to fit the projection on, given by their native features
                `[..., features]`, such as the `steps` array of branches; by default, steps are
                sampled from the world.
            num_events: Number of steps to sample.
            seed: Random seed for the sample.

        >>> Query.formula("3 - (x + 2*y)/4", ["x", "y"]).weights
        array([-0.25, -0.5 ])
        """
        names = _names(_native(features))
        expression = _parsed(text, names)
        affine = _affine(expression, names)
        if affine is not None:
            return cls.direction(affine[:-1], features, name=text)
        sample = _events(features, events, num_events, seed)
        reward_fn = _FormulaReward(names, expression)
        projected = cls._projected(sample, reward_fn(sample), features, text)
        return replace(projected, reward_fn=reward_fn)

    @classmethod
    def goal(
        cls,
        target: Target,
        features: Features,
        *,
        squared: bool = False,
        events: ArrayLike | None = None,
        num_events: int = 4096,
        seed: int = 0,
    ) -> Query:
        """The negative Euclidean distance to a target, projected like a formula.

        Args:
            target: Values of some features by name, or of all features in their order.
            features: The world; if `events` are given, any object with feature names, or the names.
            squared: Whether to square the distance.
            events: As for `formula`.
            num_events: As for `formula`.
            seed: As for `formula`.

        >>> events = np.array([[-1.0, 1.0], [-2.0, 4.0], [1.0, 1.0], [3.0, 9.0], [0.0, 0.0]])
        >>> Query.goal({"x": 1.0}, ["x", "x^2"], squared=True, events=events).weights.round(12)
        array([ 2., -1.])
        """
        names = _names(_native(features))
        if isinstance(target, Mapping):
            target = _values("target", target, names)
        else:
            target = dict(zip(names, _vector("target", target, names), strict=True))
        flag("squared", squared)
        if not target:
            raise ValueError(f"a goal needs a value for at least one of {list(names)}; got none")
        columns, sample = _columns(target, names), _events(features, events, num_events, seed)
        place = ", ".join(f"{feature}={value:g}" for feature, value in target.items())
        name = f"-{'squared distance' if squared else 'distance'} to {place}"
        reward_fn = _GoalReward(names, tuple(columns), tuple(target.values()), squared)
        projected = cls._projected(sample, reward_fn(sample), features, name)
        return replace(projected, reward_fn=reward_fn)

    @classmethod
    def samples(cls, events: ArrayLike, rewards: ArrayLike, features: Features) -> Query:
        """A reward known from examples: features `[n, features]` (native or mixed), rewards `[n]`.

        >>> Query.samples([[0.0], [1.0], [2.0]], [5.0, 7.0, 9.0], ["x"]).weights.round(12)
        array([2.])
        """
        given = real_numbers("events", events, ("...", "features"))
        if given.shape[-1:] == (len(_names(features)),):
            features = _names(features)
        sample = _events(features, given)
        return cls._projected(sample, rewards, features, f"regression on {len(sample)} samples")

    def regret_bound(
        self,
        effect_error: ArrayLike,
        discount: float,
        horizon: int | None,
        form: Literal["tight", "paper"] = "tight",
    ) -> np.ndarray:
        """Bound on the regret of the predicted best action, given the largest error of an effect.

        This is `bounds.combined_regret` for these weights. The projection
        error of a reward, `error`, is an estimate, so a bound that includes it is an estimate too.

        >>> float(Query([3.0, 4.0]).regret_bound(0.1, 0.95, 12))
        1.0
        """
        norm, supremum = np.linalg.norm(self.weights), self.error.supremum if self.error else 0.0
        return bounds.combined_regret(norm, effect_error, supremum, discount, horizon, form=form)

    @classmethod
    def _projected(
        cls, events: np.ndarray, rewards: ArrayLike, features: Features, name: str
    ) -> Query:
        weights, error = project(events, rewards)
        poor = error.r_squared < _POOR_FIT
        if poor or not weights.any():
            fit = f"is not linear (R² = {error.r_squared:.2f}); richer features may express it, or "
            fit += "model.reward_advantage may integrate it"
            problem = fit if poor else "is constant, so it prefers no action; pass other events"
            warn_user(f"on {len(events)} events, the reward {name!r} {problem}")
        return replace(cls.direction(weights, features, name=name), error=error)


@dataclass(frozen=True)
class _FormulaReward:
    """The reward of a formula, as a function of native features."""

    names: tuple[str, ...]
    expression: _Expression

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Rewards `[...]` of features `[..., features]`."""
        _check_features(features, self.names)
        columns = dict(zip(self.names, np.moveaxis(features, -1, 0), strict=True))
        return _evaluated(self.expression, columns)


@dataclass(frozen=True)
class _GoalReward:
    """The negative distance to a target, as a function of native features."""

    names: tuple[str, ...]
    columns: tuple[int, ...]
    target: tuple[float, ...]
    squared: bool

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Rewards `[...]` of features `[..., features]`."""
        _check_features(features, self.names)
        distances = np.linalg.norm(features[..., list(self.columns)] - self.target, axis=-1)
        return -(distances**2) if self.squared else -distances


def _check_features(features: np.ndarray, names: tuple[str, ...]) -> None:
    if features.shape[-1:] != (len(names),):
        raise ValueError(
            f"the reward is a function of {len(names)} features ({', '.join(names[:8])}"
            f"{', …' if len(names) > 8 else ''}); got features of shape {features.shape}"
        )


QueryLike: TypeAlias = Query | Sequence[Query] | np.ndarray  # one, several, or plain weights


def project(events: ArrayLike, rewards: ArrayLike) -> tuple[np.ndarray, ProjectionError]:
    """Least-squares weights `[features]` for a reward up to a constant; minimum norm if not unique.

    >>> weights, error = project([[0.0], [1.0], [2.0], [3.0]], [1.0, 0.0, 0.0, 1.0])
    >>> abs(weights).round(12), error.supremum
    (array([0.]), 0.5)
    """
    events, rewards = real_numbers("events", events), real_numbers("rewards", rewards)
    if events.ndim != 2 or rewards.shape != events.shape[:1] or len(events) < 2:
        got = f"{list(events.shape)} and {list(rewards.shape)}"
        raise ValueError(f"a projection needs events [n, features] and rewards [n]; got {got}")
    num, width = events.shape
    bad = num - np.sum(np.isfinite(rewards) & np.isfinite(events).all(axis=1))
    if bad:
        raise ValueError(f"reward and features must be finite; {bad} of {num} events are not")
    size = np.abs(rewards).max(initial=0.0) or 1.0
    target = np.where(varies(rewards), rewards / size - np.mean(rewards / size), 0.0)
    centred = np.where(varies(events), events - events.mean(axis=0), 0.0)
    # Columns are scaled to unit variance, so that the rank does not depend on the features' units.
    scale = np.where(varies(events), centred.std(axis=0), 1.0)
    left, values, right = np.linalg.svd(centred / scale, full_matrices=False)
    kept = values > max(num, width) * np.finfo(float).eps * values.max(initial=0.0)
    rank = int(kept.sum())
    if num <= rank + 1:
        raise ValueError(
            f"{num} events are too few to estimate the error; pass more than {width + 1}"
        )
    weights = right[kept].T @ (left[:, kept].T @ target / values[kept]) / scale
    if rank < width:  # keep only directions that the events span, in the features' own units
        basis, _ = np.linalg.qr((right[kept] * scale).T)
        weights = basis @ (basis.T @ weights)
    residuals = target - centred @ weights
    unexplained = np.mean(residuals**2) / (np.mean(target**2) or 1.0)
    errors = size * np.abs(residuals - (residuals.max() + residuals.min()) / 2)
    quantiles = tuple(np.quantile(errors, (0.5, 0.9, 0.99)).tolist())
    r_squared = float(1 - unexplained * (num - 1) / (num - rank - 1))
    return size * weights, ProjectionError(float(errors.max()), quantiles, r_squared, num)


def _parsed(text: str, names: Sequence[str]) -> _Expression:
    """Parse a formula in a small subset of Python's grammar; nothing in it is executed."""
    if not isinstance(text, str) or len(text) > _MAX_LENGTH:
        raise ValueError(f"a formula is text of up to {_MAX_LENGTH} characters; got {text!r:.80}")
    text = text.strip()
    source, hidden = _readable(text, names)
    try:
        root = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where, problem, quoting = "", str(error), ""
        if isinstance(error, SyntaxError):
            where, problem = _place(text, error), error.msg
            quoting = _quoting(source, [name for name in names if not _is_expression(name)])
        raise ValueError(
            f"the formula {text[:80]!r} cannot be parsed{where}: {problem}{quoting}"
        ) from None

    def span(node: Any) -> tuple[int, int]:
        lines = source.encode().splitlines(keepends=True)  # Python counts bytes in a line
        ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        start, end = (
            len(b"".join([*lines[: line - 1], lines[line - 1][:column]]).decode())
            for line, column in ends
        )
        return start, end

    def expression(node: ast.AST, depth: int) -> _Expression:
        if depth > _MAX_DEPTH:
            raise ValueError(f"a formula must not be nested deeper than {_MAX_DEPTH} levels")
        match node:
            case ast.Constant(int() | float() as x) if type(x) is not bool and abs(x) < 1e300:
                return float(x)
            case ast.Name(name):
                name = hidden.get(span(node)[0], name)
                if name not in names:
                    quoting = _quoting(source, names, *span(node))
                    raise ValueError(f"{unknown('feature', name, names)}{quoting}")
                return name
            case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)], expression(operand, depth + 1)
            case ast.BinOp(a, op, b) | ast.Compare(a, [op], [b]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)], expression(a, depth + 1), expression(b, depth + 1)
            case ast.Call(ast.Name(name), args, []) if _FUNCTIONS.get(name) == len(args):
                return getattr(np, name), *(expression(arg, depth + 1) for arg in args)
        start, end = span(node)
        raise ValueError(
            f"{text[start:end][:80]!r} cannot be part of a formula; allowed: numbers, names, "
            "+ - * / **, one comparison, parentheses, functions by their number of arguments "
            f"{_ARGUMENTS}{_quoting(source, names, start, end)}"
        )

    return expression(root, 0)


def _readable(text: str, names: Sequence[str]) -> tuple[str, dict[int, str]]:
    """The formula with underscores in place of names that Python cannot read; these, by position.

    >>> _readable("yield - `pain score`", ["yield", "pain score"])
    ('_____ - ____________', {0: 'yield', 8: 'pain score'})
    """
    hidden = {}

    def hide(found: re.Match[str]) -> str:
        hidden[found.start()] = found[0] if found[1] is None else found[1].replace("``", "`")
        return "_" * len(found[0])

    # Keywords, and letters that Python replaces by similar ones, such as the sign for micro.
    words = [name for name in names if name.isidentifier()]
    words = [n for n in words if keyword.iskeyword(n) or unicodedata.normalize("NFKC", n) != n]
    patterns = [_QUOTED, *(rf"(?<!\w){word}(?!\w)" for word in words)]  # accents may end words
    return re.sub("|".join(patterns), hide, text), hidden


def _place(text: str, error: SyntaxError) -> str:
    """Where a formula cannot be parsed, in words."""
    before = text.split("\n")[: (error.lineno or 1) - 1]
    start = sum(len(line) + 1 for line in before) + (error.offset or 0) - 1
    rest = text[start : start + 20] if error.offset else ""  # 0 where the text ends too early
    return f" at character {start + 1}, {rest!r}" if rest else " at its end"


def _quoting(source: str, names: Sequence[str], start: int = 0, end: int | None = None) -> str:
    """The advice to quote a name that overlaps part of a formula; none if there is no such name."""
    end = len(source) if end is None else end
    for name in sorted((name for name in names if not name.isidentifier()), key=len, reverse=True):
        for found in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", source):
            if found.start() < end and found.end() > start:
                return f"; write the feature {name!r} in backquotes: {quoted(name)}"
    return ""


def _is_expression(name: str) -> bool:
    """Whether Python reads a name as an expression, so that it is no syntax error."""
    try:
        ast.parse(name, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@np.errstate(all="ignore")  # `project` refuses values that are not finite
def _evaluated(expression: _Expression, columns: Mapping[Any, np.ndarray]) -> Any:
    """The value of an expression in which names stand for columns `[n]`."""
    if not isinstance(expression, tuple):
        return columns.get(expression, expression)
    fn, *args = expression
    return np.asarray(fn(*[_evaluated(arg, columns) for arg in args]), float)


@np.errstate(all="ignore")
def _affine(expression: _Expression, names: Sequence[str]) -> np.ndarray | None:
    """Weights and constant `[features + 1]` of a linear expression; None for any other."""
    one = (np.arange(len(names) + 1) == len(names)).astype(float)
    if isinstance(expression, str):
        return np.roll(one, 1 + names.index(expression))
    if not isinstance(expression, tuple):
        return expression * one
    fn, args = expression[0], [_affine(arg, names) for arg in expression[1:]]
    numbers = [None if arg is None or arg[:-1].any() else arg[-1] for arg in args]
    if fn is np.power and (numbers[1] is None or not abs(numbers[1]) <= _MAX_EXPONENT):
        got = "features" if numbers[1] is None else f"{numbers[1]:g}"
        raise ValueError(f"an exponent must be a number within ±{_MAX_EXPONENT}; got {got}")
    if all(number is not None for number in numbers):
        return fn(*numbers) * one
    if any(arg is None for arg in args):
        return None
    if fn in (np.add, np.subtract, np.negative, np.positive):
        return fn(*args)
    if fn is np.multiply and numbers[1] is None:
        args, numbers = args[::-1], numbers[::-1]
    if fn in (np.multiply, np.divide) and numbers[1] is not None:
        return fn(args[0], numbers[1])
    return args[0] if fn is np.power and numbers[1] == 1 else None


def _native(features: Features) -> Features:
    return features.native if isinstance(features, World) else features


def _names(features: Features) -> tuple[str, ...]:
    names: Any = getattr(features, "feature_names", features)
    if callable(getattr(features, "fit", None)) and names is features:
        raise ValueError(f"features must come from a fitted model; fit {shown(features)} first")
    try:
        return texts("features", names)
    except ValueError:
        raise ValueError(
            f"features must be a world, a data set, a fitted model or names; got {shown(features)}"
        ) from None


def _columns(wanted: Iterable[str], names: Sequence[str]) -> list[int]:
    for name in wanted:
        if name not in names:
            raise unknown("feature", name, names)
    return [names.index(name) for name in wanted]


def _vector(what: str, values: ArrayLike, names: Sequence[str]) -> np.ndarray:
    values = real_numbers(what, values, finite=True)
    if values.shape != (len(names),):
        raise ValueError(
            f"{what} must be [{len(names)}], one per feature; got shape {values.shape}"
        )
    return values


def _values(what: str, given: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Numbers by the name of a feature, checked."""
    _columns(mapping(what, given, "numbers by feature name"), names)
    return {name: number(f"{what}[{name!r}]", value) for name, value in given.items()}


def _events(
    features: Features, events: ArrayLike | None = None, num_events: int = 4096, seed: int = 0
) -> np.ndarray:
    """Native features `[n, features]`: those given, or a sample from the world."""
    native = _native(features)
    if events is None:
        if not isinstance(native, World):
            raise ValueError(
                "a reward that is not linear in the features needs a world to sample events from, "
                f"or events=...; got {type(features).__name__}"
            )
        num_events = whole_number("num_events", num_events, least=1, most=_MAX_EVENTS)
        return sample_events(native, num_events, seed=whole_number("seed", seed, least=0))
    events, names = real_numbers("events", events), _names(native)
    if events.ndim < 2 or events.shape[-1] != len(names):
        raise ValueError(f"events must be [..., features] {names}; got shape {events.shape}")
    return events.reshape(-1, len(names))
