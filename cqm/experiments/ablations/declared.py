"""The ablations as data: what varies, on which domains, with how many states, seeds and updates.

`full` has three seeds, and is meant to take less than a day on two cores for all ablations
together. States, draws, methods and domains are chosen for the question: walker costs 25 times as
much physics as reacher, and training successor features takes four times as long as the world
model, so they appear only where every vector model is compared. Cartpole is left out where every
method solves it. `quick` keeps one seed and the points that show the shape of a curve. `cqm ablate
--list` shows the expected time of each, from the rates in `cost`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cqm.experiments.ablations.cell import LAWS, MAPS
from cqm.experiments.ablations.compared import GRAPHS
from cqm.experiments.ablations.grid import Ablation, Chart, Fit, Grid, Point, Setting
from cqm.experiments.ablations.shifted import UNROLLED
from cqm.experiments.protocol import DOMAINS, PAPER, preset
from cqm.models.training import Training

CARTPOLE, REACHER, CHEETAH, WALKER = DOMAINS
_FULL = replace(preset("paper"), preset="full", test_states=1_000, ceiling_states=300)
_QUICK = replace(
    preset("quick"), test_states=500, ceiling_states=100, training=Training(updates=1_000)
)
_SMOKE = replace(
    preset("smoke"),
    states=32,
    test_states=16,
    ceiling_states=8,
    ceiling_draws=8,
    horizon=3,
    nuisance=4,
    training=Training(updates=2, batch_size=8, chunk=2),
)
_SEED = (7,)
_OWN = "cqm+effect"
"""CQM-B with conditioned input, the paper's model without its weakness; see `preprocessing`."""
_EFFECT, _ACCURACY = "excess error", "accuracy against expected effects"


def _fits(*methods: str) -> tuple[Fit, ...]:
    return tuple(map(Fit, methods))


def _points(settings: Iterable[Setting], fits: tuple[Fit, ...]) -> tuple[Point, ...]:
    return tuple(Point(setting, fits) for setting in settings)


def _ranked(ranks: Iterable[int], methods: Iterable[str]) -> tuple[Point, ...]:
    return (Point(Setting(), tuple(Fit(m, rank=rank) for rank in ranks for m in methods)),)


def _rank() -> Ablation:
    methods = (_OWN, "cqm", "world")
    chart = Chart(
        "rank",
        "rank of the decoder",
        methods=("subspace", *methods),
        x_scale="log",
        limits=("noise_floor",),
    )
    return Ablation(
        "rank",
        "Rank of the decoder",
        "Is the rank too small, or are the labels noisy?",
        ("rank",),
        (chart,),
        {
            "full": Grid(_FULL, _ranked((1, 2, 4, 8, 16, 32, 64), methods), DOMAINS[1:]),
            "quick": Grid(_QUICK, _ranked((1, 2, 8, 64), methods), (REACHER, CHEETAH), _SEED),
            "smoke": Grid(_SMOKE, _ranked((1, 64), (_OWN,)), (REACHER,), _SEED),
        },
    )


def _nuisance() -> Ablation:
    def settings(sizes: Iterable[int], amplitudes: Iterable[float]) -> list[Setting]:
        return [
            *(Setting(nuisance=size) for size in sizes),
            *(Setting(nuisance=64, amplitude=amplitude) for amplitude in amplitudes),
        ]

    methods, learned = ("cqm+project", _OWN, "cqm+learned", "cqm", "world"), (0, 64, 512)

    def points(sizes: Iterable[int], amplitudes: Iterable[float]) -> tuple[Point, ...]:
        return tuple(
            # The default model's conditioning is found by a regression, which takes longest where
            # the other methods show all there is to see.
            Point(s, _fits(*(m for m in methods if m != "cqm+learned" or s.nuisance in learned)))
            for s in settings(sizes, amplitudes)
        )

    dimension = Chart(
        "nuisance",
        "dimension of the nuisance",
        methods=methods,
        only_fn=lambda row: row["amplitude"] == 6,
        x_scale="symlog",
        title="Dimension",
    )
    amplitude = Chart(
        "amplitude",
        "amplitude of the nuisance",
        methods=methods,
        only_fn=lambda row: row["nuisance"] == 64,
        x_scale="symlog",
        title="Amplitude",
    )
    return Ablation(
        "nuisance",
        "Dimension and amplitude of the nuisance",
        "Does a larger or louder nuisance harm CQM-B as much as models of outcomes?",
        ("nuisance", "amplitude"),
        (dimension, amplitude),
        {
            "full": Grid(
                replace(_FULL, ceiling_states=150),
                # First the two that the report compares.
                points((0, 512, 64, 256, 1024), (0.0, 20.0, 50.0)),
            ),
            "quick": Grid(
                _QUICK,
                points((0, 64, 512), (0.0, 50.0)),
                (REACHER, CHEETAH),
                _SEED,
            ),
            "smoke": Grid(
                _SMOKE,
                _points(settings((0,), (50.0,)), _fits(_OWN)),
                (REACHER,),
                _SEED,
            ),
        },
    )


