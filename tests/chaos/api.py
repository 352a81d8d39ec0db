"""Nonsense arguments for every public function: each is refused in our words, or works."""

import json
import os
import signal
from pathlib import Path

import numpy as np
from support.worlds import pendulum_start, pendulum_step, pendulum_world

import cqm
from cqm import bounds, decisions, measures, queries, quotient
from cqm.branches.recipe import Continuation
from cqm.models.selection import held_out_scores
from cqm.worlds.check import check_world

from . import materials as made
from .children import Raised, in_child
from .trials import Experiment, Result

BATCH = 100  # calls per child
SECONDS = 5.0  # of computation; more count as a hang


class Hang(BaseException):
    """A call took too long."""


class Wrong:
    """An object that is nothing a function expects, whatever it tries."""

    def __repr__(self):
        return "Wrong()"


def _nan(*shape):
    return np.full(shape, np.nan)


class Things:
    """Good arguments, made when first needed in a child."""

    def __init__(self, materials, directory):
        self.materials, self.directory = materials, directory
        self._made = {}

    def __getattr__(self, name):
        if name not in self._made:
            self._made[name] = getattr(self, f"_{name}")()
        return self._made[name]

    def _world(self):
        return pendulum_world()

    def _branches(self):
        return cqm.collect(self.world, states=12, horizon=2, per_step=True, show_progress=False)

    def _logs(self):
        return cqm.Logs.from_branches(self.branches, rng=np.random.default_rng(0))

    def _stored_logs(self):
        return cqm.Logs.load(self.materials.path("logs"))

    def _model(self):
        return cqm.load_model(self.materials.path("model"))

    def _box_model(self):
        world = pendulum_world(control_low=[-1.0], control_high=[1.0])
        branches = cqm.collect(
            world, states=40, horizon=2, actions="box", continuation="box", show_progress=False
        )
        return cqm.EffectModel(candidates="ridge").fit(branches, show_progress=False)

    def _transition(self):
        """A model that can predict futures."""
        branches = cqm.collect(self.world, states=40, horizon=2, per_step=True, show_progress=False)
        settings = {"candidates": "unrolled", "width": 4, "draws": 4, "training": made.TRAINING}
        return cqm.EffectModel(**settings).fit(branches, show_progress=False)

    def _held_out(self):
        return cqm.Branches.open(self.materials.path("held-out"))

    def _residual(self):
        return cqm.load_model(self.materials.path("residual"))

    def _scorer(self):
        return cqm.Scorer.load(self.materials.path("model"))

    def _query(self):
        return cqm.Query.vector(np.arange(self.num_features) + 1.0, self.model)

    def _num_features(self):
        return len(self.model.feature_names)

    def _states(self):
        return np.zeros((2, len(self.model.observation_names)))

    def _calibration(self):
        rng = np.random.default_rng(0)
        return decisions.calibrate(rng.normal(size=(40, 3, 2)), rng.normal(size=(40, 16, 3, 2)))

    def _table(self):
        path = self.directory / "table.csv"
        path.write_text("x,a,y\n" + "".join(f"{i % 7},{'ab'[i % 2]},{i % 5}\n" for i in range(60)))
        return path

    def _mdp(self):
        return measures.FiniteMDP(np.full((2, 2, 2), 0.5))


