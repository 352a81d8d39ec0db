"""HindsightModel against regression, on rewards that are asked after the logs were recorded.

Hindsight (CQM-H) infers which action led to an event, and answers any reward from the same ratios;
regression is `ResidualModel`, fitted anew to every reward. The problems:

- few states: a random MDP with 4 states, counted by both; the truth is exact (`cqm.measures`);
- many states: an MDP with 300 states, too many to count, seen through coordinates; rewards for
  being in some of the states; the truth is exact;
- rare events: an action moves an outcome by a fraction of its noise; rewards for events in its
  tails;
- late noise: an action moves the first two of eight steps, and all steps are noisy; rewards that
  are not linear;
- poor overlap: the rare events, where an action is seldom taken in some states (1.5 % at worst).

Errors are root mean squares over states, actions and rewards, as shares of the effects' own size; 1
is predicting zero. `largest_ratio` clips density ratios; its bias is the mean error over replicates
of the estimate, as the same share. The calibration error compares the classifier's probabilities
with frequencies on decisions that it did not learn from.

    python -m benchmarks.hindsight
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import cqm
from benchmarks import write_csv
from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.measures import FiniteMDP, effect_measure, integrate, successor_measure
from cqm.models.training import Training
from cqm.quotient import center

RewardFn = Callable[[np.ndarray], np.ndarray]
_DRAWS = 20_000  # of the noise, for the truth of continuous problems
_TEST = 50  # states


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    decisions: tuple[int, ...] = (2_000, 8_000)
    """Numbers of decisions."""
    replicates: int = 3
    """Sets of logs per problem and number."""
    updates: int = 600
    """Gradient steps of the classifier, which has 32 units per layer."""
    seed: int = 0
    """Random seed."""
    out: Path = Path("benchmarks/results/hindsight.csv")
    """Where to write the results."""


@dataclass(frozen=True)
class Problem:
    """Logs with known effects on some rewards."""

    name: str
    logs_fn: Callable[[int, np.random.Generator], Logs]
    rewards: Sequence[RewardFn]
    states: np.ndarray  # [test, observations]
    truth: np.ndarray  # [test, actions, rewards]
    counted: bool = False  # whether states and events are few enough to count


def few_states(rng: np.random.Generator) -> Problem:
    mdp = _random_mdp(rng, 4, 0.7)
    return _finite("few states", mdp, np.arange(4.0)[:, None], rng, counted=True)


def many_states(rng: np.random.Generator) -> Problem:
    """A ring of 15 places, which actions move along, times 20 levels, which nothing moves."""
    places, levels = 15, 20
    turn = np.zeros((places, 3, places))
    for place in range(places):
        for action, step in enumerate((-1, 0, 1)):
            for slip, share in ((-1, 0.2), (0, 0.6), (1, 0.2)):
                turn[place, action, (place + step + slip) % places] += share
    drift = rng.dirichlet(np.full(levels, 0.5), size=levels)
    both = np.einsum("pan,lm->planm", turn, drift).reshape(places * levels, 3, places * levels)
    place, level = np.divmod(np.arange(places * levels), levels)
    angle = 2 * np.pi * place / places
    seen = np.stack([np.cos(angle), np.sin(angle), level / levels - 0.5], axis=1)
    policy = 0.5 * rng.dirichlet(np.full(3, 3.0), size=places * levels) + 0.5 / 3
    return _finite("many states", FiniteMDP(both, policy), seen, rng)


def rare_events(rng: np.random.Generator, *, least: float = 0.3) -> Problem:
    """One step; the first of three outcomes moves by half of its noise."""

    def outcomes(states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        moved = (actions - 1) * (1 + 0.5 * states[..., 0]) * 0.5
        first = noise[..., 0] + moved + 0.5 * states[..., 1]
        return np.stack([first, noise[..., 1], noise[..., 2] + 0.5 * first], axis=-1)[..., None, :]

    rewards = [
        lambda seen: (seen[..., 0] > 2) * 1.0,
        lambda seen: (seen[..., 0] < -2) * 1.0,
        lambda seen: ((np.abs(seen[..., 0] - 1) < 0.2) & (seen[..., 1] > 0)) * 1.0,
    ]
    name = "rare events" if least > 0.1 else "poor overlap"
    return _continuous(name, outcomes, 1, 3, rewards, rng, least=least)


def late_noise(rng: np.random.Generator) -> Problem:
    """Eight steps, of which the action moves the first two."""

    def outcomes(states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        steps = noise.reshape(*noise.shape[:-1], 8, 2).copy()
        steps[..., :2, 0] += ((actions - 1) * (1 + 0.5 * states[..., 0]))[..., None]
        return steps

    rewards = [
        lambda seen: np.abs(seen[..., 0] - 1),
        lambda seen: np.cos(2 * seen[..., 0] + 1),
        lambda seen: (seen[..., 0] > 1) * seen[..., 1] ** 2,
    ]
    return _continuous("late noise", outcomes, 8, 16, rewards, rng)


def _random_mdp(rng: np.random.Generator, num: int, concentration: float) -> FiniteMDP:
    transitions = rng.dirichlet(np.full(num, concentration), size=(num, 3))
    return FiniteMDP(transitions, 0.7 * rng.dirichlet(np.full(3, 3.0), size=num) + 0.1)


def _finite(
    name: str,
    mdp: FiniteMDP,
    seen: np.ndarray,
    rng: np.random.Generator,
    *,
    counted: bool = False,
    horizon: int = 4,
    discount: float = 0.9,
) -> Problem:
    laws, num_actions = mdp.transitions.toarray(), mdp.num_actions
    num_good = max(1, round(0.3 * mdp.num_states))
    values = [(rng.permutation(mdp.num_states) < num_good) * 1.0 for _ in range(3)]
    measures = effect_measure(successor_measure(mdp, discount=discount, horizon=horizon))
    truth = np.stack([integrate(measures, each) for each in values], axis=-1)

    def logs(num: int, rng: np.random.Generator) -> Logs:
        state = start = rng.integers(mdp.num_states, size=num)
        actions, features = [], []
        for _ in range(horizon):
            actions.append(draw_actions(mdp.policy[state], rng.random(num)))
            state = draw_actions(laws[state * num_actions + actions[-1]], rng.random(num))
            features.append(seen[state])
        return Logs.from_arrays(
            seen[start],
            np.stack(actions, axis=1),
            np.stack(features, axis=1),
            num_actions=num_actions,
            propensities=mdp.policy[start],
            discount=discount,
        )

    def reward(own: np.ndarray) -> RewardFn:
        def of_features(features: np.ndarray) -> np.ndarray:
            flat = features.reshape(-1, features.shape[-1])
            nearest = np.argmin(
                (flat**2).sum(axis=1)[:, None] - 2 * flat @ seen.T + (seen**2).sum(axis=1), axis=1
            )
            return own[nearest].reshape(features.shape[:-1])

        return of_features

    chosen = rng.permutation(mdp.num_states)[:_TEST]
    return Problem(
        name, logs, [reward(own) for own in values], seen[chosen], truth[chosen], counted
    )


def _continuous(
    name: str,
    outcome_fn: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    horizon: int,
    num_noise: int,
    rewards: Sequence[RewardFn],
    rng: np.random.Generator,
    *,
    least: float = 0.3,
    discount: float = 0.95,
) -> Problem:
    """Three states, and three actions of which the last is preferred where the third is large."""

    def propensities(states: np.ndarray) -> np.ndarray:
        last = np.clip(1 / (1 + np.exp(-2 * states[:, 2])), least, 1 - least)
        return np.stack([(1 - last) / 2, (1 - last) / 2, last], axis=1)

    def logs(num: int, rng: np.random.Generator) -> Logs:
        states = rng.uniform(-1.5, 1.5, (num, 3))
        known = propensities(states)
        actions = draw_actions(known, rng.random(num))
        steps = outcome_fn(states, actions, rng.standard_normal((num, num_noise)))
        later = np.zeros((num, horizon - 1), int)
        return Logs.from_arrays(
            states,
            np.column_stack([actions, later]),
            steps,
            num_actions=3,
            propensities=known,
            continuation=[1.0, 0.0, 0.0],
            discount=discount,
        )

    states, noise = rng.uniform(-1.5, 1.5, (_TEST, 3)), rng.standard_normal((_DRAWS, num_noise))
    discounts = discount ** np.arange(horizon)
    truth = np.empty((_TEST, 3, len(rewards)))
    for i, state in enumerate(states):
        for action in range(3):
            own = outcome_fn(np.broadcast_to(state, (_DRAWS, 3)), np.full(_DRAWS, action), noise)
            truth[i, action] = [(reward(own) @ discounts).mean() for reward in rewards]
    return Problem(name, logs, rewards, states, center(truth))


def regression(problem: Problem, logs: Logs) -> np.ndarray:
    """Effects on every reward by a regression of its own, `[test, actions, rewards]`."""
    found = []
    for reward in problem.rewards:
        own = Logs.from_arrays(
            logs.observations,
            logs.actions,
            reward(logs.features)[..., None],
            num_actions=logs.num_actions,
            propensities=logs.propensities,
            continuation=logs.recipe.continuation.law,
            discount=logs.recipe.discount,
        )
        method = "tabular" if problem.counted else "direct"
        found.append(cqm.ResidualModel(method=method).fit(own).effect(problem.states)[..., 0])
    return np.stack(found, axis=-1)


def answers(
    problem: Problem, logs: Logs, settings: Settings
) -> Iterator[tuple[dict[str, object], np.ndarray, float | None]]:
    """Each way with its settings, its effects on the rewards, and the calibration error."""
    overlap = problem.name == "poor overlap"
    for known in (True, False) if overlap else (True,):
        given = logs if known else logs.with_propensities(None)
        told = {"propensities": "known" if known else "estimated"}
        yield {"way": "regression", **told}, regression(problem, given), None
        for corrected in (True,) if problem.counted or not known else (True, False):
            for most in (None, 1.5) if overlap and known else (None,):
                options: dict[str, Any] = {"corrected": corrected, "largest_ratio": most}
                if problem.counted:
                    options["method"] = "tabular"
                else:
                    options["width"] = 32
                    options["training"] = Training(
                        settings.updates, batch_size=512, learning_rate=3e-3, schedule="cosine"
                    )
                model = cqm.HindsightModel(**options).fit(given)
                found = [model.reward_advantage(problem.states, each) for each in problem.rewards]
                way = "hindsight" if corrected else "hindsight, uncorrected"
                limit = "" if most is None else most
                row = {"way": way, **told, "largest_ratio": limit}
                reliability = model.reliability_
                error = None if reliability is None else reliability.error
                yield row, np.stack(found, axis=-1), error


def measured(problem: Problem, num: int, settings: Settings) -> list[dict[str, object]]:
    """The errors of all ways with this number of decisions."""
    keys: list[dict[str, object]] = []
    found: list[list[np.ndarray]] = []
    reliabilities: list[list[float]] = []
    for replicate in range(settings.replicates):
        logs = problem.logs_fn(num, np.random.default_rng([settings.seed, replicate, num]))
        for i, (row, effects, reliability) in enumerate(answers(problem, logs, settings)):
            if replicate == 0:
                keys.append(row)
                found.append([])
                reliabilities.append([])
            found[i].append(effects)
            if reliability is not None:
                reliabilities[i].append(reliability)
    size = np.sqrt(np.mean(problem.truth**2, axis=(0, 1)))
    rows = []
    for row, effects, own in zip(keys, found, reliabilities, strict=True):
        differences = (np.stack(effects) - problem.truth) / size
        squares = np.mean(differences**2, axis=(1, 2, 3))
        # The noise of a mean over replicates is subtracted from the square of its error.
        noise = differences.var(axis=0, ddof=1).mean() / settings.replicates
        bias = np.mean(differences.mean(axis=0) ** 2) - noise
        rows.append(
            {
                "problem": problem.name,
                "decisions": num,
                **{"largest_ratio": "", **row},
                "error": round(float(np.sqrt(squares).mean()), 4),
                "standard_error": round(
                    float(np.sqrt(squares).std(ddof=1) / np.sqrt(settings.replicates)), 4
                ),
                "bias": round(float(np.sqrt(max(0.0, bias))), 4),
                "calibration_error": round(float(np.mean(own)), 4) if own else "",
                "replicates": settings.replicates,
                "updates": settings.updates,
                "seed": settings.seed,
                "cqm": version("cqm"),
                "numpy": version("numpy"),
                "jax": version("jax"),
            }
        )
    return rows


def main(settings: Settings) -> None:
    warnings.simplefilter("ignore")
    rows: list[dict[str, object]] = []
    makers = (few_states, many_states, rare_events, late_noise, poor_overlap)
    for i, make in enumerate(makers):
        problem = make(np.random.default_rng([settings.seed, i]))
        sizes = settings.decisions[-1:] if problem.name == "poor overlap" else settings.decisions
        for num in sizes:
            rows += measured(problem, num, settings)
            for row in rows:
                if (row["problem"], row["decisions"]) == (problem.name, num):
                    print(*list(row.values())[:8])
            write_csv(settings.out, rows)


def poor_overlap(rng: np.random.Generator) -> Problem:
    """The rare events, where the behaviour hardly ever takes some of the actions."""
    return rare_events(rng, least=0.03)


if __name__ == "__main__":
    main(tyro.cli(Settings))
