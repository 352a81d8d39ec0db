"""A world from plain functions: a step driven by an exogenous input, and features of each step.

Use it for inventory, energy, queueing, traffic and other simulators in which demand, weather or
arrivals come from outside, whether sampled or recorded.
"""

from __future__ import annotations

import functools
import hashlib
import html
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cqm.arguments import (
    choice,
    different_texts,
    flag,
    function,
    generator,
    real_numbers,
    shown,
    text,
    whole_number,
)
from cqm.names import checked_action_names
from cqm.worlds.actions import checked_actions
from cqm.worlds.contract import (
    MAX_BATCH,
    NOT_VECTORISED,
    VECTORISE,
    NoiseKind,
    Rollout,
    States,
    Status,
    World,
    check_inputs,
    check_states,
    padded_blocks,
    take,
)

# A state as the user's functions see it: an array [n, ...], or a dict of such arrays.
State = Any
StepFn = Callable[[State, Any, Any], State]  # state, action [n, controls], exogenous [n, e]
FeaturesFn = Callable[[State, Any, Any, State], Any]  # one transition -> [n, features]
ObserveFn = Callable[[State], Any]  # -> [n, observations]
InitialFn = Callable[[int, np.random.Generator], State]  # num, rng
ExogenousFn = Callable[[int, int, np.random.Generator], Any]  # num, horizon, rng -> [n, horizon, e]
_PARAMETERS = {
    "step": ("state", "action", "exogenous"),
    "initial": ("num", "rng"),
    "features": ("state", "action", "exogenous", "next_state"),
    "observe": ("state",),
    "exogenous": ("num", "horizon", "rng"),
}


class _NotVectorisedError(ValueError):
    """A function handles one state at a time; the message says what to change."""


_MAX_BLOCK = 2**20  # rows per call
_JAX_STEPS = 16  # steps per call of the compiled program
# What NumPy, Python and JAX say if code for one state is given many.
_ONE_STATE = re.compile(
    "ambiguous|boolean conversion|concrete|only (length-1|size-1|0-dim|integer scalar)|broadcast"
    "|align|mismatch|shape|out of bounds|to unpack|with a sequence|unhashable type: 'numpy"
)