# Values that are never right, by kind of argument; a call that takes one must refuse it.
NEVER = {
    "count": [0, -1, -(10**20), 1.5, np.nan, np.inf, "3", [], {}, True, Wrong(), 2 + 1j, [3], b"3"],
    "huge": [10**12, 10**15, 10**30],
    "seed": [-1, 1.5, np.nan, "x", [], Wrong(), np.inf, b"1"],
    "share": [-0.1, 1.5, np.nan, np.inf, "x", [], Wrong(), 1j, {}],
    "positive": [-1.0, np.nan, -np.inf, "x", [], Wrong(), 1j, {}],
    "amounts": [-1.0, np.nan, -np.inf, "x", Wrong(), 1j, {}],
    "confidence": [-0.5, 0.0, 1.5, np.nan, "x", [], Wrong(), [0.5, 0.5]],
    "choice": ["", "other", 3, [], Wrong(), np.nan, b"auto", {}, "AUTO"],
    "path": [3, Wrong(), 1.5, [], {}, "a\0b", b"a\0b", "/nowhere/at/all", "", None],
    "world": [3, Wrong(), None, [], "nonsense", cqm.FunctionWorld, np.zeros(3), 1.5, {}],
    "data": [3, Wrong(), None, np.zeros(3), 1.5, "/nowhere/at/all", {"a": 1}, lambda: 1],
    "query": [3, Wrong(), None, "x", {}, [None], np.full(3, "x"), lambda: 1, [[]]],
    "model": [3, Wrong(), None, "x", np.zeros(3), {}, cqm.EffectModel],
    "states": ["x", Wrong(), None, {}, [[]], _nan(2, 9), np.zeros((2, 3, 4)), [["a"] * 9], 1j],
    "numbers": ["x", Wrong(), None, {"a": "b"}, [["a"]], np.full((2, 2, 2), "x"), [[1], [1, 2]]],
    "names": [3, Wrong(), ["a"], ["a"] * 3, [1, 2, 3], [None] * 3, "abc", {"a": 1}, ["", "b", "c"]],
    "reference": ["x", Wrong(), [0.5] * 9, [-1.0, 1.0, 1.0], _nan(3), {}, [[]], 3],
    "function": [3, Wrong(), None, "x", [], {}],
    "generator": [3, Wrong(), None, "x", [], np.random],
    "formula": ["", "x +", "nope * 2", "__import__('os')", "angle.real", "(" * 5000, 3, None, b"x"],
    "action": ["nope", 17, -9, 1.5, Wrong(), [0, 1, 2, 3, 4, 5, 6], {}, np.nan],
}
# Values that may be right somewhere.
WILD = [
    *(None, True, 0, 1, -1, 2**63, 1e308, -0.0, np.nan, np.inf, "", "x", "uniform", b"x", 1j),
    *([], (), {}, [[]], [None], ["a", 1], [[1], [1, 2]], {"x": 1}, {1: 2}, set(), range(3)),
    *(np.zeros(0), np.zeros((0, 3)), np.zeros(3), np.zeros((2, 9)), np.zeros((2, 2, 2)), _nan(3)),
    *(np.array(3), np.array("x"), np.array([None, {}], object), np.zeros(3, complex)),
    *(np.int8(3), np.float32(0.5), np.bool_(True), np.array([True, False]), np.datetime64("2020")),
    *(Wrong(), Wrong, lambda *a, **k: None, print, Ellipsis, slice(2), Path("nope"), int, "💥" * 9),
    *(np.zeros((3, 3), np.float16), np.ma.masked_all(3), memoryview(b"abc"), iter([1, 2]), "a\0b"),
]


