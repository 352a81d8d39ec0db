"""One job of an ablation: the world of its setting, its branches, and the fits of its methods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cqm.branches.collect import collect
from cqm.branches.dataset import Branches
from cqm.branches.recipe import Policy, Recipe
from cqm.experiments.ablations.grid import Fit, Setting
from cqm.experiments.job import Clock
from cqm.experiments.methods import Method, Predictor, Task, method_of
from cqm.experiments.protocol import Protocol
from cqm.experiments.results import TEXT_AXES, Row
from cqm.experiments.zoo import policy_with, state_behaviour
from cqm.storage import canonical_json
from cqm.worlds.contract import World
from cqm.worlds.features import FeatureMap, Products, RandomFourier, Squares
from cqm.worlds.loading import load_world
from cqm.worlds.nuisance import Nuisance
from cqm.worlds.suite import load_task

LAWS = ("uniform", "box", "zero", "feedback")
"""Laws of the later actions: uniform on the candidates, uniform on the control box, always the
control at the middle of the box, and a policy that depends on the state."""
MAPS: Mapping[str, tuple[FeatureMap, ...]] = {
    "none": (),
    "squares": (Squares(),),
    "squares+products": (Squares(), Products()),
    **{f"fourier-{num}": (RandomFourier(num),) for num in (16, 64, 256)},
}
"""Features that are added to the native ones, by name."""
# Methods that learn without the features of every step.
_SINGLE_STEPS = ("cqm", "cqm-full-rank", "world", "direct", "cocoa")
_MENU_SEED = 2  # of the directions in menus of a given size


@dataclass(frozen=True)
class Cell:
    """A job: one setting of one domain with one seed, and the fits that share its branches."""

    protocol: Protocol
    """The grid's protocol, with the setting's changes."""
    setting: Setting
    fits: tuple[Fit, ...]
    axes: tuple[str, ...]
    domain: str
    seed: int
    directory: Path
    """Where branches and checkpoints are kept until the job is done."""
    clock: Clock

    def world(self) -> World:
        """The domain with the setting's actions, features and nuisance."""
        setting, dimension = self.setting, self.protocol.nuisance
        return load_world(
            self.domain,
            nuisance=Nuisance(dimension, amplitude=setting.amplitude, seed=self.seed)
            if dimension
            else 0,
            seed=self.seed,
            candidate_actions=menu(self.domain, setting),
            features=MAPS[setting.features],
        )

    def collected(self, name: str, world: World, **changes: Any) -> Branches:
        """One of the protocol's sets of branches, with changes to its recipe."""
        recipe = {**self.protocol.branch_sets(self.seed)[name], **changes}
        digest = hashlib.sha256(canonical_json(Recipe(**recipe).to_json()).encode()).hexdigest()
        where = self.directory / "branches" / f"{name}-{digest[:12]}"
        branches = collect(world, out=where, show_progress=False, **recipe)
        self.clock.lap("physics")
        return branches

    def training(self, world: World, **changes: Any) -> Branches:
        """Training branches; the features of every step are stored if a method needs them."""
        bases = {fit.method.partition("+")[0] for fit in self.fits}
        own = {
            "draws": self.setting.draws,
            "per_step": not bases <= set(_SINGLE_STEPS),
            "continuation": law(world, self.setting.continuation),
        }
        return self.collected("training", world, **{**own, **changes})

    def rewards(self, world: World, fit: Fit | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Weights of training rewards for a fit, and of held-out rewards, `[rewards, features]`."""
        protocol = self.protocol
        if fit is not None and fit.rewards is not None:
            protocol = replace(protocol, training_rewards=fit.rewards)
        num = len(world.native.feature_names)
        training, held_out = protocol.rewards(num, draw=self.setting.prototypes)
        return world.mixed_weights(training), world.mixed_weights(held_out)

    def fitted(self, fit: Fit, branches: Branches, world: World) -> tuple[Method, Predictor]:
        """A method of the benchmark, fitted to the first training states."""
        method, conditioning = method_of(fit.full_name)
        task = Task(
            branches=branches if fit.states is None else branches[: fit.states],
            rewards=self.rewards(world, fit)[0],
            training=replace(self.protocol.training, seed=self.seed),
            conditioning=conditioning,
            rank=fit.rank,
            directory=self.directory / "fits" / fit.label,
            show_progress=False,
        )
        predictor = method.fit(task)
        self.clock.lap("training")
        return method, predictor

    def row(
        self, method: str, measure: str, value: float, fit: Fit | None = None, **at: Any
    ) -> Row:
        """A row of the CSV file; a value that is not finite is undefined."""
        own = {axis: at[axis] if axis in at else self.at(axis, fit) for axis in self.axes}
        known = float(value) if np.isfinite(value) else None
        return {**own, "method": method, "measure": measure, "value": known}

    def at(self, axis: str, fit: Fit | None) -> Any:
        """Where a fit stands on an axis; None if the axis has no meaning for it."""
        if fit is None and axis in Fit.__dataclass_fields__:
            return "any" if axis in TEXT_AXES else None
        for part in (fit, self.setting):
            if (value := getattr(part, axis, None)) is not None:
                return value
        if axis in TEXT_AXES:
            return "none"
        return getattr(self.protocol, axis) if axis in Protocol.__dataclass_fields__ else None


def law(world: World, name: str) -> str | list[float] | Policy:
    """A continuation by its name in `LAWS`."""
    if name == "feedback":
        return policy_with(state_behaviour(world))
    if name == "zero":
        middle = (world.control_low + world.control_high) / 2
        at_rest = np.all(world.candidate_actions == middle, axis=1)
        if not at_rest.any():
            raise ValueError(f"{world.name} has no candidate action in the middle of its box")
        return (np.arange(len(at_rest)) == at_rest.argmax()).astype(float).tolist()
    if name not in LAWS:
        raise ValueError(f"unknown continuation {name!r}; available: {list(LAWS)}")
    return name


def menu(domain: str, setting: Setting) -> np.ndarray | None:
    """Candidate actions `[actions, controls]`; None for the benchmark's.

    A menu of a given size has the middle of the box, if the size is odd, and random directions with
    their negatives, scaled to the bounds; a larger menu contains the smaller ones.
    """
    if setting.actions is None:
        return load_task(domain, seed=setting.prototypes).candidate_actions
    world = load_task(domain)
    middle, reach = (
        (world.control_low + world.control_high) / 2,
        (world.control_high - world.control_low) / 2,
    )
    if len(middle) == 1:
        return np.linspace(world.control_low, world.control_high, setting.actions)
    rng = np.random.default_rng([_MENU_SEED, len(middle)])
    directions = rng.standard_normal((setting.actions // 2, len(middle)))
    directions /= np.abs(directions).max(axis=1, keepdims=True)
    pairs = np.stack([directions, -directions], axis=1).reshape(-1, len(middle))
    rest = np.zeros((setting.actions % 2, len(middle)))
    return middle + reach * np.concatenate([rest, pairs])
