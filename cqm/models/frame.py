"""The frame: coordinates in which the effects of one world are learned, derived from its data.

Effects are measured in units of their own: each feature is divided by the size of its effects, so
none is neglected because its numbers are small. Observations are split into the directions that
actions move and the rest. Directions of the rest may shape the effects (a clock, a gain) or be
unrelated to them (a nuisance). A first regression tells them apart: each direction of the rest is
scaled by how strongly the fitted effects vary along it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cqm.branches.dataset import Branches
from cqm.models.controls import first_codes
from cqm.models.preprocessing import REST_SCALE, Coordinates, complement, output_basis, whitening
from cqm.quotient import center
from cqm.regression import FourierRidge, fourier_ridge, stretching

SAMPLED = 20_000  # families, enough for means, covariances and the span of the effects
_SPAN_FAMILIES = 5_000  # enough for the directions in which effects vary
_STEP_FAMILIES = 2_000  # enough for the mean and spread of a step's features
_ROUNDING = 1e-11  # effects below this share of the outcome are rounding errors
_WAVES, _ROUNDS = 512, 3
_SMALLEST_SCALE = 0.02  # scale of a direction that does not seem to matter
_CARRIED_SCALE = 0.1  # directions of the rest with a larger scale are predicted at every step
_DETERMINED = 1e-3  # an error below this share of a feature's standard deviation is negligible
_LEVEL_ROWS = 5_000  # enough steps to see what the coordinates leave out
_PURER = 0.01  # raw units are used if they lower the log-variance per coordinate by more


@dataclass(frozen=True)
class StepFrame:
    """Coordinates for unrolling; see `cqm.models.transition`."""

    inputs: Coordinates  # of observations: state and context, or all inputs of a latent state
    steps: Coordinates  # of step features: state and readouts; only readouts for a latent state
    outputs: np.ndarray  # [features, outputs], from outputs to features
    num_moved: int  # coordinates of the state that actions move; 0 for a latent state
    num_states: int  # coordinates of the state; 0 for a latent state
    levels: np.ndarray  # [features, steps], from coordinates of a step to features minus the shift


class Frame:
    """Coordinates of one set of branches.

    Args:
        branches: The families to learn from.
        seed: Random seed for the first regression.
    """

    def __init__(self, branches: Branches, *, seed: int):
        sample = branches[:SAMPLED]
        self.branches, self.observations, self.seed = branches, sample.observations, seed
        self.complete = branches.has_menu and branches.num_arms == branches.num_actions
        self.centred_alone = self.complete or not branches.has_menu
        """Whether each family has a reference of its own: all actions, or controls of the box."""
        effects = self._family_effects(sample)
        spread = np.sqrt(np.mean(branches[:_STEP_FAMILIES].outcomes ** 2, axis=(0, 1, 2)))
        size = np.sqrt(np.mean(effects**2, axis=(0, 1, 2)))
        self.moved = size > _ROUNDING * spread  # [features]
        self.units = np.where(self.moved, size, 1.0)
        scaled = np.where(self.moved, effects / self.units, 0.0)
        basis = output_basis("effect", scaled[:_SPAN_FAMILIES])
        rms = float(np.sqrt(np.mean((scaled @ basis) ** 2))) or 1.0
        self.targets = np.where(self.moved, 1 / self.units, 0.0)[:, None] * basis / rms
        """Maps effects to the coordinates that are learned, `[features, coordinates]`."""
        self.outputs = self.units[:, None] * basis * rms * self.moved[:, None]
        """Maps those coordinates to effects, `[features, coordinates]`."""
        self._effects = effects
        self.transform: np.ndarray | None = None
        """Scaling of the inputs that suits a regression; None until the inputs are computed."""

    def observed(self, families: Branches) -> np.ndarray:
        """Effects of families' arms, averaged over draws and centred, `[n, arms, features]`."""
        return self._family_effects(families).mean(axis=1)

    def _family_effects(self, families: Branches) -> np.ndarray:
        """Effects within families, `[n, draws, arms, features]`."""
        return families.effects() if self.centred_alone else center(families.outcomes)

    def in_own_units(self, effects: np.ndarray, arms: np.ndarray | None = None) -> np.ndarray:
        """Effects on the features that actions move, in units of their size.

        Args:
            effects: `[n, actions, features]`.
            arms: If given, only these actions count, `[n, arms]`, and the effects are centred.
                None if the actions are those of the families.
        """
        if arms is not None:
            effects = center(np.take_along_axis(effects, arms[..., None], axis=1))
        return (effects / self.units)[..., self.moved]

    def errors(
        self, predicted: np.ndarray, observed: np.ndarray, arms: np.ndarray | None
    ) -> np.ndarray:
        """Mean squared error of predicted effects `[n, actions, features]`, in own units, `[n]`."""
        misses = self.in_own_units(predicted, arms) - self.in_own_units(observed)
        return np.sum(misses**2, axis=(1, 2)) / max(1, misses[0].size)  # 0 if nothing moves

    @functools.cached_property
    def own(self) -> np.ndarray | None:
        """Positions of the observations among the features; None unless all are features."""
        if self.branches.features_are_next_observation:
            return np.arange(len(self.branches.feature_names))
        names = {name: i for i, name in enumerate(self.branches.feature_names)}
        # Mixed features and mixed observations have the same names, but are mixed differently.
        mixed = self.branches.nuisance is not None
        if mixed or not set(self.branches.observation_names) <= set(names):
            return None
        return np.array([names[name] for name in self.branches.observation_names])

    @functools.cached_property
    def _directions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Units of the observations, and orthonormal bases of the moved directions and the rest.

        The projection onto the moved directions depends on the units. If signals are mixed, wrong
        units let the rest leak in, which raises the variance along these directions; the units with
        the lowest variance are used.
        """
        spread = self.observations.std(axis=0)
        spread = np.where(spread > 0, spread, 1.0)
        if self.own is None or not self.moved[self.own].any():
            return spread, np.zeros((len(spread), 0)), np.eye(len(spread))
        moved = self.moved[self.own]
        own_units = np.where(moved, self.units[self.own], spread)
        effects = np.where(moved, self._effects[:_SPAN_FAMILIES, ..., self.own], 0.0)
        options = []
        for units in (own_units, np.ones_like(own_units)):
            basis = output_basis("effect", effects / units)
            centered = (self.observations - self.observations.mean(axis=0)) / units
            along = centered @ basis
            # The volume of the observations' spread, in coordinates that do not depend on units.
            spread_matrix, back = along.T @ along / len(along), units[:, None] * basis
            volume = np.linalg.slogdet(spread_matrix)[1] + np.linalg.slogdet(back.T @ back)[1]
            options.append((volume / basis.shape[1], units, basis))
        (plain, *_), (raw, *_) = options
        same_rank = options[0][2].shape == options[1][2].shape
        _, units, basis = options[1 if same_rank and raw < plain - _PURER else 0]
        return units, basis, complement(basis)

    @functools.cached_property
    def _whitened(self) -> tuple[np.ndarray, np.ndarray]:
        """Maps from observations to whitened coordinates of the moved directions and the rest."""
        units, moved, rest = self._directions
        centered = (self.observations - self.observations.mean(axis=0)) / units
        return tuple(whitening(centered, part) / units[:, None] for part in (moved, rest))

    @functools.cached_property
    def _scaled_rest(self) -> tuple[np.ndarray, np.ndarray]:
        """Axes of the rest, most important first, `[observations, rest]`, and their scales."""
        moved, rest = self._whitened
        if rest.shape[1] == 0 or not self.centred_alone:
            scale = REST_SCALE if moved.shape[1] else 1.0
            return rest, np.full(rest.shape[1], scale)
        initial = REST_SCALE if moved.shape[1] else 1.0
        first = Coordinates(
            self.observations.mean(axis=0), np.concatenate([moved, initial * rest], axis=1)
        )
        products = self._first_fit(first).products
        size = moved.shape[1]
        products = products * np.outer(*[np.repeat([1.0, initial], [size, rest.shape[1]])] * 2)
        largest = np.linalg.eigvalsh(products[:size, :size] if size else products)[-1]
        values, axes = np.linalg.eigh(products[size:, size:])
        scales = np.sqrt(np.maximum(values, 0) / max(largest, 1e-300))
        scales = np.clip(scales, _SMALLEST_SCALE, 1.0)[::-1]
        axes = axes[:, ::-1]
        back = np.eye(len(products))  # from the inputs below to whitened coordinates
        back[size:, size:] = axes.T / scales[:, None]
        self.transform = stretching(back @ products @ back.T)
        return rest @ axes, scales

    def _first_fit(self, inputs: Coordinates) -> FourierRidge:
        return fourier_ridge(
            inputs(self.observations),
            self._first_targets(),
            waves=_WAVES,
            rounds=_ROUNDS,
            rng=np.random.default_rng(self.seed),
        )

    def _first_targets(self) -> np.ndarray:
        """Effects of all actions, `[n, outputs]`, or how effects change along controls of a box."""
        if self.complete:
            return self.rows_of_targets(self._effects)
        along = center(first_codes(self.branches[: len(self._effects)]))  # [n, arms, controls]
        effects = self._effects.mean(axis=1) @ self.targets
        # The slopes that all states share would only add noise, because controls are random.
        flat = along.reshape(-1, along.shape[-1])
        shared = np.linalg.lstsq(flat, effects.reshape(len(flat), -1), rcond=None)[0]
        effects = effects - along @ shared
        slopes = np.einsum("nac,nat->nct", along, effects) / along.shape[1]
        return slopes.reshape(len(slopes), -1)

    def rows_of_targets(self, effects: np.ndarray) -> np.ndarray:
        """Coordinates of effects `[n, draws, actions, features]`, `[n, actions · coordinates]`."""
        return (effects.mean(axis=1) @ self.targets).reshape(len(effects), -1)

    @functools.cached_property
    def inputs(self) -> Coordinates:
        """Coordinates of observations for regressions and for the direct network."""
        rest, scales = self._scaled_rest
        matrix = np.concatenate([self._whitened[0], rest * scales], axis=1)
        return Coordinates(self.observations.mean(axis=0), matrix)

    @functools.cached_property
    def steps(self) -> StepFrame:
        """Coordinates for unrolling."""
        num = len(self.branches.feature_names)
        flat = self.branches[:_STEP_FAMILIES].step_features.reshape(-1, num)
        if self.own is None:
            matrix, outputs = self._readouts(np.arange(num), flat)
            steps = Coordinates(flat.mean(axis=0), matrix)
            return StepFrame(self.inputs, steps, outputs, 0, 0, outputs)
        units, moved, _ = self._directions
        rest, scales = self._scaled_rest
        follows, size = scales > _CARRIED_SCALE, moved.shape[1]
        state = np.concatenate([moved / units[:, None], rest[:, follows]], axis=1)
        spread = _spread(flat[:, self.own] @ state)
        readouts, outputs = self._readouts(np.setdiff1d(np.arange(num), self.own), flat)
        along = np.zeros((num, state.shape[1]))
        along[self.own, :size] = units[:, None] * moved * spread[:size]
        carried = units * np.linalg.pinv(units[:, None] * rest)[follows]
        along[self.own, size:] = carried.T * spread[size:]
        placed = np.zeros((num, state.shape[1]))
        placed[self.own] = state / spread
        shift, mean = flat.mean(axis=0), self.observations.mean(axis=0)
        shift[self.own] = mean
        context = (rest * scales)[:, ~follows]
        return StepFrame(
            Coordinates(mean, np.concatenate([state / spread, context], axis=1)),
            Coordinates(shift, np.concatenate([placed, readouts], axis=1)),
            np.concatenate([along[:, :size], outputs], axis=1),
            size,
            state.shape[1],
            np.concatenate([along, outputs], axis=1),
        )

    def native_levels(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How the native features follow from the coordinates of a step.

        Returns:
            A shift `[native]` and a matrix `[native, steps]`, and the standard deviation of what
            the coordinates leave out `[native]`, zero for features that they determine.
        """
        branches, frame = self.branches, self.steps
        to_native = np.eye(len(branches.feature_names))
        if branches.nuisance is not None and branches.mixing is not None:
            to_native = branches.mixing["features"][:, branches.nuisance["dimension"] :]
        flat = branches[:_STEP_FAMILIES].step_features.reshape(-1, len(to_native))
        flat = flat[:: max(1, len(flat) // _LEVEL_ROWS)]
        missing = (flat - frame.steps.shift - frame.steps(flat) @ frame.levels.T) @ to_native
        native = flat @ to_native
        rounding = _ROUNDING * np.abs(native).max(axis=0, initial=0)
        determined = missing.std(axis=0) <= _DETERMINED * native.std(axis=0) + rounding
        unknown = np.where(determined, 0.0, missing.std(axis=0))
        return frame.steps.shift @ to_native, to_native.T @ frame.levels, unknown

    def _readouts(self, chosen: np.ndarray, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Maps between some features and standardised coordinates of their moved directions.

        Args:
            chosen: Positions of the features.
            flat: Features of some steps, `[n, features]`.

        Returns:
            From features to coordinates and back, `[features, readouts]` each.
        """
        chosen = chosen[self.moved[chosen]]
        to, back = np.zeros((2, flat.shape[1], 0))
        if len(chosen):
            units = self.units[chosen, None]
            few = self._effects[:_SPAN_FAMILIES]
            basis = output_basis("effect", few[..., chosen] / units[:, 0])
            spread = _spread(flat[:, chosen] @ (basis / units))
            to, back = np.zeros((2, flat.shape[1], basis.shape[1]))
            to[chosen], back[chosen] = basis / units / spread, basis * units * spread
        return to, back


def _spread(values: np.ndarray) -> np.ndarray:
    """Standard deviation of each column; 1 where a column does not vary."""
    spread = values.std(axis=0)
    return np.where(spread > 1e-12 * np.abs(values).max(axis=0, initial=0), spread, 1.0)