def entries(t):
    """Public functions with good arguments: name -> (function, {argument: (kind, value)})."""
    out = t.directory / "out"
    tiny = {"candidates": "direct", "width": 4, "training": made.TRAINING}
    recipe = {
        "states": ("count huge", 4),
        "horizon": ("count huge", 2),
        "discount": ("share", 0.9),
        "draws": ("count huge", 1),
        "arms": ("wild", None),
        "warmup": ("wild", (0, 2)),
        "continuation": ("wild", "uniform"),
        "per_step": ("wild", True),
        "seed": ("seed", 0),
    }
    training = {
        "updates": ("count", 2),
        "batch_size": ("count", 4),
        "learning_rate": ("positive", 1e-3),
        "schedule": ("choice", "constant"),
        "weight_decay": ("positive", 1e-5),
        "clip": ("positive", 10.0),
        "target_every": ("wild", 0),
        "chunk": ("count", 1),
        "seed": ("wild", None),
    }
    estimator = {"members": ("count", 1), "reference": ("reference", None), "seed": ("seed", 0)}
    arrays = {
        "observations": ("numbers", np.arange(8.0).reshape(4, 2)),
        "actions": ("numbers", np.array([[0], [1], [0], [1]])),
        "features": ("numbers", np.arange(4.0).reshape(4, 1, 1)),
    }
    simple = np.arange(6.0).reshape(1, 3, 2)

    def collect(**settings):
        return cqm.collect(threads=1, show_progress=False, **settings)

    def fit_effect(branches, **settings):
        model = cqm.EffectModel(**{**tiny, **settings})
        return model.fit(branches, show_progress=False)

    def fit_residual(logs, **settings):
        return cqm.ResidualModel(**settings).fit(logs, show_progress=False)

    def fit_hindsight(logs, **settings):
        settings = {"width": 4, "training": made.TRAINING, **settings}
        return cqm.HindsightModel(**settings).fit(logs, show_progress=False)

    return {
        "collect": (collect, {"world": ("world", t.world), **recipe}),
        "collect out": (
            collect,
            {"world": ("world", t.world), "states": ("count", 3), "out": ("wild", out / "set")},
        ),
        "Recipe": (cqm.Recipe, {k: (kind.split()[0], v) for k, (kind, v) in recipe.items()}),
        "Continuation.of": (Continuation.of, {"law": ("wild", "uniform")}),
        "Training": (cqm.Training, training),
        "Nuisance": (
            cqm.Nuisance,
            {
                "dimension": ("count huge", 4),
                "persistence": ("share", 0.9),
                "scale": ("positive", 0.3),
                "amplitude": ("wild", 6.0),
                "coupling": ("choice", "shared"),
            },
        ),
        "audit": (
            cqm.audit,
            {
                "branches": ("data", t.branches),
                "world": ("model", t.world),
                "families": ("count", 4),
                "seed": ("seed", 0),
            },
        ),
        "combine": (cqm.combine, {"sets": ("data", [t.branches[:6], t.branches[6:]])}),
        "check_world": (
            check_world,
            {
                "world": ("world", t.world),
                "num": ("count huge", 3),
                "horizon": ("count huge", 2),
                "seed": ("seed", 0),
            },
        ),
        "load_world": (
            cqm.load_world,
            {
                "name": ("world", "cartpole-swingup"),
                "nuisance": ("wild", 0),
                "seed": ("seed", 0),
                "candidate_actions": ("wild", None),
                "action_names": ("wild", None),
                "features": ("wild", ()),
            },
        ),
        "GymWorld": (
            cqm.GymWorld,
            {
                "env": ("world", "CartPole-v1"),
                "candidate_actions": ("wild", None),
                "action_names": ("wild", None),
                "cloning": ("wild", None),
                "seed": ("seed", 0),
                "max_prefix": ("wild", 8),
            },
        ),
        "FunctionWorld": (
            cqm.FunctionWorld,
            {
                "step": ("function", pendulum_step),
                "initial": ("function", pendulum_start),
                "candidate_actions": ("numbers", [[-1.0], [0.0], [1.0]]),
                "action_names": ("names", ["a", "b", "c"]),
                "features": ("wild", None),
                "observe": ("wild", None),
                "exogenous": ("wild", None),
                "feature_names": ("names", ["angle", "speed", "gain"]),
                "observation_names": ("names", ["angle", "speed", "gain"]),
                "name": ("wild", "world"),
            },
        ),
        "MujocoWorld": (cqm.MujocoWorld, {"model": ("path", "/nowhere"), "seed": ("seed", 0)}),
        "Branches.open": (cqm.Branches.open, {"directory": ("path", t.materials.path("set"))}),
        "Branches.split": (t.branches.split, {"test": ("share", 0.5)}),
        "Branches.effects": (t.branches.effects, {"reference": ("reference", None)}),
        "Branches.array": (t.branches.array, {"name": ("choice", "outcome")}),
        "Branches[]": (t.branches.__getitem__, {"rows": ("wild", slice(2))}),
        "Branches.to_parquet": (t.branches.to_parquet, {"path": ("wild", out / "a.parquet")}),
        "Logs.from_arrays": (
            cqm.Logs.from_arrays,
            {
                **arrays,
                "propensities": ("wild", None),
                "num_actions": ("wild", None),
                "candidate_actions": ("wild", None),
                "action_names": ("wild", None),
                "observation_names": ("wild", None),
                "feature_names": ("wild", None),
                "groups": ("wild", None),
                "discount": ("share", 0.9),
                "continuation": ("wild", "behaviour"),
                "world": ("wild", None),
            },
        ),
        "Logs.from_branches": (
            cqm.Logs.from_branches,
            {
                "branches": ("data", t.branches),
                "propensities": ("wild", None),
                "rng": ("generator", np.random.default_rng(0)),
            },
        ),
        "Logs.from_gymnasium": (
            cqm.Logs.from_gymnasium,
            {
                "env": ("world", "CartPole-v1"),
                "trajectories": ("count huge", 2),
                "horizon": ("count huge", 2),
                "stride": ("wild", None),
                "discount": ("share", 0.9),
                "seed": ("seed", 0),
            },
        ),
        "Logs.load": (cqm.Logs.load, {"directory": ("path", t.materials.path("logs"))}),
        "Logs.save": (t.logs.save, {"directory": ("wild", out / "logs")}),
        "Logs.split": (t.logs.split, {"test": ("share", 0.5)}),
        "Logs[]": (t.logs.__getitem__, {"rows": ("wild", slice(2))}),
        "Logs.with_propensities": (t.logs.with_propensities, {"propensities": ("wild", None)}),
        "EffectModel": (
            fit_effect,
            {
                "branches": ("data", t.branches),
                "candidates": ("choice", "direct"),
                "budget": ("wild", "1h"),
                "conditioning": ("choice", "effect"),
                "decoder_rank": ("count", 1),
                "width": ("count huge", 4),
                "draws": ("count", 4),
                "training": ("data", made.TRAINING),
                "updates": ("count", 1),
                "validation": ("share", 0.0),
                "memory_gb": ("positive", 2.0),
                **estimator,
            },
        ),
        "ResidualModel": (
            fit_residual,
            {
                "logs": ("data", t.logs),
                "method": ("choice", "direct"),
                "outcome": ("choice", "full"),
                "draws": ("count", 4),
                "folds": ("count", 2),
                "weighting": ("wild", True),
                "doubly_robust": ("wild", False),
                "updates": ("wild", None),
                **estimator,
            },
        ),
        "Logs.from_frame": (
            cqm.Logs.from_frame,
            {
                "frame": ("data", {"x": [1.0, 2.0] * 9, "a": ["u", "v", "v"] * 6, "y": [0.5] * 18}),
                "observations": ("names", ["x"]),
                "action": ("choice", "a"),
                "outcomes": ("names", ["y"]),
                "missing": ("choice", "error"),
            },
        ),
        "Logs.from_csv": (
            cqm.Logs.from_csv,
            {
                "path": ("path", t.table),
                "observations": ("names", ["x"]),
                "action": ("choice", "a"),
                "outcomes": ("names", ["y"]),
                "delimiter": ("choice", ","),
                "encoding": ("choice", "utf-8"),
            },
        ),
        "model.average_effect": (
            cqm.ResidualModel().average_effect,
            {
                "logs": ("data", t.stored_logs),
                "by": ("wild", None),
                "confidence": ("confidence", 0.9),
            },
        ),
        "model.projected_effect": (
            cqm.ResidualModel().projected_effect,
            {"logs": ("data", t.stored_logs), "basis": ("choice", "linear")},
        ),
        "HindsightModel": (
            fit_hindsight,
            {
                "logs": ("data", t.logs),
                "method": ("choice", "network"),
                "baseline": ("wild", True),
                "folds": ("count", 2),
                "width": ("count huge", 4),
                **estimator,
            },
        ),
        "model.effect": (t.model.effect, {"observations": ("states", t.states)}),
        "model.effect contrast": (
            t.model.effect,
            {
                "observations": ("states", t.states),
                "action": ("action", 1),
                "baseline": ("action", 0),
            },
        ),
        "model.advantage": (
            t.model.advantage,
            {"observations": ("states", t.states), "query": ("query", t.query)},
        ),
        "model.rank": (
            t.model.rank,
            {"observations": ("states", t.states), "query": ("query", t.query)},
        ),
        "model.act": (
            t.model.act,
            {"observations": ("states", t.states), "query": ("query", t.query)},
        ),
        "model.act over the box": (
            t.box_model.act,
            {
                "observations": ("states", np.zeros((2, 3))),
                "query": ("query", [1.0, 2.0, 3.0]),
                "over": ("choice", "box"),
            },
        ),
        "model.effect of controls": (
            t.box_model.effect,
            {
                "observations": ("states", np.zeros((2, 3))),
                "actions": ("wild", [[0.0], [0.5]]),
            },
        ),
        "model.with_actions": (t.box_model.with_actions, {"actions": ("numbers", [[0.0], [0.5]])}),
        "model.answer": (
            t.transition.answer,
            {
                "reward": ("query", lambda features: features[..., 0] ** 2),
                "branches": ("wild", None),
            },
        ),
        "model.reward_advantage": (
            t.transition.reward_advantage,
            {
                "observations": ("states", np.zeros((2, 3))),
                "reward_fn": ("function", lambda features: features[..., 0] ** 2),
                "draws": ("count huge", 4),
            },
        ),
        "model.event_effect": (
            t.transition.event_effect,
            {
                "observations": ("states", np.zeros((2, 3))),
                "event_fn": ("function", lambda paths: (paths[..., 0] > 0).any(axis=-1)),
                "draws": ("count huge", 4),
            },
        ),
        "model.effect_measure": (
            t.transition.effect_measure,
            {
                "observations": ("states", np.zeros(3)),
                "action": ("action", 1),
                "draws": ("count huge", 4),
            },
        ),
        "model.certify": (
            t.model.certify,
            {
                "observations": ("states", t.states),
                "query": ("query", t.query),
                "confidence": ("confidence", 0.9),
            },
        ),
        "model.effect_interval": (
            t.model.effect_interval,
            {
                "observations": ("states", t.states),
                "query": ("query", t.query),
                "action": ("action", 1),
                "baseline": ("action", 0),
                "confidence": ("confidence", 0.9),
            },
        ),
        "model.recenter": (t.model.recenter, {"reference": ("reference", None)}),
        "model.calibrate": (t.residual.calibrate, {"branches": ("data", t.held_out)}),
        "model.refute": (
            t.residual.refute,
            {
                "logs": ("data", t.stored_logs),
                "query": ("wild", None),
                "refuters": ("wild", ["halves", "mirror"]),
                "seed": ("seed", 0),
            },
        ),
        "model.save": (t.residual.save, {"directory": ("wild", out / "model")}),
        "load_model": (cqm.load_model, {"path": ("path", t.materials.path("model"))}),
        "EffectModel.load": (
            cqm.EffectModel.load,
            {"directory": ("path", t.materials.path("model"))},
        ),
        "Scorer.load": (cqm.Scorer.load, {"directory": ("path", t.materials.path("model"))}),
        "Scorer.effect": (t.scorer.effect, {"observations": ("states", t.states)}),
        "held_out_scores": (
            held_out_scores,
            {
                "estimators": ("data", {"a": t.residual}),
                "logs": ("data", t.stored_logs),
                "seed": ("seed", 0),
            },
        ),
        "Query": (cqm.Query, {"weights": ("numbers", [1.0, 2.0])}),
        "Query.vector": (
            cqm.Query.vector,
            {"weights": ("numbers", [1.0, 2.0, 0.0]), "features": ("model", t.world)},
        ),
        "Query.direction": (
            cqm.Query.direction,
            {"weights": ("numbers", [1.0, 2.0, 0.0]), "features": ("model", t.world)},
        ),
        "Query.named": (
            cqm.Query.named,
            {"weights": ("wild", {"angle": 1.0}), "features": ("model", t.world)},
        ),
        "Query.formula": (
            cqm.Query.formula,
            {
                "text": ("formula", "angle * speed"),
                "features": ("model", t.world),
                "num_events": ("count huge", 64),
                "seed": ("seed", 0),
            },
        ),
        "Query.goal": (
            cqm.Query.goal,
            {
                "target": ("wild", {"angle": 0.0}),
                "features": ("model", t.world),
                "num_events": ("count huge", 64),
                "seed": ("seed", 0),
            },
        ),
        "Query.samples": (
            cqm.Query.samples,
            {
                "events": ("numbers", [[0.0], [1.0], [2.0], [3.0]]),
                "rewards": ("numbers", [0.0, 1.0, 2.0, 3.0]),
                "features": ("wild", ["x"]),
            },
        ),
        "queries.project": (
            queries.project,
            {
                "events": ("numbers", [[0.0], [1.0], [2.0], [3.0]]),
                "rewards": ("numbers", [0.0, 1.0, 2.0, 3.0]),
            },
        ),
        "decisions.advantage": (
            decisions.advantage,
            {"effects": ("numbers", simple), "query": ("query", np.ones(2))},
        ),
        "decisions.act": (
            decisions.act,
            {"effects": ("numbers", simple), "query": ("query", np.ones(2))},
        ),
        "decisions.rank": (decisions.rank, {"advantages": ("numbers", np.zeros((2, 3)))}),
        "decisions.best": (decisions.best, {"advantages": ("numbers", np.zeros((2, 3)))}),
        "decisions.ties": (decisions.ties, {"advantages": ("numbers", np.zeros((2, 3)))}),
        "decisions.calibrate": (
            decisions.calibrate,
            {
                "predicted": ("numbers", np.zeros((20, 3, 2))),
                "draws": ("numbers", np.random.default_rng(0).normal(size=(20, 16, 3, 2))),
            },
        ),
        "decisions.certify": (
            decisions.certify,
            {
                "effects": ("numbers", simple),
                "query": ("query", cqm.Query(np.ones(2))),
                "calibration": ("model", t.calibration),
                "discount": ("share", 0.9),
                "horizon": ("count", 3),
                "confidence": ("confidence", 0.9),
            },
        ),
        "quotient.center": (
            quotient.center,
            {"outcomes": ("numbers", simple), "reference": ("reference", None)},
        ),
        "quotient.recenter": (
            quotient.recenter,
            {"effects": ("numbers", simple), "reference": ("reference", None)},
        ),
        "quotient.contrast": (
            quotient.contrast,
            {"effects": ("numbers", simple), "action": ("wild", 1), "baseline": ("wild", 0)},
        ),
        "quotient.equivalent": (
            quotient.equivalent,
            {"f": ("numbers", simple), "g": ("numbers", simple), "tolerance": ("wild", None)},
        ),
        "quotient.norm": (quotient.norm, {"f": ("numbers", simple)}),
        "bounds.decision_regret": (bounds.decision_regret, {"measure_error": ("amounts", 0.1)}),
        "bounds.feature_regret": (
            bounds.feature_regret,
            {"weight_norm": ("amounts", 1.0), "effect_error": ("amounts", 0.1)},
        ),
        "bounds.reward_projection_error": (
            bounds.reward_projection_error,
            {
                "reward_error": ("amounts", 0.1),
                "discount": ("share", 0.9),
                "horizon": ("count", 3),
            },
        ),
        "bounds.covering_radius": (
            bounds.covering_radius,
            {
                "candidates": ("numbers", [[0.0], [1.0]]),
                "low": ("numbers", [0.0]),
                "high": ("numbers", [1.0]),
            },
        ),
        "FiniteMDP": (
            measures.FiniteMDP,
            {"transitions": ("numbers", np.full((2, 2, 2), 0.5)), "policy": ("wild", None)},
        ),
        "successor_measure": (
            measures.successor_measure,
            {
                "mdp": ("model", t.mdp),
                "discount": ("share", 0.9),
                "horizon": ("wild", 3),
                "space": ("choice", "next_state"),
                "states": ("wild", None),
            },
        ),
    }