def _coupling() -> Ablation:
    def points(correlations: Iterable[float], methods: Iterable[str]) -> tuple[Point, ...]:
        pairs = dict.fromkeys([(1.0, 1.0), (1.0, 0.0), *((c, c) for c in correlations)])
        fits = tuple(Fit(m, noise=noise, later=later) for noise, later in pairs for m in methods)
        return (Point(Setting(), fits),)

    variance = Chart(
        "noise",
        "correlation of noise and later actions between branches",
        "variance",
        "variance of target differences",
        methods=("targets",),
        only_fn=lambda row: row["noise"] == row["later"],
        limits=("predicted",),
        y_scale="log",
        top=None,
        title="Variance",
    )
    error = Chart(
        "noise",
        "correlation of noise and later actions between branches",
        methods=(_OWN, "cqm"),
        only_fn=lambda row: row["noise"] == row["later"],
        y_scale="log",
        top=None,
        title="Error",
    )
    later = replace(
        error,
        x="later",
        x_title="probability that branches share their later actions; they share all noise",
        only_fn=lambda row: row["noise"] == 1 and row["later"] in (0, 1),
        title="Shared noise, with and without shared later actions",
    )
    return Ablation(
        "coupling",
        "Coupling of the branches",
        "How much does it help that branches share noise and later actions?",
        ("noise", "later"),
        (variance, error, later),
        {
            "full": Grid(
                replace(_FULL, states=5_000),
                points((0.0, 0.5, 0.9, 1.0), (_OWN, "cqm")),
                DOMAINS[1:],
            ),
            "quick": Grid(
                replace(_QUICK, states=2_000),
                points((0.0, 0.5, 0.9, 1.0), (_OWN,)),
                (REACHER, CHEETAH),
                _SEED,
            ),
            "smoke": Grid(_SMOKE, points((0.0,), (_OWN,)), (CARTPOLE,), _SEED),
        },
        ".coupled:rows",
    )


def matching(horizon: float) -> float:
    """The discount whose effective horizon 1/(1 − γ) is to H as the protocol's 20 is to 12.

    >>> matching(12), matching(60)
    (0.95, 0.99)
    """
    return round(1 - 0.6 / horizon, 4)


def _horizon() -> Ablation:
    def settings(horizons: Iterable[int]) -> list[Setting]:
        pairs = [*((h, 0.95) for h in horizons), *((h, matching(h)) for h in horizons)]
        return [Setting(horizon=h, discount=g) for h, g in dict.fromkeys(pairs)]

    methods = (_OWN, "cqm", "world")
    chart = Chart(
        "horizon",
        "horizon",
        methods=methods,
        limits=("noise_floor",),
        only_fn=lambda row: row["discount"] == 0.95,
        x_scale="log",
        title="Discount 0.95",
    )
    matched = replace(
        chart,
        only_fn=lambda row: row["discount"] == matching(row["horizon"]),
        title="Discount 1 − 0.6/H, so that the effective horizon grows with H",
    )
    cheap = replace(_FULL, states=8_000, test_states=500, ceiling_states=150, ceiling_draws=32)
    return Ablation(
        "horizon",
        "Horizon",
        "How do errors and label noise grow with the horizon?",
        ("horizon", "discount"),
        (chart, matched),
        {
            "full": Grid(
                cheap, _points(settings((1, 4, 12, 40, 100)), _fits(*methods)), DOMAINS[1:]
            ),
            "quick": Grid(
                replace(_QUICK, test_states=200, ceiling_draws=32),
                _points(settings((1, 12, 50)), _fits(*methods)),
                (REACHER, CHEETAH),
                _SEED,
            ),
            "smoke": Grid(_SMOKE, _points(settings((1, 12)), _fits(_OWN)), (REACHER,), _SEED),
        },
    )