class FunctionWorld(World):
    """A world whose dynamics, features and observations are vectorised functions.

    >>> world = FunctionWorld(
    ...     step=lambda stock, order, demand: np.maximum(stock + order - demand, 0.0),
    ...     initial=lambda num, rng: rng.uniform(0.0, 9.0, (num, 1)),
    ...     exogenous=lambda num, horizon, rng: rng.poisson(4.0, (num, horizon, 1)),
    ...     candidate_actions=[[0.0], [4.0], [8.0]],
    ...     feature_names=["stock"],
    ...     name="shop",
    ... )
    >>> stock = {"state": np.array([[5.0], [5.0]])}
    >>> orders, demand = np.array([[[0.0]], [[8.0]]]), np.full((2, 1, 1), 4.0)
    >>> world.rollout(stock, orders, demand).features.ravel()
    array([1., 9.])

    The functions are always called on `block_size` rows; the last block is padded with copies of
    its own rows. The rounding of a matrix product or of compiled code depends on the number of
    rows, and a branch must not depend on the other branches in its batch. One JAX
    program serves every horizon, because different programs may round differently. The functions
    receive copies, so they may work in place.

    A row with a NaN in its state or a non-finite feature ends with `Status.NOT_FINITE`; a row on
    which a function raises an exception ends with `Status.RAISED`. Other rows are unaffected.

    If a function handles only one state at a time, `check_world` and the first use of the world say
    what to change.

    Args:
        step: `(state, action, exogenous) -> next state`. A state is an array `[n, ...]` or a dict
            of such arrays, as `initial` returns it. It must contain everything that later steps
            depend on.
        initial: `(num, rng) -> state`, a sampler of initial states.
        candidate_actions: `[actions, controls]`.
        action_names: One name per candidate action; by default their indices.
        features: `(state, action, exogenous, next state) -> [n, features]`; by default the next
            state, flattened.
        observe: `state -> [n, observations]`; by default the state, flattened.
        exogenous: `(num, horizon, rng) -> [num, horizon, e]`, a sampler of the exogenous input. It
            does not see the state: if the input has memory, keep its level in the state and sample
            only what is new at each step.
        trace: Recorded exogenous input `[time, e]`, instead of `exogenous`; each rollout uses a
            window that starts at a random row.
        fixed_noise: Whether `exogenous` gives every rollout the same path on purpose, whatever the
            generator; without it, `check_world` takes such a path for a mistake.
        noise_kind: `"signal"` (the default) if the numbers of `exogenous` enter the step;
            `"seeds"` if they only seed random generators.
        control_low: Lower control bounds; by default the smallest candidate action.
        control_high: Upper control bounds; by default the largest candidate action.
        continuous: Whether every control between the bounds is allowed; False if only the
            candidate actions are meaningful, for example whole numbers.
        feature_names: One name per feature; by default `feature_0`, `feature_1`, ..., or, without
            `features`, the keys of a state that is a dict with one number per key.
        observation_names: One name per observation; by default `observation_0`, ..., or, without
            `observe`, the keys of such a state.
        name: Name stored with every data set; give worlds with different parameters different
            names.
        backend: `"numpy"`, or `"jax"` to compile `step` and `features`, which must then use
            `jax.numpy`; they compute in the precision that JAX is configured for.
        block_size: Number of rows per call; use 1 if the functions loop over rows.
    """

    cloning = "copy of the state arrays"

    def __init__(
        self,
        step: StepFn,
        initial: InitialFn,
        *,
        candidate_actions: npt.ArrayLike,
        action_names: Sequence[str] | None = None,
        features: FeaturesFn | None = None,
        observe: ObserveFn | None = None,
        exogenous: ExogenousFn | None = None,
        trace: npt.ArrayLike | None = None,
        fixed_noise: bool = False,
        noise_kind: NoiseKind = "signal",
        control_low: npt.ArrayLike | None = None,
        control_high: npt.ArrayLike | None = None,
        continuous: bool = True,
        feature_names: Sequence[str] | None = None,
        observation_names: Sequence[str] | None = None,
        name: str = "function",
        backend: str = "numpy",
        block_size: int = 256,
    ) -> None:
        choice("backend", backend, ("numpy", "jax"))
        if exogenous is not None and trace is not None:
            raise ValueError("got both exogenous and trace; pass at most one of them")
        if flag("fixed_noise", fixed_noise) and exogenous is None:
            raise ValueError("fixed_noise describes exogenous, which was not given")
        if choice("noise_kind", noise_kind, ("signal", "seeds")) == "seeds" and exogenous is None:
            raise ValueError("noise_kind='seeds' describes exogenous, which was not given")
        self.noise_kind = "none" if exogenous is None and trace is None else noise_kind
        self.name, self.backend = text("name", name), backend
        self.block_size = whole_number("block_size", block_size, least=1, most=_MAX_BLOCK)
        self.continuous = flag("continuous", continuous)
        actions = _finite("candidate_actions", candidate_actions, 2)
        low, high = actions.min(axis=0), actions.max(axis=0)
        self.control_low = _bound("control_low", control_low, low)
        self.control_high = _bound("control_high", control_high, high)
        self.candidate_actions = checked_actions(actions, self.control_low, self.control_high)
        self.action_names = checked_action_names(action_names, len(actions))
        self.trace = None if trace is None else _finite("trace", trace, 1)
        # A trace is recorded once: a window as long as the trace is the same for every rollout.
        self.fixed_noise = fixed_noise or trace is not None
        functions = dict(step=step, initial=initial, features=features, observe=observe)
        functions["exogenous"] = exogenous
        for role, fn in functions.items():
            if fn is not None or role in ("step", "initial"):
                _check_parameters(role, function(role, fn))
        self._function_names = {role: fn and qualified_name(fn) for role, fn in functions.items()}
        self._initial_fn, self._exogenous_fn = initial, exogenous
        self._run = self._run_numpy if backend == "numpy" else _compiled(self._advance)
        called: dict[str, Callable[..., Any]] = {"step": step, "observe": observe or _flat}
        called["features"] = features or (lambda *transition: _flat(transition[-1]))
        self._call = {role: _explained(role, fn) for role, fn in called.items()}
        self._problem = ""  # why the functions cannot be used, found by the probe
        self._probe(feature_names, observation_names)
        self._call = called

    def __getattr__(self, name: str) -> Any:
        # The widths of functions that are not vectorised are unknown, and so are these names.
        problem = vars(self).get("_problem")
        if problem and name in ("feature_names", "observation_names"):
            raise ValueError(problem)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        problem = vars(self).get("_problem")
        if problem:
            return f"{type(self).__name__}({self.name}, cannot be used: {problem})"
        return super().__repr__()

    def _repr_html_(self) -> str:
        return html.escape(repr(self)) if self._problem else super()._repr_html_()

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states."""
        num = whole_number("num", num, least=0, most=MAX_BATCH)
        states = self._variables("initial", self._initial_fn(num, generator("rng", rng)))
        like = {n: np.empty((num, *shape), dtype) for n, (shape, dtype) in self._layout.items()}
        return _conform("initial", _stored(states), like)

    def observe(self, states: States) -> np.ndarray:
        """Observations of the states, `[n, observations]`."""
        num = check_states(states, self._layout)
        observations = np.empty((num, len(self.observation_names)))
        for rows, filled in padded_blocks(len(observations), self.block_size):
            observations[rows] = self._observe_block(take(states, filled))[: len(rows)]
        return observations

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """Exogenous input for `num` rollouts, `[num, horizon, e]`: sampled, or trace windows."""
        num = whole_number("num", num, least=0, most=MAX_BATCH)
        horizon = whole_number("horizon", horizon, least=0, most=MAX_BATCH)
        generator("rng", rng)
        if self.trace is not None:
            if horizon > len(self.trace):
                raise ValueError(
                    f"the trace has {len(self.trace)} rows, too few for {horizon} steps; "
                    f"allowed: at most {len(self.trace)} steps, or a longer trace"
                )
            starts = rng.integers(len(self.trace) - horizon, size=num, endpoint=True)
            return self.trace[starts[:, None] + np.arange(horizon)]
        if self._exogenous_fn is None:
            return np.empty((num, horizon, 0))
        noise = _explained("exogenous", self._exogenous_fn)(num, horizon, rng)
        noise = real_numbers("the result of exogenous", noise)
        return _shaped("exogenous", noise, (num, horizon, None))

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop; see `World.rollout`."""
        widths = (len(self.control_low), self._noise_width)
        controls, noise = check_inputs(states, self._layout, controls, noise, widths)
        num, horizon = controls.shape[:2]
        flag("final", final)
        features = np.full((num, horizon, len(self.feature_names)), np.nan)
        status = np.full(num, Status.RAISED, np.int8)
        after = {name: values.copy() for name, values in states.items()} if final else {}
        errors: list[str] = []

        def roll(rows: np.ndarray, filled: np.ndarray) -> None:
            last, block, finite = self._run(take(states, filled), controls[filled], noise[filled])
            features[rows] = block[: len(rows)]
            status[rows] = np.where(finite, Status.OK, Status.NOT_FINITE)[: len(rows)]
            for name in after:
                after[name][rows] = last[name][: len(rows)]

        for rows, filled in padded_blocks(num, self.block_size):
            try:
                roll(rows, filled)
            except Exception:  # a user's function may raise anything; find the rows it fails on
                for row in rows:
                    try:
                        roll(row[None], np.full(self.block_size, row))
                    except Exception as error:
                        errors.append(repr(error))
        return Rollout(features, status, after, next(iter(errors), ""))

    def identity(self) -> dict[str, Any]:
        """JSON-able name, functions, actions, bounds, trace and versions."""
        versions, precision = {"numpy": np.__version__}, "float64"
        if self.backend == "jax":
            import jax

            versions["jax"] = jax.__version__
            precision = str(jax.dtypes.canonicalize_dtype(float))
        trace = None if self.trace is None else hashlib.sha256(self.trace.tobytes()).hexdigest()
        bounds = np.stack([self.control_low, self.control_high])
        return {
            "name": self.name,
            "kind": "function",
            "functions": self._function_names,
            "backend": self.backend,
            "precision": precision,
            "block_size": self.block_size,
            "candidate_actions": self.candidate_actions.tolist(),
            # Infinity is not JSON; with infinite bounds the warm-up uses only candidate actions.
            "control_bounds": bounds.tolist() if np.isfinite(bounds).all() else None,
            "continuous": self.continuous,
            "trace": trace,
            **({"fixed_noise": True} if self.fixed_noise and self.trace is None else {}),
            "versions": versions,
        }

    def _probe(
        self, feature_names: Sequence[str] | None, observation_names: Sequence[str] | None
    ) -> None:
        """Roll one block one step forward, to learn the shapes and report mistakes early."""
        rng, num = np.random.default_rng(0), len(self.candidate_actions)
        state = _explained("initial", self._initial_fn)(num, rng)
        self._is_dict = isinstance(state, Mapping)
        self._layout = {n: (v.shape[1:], v.dtype) for n, v in _stored(state).items()}
        noise = self.sample_noise(num, 1, rng)
        self._noise_width = noise.shape[2]
        _, filled = next(padded_blocks(num, self.block_size))
        start = self.reset(num, rng)
        for name, values in start.items():
            if np.isnan(values).any():
                what = f"{name!r}" if self._is_dict else "the state"
                raise ValueError(f"initial returned NaN in {what}; allowed: states without NaN")
        states = take(start, filled)
        controls = self.candidate_actions[filled][:, None]
        try:
            _, features, finite = self._run(states, controls, noise[filled])
            observations = self._observe_block(states)
        except _NotVectorisedError as error:
            self._problem = str(error)
            return
        if not finite.all():
            actions = sorted(set(filled[~finite].tolist()))
            raise ValueError(
                f"step or features returned NaN or infinity one step after initial, with candidate "
                f"actions {actions}; allowed: finite features, and states without NaN"
            )
        widths = features.shape[2], observations.shape[1]
        after, before = self._keys("features"), self._keys("observe")
        self.feature_names = _names("feature", feature_names, widths[0], after)
        self.observation_names = _names("observation", observation_names, widths[1], before)
        if self.feature_names == self.observation_names and bool(after) != bool(before):
            # Equal names declare that the features are the next observation, which a function of
            # the user's need not return; only the user may declare it.
            if feature_names is None:
                self.feature_names = _names("feature", None, widths[0])
            elif observation_names is None:
                self.observation_names = _names("observation", None, widths[1])

    def _keys(self, role: str) -> tuple[str, ...]:
        """The state's key in each column; none for a user's function or a state without keys."""
        if self._function_names[role] is not None or not self._is_dict:
            return ()
        sizes = {name: math.prod(shape) for name, (shape, _) in self._layout.items()}
        return tuple(name for name, size in sizes.items() for _ in range(size))

    def _variables(self, source: str, state: State) -> dict[str, Any]:
        """The variables of a state from a user's function, which must be those of all states."""
        wanted = f"a dict with keys {[*self._layout]}" if self._is_dict else "an array"
        if (
            state is None
            or isinstance(state, Mapping) != self._is_dict
            or (self._is_dict and set(state) != set(self._layout))
        ):
            raise ValueError(f"{source} must return {wanted}; got {_described(state)}")
        return _packed(state)

    def _shown(self, states: States) -> State:
        """A copy of the states in the form that the user's functions see."""
        # In the order in which `initial` returns them: JAX and files sort variables by name.
        copies = {name: states[name].copy() for name in self._layout}
        return copies if self._is_dict else copies["state"]

    def _observe_block(self, states: States) -> np.ndarray:
        """Observations of one block."""
        observations = self._call["observe"](self._shown(states))
        observations = real_numbers("the result of observe", observations)
        return _shaped("observe", observations, (self.block_size, None))

    def _advance(self, states: States, action: Any, exogenous: Any) -> tuple[States, Any, Any]:
        """Step one block; returns next states, features and which rows are finite."""
        xp, rows = action.__array_namespace__(), len(action)
        following = self._call["step"](self._shown(states), action.copy(), exogenous.copy())
        following = _conform("step", self._variables("step", following), states)
        features = self._call["features"](
            self._shown(states), action.copy(), exogenous.copy(), self._shown(following)
        )
        features = _shaped("features", _numbers(xp, "features", features), (rows, None))
        finite = xp.isfinite(features).all(axis=1)
        for values in following.values():  # a state may be infinite ("never"), but not NaN
            finite = finite & ~xp.isnan(values).reshape(rows, -1).any(axis=1)
        return following, features, finite

    def _run_numpy(
        self, states: States, controls: np.ndarray, noise: np.ndarray
    ) -> tuple[States, np.ndarray, np.ndarray]:
        """Roll out one block; returns final states, features and which rows stayed finite."""
        features, finite = [], np.ones(self.block_size, bool)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # the status reports it
            for t in range(controls.shape[1]):
                states, row, ok = self._advance(states, controls[:, t], noise[:, t])
                features.append(row)
                finite &= ok
        return states, np.stack(features, axis=1), finite


