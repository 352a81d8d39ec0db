"""Check that a world fulfils the contract that branching relies on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from cqm.arguments import choice, instance, whole_number, whole_number_or_none
from cqm.names import checked_action_names
from cqm.worlds.contract import NOT_VECTORISED, VECTORISE, NoiseKind, World
from cqm.worlds.identity import stored_identity
from cqm.worlds.noise_kind import noise_kind_problem
from cqm.worlds.trial import STATES, start_trial

NOISE_KIND = "noise kind"  # name of the check
_MOST = 10_000  # states or steps that a check may take


@dataclass(frozen=True)
class Check:
    """One line of a report: a check, whether it passed, and details."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """Results of several checks; prints as a table, and is true if every check passed."""

    title: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [self.title]
        for check in self.checks:
            mark = "ok  " if check.passed else "FAIL"
            lines.append(f"  {mark}  {check.name:<{width}}  {check.detail}".rstrip())
        return "\n".join(lines)


def check_world(
    world: World | str, *, num: int = STATES, horizon: int | None = None, seed: int = 0
) -> Report:
    """Check that a world, built-in or your own, fulfils the world contract.

    A world that passes can be branched: the same state, noise and controls give the same features
    bit for bit, whatever was simulated in between, in any order, at any batch size and on any
    thread.

    By default about 12,000 simulated steps are compared with a first rollout, so randomness that
    the noise does not explain is found with probability 1 − (1 − p)^12,000 if it enters a share p
    of the steps: 99.99 % for one step in 1,300. The rollouts have 64 steps, and half of the states
    are reached by a warm-up of 20 steps. Problems that appear only later, in rarer states, on
    another machine or after more calls are not detected.

    Args:
        world: The world to check, or its name.
        num: Number of states to check.
        horizon: Number of steps per rollout; by default 64, halved until the world's noise
            allows it and most branches survive.
        seed: Random seed for the states, controls and noise.
    """
    if isinstance(world, str):
        from cqm.worlds.loading import load_world

        world = load_world(world)
    instance("world", world, World, "a World or the name of one")
    whole_number("num", num, least=1, most=_MOST)
    whole_number_or_none("horizon", horizon, least=1, most=_MOST)
    whole_number("seed", seed, least=0)

    checks: list[Check] = []
    globals_before = _global_generators()

    def record(name: str, check_fn: Callable[[], str]) -> None:
        # A world under test may raise anything; the report shows it.
        try:
            problem = check_fn()
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        checks.append(Check(name, not problem, problem))

    record("declaration", lambda: _declaration_problem(world))
    if not checks[-1].passed:
        return Report(getattr(world, "name", type(world).__name__), tuple(checks))
    title = f"{world.name} (cloning: {world.cloning})"
    try:
        trial, remark = start_trial(world, num, horizon, seed)
        checks.append(Check("runs", trial is not None, remark))
    except Exception as error:
        hint = f"; {VECTORISE}" if isinstance(error, NOT_VECTORISED) else ""
        hint = "" if VECTORISE in str(error) else hint
        checks.append(Check("runs", False, f"raised {type(error).__name__}: {error}{hint}"))
        trial = None
    if trial is None:
        return Report(title, tuple(checks))
    record("the same generator gives the same states", trial.seeded_reset)
    record("the same generator gives the same noise", trial.seeded_noise)
    record(NOISE_KIND, lambda: noise_kind_problem(trial))
    record("clone fidelity and shared noise", trial.clone_fidelity)
    record("later calls leave earlier results alone", trial.results_kept)
    record("observing changes nothing", trial.observing_is_passive)
    record("state is complete", trial.complete_state)
    record("feature names do not mislead", trial.misnamed_features)
    if checks[-1].passed:
        checks.pop()  # nothing to say about most worlds
    record("skipping final states changes nothing", trial.features_without_states)
    record("stored states give the same rollouts", trial.storage)
    record("duplicate arms are identical", trial.duplicate_arms)
    record("batch order does not matter", trial.order_independence)
    record("batch size does not matter", trial.size_independence)
    record("threads do not matter", trial.thread_independence)
    record("rollouts leave their arguments alone", lambda: trial.changed)
    record("global random generators are not used", lambda: _drawn_from(globals_before))
    return Report(title, tuple(checks))


def _declaration_problem(world: World) -> str:
    """Problem with the world's declared names, bounds or actions; empty if there is none."""
    try:
        missing = [name for name in World.__annotations__ if not hasattr(world, name)]
        if missing:
            return f"attributes {missing} are missing"
        stored_identity(world)
        choice("noise_kind", world.noise_kind, get_args(NoiseKind))
        checked_action_names(world.action_names, len(world.candidate_actions))
    except ValueError as error:
        return str(error)
    low, high, actions = world.control_low, world.control_high, world.candidate_actions
    if actions.ndim != 2 or actions.shape[1] != len(low) or len(actions) < 2:
        return f"candidate_actions have shape {actions.shape}, expected [at least 2, {len(low)}]"
    if np.any(actions < low) or np.any(actions > high):
        return "candidate_actions lie outside the control bounds"
    for field in ("observation_names", "feature_names"):
        names = getattr(world, field)
        if len(set(names)) != len(names):
            return f"{field} contain duplicates: {sorted({n for n in names if names.count(n) > 1})}"
    return ""


def _global_generators() -> tuple[object, ...]:
    """States of the generators that any code may draw from."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return (name, np.asarray(keys).tobytes(), *rest), random.getstate()


def _drawn_from(before: tuple[object, ...]) -> str:
    names = ("numpy.random", "random")
    used = [
        n for n, was, now in zip(names, before, _global_generators(), strict=True) if was != now
    ]
    if not used:
        return ""
    return f"the world drew from or seeded {' and '.join(used)}; use the generator and noise given"