def _continuation() -> Ablation:
    fits = _fits(_OWN, UNROLLED)
    chart = Chart(
        "asked",
        "law under which the model is asked",
        x_scale="name",
        lines="continuation",
        only_fn=lambda row: row["method"] == _OWN,
        title="Direct model",
    )
    unrolled = replace(chart, only_fn=lambda row: row["method"] == UNROLLED, title="Unrolled model")
    settings = [Setting(continuation=name) for name in LAWS]
    return Ablation(
        "continuation",
        "Continuation, and a shift of it",
        "Do models answer for later actions that they were not trained with?",
        ("continuation", "asked"),
        (chart, unrolled),
        {
            "full": Grid(
                replace(_FULL, ceiling_states=150, ceiling_draws=32),
                _points(settings, fits),
                DOMAINS[1:],
            ),
            "quick": Grid(
                replace(_QUICK, ceiling_draws=32), _points(settings, fits), (REACHER,), _SEED
            ),
            "smoke": Grid(_SMOKE, _points(settings[:3:2], fits), (CARTPOLE,), _SEED),
        },
        ".shifted:rows",
    )


def _rewards() -> Ablation:
    def points(numbers: Iterable[int], methods: Iterable[str], blind: Iterable[str]) -> Point:
        aware = tuple(Fit(method, rewards=num) for num in numbers for method in methods)
        return Point(Setting(), (*(Fit(method, rewards=0) for method in blind), *aware))

    aware = ("direct", "task-td", "cocoa")
    chart = Chart(
        "rewards",
        "number of training rewards (CQM-B sees none)",
        "expected_accuracy",
        _ACCURACY,
        methods=(_OWN, "cqm", *aware),
        x_scale="log",
        top=None,
    )
    return Ablation(
        "rewards",
        "Reward supervision",
        "How many training rewards match CQM-B, which sees none?",
        ("rewards",),
        (chart,),
        {
            "full": Grid(_FULL, (points((1, 8, 32, 256), aware, (_OWN, "cqm")),), DOMAINS[1:]),
            "quick": Grid(
                _QUICK, (points((1, 8, 64), aware, (_OWN, "cqm")),), (REACHER, CHEETAH), _SEED
            ),
            "smoke": Grid(_SMOKE, (points((1, 3), ("direct",), (_OWN,)),), (REACHER,), _SEED),
        },
    )