def _compiled(advance: Callable[..., Any]) -> Callable[..., Any]:
    """The rollout of one block as one JAX program for all horizons."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def program(states: States, controls: Any, noise: Any, num_steps: Any) -> Any:
        def body(t: Any, carry: Any) -> Any:
            states, features, finite = carry
            states, row, ok = advance(states, controls[t], noise[t])
            return states, features.at[t].set(row), finite & ok

        _, row, ok = jax.eval_shape(advance, states, controls[0], noise[0])
        features = jnp.zeros((_JAX_STEPS, *row.shape), row.dtype)
        start = states, features, jnp.ones(ok.shape, bool)
        # Unlike this loop, a scan of length 1 is compiled without a loop and rounds differently.
        return jax.lax.fori_loop(0, num_steps, body, start)

    def run(states: States, controls: np.ndarray, noise: np.ndarray) -> Any:
        dtypes, chunks = {name: values.dtype for name, values in states.items()}, []
        finite = np.ones(len(controls), bool)
        for t in range(0, controls.shape[1], _JAX_STEPS):
            inputs = [v[:, t : t + _JAX_STEPS].swapaxes(0, 1) for v in (controls, noise)]
            num_steps = len(inputs[0])
            padding = ((0, _JAX_STEPS - num_steps), (0, 0), (0, 0))
            states, features, ok = program(states, *(np.pad(v, padding) for v in inputs), num_steps)
            chunks.append(np.asarray(features, float)[:num_steps])
            finite &= np.asarray(ok)
        last = {name: np.asarray(states[name], dtype) for name, dtype in dtypes.items()}
        return last, np.concatenate(chunks).swapaxes(0, 1), finite

    return run


def _explained(role: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function; its errors name it, and those typical of one state say what to change."""

    def call(*arguments: Any) -> Any:
        try:
            return fn(*arguments)
        except Exception as error:  # a user's function may raise anything
            problem = f"{role} raised {type(error).__name__}: {error}"
            if role in ("initial", "exogenous"):
                raise ValueError(problem) from error
            if isinstance(error, NOT_VECTORISED) and _ONE_STATE.search(str(error)):
                raise _NotVectorisedError(
                    f"{problem}; {VECTORISE}, or pass block_size=1 to have it called with one row "
                    "at a time"
                ) from error
            raise ValueError(f"{problem}; the state is {_described(arguments[0])}") from error

    return call


