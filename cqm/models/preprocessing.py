"""Preprocessing: coordinates in which a network sees observations and predicts effects.

In raw observations, the directions that actions move may be drowned out by those they do not move.
Paired effects reveal which directions actions move; these come first, each at unit scale. The other
directions may still modulate the effects, so they are kept, whitened and at a smaller scale. If
nothing among them does, they are a nuisance and can be projected out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cqm.quotient import effect_spectrum
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros

Conditioning = Literal["none", "whiten", "effect", "project", "learned"]
REST_SCALE = 0.1  # scale of the directions that no action moves
_NEGLIGIBLE = 1e-12  # directions with a smaller share of the energy count as rounding error


@dataclass(frozen=True)
class Coordinates:
    """An affine map into the network's coordinates."""

    shift: np.ndarray  # [values]
    matrix: np.ndarray  # [values, coordinates]

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Coordinates of values, `[..., coordinates]`."""
        return (np.asarray(values, float) - self.shift) @ self.matrix

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Shift and matrix, by their names in a file."""
        return {f"{name}.shift": self.shift, f"{name}.matrix": self.matrix}


def input_coordinates(
    kind: Conditioning, observations: np.ndarray | Rows, basis: np.ndarray | None
) -> Coordinates:
    """Coordinates of observations `[n, observations]`.

    Args:
        kind: `none` for raw observations, `whiten`, `effect` for controllable directions first, or
            `project` for these alone.
        observations: The observations to condition on, or rows with a column of this name.
        basis: Directions of the observation that actions move, `[observations, coordinates]`. If
            the features are not the next observation, these are unknown; pass None, and `effect`
            then whitens, while `project` is refused.
    """
    if isinstance(observations, np.ndarray):
        observations = Rows.of(observations=observations, block=len(observations))
    size = observations.shape("observations")[0]
    if kind == "none":
        return Coordinates(np.zeros(size), np.eye(size))
    if kind not in ("whiten", "effect", "project"):
        raise ValueError(
            f"conditioning must be 'none', 'whiten', 'effect' or 'project'; got {kind!r}"
        )
    if kind == "project" and basis is None:
        raise ValueError(
            "conditioning='project' needs features that are the observation of the next state, "
            "because only these show which directions of the observation actions move"
        )
    shift = observations.mean("observations")
    centered = observations.having(values=lambda block: block["observations"] - shift)
    if kind == "whiten" or basis is None:
        return Coordinates(shift, *whitenings(centered, np.eye(size)))
    if kind == "project":
        return Coordinates(shift, *whitenings(centered, basis))
    moved, rest = whitenings(centered, basis, complement(basis))
    return Coordinates(shift, np.concatenate([moved, REST_SCALE * rest], axis=1))


def step_coordinates(
    observations: np.ndarray,
    steps: np.ndarray,
    basis: np.ndarray,
    *,
    features_are_next_observation: bool,
) -> tuple[Coordinates, Coordinates]:
    """Coordinates for unrolling: of the observations, and of the features of a step.

    Args:
        observations: `[n, observations]`.
        steps: Features of some steps, `[m, features]`.
        basis: Directions that actions move, `[features, coordinates]`.
        features_are_next_observation: If so, the first coordinates of the observation are those of
            the features, and the rest of the observation follows as context.
    """
    moved = steps @ basis
    shift, scale = moved.mean(axis=0), moved.std(axis=0) + 1e-12
    features = Coordinates(basis @ shift, basis / scale)
    if not features_are_next_observation:
        return input_coordinates("whiten", observations, None), features
    centered = observations - observations.mean(axis=0)
    rest = complement(basis)
    context = REST_SCALE * whitening(centered, rest)
    # One shift serves both parts: the features' along the basis, the observations' mean across it.
    shift = features.shift + rest @ (rest.T @ observations.mean(axis=0))
    return Coordinates(shift, np.concatenate([features.matrix, context], axis=1)), features


def output_basis(kind: Conditioning, effects: np.ndarray) -> np.ndarray:
    """An orthonormal basis `[features, coordinates]` of the span of the effects.

    With conditioning other than `effect` and `project`, a basis of all features.
    """
    if kind not in ("effect", "project"):
        return np.eye(effects.shape[-1])
    spectrum = effect_spectrum(effects.reshape(-1, *effects.shape[-2:]))
    energies = spectrum.energies
    rank = max(1, int(np.sum(energies > _NEGLIGIBLE * energies[0])))
    return spectrum.directions[:rank].T


def whitening(
    centered: np.ndarray, basis: np.ndarray, *, negligible: float = _NEGLIGIBLE
) -> np.ndarray:
    """A map `[values, coordinates]` to coordinates of unit variance within the span of a basis.

    Args:
        centered: Values with mean zero, `[n, values]`.
        basis: `[values, coordinates]`.
        negligible: Directions with a smaller share of the largest variance are left out.
    """
    rows = Rows.of(values=centered, block=len(centered))
    return whitenings(rows, basis, negligible=negligible)[0]


def whitenings(rows: Rows, *bases: np.ndarray, negligible: float = _NEGLIGIBLE) -> list[np.ndarray]:
    """The same for several bases, of rows with a column `values`."""

    return [_whitening(rows, basis, negligible) for basis in bases]


def _whitening(rows: Rows, basis: np.ndarray, negligible: float) -> np.ndarray:
    if basis.shape[1] == 0:
        return basis
    variances, axes = np.linalg.eigh(second_moments(rows, lambda block: block["values"] @ basis))
    kept = variances > negligible * max(float(variances[-1]), 1e-300)
    return basis @ (axes[:, kept] / np.sqrt(variances[kept]))


def second_moments(rows: Rows, values_fn: ColumnFn) -> np.ndarray:
    """The second moments of values `[n, values]`."""

    def add(sums: Sums, block: Block) -> None:
        values = values_fn(block)
        sums["moments"] += values.T @ values

    size = values_fn(rows.head(1)).shape[1]
    return rows.total("moments", zeros(moments=(size, size)), add)["moments"] / rows.num


def complement(basis: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the orthogonal complement of a basis."""
    return np.linalg.svd(basis, full_matrices=True)[0][:, basis.shape[1] :]
