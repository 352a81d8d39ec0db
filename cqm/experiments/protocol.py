"""The paper's protocol as data, and smaller versions of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cqm.experiments.methods import METHODS, RIVALS
from cqm.models.training import Training

DOMAINS = ("cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk")
PAPER = tuple(name for name, method in METHODS.items() if method.in_paper)
LIMITS = tuple(name for name, method in METHODS.items() if method.role == "limit")
CEILINGS = "ceilings"
"""The job that estimates the best achievable scores; it takes the place of a method."""
SEEDS = (7, 8, 9, 10, 11)
PRESETS = ("paper", "quick", "smoke")
_REWARD_SEED = 0  # one set of reward directions for all seeds of a run


@dataclass(frozen=True)
class Job:
    """One method, or `ceilings`, on one domain with one seed."""

    domain: str
    seed: int
    method: str


@dataclass(frozen=True)
class Stage:
    """Methods and the seeds they run with; stages run one after another."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Protocol:
    """Everything that determines a score, apart from the code."""

    preset: str
    stages: tuple[Stage, ...]
    domains: tuple[str, ...] = DOMAINS
    states: int = 20_000
    test_states: int = 4_000
    ceiling_states: int = 500
    ceiling_draws: int = 64
    horizon: int = 12
    discount: float = 0.95
    nuisance: int = 64
    training_rewards: int = 32
    test_rewards: int = 16
    training: Training = field(default_factory=Training)

    def jobs(self) -> list[Job]:
        """All jobs, stage by stage, so that the most important scores are known first."""
        return [
            Job(domain, seed, method)
            for stage in self.stages
            for seed in stage.seeds
            for domain in self.domains
            for method in stage.methods
        ]

    def restricted(
        self,
        domains: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        methods: Sequence[str] | None = None,
    ) -> Protocol:
        """The protocol for some domains, seeds and methods; methods and seeds may be new ones."""
        protocol = self
        if domains is not None:
            unknown = sorted(set(domains) - set(DOMAINS))
            if unknown:
                raise ValueError(f"unknown domains {unknown}; available: {list(DOMAINS)}")
            protocol = replace(protocol, domains=tuple(d for d in DOMAINS if d in domains))
        stages = protocol.stages
        if methods is not None:
            wanted = [*methods, CEILINGS]
            stages = tuple(
                Stage(tuple(m for m in stage.methods if m in wanted), stage.seeds)
                for stage in stages
            )
            known = {method for stage in stages for method in stage.methods}
            added = tuple(dict.fromkeys(m for m in methods if m not in known))
            if added:
                stages = (*stages, Stage(added, self.stages[0].seeds))
        if seeds is not None:
            chosen = tuple(dict.fromkeys(seeds))
            stages = tuple(Stage(stage.methods, chosen) for stage in stages)
        return replace(protocol, stages=stages)

    def branch_sets(self, seed: int) -> dict[str, dict[str, Any]]:
        """Recipes of the branches that all methods share, by name."""
        shared = {"horizon": self.horizon, "discount": self.discount}
        return {
            "training": {**shared, "states": self.states, "per_step": True, "seed": seed},
            "test": {**shared, "states": self.test_states, "seed": seed + 1_000},
            "ceiling": {
                **shared,
                "states": self.ceiling_states,
                "draws": self.ceiling_draws,
                "seed": seed + 2_000,
            },
        }

    def rewards(self, num_features: int, *, draw: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Training and held-out reward directions, unit vectors of native features `[rewards, d]`.

        Each domain has one set for all seeds: drawn per seed, they would change the scores by more
        than the paper's intervals. Other sets have another number, `draw`.
        """
        rng = np.random.default_rng(_REWARD_SEED + draw)
        directions = rng.standard_normal((self.test_rewards + self.training_rewards, num_features))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return directions[self.test_rewards :], directions[: self.test_rewards]

    def fixed(self) -> dict[str, Any]:
        """The settings on which all jobs in one directory must agree."""
        values = asdict(replace(self, training=replace(self.training, seed=None)))  # set per job
        for name in ("preset", "stages", "domains"):
            del values[name]
        return values


def preset(name: str) -> Protocol:
    """`paper`: the full protocol. `quick`: one seed, minutes on two cores. `smoke`: seconds.

    >>> preset("paper").states, len(preset("quick").jobs())
    (20000, 44)
    """
    first = (CEILINGS, *LIMITS, *PAPER)
    if name == "paper":
        ranks = ("cqm-full-rank", "cqm-full-rank+effect")
        conditioned = tuple(f"{method}+effect" for method in PAPER)
        return Protocol(
            "paper",
            (
                Stage(first, SEEDS),
                Stage(("default",), SEEDS),
                Stage((*conditioned, *ranks), SEEDS[:3]),
                Stage(("world-ensemble",), SEEDS[:3]),
                Stage(RIVALS, SEEDS),
            ),
        )
    if name == "quick":
        return Protocol(
            "quick",
            (Stage((*first, "cqm+effect"), SEEDS[:1]),),
            states=4_000,
            test_states=1_000,
            training=Training(updates=1_000),
        )
    if name == "smoke":
        return Protocol(
            "smoke",
            (Stage(first, SEEDS[:1]),),
            states=64,
            test_states=32,
            ceiling_states=8,
            ceiling_draws=16,
            training=Training(updates=8, batch_size=16, chunk=4),
        )
    raise ValueError(f"unknown preset {name!r}; available: {list(PRESETS)}")
