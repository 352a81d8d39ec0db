"""The rollouts of a world under test, and the questions that `check_world` asks of them.

Each question is answered by what is wrong, or by an empty string. All compare with one first
rollout, bit for bit.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cqm.worlds.contract import (
    NOT_VECTORISED,
    VECTORISE,
    Rollout,
    States,
    Status,
    World,
    concatenate,
    take,
)

STATES = 16  # states to check
STEPS = 64  # steps per rollout: several times the default horizon, and longer than its warm-up
_WARMUP = 20  # steps before half of the states, the most that collecting takes by default
_SIZES = (1, 2, 3, 17, 257, 768)  # of batches; 768 states are a block of three actions
_TOO_MANY = "most branches failed: "
_AGAIN = 4  # generators tried before a world is said to ignore them


@dataclass
class Trial:
    """States of a world with controls and noise, and the rollout that all others must repeat."""

    world: World
    states: States
    controls: np.ndarray
    noise: np.ndarray
    result: Rollout
    seed: int
    fresh: np.ndarray  # rows whose state comes straight from reset

    def __post_init__(self) -> None:
        self.num, self.horizon = self.controls.shape[:2]
        self.all = np.arange(self.num)
        self.ok = np.array(self.result.status == Status.OK)
        self.features = self.result.features.copy()
        self.changed, self.overwritten = "", False

    def roll(self, rows: np.ndarray, horizon: int | None = None, *, final: bool = True) -> Rollout:
        """Roll out copies of some states, after which their arrays must be as before."""
        given = take(self.states, rows), self.controls[rows, :horizon], self.noise[rows, :horizon]
        before = take(self.states, rows), given[1].copy(), given[2].copy()
        result = self.world.rollout(*given, final=final)
        for what, was, now in zip(("states", "controls", "noise"), before, given, strict=True):
            if not _same(was, now):
                self.changed = f"rollout changes the {what} that it is given; let it copy them"
        return result

    def unlike(self, what: str, result: Rollout, rows: np.ndarray) -> str:
        """How a rollout of some rows differs from the first one; features of failures may."""
        expected, got = self.features[rows], result.features
        if got.shape[:1] + got.shape[2:] != expected.shape[:1] + expected.shape[2:]:
            return f"features {what} have shape {got.shape}, expected {expected.shape}"
        ok = self.ok[rows]
        if got.shape == expected.shape and np.any(ok != (result.status == Status.OK)):
            differ = np.sum(ok != (result.status == Status.OK))
            return (
                f"{differ} of {len(rows)} branches {what} failed in one of the two rollouts but "
                "not in the other"
            )
        return _difference(f"features {what}", expected[ok, : got.shape[1]], got[ok])

    def rng(self, purpose: int) -> np.random.Generator:
        """The random generator for one purpose."""
        return np.random.default_rng([self.seed, purpose])

    def seeded_reset(self) -> str:
        """Whether reset draws from the generator that it is given, and from nothing else."""
        reset, observe = self.world.reset, self.world.observe
        first, again, other = (reset(self.num, self.rng(purpose)) for purpose in (0, 0, 5))
        problem = _difference("observations after the same reset", observe(first), observe(again))
        if problem or not len(self.fresh):
            return problem
        rows = self.fresh
        repeated = self.world.rollout(take(again, rows), self.controls[rows], self.noise[rows])
        problem = self.unlike("after the same reset", repeated, rows)
        if problem or not _ignored(observe(first), observe(other)):
            return problem
        more = [observe(reset(4 * STATES, self.rng(6 + i))) for i in range(_AGAIN)]
        if all(_ignored(more[0], each) for each in more[1:]):
            return "reset draws the same states from every generator; use the one that it is given"
        return ""

    def seeded_noise(self) -> str:
        """Whether noise comes from the generator, and differs between states."""
        native, num = self.world.native, max(self.num, 2)
        first, again, other = (
            np.asarray(native.sample_noise(num, self.horizon, self.rng(purpose)))
            for purpose in (2, 2, 7)
        )
        if not _same(first, again):
            return "noise differs although the generator is the same; draw only from the generator"
        if native.fixed_noise or first.size == 0:
            return ""
        declare = (
            "draw from the generator, or declare fixed_noise=True if all rollouts share one path"
        )
        same, shared = _same(first, other), _all_equal(first)
        if not (same or shared):
            return ""
        # Events may be rare: look at many more draws before saying that there are none.
        more = [
            np.asarray(native.sample_noise(16 * STATES, self.horizon, self.rng(10 + i)))
            for i in range(_AGAIN)
        ]
        if all(_same(more[0], each) for each in more[1:]):
            return f"noise is the same for every generator; {declare}"
        if all(_all_equal(each) for each in more):
            return f"noise is the same for every state; {declare}"
        return ""

    def clone_fidelity(self) -> str:
        """Whether a second rollout gives the same, with another one in between."""
        other = self.world.reset(self.num, self.rng(3))
        self.world.rollout(other, self.controls[::-1].copy(), self.noise[::-1].copy())
        self.overwritten = not _same(self.features[self.ok], self.result.features[self.ok])
        return self.unlike("from a second rollout", self.roll(self.all), self.all)

    def results_kept(self) -> str:
        """Whether returned arrays stay as they are."""
        if self.overwritten:  # by the other rollout of clone_fidelity
            return "a later rollout overwrites the features that were returned; return a new array"
        seen = self.world.observe(take(self.states, self.all))
        before = seen.copy()
        self.world.observe(take(self.states, self.all[::-1]))
        if not _same(before, seen):
            return "a later call overwrites the observations that were returned; return a new array"
        return ""

    def observing_is_passive(self) -> str:
        """Whether observing is repeatable, row by row, and leaves the states alone."""
        states, observe = take(self.states, self.all), self.world.observe
        before = observe(states).copy()
        if not _same(states, self.states):
            return "observe changes the states that it is given; let it copy them"
        self.world.rollout(states, self.controls.copy(), self.noise.copy())
        problem = _difference("observations after a rollout", before, observe(states))
        order = self.rng(4).permutation(self.num)
        other = observe(take(self.states, order))
        problem = problem or _difference("observations in another order", before[order], other)
        alone = np.concatenate([observe(take(self.states, np.array([row]))) for row in self.all])
        return problem or _difference("observations of single states", before, alone)

    def misnamed_features(self) -> str:
        """Whether features with the names of the observations are something else.

        Models take such features to be the observation of the next state.
        """
        world = self.world
        if world.feature_names != world.observation_names or world.native is not world:
            return ""
        after = world.step(
            take(self.states, self.all), self.controls[:, 0].copy(), self.noise[:, 0].copy()
        )
        sound = after.status == Status.OK
        features, expected = after.features[sound, 0], world.observe(after.states)[sound]
        wrong = np.abs(features - expected) > 1e-6 * (np.abs(expected).max(axis=0) + 1e-12)
        if not wrong.any():
            return ""
        name = world.feature_names[int(wrong.any(axis=0).argmax())]
        return (
            f"feature {name!r} has the name of an observation, but is not its value after the "
            "step; rename it in feature_names"
        )

    def complete_state(self) -> str:
        """Whether a rollout equals its single steps, interleaved with those of other states."""
        # Whatever a state fails to hold leaks between them.
        features, status = np.full_like(self.features, np.nan), np.zeros(self.num, np.int8)
        current = [take(self.states, np.array([row])) for row in self.all]
        for t in range(self.horizon):
            for i in np.flatnonzero(status == Status.OK):
                one = self.world.step(
                    current[i], self.controls[i : i + 1, t].copy(), self.noise[i : i + 1, t].copy()
                )
                features[i, t], current[i], status[i] = (
                    one.features[0, 0],
                    one.states,
                    one.status[0],
                )
        problem = self.unlike("from single steps", Rollout(features, status, {}), self.all)
        why = "the state may lack a variable, or rounding may depend on batch size or horizon"
        return problem and f"{problem}: {why}"

    def features_without_states(self) -> str:
        """Whether features depend on the wish for final states."""
        bare = self.roll(self.all, final=False)
        return self.unlike("from a rollout without final states", bare, self.all)

    def storage(self) -> str:
        """Whether stored states give the same observations and rollouts."""
        kept = {n: np.array(v) for n, v in self.world.store(take(self.states, self.all)).items()}
        opaque = [name for name, values in kept.items() if values.dtype == object]
        if opaque:
            return f"stored arrays {opaque} hold Python objects; only numbers can be stored"
        states = self.world.restore(kept)
        before = self.world.observe(take(self.states, self.all))
        problem = _difference("observations of stored states", before, self.world.observe(states))
        again = self.world.rollout(states, self.controls.copy(), self.noise.copy())
        return problem or self.unlike("from a rollout of stored states", again, self.all)

    def duplicate_arms(self) -> str:
        """Whether a branch and its copy in the same batch are the same."""
        rows = np.repeat(self.all[: -(-self.num // 2)], 2)
        both = self.roll(rows)
        keep = (both.status[::2] == Status.OK) & (both.status[1::2] == Status.OK)
        twins = both.features[::2][keep], both.features[1::2][keep]
        return _difference("features of a duplicated arm", *twins)

    def order_independence(self) -> str:
        """Whether the order of a batch matters."""
        order = self.rng(4).permutation(self.num)
        return self.unlike("in another order", self.roll(order), order)

    def size_independence(self) -> str:
        """Whether the size of a batch matters."""
        for size in _SIZES:
            if size <= 48 * self.num:
                rows = np.resize(self.all, size)
                few = self.roll(rows, min(self.horizon, 2))
                problem = self.unlike(f"in a batch of {size}", few, rows)
                if problem:
                    return problem
        return ""

    def thread_independence(self) -> str:
        """Whether a rollout is the same in other threads, next to other rollouts."""
        # Different rows in different threads: equal ones would hide a buffer that threads share.
        pieces = [np.roll(self.all, 3 * i)[: -(-self.num // 2)] for i in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(self.roll, pieces))
        finally:
            sys.setswitchinterval(interval)
        pairs = zip(results, pieces, strict=True)
        return next(
            filter(None, (self.unlike("from rollouts on other threads", *pair) for pair in pairs)),
            "",
        )


def start_trial(world: World, num: int, horizon: int | None, seed: int) -> tuple[Trial | None, str]:
    """The first rollout and a remark on it, or None and what is wrong with it."""
    lengths = [STEPS >> i for i in range(STEPS.bit_length())] if horizon is None else [horizon]
    attempts = [*((steps, min(_WARMUP, steps)) for steps in lengths), (lengths[-1], 0)]
    for attempt in attempts:
        last = attempt == attempts[-1]
        try:
            trial = _first_rollout(world, num, *attempt, seed)
        except ValueError:  # a recorded trace or a world's memory may be shorter
            if last:
                raise
            continue
        problem, remark = _judged(trial)
        if remark or last or not problem.startswith(_TOO_MANY):
            return (None, problem) if problem else (trial, remark)
    raise AssertionError("the last attempt decides")


def _first_rollout(world: World, num: int, steps: int, warmup: int, seed: int) -> Trial:
    """Roll out states, half of them after a warm-up."""

    def rng(purpose: int) -> np.random.Generator:
        return np.random.default_rng([seed, purpose])

    def controls(purpose: int) -> np.ndarray:
        return world.candidate_actions[
            rng(purpose).integers(len(world.candidate_actions), size=(num, steps))
        ]

    noise = np.asarray(world.sample_noise(num, steps, rng(2)))
    states, source, warm = world.reset(num, rng(0)), np.arange(num), np.arange(num // 2, num)
    if warmup and len(warm):
        inputs = controls(8)[warm, :warmup], noise[warm, :warmup]
        later = world.rollout(take(states, warm), *inputs)
        survived = np.flatnonzero(later.status == Status.OK)
        source[warm[survived]] = num + survived
        states = take(concatenate([states, later.states]), source)
    result = world.rollout(take(states, np.arange(num)), controls(1), noise.copy())
    return Trial(world, states, controls(1), noise, result, seed, np.flatnonzero(source < num))


def _judged(trial: Trial) -> tuple[str, str]:
    """A problem with the first rollout, or else a remark on it."""
    world, result, num = trial.world, trial.result, trial.num
    expected = (*trial.controls.shape[:2], len(world.feature_names))
    if result.features.shape != expected:
        hint = f"; {VECTORISE}" if len(result.features) != num else ""
        return f"features have shape {result.features.shape}, expected {expected}{hint}", ""
    failed, remark = num - np.sum(trial.ok), f"{num} states, {trial.horizon} steps"
    if failed:
        what = f"{failed} of {num} branches failed"
        what += f", for example {result.error}" if result.error else ""
        if 2 * failed > num:
            one_by_one = result.error.startswith(tuple(kind.__name__ for kind in NOT_VECTORISED))
            return f"{_TOO_MANY}{what}" + (f"; {VECTORISE}" if one_by_one else ""), ""
        remark += f"; {what} (collecting drops and counts their families)"
    if not np.all(np.isfinite(result.features[trial.ok])):
        return "features are not finite although the branch reports success", ""
    observed, wanted = world.observe(trial.states).shape, (num, len(world.observation_names))
    if observed != wanted:
        return f"observations have shape {observed}, expected {wanted}", ""
    return "", remark


def _same(one: object, other: object) -> bool:
    """Whether two arrays, or two dictionaries of arrays, are equal bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    one, other = np.asarray(one), np.asarray(other)
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def _all_equal(rows: np.ndarray) -> bool:
    """Whether all rows are the same."""
    return _same(rows, np.broadcast_to(rows[:1], rows.shape))


def _ignored(observations: np.ndarray, others: np.ndarray) -> bool:
    """Whether two generators gave the same states, although a world has more than one."""
    return _same(observations, others) and not _all_equal(observations)


def _difference(what: str, expected: np.ndarray, got: np.ndarray) -> str:
    """How two arrays differ; empty if they are equal bit for bit."""
    if expected.shape != got.shape:
        return f"{what} have shape {got.shape}, expected {expected.shape}"
    if np.array_equal(expected, got, equal_nan=True):
        return ""
    gap = np.abs(expected - got)[~(np.isnan(expected) & np.isnan(got))]
    return f"{what} differ by up to {gap.max():.3g}"
