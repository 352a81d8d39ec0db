"""Predictors: the learned part of a fitted model, with arrays by name so that it can be saved.

A predictor maps observations to the effects of every candidate action, up to a shift that all
actions share; the estimator centres them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.capacity import require_memory
from cqm.models.controls import centered_monomials
from cqm.models.layout import Arrays, arrays_under, part_prefix
from cqm.models.network import Classifier, Network, named_arrays, with_arrays
from cqm.models.preprocessing import Coordinates
from cqm.models.transition import Transition
from cqm.quotient import center
from cqm.regression import RandomFourierFeatures, Table, predictions_in_blocks

_SMALL_BLOCKS = (1, 16)  # rows per block for one state, or a few
_UNROLLED_ROWS = 32  # states that are unrolled at once, each with all actions and continuations
_BRANCHES = 2048  # branches that are unrolled at once for controls that were asked about
_FUTURES_BYTES = 2**27  # futures that are in memory at once, if they are those of several states


class Predictor(Protocol):
    """The interface of every predictor."""

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects by each member, `[members, n, actions, features]`, up to a shared shift.

        Args:
            observations: `[n, observations]`.
            controls: Codes of other actions, `[actions, controls]`, or one set per state
                `[n, actions, controls]`, for predictors that take controls; the candidate actions
                by default.
        """

    def arrays(self) -> Arrays:
        """Everything that was learned, by name."""