def _data() -> Ablation:
    def points(
        sizes: tuple[int, ...],
        shared: Iterable[tuple[int, int]],
        methods: tuple[str, ...],
        attributed: tuple[str, ...] = ("cqm-full-rank", "cqm-full-rank+effect"),
    ) -> tuple[Point, ...]:
        base = sizes[-1] // 5
        # With those of the curve, the eight models behind the attribution of errors: raw or
        # conditioned input, rank 8 or full, a fifth of the states or all of them.
        more = [Fit(method, states=num) for num in (base, sizes[-1]) for method in attributed]
        curve = [Fit(method, states=num) for num in sizes for method in methods]
        largest = Point(Setting(states=sizes[-1]), (*curve, *more))
        others = [Setting(states=states, draws=draws) for states, draws in shared]
        return (largest, *_points(others, _fits(*methods)))

    methods = (_OWN, "cqm", "world")
    curves = Chart(
        "states",
        "training states, one draw each",
        methods=(*methods, "cqm-full-rank+effect"),
        only_fn=lambda row: row["draws"] == 1,
        limits=("noise_floor",),
        x_scale="log",
        title="More states",
    )
    shared = Chart(
        "draws",
        "draws per state, at equal cost",
        methods=methods,
        only_fn=lambda row: row["draws"] * row["states"] in (2_000, 20_000),
        x_scale="log",
        title="States or draws",
    )
    cost = 20_000
    return Ablation(
        "data",
        "Amount of data",
        "More states or more draws, and what limits the error?",
        ("states", "draws"),
        (curves, shared),
        {
            "full": Grid(
                _FULL,
                points(
                    (500, 2_000, 5_000, cost, 5 * cost),
                    [(cost // draws, draws) for draws in (4, 16)],
                    methods,
                ),
                DOMAINS[1:],
            ),
            "quick": Grid(
                _QUICK,
                points((500, 2_000, 10_000), [(1_000, 2), (250, 8)], methods),
                (REACHER, CHEETAH),
                _SEED,
            ),
            "smoke": Grid(_SMOKE, points((8, 40), [(4, 2)], (_OWN,), ()), (REACHER,), _SEED),
        },
    )


def _actions() -> Ablation:
    def settings(numbers: Iterable[int]) -> list[Setting]:
        # A menu of two has one pair, so every graph is the same.
        return [
            Setting(actions=num, graph=graph)
            for num in numbers
            for graph in (GRAPHS if num > 2 else GRAPHS[:1])
        ]

    chart = Chart(
        "actions",
        "number of candidate actions",
        x_scale="log",
        lines="graph",
        only_fn=lambda row: row["method"] == "cqm+whiten",
    )
    regret = replace(
        chart, y="regret_share", y_title="regret, as a share of the gain", title="Decisions"
    )
    small = replace(_FULL, ceiling_states=150, ceiling_draws=32)
    return Ablation(
        "actions",
        "Number of actions and comparison graph",
        "How do errors grow with the menu, and do pairs of actions suffice?",
        ("actions", "graph"),
        (replace(chart, title="Effects"), regret),
        {
            "full": Grid(
                small,
                _points(settings((2, 5, 13, 33)), _fits("cqm+whiten")),
                (REACHER, CHEETAH),
            ),
            "quick": Grid(
                replace(_QUICK, ceiling_draws=32),
                _points(settings((2, 5, 17)), _fits("cqm+whiten")),
                (REACHER,),
                _SEED,
            ),
            "smoke": Grid(
                _SMOKE, _points(settings((2, 5)), _fits("cqm+whiten")), (REACHER,), _SEED
            ),
        },
        ".compared:rows",
    )


def _preprocessing() -> Ablation:
    def points(methods: Iterable[str]) -> tuple[Point, ...]:
        kinds = (None, "whiten", "effect")
        return (Point(Setting(), tuple(Fit(m, kind) for m in methods for kind in kinds)),)

    methods = ("cqm", "cqm-full-rank", "world", "sf", "world-ensemble")
    chart = Chart(
        "conditioning",
        "conditioning of the input",
        methods=methods,
        x_scale="name",
    )
    return Ablation(
        "preprocessing",
        "Preprocessing of the input",
        "How much of each vector model's error comes from its raw input?",
        ("conditioning",),
        (chart,),
        {
            "full": Grid(_FULL, points(methods), DOMAINS[1:]),
            "quick": Grid(_QUICK, points(methods[:4]), (REACHER, CHEETAH), _SEED),
            "smoke": Grid(_SMOKE, points(("cqm",)), (REACHER,), _SEED),
        },
    )


def _features() -> Ablation:
    settings = [Setting(nuisance=0, features=name) for name in MAPS]
    fit = "cqm-full-rank+whiten"
    regret = Chart(
        "features",
        "features that are added",
        "regret_share",
        "regret, as a share of the gain",
        methods=("exact", fit),
        x_scale="name",
        top=None,
        title="Decisions",
    )
    error = replace(regret, y="excess_error", y_title=_EFFECT, methods=(fit,), title="Estimation")
    bound = replace(
        regret,
        y="combined_bound",
        y_title="bound on the regret, as a share of the gain",
        methods=(fit,),
        y_scale="log",
        title="Combined bound",
    )
    few = _points(
        [s for s in settings if s.features in ("none", "squares", "fourier-64")], _fits(fit)
    )
    return Ablation(
        "features",
        "More features for a nonlinear reward",
        "How do projection and estimation trade off as features are added?",
        ("features",),
        (regret, error, bound),
        {
            "full": Grid(replace(_FULL, ceiling_draws=32), _points(settings, _fits(fit))),
            "quick": Grid(_QUICK, few, (CARTPOLE, REACHER), _SEED),
            "smoke": Grid(_SMOKE, few[:2], (REACHER,), _SEED),
        },
        ".nonlinear:rows",
    )


def _prototypes() -> Ablation:
    def points(numbers: Iterable[int], methods: Iterable[str]) -> tuple[Point, ...]:
        return _points([Setting(prototypes=num) for num in numbers], _fits(*methods))

    return Ablation(
        "prototypes",
        "Other draws of prototypes and rewards",
        "Do the paper's unpublished draws explain differences from its tables?",
        ("prototypes",),
        (),  # its figure compares with the paper; see `views`
        {
            "full": Grid(
                # Only accuracies are compared with the paper, so ceilings may be rough.
                replace(_FULL, test_states=2_000, ceiling_states=50, ceiling_draws=32),
                points(range(1, 11), PAPER),
            ),
            "quick": Grid(
                replace(_QUICK, test_states=1_000),
                points((1, 2, 3), ("cqm", "world", "direct")),
                (REACHER, CHEETAH),
                _SEED,
            ),
            "smoke": Grid(_SMOKE, points((1, 2), ("cqm",)), (REACHER,), _SEED),
        },
    )


ABLATIONS: dict[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        *(_rank(), _nuisance(), _coupling(), _horizon(), _continuation(), _rewards()),
        *(_data(), _actions(), _preprocessing(), _features(), _prototypes()),
    )
}
"""All ablations by name, in the order of the list and of the report."""
