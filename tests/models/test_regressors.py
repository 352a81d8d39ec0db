"""Regressors that a user brings: cross-fitted baselines, effects from scores, and refusals."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression

import cqm
from cqm.models.regressors import cross_fitted_columns
from cqm.models.residual import ResidualModel

STATES = np.linspace(-1.5, 1.5, 30)[:, None]


def stepped(num=2_000, seed=0):
    """Two actions; the baseline and the effect are steps, which waves do not suit."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(num, 1))
    chance = 0.3 + 0.4 * (x[:, 0] > 0)
    action = (rng.random(num) < chance).astype(int)
    outcome = 5 * (x[:, 0] > 0.5) + action * (x[:, 0] > 0) + 0.5 * rng.normal(size=num)
    propensities = np.stack([1 - chance, chance], axis=1)
    return cqm.Logs.from_arrays(
        x, action, outcome[:, None, None], discount=1.0, propensities=propensities
    )


def error(model, logs):
    effects = model.fit(logs).effect(STATES, action=1, baseline=0)[:, 0]
    return np.sqrt(np.mean((effects - (STATES[:, 0] > 0)) ** 2))


def test_rows_are_predicted_from_other_folds():
    class Memory:
        """Predicts the mean of what it has seen, and knows its rows."""

        def fit(self, X, y):
            self.mean, self.seen = y.mean(), set(X[:, 0])

        def predict(self, X):
            assert not self.seen & set(X[:, 0])
            return np.full(len(X), self.mean)

    x, y, folds = np.arange(6.0)[:, None], np.arange(6.0)[:, None], np.array([0, 0, 1, 1, 2, 2])
    found = cross_fitted_columns(Memory(), x, y, folds)
    np.testing.assert_allclose(found[:, 0], [3.5, 3.5, 2.5, 2.5, 1.5, 1.5])


class Bins:
    """Means of three ranges, which contain the steps."""

    def fit(self, X, y):
        own = self.ranges(X)
        self.means = np.array([y[own == i].mean() for i in range(3)])

    def predict(self, X):
        return self.means[self.ranges(X)]

    @staticmethod
    def ranges(X):
        return np.digitize(X[:, 0], [0.0, 0.5])


def test_regressors_that_suit_the_problem_are_better_than_waves():
    logs, few = stepped(), {"members": 1, "folds": 2}
    suited = ResidualModel(baseline_regressor=Bins(), effect_regressor=Bins(), **few)
    assert error(suited, logs) < 0.5 * error(ResidualModel(**few), logs)


def test_what_a_baseline_regressor_explains_is_not_noise():
    logs, few = stepped(1_000), {"members": 1, "folds": 2}
    errors = [
        ResidualModel(baseline_regressor=own, **few).average_effect(logs).contrast(1, 0)[1][0]
        for own in (None, Bins())
    ]
    assert errors[1] < 0.9 * errors[0]


def test_a_model_with_a_baseline_regressor_is_saved_without_it(tmp_path):
    logs = stepped(400)
    model = ResidualModel(members=1, baseline_regressor=LinearRegression()).fit(logs)
    assert any(note.startswith("baseline: LinearRegression, then") for note in model.notes_)
    model.save(tmp_path)
    loaded = cqm.load_model(tmp_path)
    assert loaded.baseline_regressor is None
    np.testing.assert_array_equal(loaded.effect(STATES), model.effect(STATES))


def test_regressors_are_copied_and_cloned():
    logs, own = stepped(400), LinearRegression()
    model = clone(ResidualModel(members=1, folds=2, effect_regressor=own))
    effects = model.fit(logs).effect(STATES)
    assert not hasattr(own, "coef_")
    assert not hasattr(model.effect_regressor, "coef_")
    np.testing.assert_allclose(effects.sum(axis=1), 0, atol=1e-12)
    averages = model.average_effect(logs)
    assert abs(averages.contrast(1, 0)[0][0] - 0.5) < 0.3


def test_mistakes_are_explained(tmp_path):
    logs, own = stepped(400), LinearRegression()
    for wrong, message in (
        ({"effect_regressor": 3}, "fit of effect_regressor must be"),
        ({"effect_regressor": LinearRegression}, "must be a regressor, not its class"),
        ({"effect_regressor": own, "method": "tabular"}, "is for method='direct'"),
        ({"effect_regressor": own, "outcome": "additive"}, "leave out one of the two"),
    ):
        with pytest.raises(ValueError, match=message):
            ResidualModel(**wrong).fit(logs)
    model = ResidualModel(members=1, folds=2, effect_regressor=LinearRegression()).fit(logs)
    with pytest.raises(ValueError, match="LinearRegression cannot be saved, because files contain"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model" / "model.json").exists()


def test_wrong_predictions_are_refused():
    class Wrong(LinearRegression):
        def predict(self, X):
            return np.zeros((len(X), 2))

    with pytest.raises(ValueError, match=r"predictions of Wrong must be \[200\], one per row"):
        ResidualModel(folds=2, baseline_regressor=Wrong()).fit(stepped(400))