def _check_parameters(role: str, fn: Callable[..., Any]) -> None:
    """Raise if a user's function cannot be called with the arguments of its role."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # such as some built-in functions
        return
    try:
        signature.bind(*_PARAMETERS[role])
    except TypeError:
        raise ValueError(
            f"{role} is called as {role}({', '.join(_PARAMETERS[role])}); got a function with the "
            f"parameters ({', '.join(signature.parameters)})"
        ) from None


def _described(state: Any) -> str:
    """What a user's function returned in place of a state, in words."""
    if isinstance(state, Mapping):
        return f"a dict with keys {[*state]}"
    shape = getattr(state, "shape", None)
    return shown(state) if shape is None else f"an array of shape {tuple(shape)}"


def _flat(state: State) -> Any:
    """All variables of a user's state side by side, `[n, width]`."""
    arrays = list(_packed(state).values())
    xp = arrays[0].__array_namespace__()
    return xp.concatenate([v.reshape(len(v), -1) for v in arrays], axis=1)


def _packed(state: State) -> dict[str, Any]:
    """A user's state as a dict of arrays."""
    if isinstance(state, Mapping):
        return {text("the name of a state variable", name): v for name, v in state.items()}
    return {"state": state}


def _stored(state: State) -> States:
    """The state variables as NumPy arrays: float64, integers or booleans."""
    arrays = {n: _numbers(np, f"{n!r} from initial", v) for n, v in _packed(state).items()}
    if not arrays:
        raise ValueError("initial returned a state without variables; at least one is needed")
    for name, values in arrays.items():
        if values.ndim == 0:
            raise ValueError(f"initial must return one row per state; got {values} for {name!r}")
    return {n: v.astype(float) if v.dtype.kind == "f" else v for n, v in arrays.items()}


