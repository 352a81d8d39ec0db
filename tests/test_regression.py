"""Regressions in closed form, against what they must find."""

import numpy as np
import pytest

from cqm.regression import fold_numbers, inverse_root, ridge, shrunk_covariance


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