@dataclass(frozen=True)
class TablePredictor:
    """Looks up the effects of finitely many observations."""

    table: Table
    effects: np.ndarray  # [states, actions, features]

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[1, n, actions, features]`."""
        assert controls is None
        return self.effects[self.table.find(observations)][None]

    def arrays(self) -> Arrays:
        """The table's rows and effects."""
        return {"table.rows": self.table.rows, "table.effects": self.effects}


@dataclass(frozen=True)
class FourierPredictor:
    """Effects as a linear function of regressors that are computed from the state.

    The regressors are a constant, the inputs, cosines of them and, if there are weights for them,
    the products of all pairs of inputs. Observations that are in the table of cells have deviations
    of their own.
    """

    inputs: Coordinates
    frequencies: np.ndarray  # [members, inputs, waves]
    phases: np.ndarray  # [members, waves]
    weights: np.ndarray  # [members, actions, regressors, coordinates]
    basis: np.ndarray  # [features, coordinates]
    cells: Table | None = None
    deviations: np.ndarray | None = None  # [cells, actions, coordinates]

    @classmethod
    def of_members(
        cls,
        inputs: Coordinates,
        members: list[tuple[RandomFourierFeatures, np.ndarray]],
        basis: np.ndarray,
    ) -> FourierPredictor:
        """Stack the members' features and weights `[actions, regressors, coordinates]`."""
        return cls(
            inputs,
            np.stack([features.frequencies for features, _ in members]),
            np.stack([features.phases for features, _ in members]),
            np.stack([weights for _, weights in members]),
            basis,
        )

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[members, n, actions, features]`."""
        assert controls is None
        inputs, members = self.inputs(observations), (self.frequencies, self.phases, self.weights)
        parts = [
            predictions_in_blocks(RandomFourierFeatures(frequencies, phases), weights, inputs)
            for frequencies, phases, weights in zip(*members, strict=True)
        ]
        effects = np.stack(parts)
        if self.cells is not None and self.deviations is not None:
            numbers = self.cells.numbers(observations)
            known = numbers >= 0
            effects[:, known] += self.deviations[numbers[known]]
        return effects @ self.basis.T

    def arrays(self) -> Arrays:
        """Coordinates, Fourier features, weights, basis and cells."""
        arrays = {
            **self.inputs.arrays("inputs"),
            "waves.frequencies": self.frequencies,
            "waves.phases": self.phases,
            "waves.weights": self.weights,
            "basis": self.basis,
        }
        if self.cells is not None and self.deviations is not None:
            arrays |= {"cells.rows": self.cells.rows, "cells.deviations": self.deviations}
        return arrays


@dataclass(frozen=True)
class DirectPredictor:
    """A direct network, applied to the state."""

    inputs: Coordinates
    basis: np.ndarray  # [features, coordinates]
    network: Network  # members stacked
    controls: np.ndarray | None = None  # [actions, controls]; None if actions have an embedding

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[members, n, actions, features]`."""
        asked = self.controls if controls is None else controls
        rows, split_fn = _with_controls(self.inputs(observations), asked)

        def predict(block: Array) -> Array:
            return _by_member(_direct_effects, self.network, *split_fn(block))

        most = 1024 if controls is None else max(16, 8 * _BRANCHES // controls.shape[-2])
        return in_blocks(predict, rows, min(1024, most), axis=1) @ self.basis.T

    def arrays(self) -> Arrays:
        """Coordinates, basis, layers and control vectors."""
        arrays = {**self.inputs.arrays("inputs"), "basis": self.basis}
        if self.controls is not None:
            arrays["controls"] = self.controls
        return arrays | _network_arrays("network", self.network)


@dataclass(frozen=True)
class PolynomialPredictor:
    """Effects as quadratic polynomials of the controls, with coefficients that depend on the state.

    The monomials are centred over the box in closed form, and so are the effects.
    """

    inputs: Coordinates
    basis: np.ndarray  # [features, coordinates]
    controls: np.ndarray  # [actions, controls], codes of the candidate actions
    features: RandomFourierFeatures
    weights: np.ndarray  # [monomials, regressors, coordinates]

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[1, n, actions, features]`."""
        monomials = centered_monomials(self.controls if controls is None else controls)
        regressors = self.features(self.inputs(observations))
        coefficients = np.tensordot(regressors, self.weights, axes=(1, 1))  # [n, monomials, ...]
        return (monomials @ coefficients @ self.basis.T)[None]

    def arrays(self) -> Arrays:
        """Coordinates, basis, candidate actions, regressors and weights."""
        return {
            **self.inputs.arrays("inputs"),
            "basis": self.basis,
            "controls": self.controls,
            "polynomial.frequencies": self.features.frequencies,
            "polynomial.phases": self.features.phases,
            "polynomial.weights": self.weights,
        }


def _direct_effects(network: Network, inputs: Array, controls: Array | None) -> Array:
    return network.effects(inputs, controls=controls)


def check_draws(draws: int, horizon: int, num_actions: int, width: int) -> None:
    """Raise `ValueError` if so many continuations do not fit into memory."""
    num_bytes = 4 * draws * (_UNROLLED_ROWS * num_actions * width + 2 * horizon)
    require_memory(f"averaging over {draws:,} continuations", num_bytes, "choose fewer draws")


def _unrolled_steps(
    network: Transition,
    inputs: Array,
    first: Array,
    controls: Array,
    drawn: Array,
    noise: Array | None,
    behaviour: Classifier | None,
) -> Array:
    if behaviour is not None:
        return network.branches_under(inputs, first, controls, behaviour, drawn, noise)
    later = controls[drawn] if drawn.ndim == 2 else drawn  # actions, or controls from the box
    return network.branches(inputs, first, later, noise)


def _unrolled_effects(
    network: Transition, inputs: Array, first: Array, discounts: Array, *drawn: Any
) -> Array:
    return network.effects(_unrolled_steps(network, inputs, first, *drawn), discounts)


@dataclass(frozen=True)
class Levels:
    """Maps the coordinates of a step to the features themselves, which may have any level.

    If a nuisance is mixed into the features, these are the native ones.
    """

    shift: np.ndarray  # [native]
    matrix: np.ndarray  # [native, steps], without those of a latent state
    unknown: np.ndarray  # [native], standard deviation of what the coordinates do not contain
    noise: np.ndarray | None = None  # [paths, horizon, noise], observed paths; None without noise

    def __call__(self, coordinates: np.ndarray) -> np.ndarray:
        """Features `[..., native]` of coordinates `[..., steps]`; latent ones come first."""
        num_latent = coordinates.shape[-1] - self.matrix.shape[1]
        return self.shift + coordinates[..., num_latent:] @ self.matrix.T

    def arrays(self) -> Arrays:
        """The map, by its names in a file."""
        arrays = {
            "levels.shift": self.shift,
            "levels.matrix": self.matrix,
            "levels.unknown": self.unknown,
        }
        return arrays if self.noise is None else arrays | {"levels.noise": self.noise}


@dataclass(frozen=True)
class UnrolledPredictor:
    """A transition network, unrolled under fresh continuations and noise and averaged over them.

    The later actions are drawn from a known distribution, or chosen by an estimated policy.
    """

    inputs: Coordinates
    basis: np.ndarray  # [features, outputs], from the network's outputs to features
    discounts: np.ndarray  # [horizon]
    controls: np.ndarray  # [actions, controls], the candidate actions
    network: Transition  # members stacked
    continuations: np.ndarray
    """Later actions, `[draws, horizon − 1]`; uniform numbers for a behaviour; codes in a last axis
    if controls are drawn from the box."""
    noise: np.ndarray | None = None  # [draws, horizon, noise], paths that were observed
    behaviour: Classifier | None = None  # sees the state and the context
    levels: Levels | None = None  # None if futures cannot be sampled

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[members, n, actions, features]`."""
        asked = self.controls if controls is None else controls
        rows, split_fn = _with_controls(self.inputs(observations), asked)
        discounts, drawn = jnp.asarray(self.discounts, jnp.float32), self._drawn()

        def predict(block: Array) -> Array:
            return _by_member(_unrolled_effects, self.network, *split_fn(block), discounts, *drawn)

        most = _UNROLLED_ROWS if controls is None else max(1, _BRANCHES // asked.shape[-2])
        return in_blocks(predict, rows, _block_size(most), axis=1) @ self.basis.T

    def futures(
        self, observations: np.ndarray, controls: np.ndarray | None = None
    ) -> Iterator[np.ndarray]:
        """Features along sampled futures of every action, `[n, draws, actions, horizon, features]`.

        They come block by block of states. The draws of all members count as draws.
        """
        assert self.levels is not None
        asked = self.controls if controls is None else controls
        rows, split_fn = _with_controls(self.inputs(observations), asked)
        drawn = self._drawn()
        per_state = self._bytes_per_state(len(self.continuations), asked.shape[-2])
        size = _block_size(max(1, _FUTURES_BYTES // per_state))
        for block, num in _padded_blocks(rows, size):
            given = split_fn(block)
            steps = np.asarray(_by_member(_unrolled_steps, self.network, *given, *drawn), float)
            yield self._features(steps[:, :, :num])

    def along(
        self, observations: np.ndarray, actions: np.ndarray, noise: np.ndarray | None = None
    ) -> Iterator[np.ndarray]:
        """Features along given branches, `[n, draws, arms, horizon, features]`, block by block.

        The draws of all members count as draws.

        Args:
            observations: `[n, observations]`.
            actions: Actions of every branch, `[n, draws, arms, horizon]`.
            noise: Standardised noise, `[n, draws, horizon, noise]`; None without noise.
        """
        inputs = np.asarray(self.inputs(observations), np.float32)
        num_draws, arms = actions.shape[1:3]
        flat = actions.reshape(len(actions), num_draws * arms, -1)
        table = np.asarray(self.controls, np.float32)
        for start in range(0, len(inputs), _UNROLLED_ROWS):
            rows = slice(start, start + _UNROLLED_ROWS)
            paths = None if noise is None else np.repeat(noise[rows], arms, axis=1)
            given = (
                _padded(inputs[rows]),
                _padded(table[flat[rows]]),
                None if paths is None else _padded(np.asarray(paths, np.float32)),
            )
            steps = np.asarray(_by_member(Transition.unroll, self.network, *given), float)
            steps = steps.reshape(*steps.shape[:3], num_draws, arms, steps.shape[-1])
            yield self._features(steps[:, :, : len(inputs[rows])])

    def _features(self, steps: np.ndarray) -> np.ndarray:
        """Features `[n, draws, actions, horizon, features]` from coordinates of steps.

        Args:
            steps: `[members, horizon, n, draws, actions, steps]`.
        """
        assert self.levels is not None
        steps = np.moveaxis(steps, (2, 0, 3, 4, 1), (0, 1, 2, 3, 4))
        # No action moves these, so what differs between actions is an error of the network.
        carried = steps[..., self.network.num_moved : self.network.num_states]
        if self.network.lift is None:
            carried[...] = carried.mean(axis=3, keepdims=True)
        num, members, draws = steps.shape[:3]
        return self.levels(steps.reshape(num, members * draws, *steps.shape[3:]))

    def with_continuations(self, continuations: np.ndarray) -> UnrolledPredictor:
        """The same transition under other continuations and paths of noise, to sample futures.

        If there are more continuations than observed paths, paths are used several times.
        """
        assert self.levels is not None
        need = self._bytes_per_state(len(continuations), len(self.controls))
        require_memory(f"sampling {len(continuations):,} futures", need, "choose fewer draws")
        noise = self.levels.noise
        if noise is not None:
            noise = noise[np.arange(len(continuations)) % len(noise)]
        return replace(self, continuations=continuations, noise=noise)

    def _bytes_per_state(self, draws: int, num_actions: int) -> int:
        """Memory for the futures of one state: single and double precision, and a copy."""
        members, coordinates = self.network.last.bias.shape
        return 20 * members * draws * num_actions * len(self.discounts) * coordinates

    def _drawn(self) -> tuple[Any, ...]:
        """Control vectors, draws of later actions and noise, and the behaviour policy."""
        controls, noise = (
            None if values is None else jnp.asarray(values, jnp.float32)
            for values in (self.controls, self.noise)
        )
        return controls, jnp.asarray(self.continuations), noise, self.behaviour

    def arrays(self) -> Arrays:
        """Coordinates, basis, continuations, noise and layers."""
        network = self.network
        arrays = {
            **self.inputs.arrays("inputs"),
            "basis": self.basis,
            "discounts": self.discounts,
            "controls": self.controls,
            "continuations": np.asarray(self.continuations),
            "sizes": np.array([network.num_states, network.num_moved]),
            **_network_arrays("network", network),
        }
        if np.isfinite(network.bound):
            arrays["bound"] = np.array([network.bound])
        if self.noise is not None:
            arrays["noise"] = self.noise
        if self.behaviour is not None:
            arrays |= _network_arrays("behaviour", self.behaviour)
        if self.levels is not None:
            arrays |= self.levels.arrays()
        return arrays


@dataclass(frozen=True)
class StackedPredictor:
    """A weighted mean of predictors."""

    parts: tuple[Predictor, ...]
    weights: np.ndarray  # [parts], positive, with sum 1

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[members, n, actions, features]`; single-member parts are repeated."""
        predicted = [part(observations, controls) for part in self.parts]
        members = max(len(effects) for effects in predicted)
        return sum(
            weight * center(np.broadcast_to(effects, (members, *effects.shape[1:])))
            for weight, effects in zip(self.weights, predicted, strict=True)
        )

    def arrays(self) -> Arrays:
        """The weights, and the arrays of each part under its number."""
        arrays = {"stack.weights": self.weights}
        for i, part in enumerate(self.parts):
            arrays |= {f"{part_prefix(i)}{name}": values for name, values in part.arrays().items()}
        return arrays


def restore_predictor(arrays: Mapping[str, np.ndarray]) -> Predictor:
    """The predictor whose `arrays()` these are."""
    if "stack.weights" in arrays:
        weights = arrays["stack.weights"]
        parts = (arrays_under(part_prefix(i), arrays) for i in range(len(weights)))
        return StackedPredictor(tuple(map(restore_predictor, parts)), weights)
    if "table.rows" in arrays:
        return TablePredictor(Table(arrays["table.rows"]), arrays["table.effects"])
    inputs, basis = Coordinates(arrays["inputs.shift"], arrays["inputs.matrix"]), arrays["basis"]
    if "waves.weights" in arrays:
        frequencies, phases, weights = (
            arrays[f"waves.{name}"] for name in ("frequencies", "phases", "weights")
        )
        cells = Table(arrays["cells.rows"]) if "cells.rows" in arrays else None
        return FourierPredictor(
            inputs, frequencies, phases, weights, basis, cells, arrays.get("cells.deviations")
        )
    if "polynomial.weights" in arrays:
        features = RandomFourierFeatures(
            arrays["polynomial.frequencies"], arrays["polynomial.phases"]
        )
        weights = arrays["polynomial.weights"]
        return PolynomialPredictor(inputs, basis, arrays["controls"], features, weights)
    if "network.decoder.weight" in arrays:
        return _restored_direct(inputs, basis, arrays)
    return _restored_unrolled(inputs, arrays)


def _restored_direct(
    inputs: Coordinates, basis: np.ndarray, arrays: Mapping[str, np.ndarray]
) -> DirectPredictor:
    *_, width, rank = arrays["network.head.2.weight"].shape
    controls = arrays.get("controls")
    network = Network(
        inputs.matrix.shape[1],
        arrays["network.embedding"].shape[1] if controls is None else len(controls),
        basis.shape[1],
        rank=rank,
        width=width,
        num_controls=None if controls is None else controls.shape[1],
        gated="network.gate.weight" in arrays,
        key=jax.random.key(0),
    )
    return DirectPredictor(inputs, basis, _restored(network, "network", arrays), controls)


def _restored_unrolled(inputs: Coordinates, arrays: Mapping[str, np.ndarray]) -> UnrolledPredictor:
    num_states, num_moved = map(int, arrays["sizes"])
    controls, basis, noise = arrays["controls"], arrays["basis"], arrays.get("noise")
    network = Transition(
        inputs.matrix.shape[1],
        controls.shape[1],
        num_states,
        num_moved=num_moved,
        num_readouts=arrays["network.last.bias"].shape[1] - num_states,
        num_noise=0 if noise is None else noise.shape[2],
        width=arrays["network.controls"].shape[2],
        has_latent="network.lift.weight" in arrays,
        bound=float(arrays["bound"][0]) if "bound" in arrays else np.inf,
        key=jax.random.key(0),
    )
    behaviour = None
    if "behaviour.layers.0.weight" in arrays:
        num_seen, hidden = arrays["behaviour.layers.0.weight"].shape
        empty = Classifier(num_seen, len(controls), width=hidden, key=jax.random.key(0))
        behaviour = _restored(empty, "behaviour", arrays)
    return UnrolledPredictor(
        inputs,
        basis,
        arrays["discounts"],
        controls,
        _restored(network, "network", arrays),
        arrays["continuations"],
        noise,
        behaviour,
        Levels(**arrays_under("levels.", arrays)) if "levels.shift" in arrays else None,
    )


def with_menu(predictor: Predictor, codes: np.ndarray) -> Predictor:
    """A predictor that takes controls, with other candidate actions."""
    if isinstance(predictor, StackedPredictor):
        parts = tuple(with_menu(part, codes) for part in predictor.parts)
        return replace(predictor, parts=parts)
    assert isinstance(predictor, DirectPredictor | PolynomialPredictor | UnrolledPredictor)
    return replace(predictor, controls=codes)


def _with_controls(
    inputs: np.ndarray, controls: np.ndarray | None
) -> tuple[np.ndarray, Callable[[Array], tuple[Array, Array | None]]]:
    """Rows for `in_blocks`, and the function that splits a block into inputs and controls.

    If every state has controls of its own, they are appended to its inputs.
    """
    if controls is None or controls.ndim == 2:
        shared = None if controls is None else jnp.asarray(controls, jnp.float32)
        return np.asarray(inputs, np.float32), lambda block: (block, shared)
    size, shape = inputs.shape[1], controls.shape[1:]
    rows = np.concatenate([inputs, controls.reshape(len(inputs), -1)], axis=1)
    return np.asarray(rows, np.float32), lambda block: (
        block[:, :size],
        block[:, size:].reshape(len(block), *shape),
    )


def _block_size(most: int) -> int:
    """The largest number of states per block that is allowed."""
    return next(n for n in (_UNROLLED_ROWS, *_SMALL_BLOCKS[::-1]) if n <= most)


def in_blocks(
    predict_fn: Callable[[Array], Array], inputs: np.ndarray, size: int, *, axis: int = 0
) -> np.ndarray:
    """Predictions for inputs `[n, inputs]` in float64, padded to blocks of few compiled shapes.

    Args:
        predict_fn: Maps a float32 block `[size, inputs]` to predictions.
        inputs: All inputs.
        size: Rows per block; smaller blocks are used for only a few states.
        axis: The axis of the predictions that runs over rows.
    """
    parts = []
    for block, num in _padded_blocks(inputs, size):
        predicted = np.asarray(predict_fn(block), float)
        parts.append(predicted[(slice(None),) * axis + (slice(num),)])
    return np.concatenate(parts, axis=axis)


def _padded_blocks(inputs: np.ndarray, size: int) -> Iterator[tuple[Array, int]]:
    """Blocks of inputs, padded to few different sizes, each with its number of rows."""
    num = min(len(inputs), size)
    size = next(n for n in (*_SMALL_BLOCKS, size) if num <= n <= size)
    for start in range(0, max(1, len(inputs)), size):
        block = np.zeros((size, inputs.shape[1]), np.float32)
        num = min(size, len(inputs) - start)
        block[:num] = inputs[start : start + num]
        yield jnp.asarray(block), num


def _padded(values: np.ndarray) -> Array:
    """Rows of one block of states, padded to the size of a full block."""
    missing = _UNROLLED_ROWS - len(values)
    return jnp.asarray(np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1)))


def _network_arrays(prefix: str, network: Any) -> Arrays:
    return {f"{prefix}.{name}": values for name, values in named_arrays(network).items()}


def _restored(network: Any, prefix: str, arrays: Mapping[str, np.ndarray]) -> Any:
    """The network with the arrays from `_network_arrays`, which include the members' axis."""
    return with_arrays(network, arrays_under(f"{prefix}.", arrays))


@eqx.filter_jit
def _by_member(method: Callable[..., Array], networks: Any, *arguments: Any) -> Array:
    """A method of every member of an ensemble, `[members, ...]`."""
    return eqx.filter_vmap(lambda member: method(member, *arguments))(networks)
