"""EconML's estimators and plain T- and S-learners, for `benchmarks.cate`.

Runs in an environment with EconML, without cqm. Reads one JSON object per line from standard input
(`path` of an npz file with logs, `methods` to fit) and answers each with one line of JSON: effects
`[test states, actions, outcomes]` by method.

Outcome regressions and propensities are gradient boosting everywhere. EconML's estimators see the
same folds, so that a model which two of them would fit to the same rows is fitted once.
"""

import json
import sys
import warnings

import numpy as np
from econml.dml import CausalForestDML, LinearDML
from econml.dr import DRLearner
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.multioutput import MultiOutputRegressor

FITTED = {}  # models of the current logs, by what they were fitted to
BOOSTING = {"n_estimators": 100, "max_depth": 3, "subsample": 0.7, "random_state": 0}


class Shared:
    """A model that is fitted once to the same rows."""

    def fit(self, x, y):
        key = (type(self), x.tobytes(), np.ravel(y).tobytes())
        if key not in FITTED:
            FITTED[key] = dict(vars(super().fit(x, np.ravel(y))))
        vars(self).update(FITTED[key])
        return self


class Regressor(Shared, GradientBoostingRegressor):
    """Outcome regression."""


class Classifier(Shared, GradientBoostingClassifier):
    """Propensities."""


def by_outcome(make):
    """Effects relative to the first action, one model per outcome."""

    def fit(x, y, t, actions):
        models = [make(_folds(t)).fit(column, t, X=x) for column in y.T]

        def effects(test):
            columns = []
            for model in models:
                own = np.asarray(model.const_marginal_effect(test)).reshape(len(test), -1)
                columns.append(np.concatenate([np.zeros((len(test), 1)), own], axis=1))
            return np.stack(columns, axis=2)

        return effects

    return fit


def _folds(t):
    return list(StratifiedKFold(3, shuffle=True, random_state=0).split(t[:, None], t))


def t_learner(make):
    """One regression per action."""

    def fit(x, y, t, actions):
        models = [make().fit(x[t == a], y[t == a]) for a in range(actions)]
        return lambda test: np.stack([m.predict(test).reshape(len(test), -1) for m in models], 1)

    return fit


def s_learner(make):
    """One regression on state and action."""

    def fit(x, y, t, actions):
        model = make().fit(np.c_[x, np.eye(actions)[t]], y)

        def effects(test):
            arms = [np.c_[test, np.tile(own, (len(test), 1))] for own in np.eye(actions)]
            return np.stack([model.predict(arm).reshape(len(test), -1) for arm in arms], axis=1)

        return effects

    return fit


def boosting():
    return MultiOutputRegressor(GradientBoostingRegressor(**BOOSTING))


def dml(kind, **settings):
    return by_outcome(
        lambda folds: kind(
            model_y=Regressor(**BOOSTING),
            model_t=Classifier(**BOOSTING),
            discrete_treatment=True,
            cv=folds,
            random_state=0,
            **settings,
        )
    )


METHODS = {
    "LinearDML": dml(LinearDML),
    "CausalForestDML": dml(CausalForestDML, n_jobs=1),
    "DRLearner": by_outcome(
        lambda folds: DRLearner(
            model_regression=Regressor(**BOOSTING),
            model_propensity=Classifier(**BOOSTING),
            model_final=LinearRegression(),
            cv=folds,
            random_state=0,
        )
    ),
    "T-OLS": t_learner(LinearRegression),
    "T-boosting": t_learner(boosting),
    "S-OLS": s_learner(LinearRegression),
    "S-boosting": s_learner(boosting),
}


def answer(path, methods):
    """Effects in the test states, by method."""
    FITTED.clear()
    with np.load(path) as data:
        x, t, y, test = (data[name] for name in ("x", "t", "y", "test"))
        actions = int(data["actions"])
    return {name: METHODS[name](x, y, t, actions)(test).tolist() for name in methods}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
