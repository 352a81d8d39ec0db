"""Made-up run directories, small and plausible, for tests of tables, figures and report."""

import math
from pathlib import Path

import numpy as np

from cqm.experiments import published as paper
from cqm.experiments.results import COLUMNS, load, write_csv
from cqm.storage import write_json

LIMITS = {
    "cartpole-swingup": (3, 1.0, 0.0, 2e-7),
    "reacher-easy": (5, 0.98, 0.0004, 0.015),
    "cheetah-run": (5, 0.71, 0.03, 0.25),
    "walker-walk": (5, 0.48, 0.12, 0.63),
}
SIZES = {"cartpole-swingup": 5, "reacher-easy": 6, "cheetah-run": 17, "walker-walk": 24}
ESTIMATORS = ("branched", "residual", "residual-unweighted", "hindsight")
LOGGED = ((0, "uniform"), (64, "uniform"), (64, "state"))
BEYOND = ("default", "world-ensemble", *(f"{method}+effect" for method in paper.METHODS))


def write_run(
    directory,
    *,
    domains=tuple(paper.DOMAINS),
    seeds=(7, 8, 9, 10, 11),
    methods=(*paper.METHODS, "oracle", "zero", "random"),
    beyond=BEYOND,
    failed=(),
    times=True,
    states=20_000,
    seed=0,
):
    """Write all files of a run; scores lie near the paper's, and conditioning helps."""
    rng, directory = np.random.default_rng(seed), Path(directory)
    jobs = [(d, s, m) for d in domains for s in seeds for m in methods]
    jobs += [(d, s, m) for d in domains for s in seeds[:3] for m in beyond]
    write_json(
        directory / "run.json",
        {
            "preset": "paper" if states == 20_000 else "quick",
            "commands": ["cqm reproduce --preset " + ("paper" if states == 20_000 else "quick")],
            "protocol": {
                "states": states,
                "test_states": states // 5,
                "training": {"updates": states // 5, "learning_rate": 3e-4},
            },
            "versions": {"cqm": "0.1.0", "jax": "0.10.2", "mujoco": "3.17.0"},
            "machine": {"cores": 2, "platform": "Linux-6.1-x86_64"},
            "failed": list(failed),
        },
    )
    rows = {
        "scores": [score_row(rng, *job) for job in jobs],
        "ceilings": [ceiling_row(rng, d, s) for d in domains for s in seeds],
        "curves": [row for job in jobs for row in curve_rows(rng, *job)],
        "regret_cdf": [row for job in jobs for row in cdf_rows(rng, *job)],
        "alignment": [row for d in domains for m in methods for row in cloud_rows(rng, d, m)],
        "spectrum": [
            {"domain": d, "seed": s, "index": i, "energy": float(energy)}
            for d in domains
            for s in seeds
            for i, energy in enumerate(energies(SIZES.get(d, 4)))
        ],
        "parameters": [
            {"domain": d, "seed": s, "method": m, "parameters": 80_000} for d, s, m in jobs
        ],
        "logs": [row for d in domains for row in log_rows(d)],
    }
    for name, table in rows.items():
        write_csv(directory / f"{name}.csv", table, COLUMNS[f"{name}.csv"])
    if times:
        parts = {"physics": 210.5, "compilation": 61.0, "training": 330.25, "evaluation": 80.0}
        write_json(directory / "times.json", {**parts, "rest": 31.0, "wall": 401.5, "jobs": []})
    return directory


def write_scores(directory, scores, column="accuracy", **protocol):
    """A run with nothing but one score per seed from 7 on, as loaded results.

    Args:
        directory: Where to write it.
        scores: Values of the seeds, by method on reacher or by (domain, method).
        column: The score they are.
        protocol: Settings of the run.
    """
    rows = []
    for name, values in scores.items():
        domain, method = name if isinstance(name, tuple) else ("reacher-easy", name)
        for seed, value in enumerate(values, 7):
            row = dict.fromkeys(COLUMNS["scores.csv"])
            row |= {"domain": domain, "seed": seed, "method": method, column: value}
            if column == "accuracy":
                row["ceiling_share"] = 2 * value - 1
            rows.append(row)
    write_csv(directory / "scores.csv", rows, COLUMNS["scores.csv"])
    write_json(directory / "run.json", {"preset": "test", "protocol": protocol})
    return load(directory)


def log_rows(domain, seed=7):
    """Errors that fall as 1/n, each estimator's ten times as large as the one before."""
    return [
        {
            "domain": domain,
            "nuisance": nuisance,
            "behaviour": behaviour,
            "trajectories": num,
            "seed": seed,
            "estimator": name,
            "effect_nmse": 0.1 + 0.9 * error,
            "noise_floor": 0.1,
            "excess_error": error,
            "accuracy": 0.9 - 0.1 * i,
            "regret_share": 0.01 * (1 + i),
            "r_score": 0.5 - error,
            "r_error": 0.01,
            "dr_score": 0.5 + error,
            "dr_error": 0.01,
        }
        for nuisance, behaviour in LOGGED
        for num in (1_000, 20_000)
        for i, name in enumerate(ESTIMATORS)
        for error in [0.002 * 10**i * 1_000 / num]
    ]


def world_rows(world, states=2_000, errors=None, chosen="ridge", spread=0.01):
    """Rows of the study of worlds; the default's error is that of the candidate it chose."""
    errors = errors or {"constant": 1.0, "ridge": 0.2, "direct": 0.4, "paper": 0.5}
    errors = {"default": errors[chosen], **errors}
    best = min(errors.values())
    rows = []
    for name, error in errors.items():
        difference = errors["default"] - error
        se = 0.0 if name in ("default", chosen) else spread
        allowance = max(0.05 * best, 2 * se, 0.001)
        row = dict.fromkeys(COLUMNS["worlds.csv"])
        row |= {"world": world, "states": states, "actions": 3, "features": 4, "moved": 3}
        row |= {"noise_floor": 0.3, "own_noise_floor": 0.25, "chosen": chosen, "candidate": name}
        row |= {"own_error": error, "own_error_se": spread, "pooled_error": error / 2}
        row |= {"pooled_error_se": spread, "difference": difference, "difference_se": se}
        row |= {"allowance": allowance, "within": int(difference <= allowance), "seconds": 12.5}
        rows.append(row)
    return rows


def score_row(rng, domain, seed, method):
    actions, ceiling, floor, noise = LIMITS.get(domain, (5, 0.9, 0.01, 0.1))
    base, _, conditioned = method.partition("+")
    if base in ("oracle", "zero", "random"):
        accuracy = 1.0 if base == "oracle" else 1 / actions
        regret = 0.0 if base == "oracle" else 0.33
        nmse = {"oracle": 0.0, "zero": 1.0}.get(base, math.nan)
    else:
        like = {"default": "cqm", "world-ensemble": "world"}.get(base, base)
        published = paper.ACCURACY.get((domain, like))
        mean, half = (published.value, published.half_width) if published else (0.6, 0.05)
        accuracy = min(mean + half * rng.normal() * 0.9, 1.0)
        if conditioned or base in ("default", "world-ensemble"):
            accuracy += 0.5 * (ceiling - accuracy)
        regret = floor + 0.35 * max(ceiling - accuracy, 0.0)
        vector = paper.EFFECT_NMSE.get((domain, like))
        nmse = vector.value * math.exp(0.05 * rng.normal()) if vector else math.nan
        if conditioned or base == "default":
            nmse = noise + 0.6 * (nmse - noise)
    alike = base in ("zero", "random")
    return {
        "domain": domain,
        "seed": seed,
        "method": method,
        "accuracy": accuracy,
        "regret": regret,
        "effect_nmse": nmse,
        "absolute_nmse": 0.925 + 0.004 * rng.normal() if base.startswith(("world", "sf")) else None,
        "correlation": None if alike else min(accuracy**0.5 + 0.01 * rng.normal(), 1.0),
        "excess_error": (nmse - noise) / (1 - noise),
        "expected_accuracy": min(accuracy * 1.1, 1.0),
        "expected_regret": regret * 0.8,
        "ceiling_share": (accuracy - 1 / actions) / (ceiling - 1 / actions),
    }


def ceiling_row(rng, domain, seed):
    actions, ceiling, floor, noise = LIMITS.get(domain, (5, 0.9, 0.01, 0.1))
    return {
        "domain": domain,
        "seed": seed,
        "actions": actions,
        "states": 500,
        "draws": 64,
        "accuracy_ceiling": min(ceiling + 0.003 * rng.normal(), 1.0),
        "accuracy_ceiling_se": 0.004,
        "regret_floor": floor,
        "regret_floor_se": 0.05 * floor,
        "noise_floor": noise,
        "noise_floor_se": 0.02 * noise,
    }


def curve_rows(rng, domain, seed, method):
    if method in ("oracle", "zero", "random"):
        return []
    return [
        {
            "domain": domain,
            "seed": seed,
            "method": method,
            "step": step,
            "loss": float(0.2 + math.exp(-step / 800) * (1 + 0.1 * rng.normal())),
        }
        for step in range(0, 4001, 100)
    ]


def cdf_rows(rng, domain, seed, method):
    score = paper.REGRET.get((domain, method.partition("+")[0]))
    scale = max(score.value if score else 0.2, 1e-4) * math.exp(0.1 * rng.normal())
    grid = [0.0, *np.geomspace(1e-4, 10.0, 60)]
    start = 1.0 if method == "oracle" else 0.3
    return [
        {
            "domain": domain,
            "seed": seed,
            "method": method,
            "regret": float(regret),
            "share": float(1 - (1 - start) * math.exp(-regret / scale)),
        }
        for regret in grid
    ]


def cloud_rows(rng, domain, method):
    """Counts of aligned advantages; none for methods that score all actions alike."""
    if method in ("zero", "random"):
        return []
    accuracy = paper.ACCURACY.get((domain, method))
    agreement = accuracy.value if accuracy else 1.0
    limit = math.sqrt(LIMITS.get(domain, (5,))[0] - 1)
    x = np.clip(rng.normal(size=4000), -limit, limit)
    y = np.clip(agreement * x + math.sqrt(1 - agreement**2) * rng.normal(size=4000), -limit, limit)
    edges = np.linspace(-2, 2, 51)
    counts, _, _ = np.histogram2d(x, y, bins=(edges, edges))
    centres = (edges[:-1] + edges[1:]) / 2
    return [
        {
            "domain": domain,
            "method": method,
            "oracle": float(centres[i]),
            "predicted": float(centres[j]),
            "count": int(counts[i, j]),
        }
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]


def energies(size):
    shares = 0.6 ** np.arange(size)
    return shares / shares.sum()


if __name__ == "__main__":
    import sys

    print(write_run(sys.argv[1]))
