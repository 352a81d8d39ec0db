"""Expected time of an ablation, from measured rates: physics in steps, training in updates.

The rates were measured on one core of a two-core x86 machine; on others, only ratios hold. Jobs run
side by side, one per core, so the time is the sum over the cores available.
"""

from __future__ import annotations

from cqm.experiments.ablations.cell import LAWS
from cqm.experiments.ablations.compared import ARMS_OF_PROTOCOL
from cqm.experiments.ablations.grid import Ablation, Fit, Grid, Point

STEPS_PER_SECOND = {
    "cartpole-swingup": 120_000,
    "reacher-easy": 350_000,
    "cheetah-run": 65_000,
    "walker-walk": 13_000,
}
"""Control steps per second of one core, with everything around them."""
MILLISECONDS = {
    "cqm": 3.5,
    "world": 4.0,
    "sf": 14.0,
    "direct": 4.0,
    "task-td": 21.0,
    "cocoa": 5.0,
    "world-ensemble": 65.0,
    "unrolled": 6.0,
}
"""Per update of a method, at the protocol's batch size with five actions; others count as `cqm`."""
SECONDS_PER_FIT = 6.0
"""For compiling, statistics and scores."""
SECONDS_PER_JOB = 10.0
"""For the best achievable scores, and for reading and writing branches."""
_LOOP = 4.0  # a policy that sees the state is simulated step by step, at a fraction of the rate


def seconds(ablation: Ablation, grid: Grid, cores: int = 2) -> float:
    """Expected wall-clock seconds of a grid on some cores."""
    total = sum(_seconds(ablation, grid, p, d) for p in grid.points for d in grid.domains)
    return len(grid.seeds) * total / cores


def _seconds(ablation: Ablation, grid: Grid, point: Point, domain: str) -> float:
    """Expected seconds of one job."""
    setting, protocol = point.setting, point.setting.applied(grid.protocol)
    actions = setting.actions or (3 if domain.startswith("cartpole") else 5)
    draws = setting.draws * (1 + actions if ablation.name == "coupling" else 1)
    tests = len(LAWS) if ablation.name == "continuation" else 1
    many = tests * protocol.ceiling_states * protocol.ceiling_draws * actions
    training = protocol.states * draws * (ARMS_OF_PROTOCOL if setting.actions else actions)
    single = protocol.test_states * actions if ablation.measure.endswith("benchmarked:rows") else 0
    loop = _LOOP if setting.continuation == "feedback" else 1.0
    physics = (many + loop * training + single) * protocol.horizon / STEPS_PER_SECOND[domain]
    updates, size = protocol.training.updates, protocol.training.batch_size / 256
    fits = sum(
        SECONDS_PER_FIT
        + 1e-3
        * MILLISECONDS.get(fit.method.partition("+")[0], MILLISECONDS["cqm"])
        * (updates * size * _wide(fit, protocol.nuisance) * max(0.6, actions / 5))
        for fit in point.fits
    )
    return SECONDS_PER_JOB + physics + fits


def _wide(fit: Fit, nuisance: int) -> float:
    """How much longer an update takes on larger observations, unless most of them is left out."""
    return 1.0 if fit.full_name.endswith("+project") else 1 + max(0, nuisance - 64) / 120