def _chosen(t, rng):
    """A public function, its arguments, and which of them are wrong for certain."""
    table = entries(t)
    name = list(table)[rng.integers(len(table))]
    function, parameters = table[name]
    arguments = {key: value for key, (_, value) in parameters.items()}
    num = min(len(parameters), 1 + int(rng.random() < 0.2))
    broken, certain = {}, False
    for key in rng.permutation(list(parameters))[:num]:
        kind, _ = parameters[key]
        pool = [value for one in kind.split() for value in NEVER.get(one, [])]
        if pool and rng.random() < 0.6:
            certain, broken[key] = True, pool[rng.integers(len(pool))]
        else:
            broken[key] = WILD[rng.integers(len(WILD))]
    return name, function, arguments | broken, broken, certain


def _call(t, rng):
    """Make one call; returns a result."""
    name, function, arguments, broken, certain = _chosen(t, rng)
    what = f"{name}({', '.join(f'{key}={_short(value)}' for key, value in broken.items())})"
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 12 * SECONDS)
    try:
        function(**arguments)
    except Hang:
        return Result(what, "hung", f"took more than {SECONDS:.0f} s")
    except Exception as error:
        raised = Raised.of(error)
        if raised.explained:
            return Result(what, "refused")
        return Result(what, "unexplained", str(raised))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Result(what, "accepted", "nonsense was accepted" if certain else "")


