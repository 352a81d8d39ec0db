"""Check that a world fulfils the contract that branching relies on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cqm.names import checked_action_names
from cqm.worlds.contract import NOT_VECTORISED, VECTORISE, Status, World, take
from cqm.worlds.identity import stored_identity


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


def check_world(world: World, *, num: int = 6, horizon: int = 5, seed: int = 0) -> Report:
    """Check that a world, built-in or your own, fulfils the world contract.

    A world that passes can be branched: the same state, noise and controls give the same features
    bit for bit, whatever was simulated in between, in any order and in any thread.

    Args:
        world: The world to check.
        num: Number of states to check.
        horizon: Number of steps per rollout.
        seed: Random seed for the states, controls and noise.
    """
    checks: list[Check] = []

    def record(name: str, check_fn: Callable[[], str]) -> None:
        # A world under test may raise anything; the report shows it.
        try:
            problem = check_fn()
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        checks.append(Check(name, not problem, problem))

    def rng(purpose: int) -> np.random.Generator:
        return np.random.default_rng([seed, purpose])

    record("declaration", lambda: _declaration_problem(world))
    if not checks[-1].passed:
        return Report(getattr(world, "name", type(world).__name__), tuple(checks))

    title = f"{world.name} (cloned by {world.cloning})"
    try:
        states = world.reset(num, rng(0))
        actions = rng(1).integers(len(world.candidate_actions), size=(num, horizon))
        controls = world.candidate_actions[actions]
        noise = world.sample_noise(num, horizon, rng(2))
        original = world.rollout(states, controls, noise)
    except Exception as error:
        hint = f"; {VECTORISE}" if isinstance(error, NOT_VECTORISED) else ""
        checks.append(Check("runs", False, f"raised {type(error).__name__}: {error}{hint}"))
        return Report(title, tuple(checks))

    def unlike_original(what: str, features: np.ndarray) -> str:
        return _difference(f"features {what}", original.features, features)

    def runs() -> str:
        expected = (num, horizon, len(world.feature_names))
        if original.features.shape != expected:
            hint = f"; {VECTORISE}" if len(original.features) != num else ""
            return f"features have shape {original.features.shape}, expected {expected}{hint}"
        if np.any(original.status != Status.OK):
            failed = f"{np.sum(original.status != Status.OK)} of {num} branches failed"
            if original.error.startswith(tuple(kind.__name__ for kind in NOT_VECTORISED)):
                return f"{failed}; one raised {original.error}; {VECTORISE}"
            return f"{failed}; one raised {original.error}" if original.error else failed
        if not np.all(np.isfinite(original.features)):
            return "features are not finite although every branch reports success"
        observed, wanted = world.observe(states).shape, (num, len(world.observation_names))
        if observed != wanted:
            return f"observations have shape {observed}, expected {wanted}"
        return ""

    def seeded_reset() -> str:
        again = world.observe(world.reset(num, rng(0)))
        return _difference("observations after the same reset", world.observe(states), again)

    def clone_fidelity() -> str:
        world.rollout(world.reset(num, rng(3)), controls[::-1], noise[::-1])
        again = world.rollout(states, controls, noise)
        return unlike_original("rolled out a second time", again.features)

    def observing_is_passive() -> str:
        before = world.observe(states)
        world.rollout(states, controls, noise)
        return _difference("observations after a rollout", before, world.observe(states))

    def complete_state() -> str:
        # Interleave the steps of different states: whatever a state fails to hold leaks between
        # them.
        features = np.empty_like(original.features)
        current = [take(states, slice(i, i + 1)) for i in range(num)]
        for t in range(horizon):
            for i in range(num):
                one = world.step(current[i], controls[i : i + 1, t], noise[i : i + 1, t])
                features[i, t], current[i] = one.features[0, 0], one.states
        problem = unlike_original("stepped one at a time", features)
        why = "the state may lack a variable, or rounding may depend on batch size or horizon"
        return problem and f"{problem}: {why}"

    def storage() -> str:
        kept = {name: np.array(values) for name, values in world.store(states).items()}
        opaque = [name for name, values in kept.items() if values.dtype == object]
        if opaque:
            return f"stored arrays {opaque} hold Python objects; only numbers can be stored"
        again = world.rollout(world.restore(kept), controls, noise)
        return unlike_original("rolled out from stored states", again.features)

    def duplicate_arms() -> str:
        twice = np.repeat(np.arange(num), 2)
        both = world.rollout(take(states, twice), controls[twice], noise[twice]).features
        return _difference("features of a duplicated arm", both[::2], both[1::2])

    def order_independence() -> str:
        order = rng(4).permutation(num)
        other = world.rollout(take(states, order), controls[order], noise[order])
        return _difference("features in another order", original.features[order], other.features)

    def thread_independence() -> str:
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(world.rollout, states, controls, noise) for _ in range(4)]
        problems = [unlike_original("from threads", job.result().features) for job in jobs]
        return next(filter(None, problems), "")

    def features_without_states() -> str:
        bare = world.rollout(states, controls, noise, final=False)
        return unlike_original("rolled out without final states", bare.features)

    record("runs", runs)
    record("reset follows its generator", seeded_reset)
    record("clone fidelity and shared noise", clone_fidelity)
    record("observing changes nothing", observing_is_passive)
    record("state is complete", complete_state)
    record("skipping final states changes nothing", features_without_states)
    record("stored states give the same rollouts", storage)
    record("duplicate arms are identical", duplicate_arms)
    record("batch order does not matter", order_independence)
    record("threads do not matter", thread_independence)
    return Report(title, tuple(checks))


def _declaration_problem(world: World) -> str:
    """Problem with the world's declared names, bounds or actions; empty if there is none."""
    missing = [name for name in World.__annotations__ if not hasattr(world, name)]
    if missing:
        return f"attributes {missing} are missing"
    try:
        stored_identity(world)
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


def _difference(what: str, expected: np.ndarray, got: np.ndarray) -> str:
    """How two arrays differ; empty if they are equal bit for bit."""
    if expected.shape != got.shape:
        return f"{what} have shape {got.shape}, expected {expected.shape}"
    if np.array_equal(expected, got, equal_nan=True):
        return ""
    gap = np.abs(expected - got)[~(np.isnan(expected) & np.isnan(got))]
    return f"{what} differ by up to {gap.max():.3g}"