def _conform(source: str, state: Mapping[str, Any], like: States) -> States:
    """A copy of the state, checked to have the shapes and dtypes of `like`."""
    states = {}
    for name, expected in like.items():
        values = _numbers(expected.__array_namespace__(), f"{name!r} from {source}", state[name])
        _shaped(f"{name!r} from {source}", values, expected.shape)
        if not np.can_cast(values.dtype, expected.dtype, "same_kind"):
            raise ValueError(
                f"{source} returned {name!r} as {values.dtype}, but initial returned it as "
                f"{expected.dtype}; let initial return {values.dtype}"
            )
        states[name] = values.astype(expected.dtype).copy()
    return states


def _shaped(source: str, values: Any, shape: tuple[int | None, ...]) -> Any:
    """Check the shape of values, where None allows any length."""
    got = tuple(values.shape)
    fits = len(got) == len(shape) and all(w in (None, g) for w, g in zip(shape, got, strict=True))
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        wanted = f"({wanted},)" if len(shape) == 1 else f"({wanted})"
        problem = f"{source} has shape {got}, expected {wanted}"
        if got[:1] != shape[:1]:
            raise _NotVectorisedError(f"{problem}; {VECTORISE}")
        raise ValueError(f"{problem}{_remedy(got, shape)}")
    return values


