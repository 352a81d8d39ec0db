"""Regressions in closed form, against what they must find."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from cqm.regression import (
    RandomFourierFeatures,
    _Products,
    cosines,
    fold_numbers,
    fourier_ridge,
    inverse_root,
    leave_one_out_ridge,
    one_thread,
    pair_products,
    product_ridge,
    ridge,
    ridges_of_rows,
    shrunk_covariance,
)
from cqm.rows import Rows


def test_a_cross_fitted_ridge_predicts_new_rows_and_not_its_own_noise():
    rng = np.random.default_rng(0)
    design = rng.normal(size=(400, 20))
    weights = rng.normal(size=(20, 1))
    targets = np.concatenate([design @ weights, rng.normal(size=(400, 1))], axis=1)
    folds = fold_numbers(400, 5)
    fitted = ridge(design, targets, folds)
    np.testing.assert_allclose(fitted.weights[:, :1], weights, atol=1e-3)
    assert abs(np.corrcoef(fitted.predictions[:, 1], targets[:, 1])[0, 1]) < 0.2
    by_hand = np.einsum("nr,nro->no", design, fitted.by_fold[folds])
    np.testing.assert_allclose(fitted.predictions, by_hand, atol=1e-9)


def test_folds_are_even_keep_groups_together_and_follow_no_rhythm():
    folds = fold_numbers(400, 5)
    assert np.bincount(folds).tolist() == [80] * 5
    for period in (2, 5):  # every fold has every phase
        assert len({*zip(folds, np.arange(400) % period, strict=True)}) == 5 * period
    groups = np.repeat(np.arange(40), 10)
    own = fold_numbers(400, 5, groups).reshape(40, 10)
    assert (own == own[:, :1]).all()
    assert np.bincount(own[:, 0]).tolist() == [8] * 5
    with pytest.raises(ValueError, match="number of trajectories, 400; got 1"):
        fold_numbers(400, 1)
    with pytest.raises(ValueError, match="number of groups of trajectories, 40; got 41"):
        fold_numbers(400, 41, groups)


def test_a_shrunk_covariance_is_right_with_much_data_and_diagonal_with_little():
    rng = np.random.default_rng(0)
    root = np.array([[2.0, 0.0], [1.5, 0.5]])
    many = rng.normal(size=(50_000, 2)) @ root.T
    np.testing.assert_allclose(shrunk_covariance(many), root @ root.T, rtol=0.05)
    few = shrunk_covariance(rng.normal(size=(10, 8)))
    off = few[~np.eye(8, dtype=bool)]
    assert np.abs(off).max() < 0.5
    back = inverse_root(root @ root.T)
    np.testing.assert_allclose(back @ back.T, np.linalg.inv(root @ root.T), rtol=1e-9)


def test_leaving_one_row_out_in_closed_form_is_leaving_it_out():
    rng = np.random.default_rng(0)
    num = 30
    design = np.concatenate([np.ones((num, 1)), rng.normal(size=(num, 6))], axis=1)
    targets = np.stack(
        [
            5 + design[:, 1] - 2 * design[:, 2],
            design[:, 3] + rng.normal(size=num),
            rng.normal(size=num),
        ],
        axis=1,
    )
    scaled = design * np.array([1e3, *np.ones(6)])  # the constant is not shrunk
    best = np.full(3, np.inf)
    weights = np.zeros((7, 3))
    for penalty in 10.0 ** np.arange(-6, 4):

        def solve(rows, penalty=penalty):
            square = scaled[rows].T @ scaled[rows] + penalty * num * np.eye(7)
            return np.linalg.solve(square, scaled[rows].T @ targets[rows])

        left_out = np.stack([scaled[i] @ solve(np.arange(num) != i) for i in range(num)])
        errors = np.mean((left_out - targets) ** 2, axis=0)
        better = errors < best
        best[better] = errors[better]
        weights[:, better] = solve(np.arange(num) >= 0)[:, better]
    fitted = leave_one_out_ridge(design, targets)
    np.testing.assert_allclose(fitted.errors, best, atol=1e-6)
    np.testing.assert_allclose(fitted.weights, weights * np.array([[1e3], *[[1.0]] * 6]), atol=1e-6)
    np.testing.assert_allclose(fitted.weights[:, 0], [5, 1, -2, 0, 0, 0, 0], atol=1e-4)


def test_a_product_ridge_solves_the_normal_equations_of_all_products():
    rng = np.random.default_rng(3)
    design = np.concatenate([np.ones((300, 1)), rng.normal(size=(300, 7))], axis=1)
    factors, targets = rng.normal(size=(300, 3, 2)), rng.normal(size=(300, 3, 2))
    penalties = np.array([0.01, 10.0])
    products = np.einsum("nr,nap->narp", design, factors).reshape(900, 16)
    expected = [
        np.linalg.solve(products.T @ products + 300 * penalty * np.eye(16), products.T @ values)
        for penalty, values in zip(penalties, targets.reshape(900, 2).T, strict=True)
    ]
    solved = _Products(design, factors, targets).solved(
        penalties, np.zeros((8, 2, 2)), precise=1e-12
    )
    assert np.allclose(solved.reshape(16, 2), np.transpose(expected), rtol=0, atol=1e-9)


def test_a_product_ridge_finds_coefficients_and_ignores_noise():
    rng = np.random.default_rng(4)
    design = np.concatenate([np.ones((800, 1)), rng.normal(size=(800, 20))], axis=1)
    factors, weights = rng.normal(size=(800, 4, 3)), rng.normal(size=(21, 3, 1))
    exact = np.einsum("nr,nap,rpt->nat", design, factors, weights)
    noise = rng.normal(size=exact.shape)
    fitted = product_ridge(design, factors, np.concatenate([exact, noise], axis=-1))
    assert np.allclose(fitted.weights[..., :1], weights, atol=1e-4)
    # Least squares on 3,200 values of noise with 63 regressors would explain 2 % of them.
    explained = np.einsum("nr,nap,rp->na", design, factors, fitted.weights[..., 1])
    assert np.mean(explained**2) < 0.006


def test_fourier_ridge_finds_which_inputs_matter():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(600, 8))
    targets = np.stack([np.sin(2 * inputs[:, 0]), np.cos(inputs[:, 0] + inputs[:, 3])], axis=1)
    fitted = fourier_ridge(inputs, targets, waves=128, rounds=3, rng=rng)
    slopes = np.sqrt(np.diag(fitted.products))
    others = [1, 2, 4, 5, 6, 7]
    assert slopes[[0, 3]].min() > 5 * slopes[others].max()
    stretched = np.linalg.norm(fitted.transform, axis=1)
    assert stretched[[0, 3]].min() > 5 * stretched[others].max()
    new = rng.normal(size=(500, 8))
    truth = np.stack([np.sin(2 * new[:, 0]), np.cos(new[:, 0] + new[:, 3])], axis=1)
    once = fourier_ridge(inputs, targets, waves=128, rounds=0, rng=np.random.default_rng(1))
    error, plain = (np.mean((model(new) - truth) ** 2) for model in (fitted, once))
    assert error < 0.02
    assert error < 0.3 * plain


def test_gradient_products_are_those_of_finite_differences():
    rng = np.random.default_rng(0)
    inputs, step = rng.normal(size=(40, 3)), 1e-5
    features = RandomFourierFeatures.draw(inputs, 10, rng)
    weights = rng.normal(size=(1 + 3 + 10, 2))
    gradients = np.stack(
        [
            (features(inputs + step * axis) - features(inputs - step * axis)) @ weights / (2 * step)
            for axis in np.eye(3)
        ],
        axis=1,
    )  # [n, inputs, outputs]
    expected = np.einsum("nio,njo->ij", gradients, gradients) / 40 / 2
    np.testing.assert_allclose(features.gradient_products(weights, inputs), expected, atol=1e-7)


def test_products_of_pairs_include_squares():
    products = pair_products(np.array([[2.0, 3.0, 5.0]]))
    assert products.tolist() == [[4.0, 6.0, 10.0, 9.0, 15.0, 25.0]]
    assert pair_products(np.empty((4, 0))).shape == (4, 0)


def blas_threads():
    return {own["num_threads"] for own in threadpool_info() if own["user_api"] == "blas"}


def test_one_thread_lasts_as_long_as_its_block():
    with threadpool_limits(2, user_api="blas"):
        with one_thread():
            assert blas_threads() == {1}
        assert blas_threads() == {2}


def test_one_thread_lasts_until_the_last_of_several_has_left():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with one_thread():
            entered.set()
            leave.wait(10)

    before = blas_threads()
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    with one_thread():
        leave.set()
        thread.join()
        assert blas_threads() == {1}
    assert blas_threads() == before


def test_cosines_are_those_of_numpy():
    angles = np.random.default_rng(0).uniform(-300, 300, (100, 200))
    np.testing.assert_allclose(cosines(angles.copy()), np.cos(angles), rtol=0, atol=1e-12)
    assert np.isnan(cosines(np.array([np.nan]))).all()


def test_random_fourier_features_are_a_constant_the_inputs_and_cosines():
    features = RandomFourierFeatures(np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0.0, np.pi]))
    found = features(np.array([[0.0, 0.0], [np.pi, np.pi / 4]]))
    expected = [[1, 0, 0, 1, -1], [1, np.pi, np.pi / 4, -1, 0]]
    np.testing.assert_allclose(found, expected, atol=1e-14)
    assert features(np.zeros((0, 2))).shape == (0, 5)


def test_ridge_regressions_of_rows_are_those_of_arrays():
    rng = np.random.default_rng(0)
    design = np.column_stack([np.ones(300), rng.normal(size=(300, 3))])
    targets = design @ rng.normal(size=(4, 2)) + 5 + rng.normal(size=(300, 2))
    folds = fold_numbers(300, 3)
    rows = Rows.of(design=design, targets=targets, folds=folds, block=70)
    rows = replace(rows, num_folds=3)
    few, whole = ridges_of_rows(
        rows,
        "test",
        [lambda block: block["design"][:, :2], lambda block: block["design"]],
        lambda block: block["targets"],
    )
    expected = ridge(design, targets, folds)
    np.testing.assert_allclose(whole.weights, expected.weights)
    np.testing.assert_allclose(rows.array(whole.predict_fn), expected.predictions)
    np.testing.assert_allclose(few.weights, ridge(design[:, :2], targets, folds).weights)
    both, squares = whole.agreement()
    np.testing.assert_allclose(both, (expected.predictions * targets).sum(axis=0))
    np.testing.assert_allclose(squares, (expected.predictions**2).sum(axis=0))
