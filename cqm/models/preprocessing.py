"""Conditioning: coordinates in which a network sees observations and predicts effects.

Raw observations may bury what actions move under what they do not. Paired effects show by
themselves which directions actions move; those come first, each at unit scale. The other directions
may still modulate the effects, so they are kept, whitened and at a smaller scale, never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cqm.quotient import effect_spectrum

Conditioning = Literal["none", "whiten", "effect"]
REST_SCALE = 0.1  # of directions that no action was seen to move
_NEGLIGIBLE = 1e-12  # share of the energy below which a direction is rounding


@dataclass(frozen=True)
class Coordinates:
    """An affine map into the network's coordinates."""

    shift: np.ndarray  # [values]
    matrix: np.ndarray  # [values, coordinates]

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Coordinates of values, `[..., coordinates]`."""
        return (np.asarray(values, float) - self.shift) @ self.matrix


def input_coordinates(
    kind: Conditioning, observations: np.ndarray, basis: np.ndarray, *, closed: bool
) -> Coordinates:
    """Coordinates of observations `[n, observations]`.

    Conditioning on the `basis` of the effects needs features that are the observation of the next
    state (`closed`); where they are not, the observations are whitened.
    """
    size = observations.shape[1]
    if kind == "none":
        return Coordinates(np.zeros(size), np.eye(size))
    shift = observations.mean(axis=0)
    if kind == "whiten" or not closed:
        return Coordinates(shift, _whitening(observations - shift, np.eye(size)))
    if kind != "effect":
        raise ValueError(f"conditioning must be 'none', 'whiten' or 'effect'; got {kind!r}")
    centered = observations - shift
    rest = REST_SCALE * _whitening(centered, _complement(basis))
    return Coordinates(shift, np.concatenate([_whitening(centered, basis), rest], axis=1))


def step_coordinates(
    observations: np.ndarray, steps: np.ndarray, basis: np.ndarray, *, closed: bool
) -> tuple[Coordinates, Coordinates]:
    """Coordinates for unrolling: of observations, and of the features of a step.

    Args:
        observations: `[n, observations]`.
        steps: Features of some steps, `[m, features]`.
        basis: Of what actions move, `[features, coordinates]`.
        closed: Whether the features are the observation of the next state. Then the observation's
            first coordinates are the features' own, and the rest of it follows as context.
    """
    moved = steps @ basis
    shift, scale = moved.mean(axis=0), moved.std(axis=0) + 1e-12
    features = Coordinates(basis @ shift, basis / scale)
    if not closed:
        return input_coordinates("whiten", observations, basis, closed=False), features
    centered = observations - observations.mean(axis=0)
    rest = _complement(basis)
    whitening = REST_SCALE * _whitening(centered, rest)
    # One shift serves both parts: the features' along the basis, the observations' mean across it.
    shift = features.shift + rest @ (rest.T @ observations.mean(axis=0))
    return Coordinates(shift, np.concatenate([features.matrix, whitening], axis=1)), features


def output_basis(kind: Conditioning, effects: np.ndarray) -> np.ndarray:
    """An orthonormal basis `[features, coordinates]` of what effects span, or of everything."""
    if kind != "effect":
        return np.eye(effects.shape[-1])
    spectrum = effect_spectrum(effects.reshape(-1, *effects.shape[-2:]))
    return spectrum.directions[: moved_rank(spectrum.energies)].T


def moved_rank(energies: np.ndarray) -> int:
    """The number of directions that actions move."""
    return max(1, int(np.sum(energies > _NEGLIGIBLE * energies[0])))


def _complement(basis: np.ndarray) -> np.ndarray:
    """An orthonormal basis of all directions that a basis leaves out."""
    return np.linalg.svd(basis, full_matrices=True)[0][:, basis.shape[1] :]


def _whitening(centered: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Within the span of a basis, to coordinates of unit variance."""
    if basis.shape[1] == 0:
        return basis
    values = centered @ basis
    variances, axes = np.linalg.eigh(values.T @ values / len(values))
    kept = variances > _NEGLIGIBLE * variances[-1]
    return basis @ (axes[:, kept] / np.sqrt(variances[kept]))
