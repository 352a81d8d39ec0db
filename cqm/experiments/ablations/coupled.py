"""What sharing is worth: targets whose branches share their noise and later actions only in part.

Each family is drawn several times: once with everything shared, and once per arm for branches of
its own. Couplings in between are made from these draws:

- *Nuisance noise* with correlation ρ between branches: √ρ times the shared noise plus √(1−ρ) times
  a branch's own. The nuisance is linear in its noise, so its path follows exactly.
- *Later actions* shared with probability ρ: the family is the shared draw, or else each arm comes
  from a draw of its own.

The paired-variance proposition then predicts the variance of the difference of two branches, given
the state. For the nuisance, which no action moves, Var(C_a − C_b) = 2 (1 − ρ) Var(C). For outcomes
that later actions move differently in different branches, the shared part enters through its
covariance: Var(F_a − F_b) = Var_shared + 2 (1 − ρ) Cov_shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np

from cqm.branches.dataset import Branches
from cqm.branches.shards import MemoryShard
from cqm.experiments.ablations.benchmarked import LIMIT, SCORES
from cqm.experiments.ablations.cell import Cell
from cqm.experiments.job import ceilings, score
from cqm.experiments.results import Row
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

TARGETS = "targets"
"""Name in the column of methods for properties of the training targets themselves."""
_FAMILIES = 1_024  # coupled at a time
_FAMILIES_OF_MANY_DRAWS = 32


def rows(cell: Cell) -> Iterator[Row]:
    """Variances of target differences, measured and predicted, and scores of the fits."""
    world = cell.world()
    assert isinstance(world, NuisanceWorld)
    sets = {name: cell.collected(name, world) for name in ("test", "ceiling")}
    _, held_out = cell.rewards(world)
    (best,) = ceilings(sets, held_out)["ceilings"]
    for name in ("accuracy_ceiling", "regret_floor", "noise_floor"):
        yield cell.row(LIMIT, name, best[name])
    arms = len(world.candidate_actions)
    drawn = cell.training(world, draws=1 + arms)
    couplings = dict.fromkeys((fit.noise, fit.later) for fit in cell.fits)
    for i, (noise, later) in enumerate(couplings):
        assert noise is not None
        assert later is not None
        at: dict[str, Any] = {"noise": noise, "later": later}
        measured = variances(sets["ceiling"], world.nuisance, noise, later, _rng(cell, i, 1))
        for name, value in measured.items():
            yield cell.row(TARGETS, name, value, **at)
        cell.clock.lap("evaluation")
        training = coupled(drawn, world.nuisance, noise, later, _rng(cell, i, 0))
        for fit in cell.fits:
            if (fit.noise, fit.later) == (noise, later):
                method, predictor = cell.fitted(fit, training, world)
                (scores,) = score(method, predictor, sets, held_out)["scores"]
                for name in SCORES:
                    if scores[name] is not None:
                        yield cell.row(fit.method, name, scores[name], fit)
                cell.clock.lap("evaluation")


def _rng(cell: Cell, *purpose: int) -> np.random.Generator:
    return np.random.default_rng([cell.seed, *purpose])


def coupled(
    drawn: Branches, nuisance: Nuisance, noise: float, later: float, rng: np.random.Generator
) -> Branches:
    """Families of one draw whose branches share their noise and later actions only in part.

    Args:
        drawn: Families with one draw that is shared, and one more per arm.
        nuisance: The nuisance of their world.
        noise: Correlation of the nuisance's noise between branches.
        later: Probability that a family shares its later actions.
        rng: Decides which families share, and draws the nuisance's noise.
    """
    for name, value in (("noise", noise), ("later", later)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1; got {value}")
    if drawn.recipe.draws != 1 + drawn.num_arms:
        raise ValueError(
            f"families of {drawn.num_arms} arms need {1 + drawn.num_arms} draws to couple them; "
            f"got {drawn.recipe.draws}"
        )
    shards = [
        MemoryShard(_coupled_arrays(part, nuisance, noise, later, rng), {})
        for part in drawn.batches(_FAMILIES)
    ]
    recipe = {**drawn.recipe.to_json(), "draws": 1}
    return Branches({**drawn.manifest, "recipe": recipe}, shards, mixing=drawn.mixing)


def _coupled_arrays(
    part: Branches, nuisance: Nuisance, noise: float, later: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    num, arms, horizon = len(part), part.num_arms, part.recipe.horizon
    shares = rng.random(num) < later
    which = np.where(shares[:, None], 0, 1 + np.arange(arms))  # draw of each arm, [n, arms]
    own: dict[str, Any] = {}
    for name in ("outcome", "first"):
        values = part.array(name)
        own[name] = values[np.arange(num)[:, None], which, np.arange(arms)][:, None]
    actions = part.array("continuation")[:, :, 0]  # [n, draws, horizon − 1]
    own["continuation"] = actions[np.arange(num)[:, None], which][:, None]
    start = part.array("nuisance_start")
    own["nuisance"] = _paths(start, nuisance, noise, (1, arms, horizon), rng)
    kept = [n for n in part.array_names() if n in ("index", "arms", "observation")]
    kept += [name for name in part.array_names() if name.startswith("state.")]
    return {**{name: part.array(name) for name in kept}, "nuisance_start": start, **own}


def _paths(
    start: np.ndarray,
    nuisance: Nuisance,
    correlation: float,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> np.ndarray:
    """Paths of the nuisance whose noise is correlated between arms, `[n, *shape, dimension]`.

    Args:
        start: Where they start, `[n, dimension]`.
        nuisance: The nuisance.
        correlation: Correlation of the noise between arms.
        shape: Numbers of draws, arms and steps.
        rng: Draws the noise.
    """
    num, (draws, _, horizon) = len(start), shape
    common = nuisance.noise((num, draws, 1, horizon), rng)
    noise = np.sqrt(1 - correlation, dtype=np.float32) * nuisance.noise((num, *shape), rng)
    noise += np.sqrt(correlation, dtype=np.float32) * common
    return nuisance.path(start[:, None, None], noise)


def variances(
    many: Branches, nuisance: Nuisance, noise: float, later: float, rng: np.random.Generator
) -> dict[str, float]:
    """Variances of the difference of two branches given the state, measured and predicted.

    They are summed over the features, and averaged over states and pairs of actions. Mixing is a
    rotation, so the features' own part and the nuisance's can be told apart.

    Args:
        many: Families with many draws; everything is shared within a draw.
        nuisance: The nuisance of their world.
        noise: Correlation of the nuisance's noise between branches.
        later: Probability that a family shares its later actions.
        rng: Decides which families share, and draws the nuisance's noise.
    """
    outcomes = many.array("outcome")  # [n, draws, arms, features], without the nuisance
    num, draws, arms, _ = outcomes.shape
    half = draws // 2  # the second half of the draws provides arms of other draws
    # Evenly spread over the draws of a state, which is less noisy than drawing each.
    shares = (rng.random((num, 1)) + np.arange(half) / half) % 1 < later
    process = _discounted_nuisance(many, nuisance, noise, half, rng)
    # Measured and predicted from the same draws where branches share everything: in a few states
    # outcomes vary far more than in others, so other draws would have another variance.
    parts: dict[str, list[float]] = {"own": [], "nuisance": [], "shared": [], "covariance": []}
    for a, b in combinations(range(arms), 2):
        one, other, elsewhere = outcomes[:, :half, a], outcomes[:, :half, b], outcomes[:, half:, b]
        coupled_to = np.where(shares[..., None], other, elsewhere[:, :half])
        parts["own"].append(_variance(one - coupled_to))
        parts["nuisance"].append(_variance(process[:, :, a] - process[:, :, b]))
        parts["shared"].append(_variance(one - other))
        sum_of_both = _variance(one) + _variance(other)
        parts["covariance"].append((sum_of_both - parts["shared"][-1]) / 2)
    mean = {name: float(np.mean(values)) for name, values in parts.items()}
    measured = {"own": mean["own"], "nuisance": mean["nuisance"]}
    weights = nuisance.amplitude * nuisance.scale * _noise_weights(many, nuisance)
    expected = {
        "own": mean["shared"] + 2 * (1 - later) * mean["covariance"],
        "nuisance": 2 * (1 - noise) * np.sum(weights**2) * nuisance.dimension,
    }
    found = {f"variance_{name}": value for name, value in measured.items()}
    found |= {f"predicted_{name}": value for name, value in expected.items()}
    found["variance"] = sum(measured.values())
    found["predicted"] = sum(expected.values())
    return found


def _discounted_nuisance(
    many: Branches, nuisance: Nuisance, noise: float, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Discounted sums of simulated paths of the nuisance, `[n, draws, arms, dimension]`."""
    shape = (draws, many.num_arms, many.recipe.horizon)
    parts = [
        many.recipe.discounted(_paths(part.array("nuisance_start"), nuisance, noise, shape, rng))
        for part in many.batches(_FAMILIES_OF_MANY_DRAWS)
    ]
    return nuisance.amplitude * np.concatenate(parts)


def _noise_weights(branches: Branches, nuisance: Nuisance) -> np.ndarray:
    """Weight of the noise of each step in the discounted sum, Σ_{k≥j} γᵏ pᵏ⁻ʲ, `[horizon]`."""
    discounts, steps = branches.recipe.discounts, np.arange(branches.recipe.horizon)
    return np.array(
        [np.sum(discounts[j:] * nuisance.persistence ** (steps[j:] - j)) for j in steps]
    )


def _variance(values: np.ndarray) -> float:
    """Variance over draws of `[n, draws, features]`, summed over features, averaged over states."""
    return float(values.var(axis=1, ddof=1).sum(axis=-1).mean())
