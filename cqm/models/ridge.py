"""Ridge regression on the state: a predictor in closed form, fitted in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from cqm.models.controls import centered_monomials
from cqm.models.predictors import FourierPredictor, PolynomialPredictor
from cqm.models.preprocessing import Coordinates
from cqm.quotient import center
from cqm.regression import (
    RandomFourierFeatures,
    Regression,
    fourier_ridge,
    learned_transform,
    leave_one_out_ridge,
    pair_products,
    product_ridge,
)

MOST_FAMILIES = 50_000  # more hardly change a regression
_WAVES, _ROUNDS = 1_024, 1
_PRODUCTS = 8_192  # inputs times monomials of the controls, and cosines times monomials
_PRODUCT_ROUNDS = 5
_MAX_PAIRS = 1_000  # products of inputs in a quadratic regression


def ridge_predictor(
    coordinates: Coordinates,
    observations: np.ndarray,
    labels: np.ndarray,
    basis: np.ndarray,
    *,
    seed: int,
    transform: np.ndarray | None = None,
) -> FourierPredictor:
    """Regress labels on the state.

    Each coordinate of each action's label uses the regressors and the penalty with the lowest
    leave-one-out error: a constant, the inputs, their products, or cosines of learned coordinates.

    Args:
        coordinates: From observations to inputs of comparable scale.
        observations: `[n, observations]`.
        labels: `[n, actions, coordinates]`.
        basis: From coordinates of labels to what is predicted, `[features, coordinates]`.
        seed: Random seed for the cosines.
        transform: Scaling of the inputs that suits a regression, if known; otherwise it is learned.
    """
    inputs, targets = coordinates(observations), labels.reshape(len(labels), -1)
    num, size = inputs.shape
    constant = np.ones((num, 1))
    pairs = size * (size + 1) // 2
    pairs = pairs if pairs <= min(_MAX_PAIRS, num // 4) else 0
    weights = np.zeros((1 + size + _WAVES + pairs, targets.shape[1]))
    least = np.full(targets.shape[1], np.inf)

    def offer(fitted: Regression, places: Any, own: np.ndarray) -> None:
        """Take over the outputs that this regression predicts better than those before."""
        better = fitted.errors < least
        weights[:, better] = 0
        weights[np.ix_(places, np.flatnonzero(better))] = own[:, better]
        least[better] = fitted.errors[better]

    for design, places in (
        (constant, [0]),
        (np.concatenate([constant, inputs], axis=1), range(1 + size)),
    ):
        fitted = leave_one_out_ridge(design, targets)
        offer(fitted, places, fitted.weights)
    if pairs:
        design = np.concatenate([constant, inputs, pair_products(inputs)], axis=1)
        fitted = leave_one_out_ridge(design, targets)
        places = np.r_[: 1 + size, 1 + size + _WAVES : len(weights)]
        offer(fitted, places, fitted.weights)
    fourier = fourier_ridge(
        inputs,
        targets,
        waves=min(_WAVES, max(16, num // 4)),
        rounds=_ROUNDS if transform is not None else 3 * _ROUNDS,
        rng=np.random.default_rng(seed),
        transform=transform,
    )
    waves = fourier.features.frequencies.shape[1]
    own = fourier.fitted.weights.copy()
    own[1 : 1 + size] = fourier.transform @ own[1 : 1 + size]
    offer(fourier.fitted, range(1 + size + waves), own)
    used = np.abs(weights).max(axis=1) > 0
    kept = np.r_[: 1 + size + waves, 1 + size + _WAVES : len(weights)]
    if not used[1 + size + _WAVES :].any():
        kept = kept[: 1 + size + waves]
    frequencies = fourier.transform @ fourier.features.frequencies
    features = RandomFourierFeatures(frequencies, fourier.features.phases)
    if not used[1 + size : 1 + size + waves].any():
        features = RandomFourierFeatures(frequencies[:, :0], features.phases[:0])
        kept = np.setdiff1d(kept, np.arange(1 + size, 1 + size + waves))
    shaped = weights[kept].reshape(len(kept), labels.shape[1], -1).transpose(1, 0, 2)
    return FourierPredictor.of_members(coordinates, [(features, shaped)], basis)


def polynomial_predictor(
    coordinates: Coordinates,
    observations: np.ndarray,
    codes: np.ndarray,
    labels: np.ndarray,
    basis: np.ndarray,
    menu: np.ndarray,
    *,
    seed: int,
    transform: np.ndarray | None = None,
) -> PolynomialPredictor:
    """Regress labels on polynomials of the controls whose coefficients depend on the state.

    Args:
        coordinates: From observations to inputs of comparable scale, the most important ones first;
            the last ones are left out if there are too many.
        observations: `[n, observations]`.
        codes: Codes of the controls, `[n, arms, controls]`.
        labels: Centred over the arms, `[n, arms, coordinates]`.
        basis: From coordinates of labels to what is predicted, `[features, coordinates]`.
        menu: Codes of the candidate actions, `[actions, controls]`.
        seed: Random seed for the cosines.
        transform: Scaling of the inputs that suits a regression, if known.
    """
    monomials, rng = center(centered_monomials(codes)), np.random.default_rng(seed)
    spread = np.sqrt(np.mean(monomials**2, axis=(0, 1)))
    most = max(1, _PRODUCTS // monomials.shape[-1])
    if coordinates.matrix.shape[1] > most:
        coordinates = Coordinates(coordinates.shift, coordinates.matrix[:, :most])
        transform = None
    inputs = coordinates(observations)
    waves = min(_WAVES, most, max(16, len(inputs) // 4)) if inputs.shape[1] else 0

    def fit(design: np.ndarray, rows: slice) -> tuple[np.ndarray, float]:
        fitted = product_ridge(design, monomials[rows], labels[rows])
        return (spread[:, None] * fitted.weights).reshape(len(fitted.weights), -1), fitted.error

    best = learned_transform(
        inputs, fit, waves=waves, rounds=_PRODUCT_ROUNDS, rng=rng, transform=transform
    )
    coordinates = Coordinates(coordinates.shift, coordinates.matrix @ best)
    inputs = coordinates(observations)
    features = RandomFourierFeatures.draw(inputs, waves, rng)
    weights = product_ridge(features(inputs), monomials, labels).weights.transpose(1, 0, 2)
    return PolynomialPredictor(coordinates, basis, menu, features, weights)