def _short(value):
    text = repr(value).replace("\n", "")
    return text if len(text) < 80 else text[:77] + "..."


def _batch(materials, directory, seed, numbers, file):
    def hang(*_):
        raise Hang

    os.chdir(directory)  # some nonsense is a valid file name
    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, hang)
    things = Things(materials, directory)
    with open(file, "a", encoding="utf-8") as lines:
        for number in numbers:
            result = _call(things, np.random.default_rng([seed, number]))
            lines.write(json.dumps([result.what, result.outcome, result.failure]) + "\n")
            lines.flush()


def run(materials, seed, numbers):
    """Calls in batches, each in a child; a call that ends its child is a failure."""
    for name in ("set", "logs", "model", "held-out", "residual"):
        materials.path(name)
    numbers = list(numbers)
    while numbers:
        batch = numbers[:BATCH]
        with materials.scratch() as directory:
            file = directory / "results.jsonl"
            ended = in_child(
                _batch, materials, directory, seed, batch, file, limit=600, memory_gb=12
            )
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            results = [Result(*json.loads(line)) for line in lines]
        if len(results) < len(batch):
            problem = ended.crash or str(ended.raised)
            results.append(Result(f"call {batch[len(results)]}", "crashed", problem))
        yield from results
        numbers = numbers[len(results) :]


EXPERIMENT = Experiment("api", "A function is called with nonsense arguments", 10_000, 200, run)