def _remedy(got: tuple[int, ...], shape: tuple[int | None, ...]) -> str:
    """What usually leads from one shape to the other, as the end of a message."""
    if got == (*shape, 1):
        return "; take its only column, as in x[:, 0]"
    if len(got) == 1 and len(shape) == 2:
        return "; put columns side by side with np.column_stack([...])"
    if got == shape[:-1]:
        return "; add an axis, as in x[..., None]"
    if got == shape[:1] * 2:
        return "; it combines arrays [n] and [n, 1]: take a column, as in action[:, 0]"
    return ""


def _numbers(xp: Any, source: str, values: Any) -> Any:
    """What a user's function returned, as an array of numbers or booleans."""
    try:
        array = xp.asarray(values)
        sound = array.dtype.kind in "fiub"
    except Exception:  # neither NumPy nor JAX can make an array of it
        sound = False
    if not sound:
        raise ValueError(f"{source} must be an array of numbers or booleans; got {shown(values)}")
    return array


def _bound(name: str, given: npt.ArrayLike | None, default: np.ndarray) -> np.ndarray:
    """A control bound `[controls]`, also from one number for all controls."""
    if given is None:
        return default
    bound = real_numbers(name, given)
    if bound.shape not in ((), default.shape) or np.isnan(bound).any():
        raise ValueError(
            f"{name} must be a number, or {len(default)} of them, one per control; got "
            f"{shown(given)}"
        )
    return np.full_like(default, bound)


def _finite(source: str, values: npt.ArrayLike, min_rows: int) -> np.ndarray:
    """A float64 copy of a matrix, checked to be finite."""
    array = real_numbers(source, values).copy()
    num_bad = np.sum(~np.isfinite(array))
    if array.ndim != 2 or len(array) < min_rows or num_bad:
        raise ValueError(
            f"{source} has shape {array.shape} and {num_bad} non-finite values; "
            f"allowed: two axes, at least {min_rows} rows, finite values"
        )
    return array


def _names(
    kind: str, given: Sequence[str] | None, width: int, keys: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The given names; by default the state's keys if each has one column, or numbered ones.

    Args:
        kind: What is named.
        given: The names.
        width: Number of columns.
        keys: The state's key in each column; none if the columns are not those of a dict.
    """
    if given is None:
        numbered = tuple(f"{kind}_{i}" for i in range(width))
        return keys if len(set(keys)) == width else numbered
    names = different_texts(f"{kind}_names", given)
    if len(names) != width:
        raise ValueError(f"{kind}_names has {len(names)} names, but there are {width} {kind}s")
    different = len(set(keys)) == len(keys)  # a key with several columns names none of them
    if different and any(n in keys and n != key for n, key in zip(names, keys, strict=False)):
        raise ValueError(
            f"{kind}_names must have the keys of the state in the order in which initial returns "
            f"them; got {list(names)}, allowed: {list(keys)}, or names that are not keys"
        )
    return names


def qualified_name(fn: Any) -> str:
    """The module and name of a function, or of the class of a callable object.

    >>> qualified_name(functools.partial(take, rows=0))
    'cqm.worlds.contract.take'
    """
    fn = fn.func if isinstance(fn, functools.partial) else fn
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{named.__module__}.{named.__qualname__}"
