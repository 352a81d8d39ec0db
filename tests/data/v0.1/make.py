"""The files of this directory were written by version 0.1.0 of cqm at commit fe2a83d.

This script made them and needs that version. It is kept as the record of how they were made; later
versions only read them. To repeat it, with FE2A83D a checkout of that commit and OUT an empty or
new directory:

    PYTHONPATH=FE2A83D MUJOCO_GL=disable taskset -c 0 python tests/data/v0.1/make.py OUT

One core, because training is repeatable bit for bit with one number of threads only. Nothing of cqm
is imported before it is needed, so that whoever only looks at this file can import it.
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from importlib import import_module  # by name, because linters know the modules of today
from pathlib import Path

import numpy as np

DOMAIN, SEED = "cartpole-swingup", 7
KEPT_STATES = 8  # of the test set, whose predictions are kept for every method


def main(out):
    """Make everything below a directory."""
    import cqm

    if cqm.__version__ != "0.1.0":
        raise SystemExit(f"this needs cqm 0.1.0, commit fe2a83d; got {cqm.__version__}")
    print("cqm is", cqm.__file__)
    out = Path(out)
    if (out / "branches").exists():
        raise SystemExit(f"{out} is full; give another directory")
    expected = {}
    make_branches(out, expected)
    make_logs(out, expected)
    make_models(out, expected)
    make_checkpoint(out, expected)
    make_run(out)
    make_methods(out, expected)
    write_arrays(out / "expected.safetensors", expected)


def write_arrays(path, arrays):
    """One safetensors file, arrays sorted by name."""
    storage = import_module("cqm.storage")
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    storage.write_pieces(path, storage.encode_arrays([arrays], {"kind": "cqm 0.1.0 expected"}))


# Branches: a nuisance and every step; a policy and two draws; noise of the world's own and
# two of three arms.


def push(observations, uniforms):
    """A policy: mostly push the cart back to the middle, sometimes do nothing."""
    back = np.where(observations[:, 0] > 0, 0, 2)
    return np.where(uniforms < 0.7, back, 1)


def shop_start(num, rng):
    """Stock and backlog of a shop."""
    return {"stock": rng.uniform(0.0, 9.0, (num, 1)), "backlog": np.zeros((num, 1))}


def shop_step(state, order, demand):
    """What is not in stock is owed."""
    level = state["stock"] - state["backlog"] + order - demand
    return {"stock": np.maximum(level, 0.0), "backlog": np.maximum(-level, 0.0)}


def shop_demand(num, horizon, rng):
    """The exogenous noise."""
    return rng.poisson(4.0, (num, horizon, 1))


def shop():
    """A world of plain functions with noise."""
    return import_module("cqm.worlds.function").FunctionWorld(
        shop_step,
        shop_start,
        exogenous=shop_demand,
        candidate_actions=[[0.0], [4.0], [8.0]],
        feature_names=["stock", "backlog"],
        observation_names=["stock", "backlog"],
        name="shop",
    )


def mixed_cartpole():
    """The world of `branches` and of the effect models."""
    import cqm

    return cqm.load_world(DOMAIN, nuisance=4, seed=SEED)


def make_branches(out, expected):
    """Three sets, and what is read from them."""
    import cqm

    quiet = {"show_progress": False}
    sets = {
        "branches": cqm.collect(
            mixed_cartpole(),
            states=40,
            per_step=True,
            seed=SEED,
            horizon=6,
            out=out / "branches",
            **quiet,
        ),
        "branches-policy": cqm.collect(
            cqm.load_world(DOMAIN),
            states=12,
            draws=2,
            seed=SEED,
            horizon=4,
            continuation=cqm.Policy("push", push),
            out=out / "branches-policy",
            **quiet,
        ),
        "branches-noise": cqm.collect(
            shop(),
            states=24,
            arms=2,
            per_step=True,
            seed=SEED,
            horizon=4,
            out=out / "branches-noise",
            **quiet,
        ),
    }
    for name, branches in sets.items():
        arrays = {
            "observations": branches.observations,
            "outcomes": branches.outcomes,
            "continuation": branches.continuation,
            "arms": branches.arms,
        }
        if branches.num_arms == branches.num_actions:
            arrays["effects"] = branches.effects()
        if branches.recipe.per_step:
            arrays["step_features"] = branches.step_features
        expected |= {f"{name}/{key}": values for key, values in arrays.items()}


def make_logs(out, expected):
    """Logs of 200 trajectories, and what is read from them."""
    import cqm

    branches = cqm.collect(
        cqm.load_world(DOMAIN), states=200, per_step=True, seed=SEED, horizon=3, show_progress=False
    )
    cqm.Logs.from_branches(branches, rng=np.random.default_rng(SEED)).save(out / "logs")
    logs = cqm.Logs.load(out / "logs")
    for name in ("outcomes", "actions", "propensities"):
        expected[f"logs/{name}"] = getattr(logs, name)


def finite_logs():
    """A chain of four states, three actions and three steps, for the methods that count."""
    import cqm

    rng, num = np.random.default_rng(SEED), 600
    values = np.array([[0.0, 1.0], [1.0, -1.0], [2.0, 0.5], [4.0, 0.0]])  # features of a state
    state = start = rng.integers(4, size=num)
    actions, features = [], []
    for _ in range(3):
        action = rng.integers(3, size=num)
        state = (state + action + (rng.random(num) < 0.2)) % 4
        actions.append(action)
        features.append(values[state])
    return cqm.Logs.from_arrays(
        start[:, None].astype(float),
        np.stack(actions, axis=1),
        np.stack(features, axis=1),
        propensities=np.full(3, 1 / 3),
        continuation="uniform",
        discount=0.9,
    )


def make_models(out, expected):
    """A saved model of every kind and method, and its effects at 16 observations."""
    import cqm

    load_model = import_module("cqm.models.estimator").load_model
    quiet = {"show_progress": False}
    training = cqm.Training(updates=8, batch_size=16, chunk=4)
    branches = cqm.Branches.open(out / "branches")
    logs, counted = cqm.Logs.load(out / "logs"), finite_logs()
    mixed, plain = mixed_cartpole(), cqm.load_world(DOMAIN)
    small = {"width": 8, "training": training, "seed": SEED}
    models = {
        "effect-direct": cqm.EffectModel(method="direct", **small).fit(branches, **quiet),
        "effect-unrolled": cqm.EffectModel(method="unrolled", **small).fit(branches, **quiet),
        "effect-paper": cqm.EffectModel.paper(
            seed=SEED, width=16, training=replace(training, seed=SEED)
        ).fit(branches, **quiet),
        "effect-ensemble": cqm.EffectModel(
            method="direct", members=2, reference=(0.5, 0.3, 0.2), **small
        ).fit(branches, **quiet),
        "residual": cqm.ResidualModel(seed=SEED).fit(logs, **quiet),
        "residual-steps": cqm.ResidualModel(method="steps", **small).fit(logs, **quiet),
        "residual-tabular": cqm.ResidualModel(method="tabular").fit(counted, **quiet),
        "hindsight": cqm.HindsightModel(**small).fit(logs, **quiet),
        "hindsight-tabular": cqm.HindsightModel(method="tabular").fit(counted, **quiet),
    }
    drawn = {"states": 20, "draws": 16, "seed": SEED + 1}
    models["effect-ensemble"].calibrate(cqm.collect(mixed, horizon=6, **drawn))
    models["residual"].calibrate(cqm.collect(plain, horizon=3, **drawn))

    unmixed = cqm.collect(plain, states=16, horizon=1, seed=SEED + 2).observations
    asked = {
        "effect": cqm.collect(mixed, states=16, horizon=1, seed=SEED + 2).observations,
        "residual": unmixed,
        "hindsight": unmixed,
        "tabular": np.arange(16.0)[:, None] % 4,
    }
    for name, model in models.items():
        model.save(out / "models" / name)
        family, _, method = name.partition("-")
        observations = asked[method if method == "tabular" else family]
        effect = model.effect(observations)
        again = load_model(out / "models" / name)
        assert np.array_equal(again.effect(observations), effect), name
        expected[f"models/{name}/observations"] = observations
        expected[f"models/{name}/effect"] = effect
        if model.calibration_ is not None:
            found = again.calibration_
            scores = [found.excess_error, found.nmse, found.noise_floor]
            expected[f"models/{name}/calibration"] = np.array(scores)


def make_checkpoint(out, expected):
    """A fit interrupted after two of its four chunks, and the effect of the uninterrupted one."""
    import cqm

    metrics = import_module("cqm.models.training").Metrics
    branches = cqm.Branches.open(out / "branches")
    training = cqm.Training(updates=16, batch_size=8, chunk=4)
    make = lambda: cqm.EffectModel(method="direct", width=8, training=training)
    write, steps = metrics.write, []

    def interrupted(self, step, values):
        write(self, step, values)
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    metrics.write = interrupted
    try:
        make().fit(branches, directory=out / "checkpoint", show_progress=False)
    except KeyboardInterrupt:
        assert steps == [4, 8]
    else:
        raise AssertionError("the fit was not interrupted")
    finally:
        metrics.write = write
    shutil.rmtree(out / "checkpoint" / "tensorboard", ignore_errors=True)

    observations = expected["models/effect-direct/observations"]
    effect = make().fit(branches, show_progress=False).effect(observations)
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(out / "checkpoint", copy, dirs_exist_ok=True)
        continued = make().fit(branches, directory=copy, show_progress=False)
        assert np.array_equal(continued.effect(observations), effect)
    expected["checkpoint/observations"] = observations
    expected["checkpoint/effect"] = effect


def make_run(out):
    """The benchmark and the study of logs at their smallest, without what is large."""
    study = import_module("cqm.experiments.logs_study")
    benchmark = import_module("cqm.experiments.run")
    preset = import_module("cqm.experiments.protocol").preset
    run, domains = out / "run", [DOMAIN]
    command = f"cqm reproduce --preset smoke{{}} --domains {DOMAIN} --out run"
    protocol = preset("smoke").restricted(domains=domains)
    outcome = benchmark.reproduce(protocol, run, command=command.format(""), show_progress=False)
    assert not outcome.failed, outcome.failed
    failed = study.reproduce_logs(
        study.STUDIES["smoke"],
        run,
        domains=domains,
        seeds=[SEED],
        command=command.format(" --study logs"),
        show_progress=False,
    )
    assert not failed, failed
    import_module("cqm.experiments.tables").write_tables(run)
    for directory in (run / "branches", run / "logs" / "branches"):
        shutil.rmtree(directory)
    for path in sorted((run / "jobs").rglob("*")):
        if path.is_file() and path.name != "record.json":
            path.unlink()
    for path in sorted((run / "jobs").rglob("tensorboard")):
        shutil.rmtree(path)
    (run / "times.json").unlink()


def make_methods(out, expected):
    """Predictions of every method of the benchmark for the first states of the test set."""
    import cqm

    baselines = import_module("cqm.experiments.baselines")
    protocols = import_module("cqm.experiments.protocol")
    protocol = protocols.preset("smoke")
    world = cqm.load_world(DOMAIN, nuisance=protocol.nuisance, seed=SEED)
    recipes = protocol.branch_sets(SEED)
    training_set = cqm.collect(world, show_progress=False, **recipes["training"])
    test_set = cqm.collect(world, show_progress=False, **recipes["test"])
    rewards, held_out = (
        world.mixed_weights(directions)
        for directions in protocol.rewards(len(world.native.feature_names))
    )
    arrays = {}
    conditioned = [f"{name}+effect" for name in (*protocols.PAPER, "cqm-full-rank")]
    for method in [*baselines.METHODS, *conditioned]:
        job = protocols.Job(DOMAIN, SEED, method)
        lesson = baselines.Lesson(
            branches=training_set,
            rewards=rewards,
            training=replace(protocol.training, seed=SEED),
            conditioning=job.conditioning,
            directory=None,
            show_progress=False,
        )
        predictor = baselines.METHODS[job.base_method](lesson)
        # Of the whole set, because the lots of `random` depend on how many states there are.
        outcomes = predictor.outcomes(test_set)
        arrays[f"{method}/values"] = predictor.values(test_set, held_out)[:KEPT_STATES]
        if outcomes is not None:
            arrays[f"{method}/outcomes"] = outcomes[:KEPT_STATES]
    write_arrays(out / "methods.safetensors", arrays)
    expected["methods/observations"] = test_set.observations[:KEPT_STATES]
    expected["methods/weights"] = held_out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: make.py OUT")
    import make  # by its name, so that the functions of the shop are stored as `make.shop_step`

    make.main(sys.argv[1])
