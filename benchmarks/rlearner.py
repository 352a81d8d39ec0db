"""The residual model against an independent double machine learning implementation.

With one-dimensional outcomes, two actions and one step, the residual model is an R-learner, so its
average contrast can be compared with EconML's `LinearDML` on the same logs. EconML is not a
dependency of the package; it runs in an environment of its own.

    python -m venv peer && peer/bin/pip install econml
    python -m benchmarks.rlearner --peer peer/bin/python
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmarks import write_csv
from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel

PEER = """
import json, sys, numpy as np
from econml.dml import LinearDML
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, StandardScaler
data = np.load(sys.argv[1])
forest = {"n_estimators": 200, "min_samples_leaf": 20, "random_state": 0, "n_jobs": 1}
def waves():
    sampler = RBFSampler(gamma=0.3, n_components=128, random_state=0)
    both = make_union(FunctionTransformer(), sampler)
    return make_pipeline(StandardScaler(), both, RidgeCV(np.logspace(-3, 4, 8)))
models = {
    "waves": LinearDML(model_y=waves(), model_t=waves(), cv=5, random_state=0),
    "forest": LinearDML(
        model_y=RandomForestRegressor(**forest), model_t=RandomForestClassifier(**forest),
        discrete_treatment=True, cv=5, random_state=0,
    ),
}
answers = {}
for name, model in models.items():
    treatment = data["t"] if name == "forest" else data["t"].astype(float)
    model.fit(data["y"], treatment, X=data["x"])
    inference = model.ate_inference(data["x"])
    answers[name] = {
        "average": float(inference.mean_point),
        "error": float(inference.stderr_mean),
        "effects": model.effect(data["test"]).tolist(),
        "errors": model.effect_inference(data["test"]).stderr.tolist(),
    }
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Settings:
    """What to compare."""

    peer: Path
    """Python interpreter of an environment with EconML."""
    trajectories: int = 5_000
    """Number of trajectories per set of logs."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Random seeds for the logs; one set of logs per seed."""
    out: Path = Path("benchmarks/results/rlearner.csv")
    """Where to write the results."""


def sample(num: int, rng: np.random.Generator) -> tuple[Logs, np.ndarray]:
    """Confounded logs: the state raises both the outcome and the propensity of the action."""
    state = rng.normal(size=(num, 3))
    propensity = 0.15 + 0.7 / (1 + np.exp(-1.5 * state[:, 0]))
    propensities = np.stack([1 - propensity, propensity], axis=1)
    action = draw_actions(propensities, rng.random(num))
    effect = 1 + 0.5 * state[:, 1]
    common = 3 * state[:, 0] + np.sin(2 * state[:, 2])
    outcome = common + effect * action + rng.normal(size=num)
    return Logs.from_arrays(
        state, action, outcome[:, None, None], feature_names=["outcome"], discount=1.0
    ), effect


def main(settings: Settings) -> None:
    rows = []
    for seed in settings.seeds:
        rng = np.random.default_rng(seed)
        logs, truth = sample(settings.trajectories, rng)
        test = rng.normal(size=(200, 3))
        model = ResidualModel(seed=seed).fit(logs)
        ours = float(model.effect(logs.observations, action=1, baseline=0).mean())
        states = model.effect(test, action=1, baseline=0)[:, 0]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "logs.npz"
            np.savez(
                path, x=logs.observations, t=logs.first_actions, y=logs.outcomes[:, 0], test=test
            )
            command = [str(settings.peer), "-c", PEER, str(path)]
            answers = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        naive = (
            logs.outcomes[logs.first_actions == 1].mean()
            - logs.outcomes[logs.first_actions == 0].mean()
        )
        for nuisance, answer in answers.items():
            within = np.abs(states - np.array(answer["effects"])) <= 2 * np.array(answer["errors"])
            rows.append(
                {
                    "seed": seed,
                    "trajectories": settings.trajectories,
                    "truth": round(float(truth.mean()), 4),
                    "cqm": round(ours, 4),
                    "nuisance": nuisance,
                    "econml": round(answer["average"], 4),
                    "econml_error": round(answer["error"], 4),
                    "difference_in_errors": round((ours - answer["average"]) / answer["error"], 3),
                    "states_within_2_errors": round(float(within.mean()), 3),
                    "difference_of_means": round(float(naive), 4),
                }
            )
            print(rows[-1])
    write_csv(settings.out, rows)
    print(f"written to {settings.out}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
