"""Branching a block of states: the body of the paper's algorithm 1.

One branch per candidate action is rolled out from each state. The branches of a family share the
state, the noise and the continuation, and differ only in the first action. All randomness is keyed
by (seed, block, purpose), never by the worker.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

import cqm
from cqm.branches import shards
from cqm.branches.recipe import BLOCK, Policy, Recipe
from cqm.names import stored_action_names
from cqm.worlds.contract import NoiseKind, States, Status, World, concatenate, take
from cqm.worlds.identity import stored_identity

_RESET, _WARMUP, _CONTINUATION, _NOISE, _NUISANCE, _ARMS = range(6)  # purposes of random streams
FIRST_CONTROLS = "first_controls"  # array of a set whose first actions are controls from the box


@dataclass(frozen=True)
class Block:
    """The families of one block of states, and the number dropped for each reason."""

    arrays: dict[str, np.ndarray]
    dropped: Counter[str]
    error: str = ""  # message of the first exception, if any


@dataclass(frozen=True)
class Plan:
    """A world, a recipe that fits it, and the division of the work into shards and blocks."""

    world: World
    recipe: Recipe
    subsets: np.ndarray | None  # [subsets, arms] to draw from; None for all of size num_arms
    num_arms: int
    blocks_per_shard: int
    noise_kind: NoiseKind = "none"  # as stored; "none" also if the set does not say

    @property
    def policy(self) -> Policy | None:
        """The policy of a state-dependent continuation; None for an open-loop one."""
        return self.recipe.continuation.policy

    @property
    def box(self) -> np.ndarray | None:
        """Bounds of the controls, `[2, controls]`, if any are drawn from the whole box."""
        if self.recipe.actions == "menu" and not self.recipe.continuation.on_box:
            return None
        return np.stack([self.world.control_low, self.world.control_high])

    def in_box(self, uniforms: np.ndarray) -> np.ndarray:
        """Controls in the box for numbers between 0 and 1, `[..., controls]`."""
        low, high = self.world.control_low, self.world.control_high
        return low + (high - low) * uniforms

    def later_actions(self, uniforms: np.ndarray) -> np.ndarray:
        """What an open-loop law draws: candidate actions, or controls with an axis of their own."""
        law = self.recipe.continuation
        if law.on_box:
            return self.in_box(uniforms)
        return law.draw(uniforms, len(self.world.candidate_actions))

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.recipe.states // (BLOCK * self.blocks_per_shard))

    def blocks(self, shard: int) -> range:
        """Numbers of the blocks in a shard."""
        first = shard * self.blocks_per_shard
        return range(first, min(first + self.blocks_per_shard, -(-self.recipe.states // BLOCK)))

    def block_states(self, block: int) -> range:
        """Numbers of the states in a block."""
        return range(block * BLOCK, min((block + 1) * BLOCK, self.recipe.states))

    def num_states(self, blocks: Iterable[int]) -> int:
        """Number of states in some blocks."""
        return sum(len(self.block_states(block)) for block in blocks)

    def manifest(self, mixing_file: Mapping[str, str] | None) -> dict[str, Any]:
        """Everything that determines the stored bytes, and the versions that wrote them."""
        return {
            "schema": shards.SCHEMA,
            "world": stored_identity(self.world),
            "recipe": self.recipe.to_json(),
            "observation_names": list(self.world.observation_names),
            "feature_names": list(self.world.feature_names),
            "candidate_actions": self.world.candidate_actions.tolist(),
            **stored_action_names(self.world.action_names),
            **({} if self.box is None else {"box": self.box.tolist()}),
            **({"noise_kind": self.noise_kind} if self.noise_kind != "none" else {}),
            "blocks_per_shard": self.blocks_per_shard,
            "num_shards": self.num_shards,
            "mixing": mixing_file,
            "versions": {
                "cqm": cqm.__version__,
                "numpy": version("numpy"),
                "python": platform.python_version(),
            },
        }


def draw_inputs(plan: Plan, block: int) -> dict[str, np.ndarray]:
    """Everything random in a block but its states: arms, uniforms, noise and nuisance.

    Nothing is simulated, so an audit can afford to draw them again for every block.
    """
    native, nuisance, recipe = plan.world.native, plan.world.nuisance, plan.recipe
    index = np.array(plan.block_states(block))
    num, draws = len(index), recipe.draws
    arms = _draw_arms(plan, stream(recipe.seed, block, _ARMS), num)
    rng = stream(recipe.seed, block, _CONTINUATION)
    size = (len(native.control_low),) if recipe.continuation.on_box else ()
    uniforms = rng.random((num, draws, recipe.horizon - 1, *size))
    rng = stream(recipe.seed, block, _NOISE)
    noise = native.sample_noise(num * draws, recipe.horizon, rng)
    inputs = {
        "index": index,
        "arms": arms.astype(np.int16),
        "uniforms": uniforms,
        "noise": noise.reshape(num, draws, *noise.shape[1:]),
    }
    if recipe.actions == "box":
        inputs[FIRST_CONTROLS] = _draw_controls(plan, block, num)
    if nuisance is not None:
        rng = stream(recipe.seed, block, _NUISANCE)
        inputs["nuisance_start"] = start = nuisance.start(num, rng)
        copies = plan.num_arms if nuisance.coupling == "independent" else 1
        shape = (num, draws, copies, recipe.horizon)
        inputs["nuisance"] = nuisance.path(start[:, None, None], nuisance.noise(shape, rng))
    return inputs


def simulate_block(plan: Plan, block: int) -> Block:
    """Simulate all families of a block of states."""
    native, recipe, inputs = plan.world.native, plan.recipe, draw_inputs(plan, block)
    num, draws, uniforms, noise = (
        len(inputs["index"]),
        recipe.draws,
        inputs["uniforms"],
        inputs["noise"],
    )
    first = inputs.get(FIRST_CONTROLS)
    if first is None:
        first = plan.world.candidate_actions[inputs["arms"].astype(int)]
    path = inputs.get("nuisance")
    states, status, error = _initial_states(native, recipe, block, num)
    arrays = {
        **{name: values for name, values in inputs.items() if name not in ("uniforms", "noise")},
        "observation": native.observe(states),
        **{f"state.{key}": values for key, values in native.store(states).items()},
    }
    if noise.size:
        arrays["noise"] = noise

    steps, continuation, drew = [], [], []
    for draw in range(draws):
        if plan.policy is None:
            later = plan.later_actions(uniforms[:, draw])
            result = roll_open_loop(plan, states, first, later, noise[:, draw])
        else:
            common = None if path is None else path[:, draw]
            result = roll_closed_loop(
                plan, states, first, uniforms[:, draw], noise[:, draw], common
            )
        steps.append(result.features)
        continuation.append(result.continuation)
        drew.append(result.drew)
        error = error or result.error
        status = np.where(status == Status.OK, result.status, status)
    # [n, draws, arms, horizon, features]; a single draw is not copied
    features = np.stack(steps, axis=1) if draws > 1 else steps[0][:, None]
    arrays["continuation"] = as_stored(np.stack(continuation, axis=1))
    reported = stored_draws(plan, drew)
    if reported is not None:
        arrays["drew"] = reported
    # Stored values are finite, whatever status a world reports.
    finite = np.isfinite(arrays["observation"]).all(axis=1)
    finite &= np.isfinite(features).reshape(num, -1).all(axis=1)
    status = np.where((status == Status.OK) & ~finite, Status.NOT_FINITE, status)
    features[status != Status.OK] = 0  # failed families must not overflow in the sum
    arrays["outcome"] = recipe.discounted(features)
    arrays["first"] = features[..., 0, :].copy()  # a view would keep every step in memory
    if plan.policy is not None:
        arrays["uniforms"] = uniforms
    if recipe.per_step:
        arrays["steps"] = features

    kept = status == Status.OK
    if kept.all():
        return Block(arrays, Counter())
    reasons = Counter(Status(s).name.lower().replace("_", " ") for s in status[~kept])
    return Block({name: values[kept] for name, values in arrays.items()}, reasons, error)


def stored_draws(plan: Plan, drew: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Which families used their seeds in each draw, `[n, draws]`; None if it is not stored."""
    reported = [each for each in drew if each is not None]
    if plan.noise_kind != "seeds" or len(reported) < len(drew):
        return None
    return np.stack(reported, axis=1)


def simulate_blocks(plan: Plan, blocks: Iterable[int]) -> list[Block]:
    """Simulate several blocks, one after another."""
    return [simulate_block(plan, block) for block in blocks]


@dataclass(frozen=True)
class FamilyRollout:
    """The branches of each state in one draw."""

    features: np.ndarray  # [n, arms, horizon, features]
    status: np.ndarray  # [n], the worst status among the branches of a family
    continuation: np.ndarray  # [n, arms or 1, horizon − 1], actions; controls in a last axis
    error: str  # message of the first exception, or empty
    drew: np.ndarray | None  # [n], whether any branch of a family used its seeds, if known


def roll_open_loop(
    plan: Plan, states: States, first: np.ndarray, continuation: np.ndarray, noise: np.ndarray
) -> FamilyRollout:
    """Roll out branches whose continuation does not depend on the state, in one call.

    Args:
        plan: The world and the recipe.
        states: `n` states.
        first: Controls of the first step, `[n, arms, controls]`.
        continuation: Actions after the first, shared by the arms, `[n, horizon − 1]`, or controls
            `[n, horizon − 1, controls]`.
        noise: Noise of the world, shared by the arms, `[n, horizon, noise]`.
    """
    num, num_arms, size = first.shape
    later = continuation
    if not plan.recipe.continuation.on_box:
        later = plan.world.candidate_actions[continuation]
    controls = np.empty((num, num_arms, plan.recipe.horizon, size))
    controls[:, :, 0] = first
    controls[:, :, 1:] = later[:, None]
    rows = np.repeat(np.arange(num), num_arms)
    result = plan.world.native.rollout(
        take(states, rows),
        controls.reshape(num * num_arms, *controls.shape[2:]),
        noise[rows],
        final=False,
    )
    features = result.features.reshape(num, num_arms, *result.features.shape[1:])
    status = result.status.reshape(num, num_arms).max(axis=1)
    drew = _any_arm(result.drew, num)
    return FamilyRollout(features, status, continuation[:, None], result.error, drew)


def roll_closed_loop(
    plan: Plan,
    states: States,
    first: np.ndarray,
    uniforms: np.ndarray,
    noise: np.ndarray,
    nuisance: np.ndarray | None,
) -> FamilyRollout:
    """Roll out branches that continue with a policy; the arms share the policy's noise.

    Args:
        plan: The world, the recipe and the policy.
        states: `n` states.
        first: Controls of the first step, `[n, arms, controls]`.
        uniforms: Noise of the policy, `[n, horizon − 1]`.
        noise: Noise of the world, `[n, horizon, noise]`.
        nuisance: Path of the nuisance, which the policy observes too,
            `[n, arms or 1, horizon, dimension]`.
    """
    num, num_arms, size = first.shape
    rows = np.repeat(np.arange(num), num_arms)
    states, noise, uniforms = take(states, rows), noise[rows], uniforms[rows]
    controls, chosen, features = first.reshape(-1, size), [], []
    status, error = np.zeros(len(rows), dtype=np.int8), ""
    drew: np.ndarray | None = np.zeros(len(rows), bool)
    for t in range(plan.recipe.horizon):
        if t > 0:
            seen = states
            if nuisance is not None:
                path = np.broadcast_to(nuisance, (num, num_arms, *nuisance.shape[2:]))
                seen = {**states, "nuisance": path[:, :, t - 1].reshape(len(rows), -1)}
            action = _policy_actions(plan, plan.world.observe(seen), uniforms[:, t - 1])
            chosen.append(action)
            controls = plan.world.candidate_actions[action]
        result = plan.world.native.step(states, controls, noise[:, t])
        features.append(result.features[:, 0])
        error = error or result.error
        drew = None if drew is None or result.drew is None else drew | result.drew
        status = np.where(status == Status.OK, result.status, status)
        states = _replaced(result.states, states, result.status != Status.OK)
    return FamilyRollout(
        np.stack(features, axis=1).reshape(num, num_arms, plan.recipe.horizon, -1),
        status.reshape(num, num_arms).max(axis=1),
        np.array(chosen, dtype=int).reshape(-1, len(rows)).T.reshape(num, num_arms, -1),
        error,
        _any_arm(drew, num),
    )


def _any_arm(drew: np.ndarray | None, num: int) -> np.ndarray | None:
    """Whether any branch of each of `num` families used its seeds, `[n]`; None if unknown."""
    return None if drew is None else np.any(drew.reshape(num, -1), axis=1)


def _policy_actions(plan: Plan, observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Candidate actions chosen by the policy, checked."""
    assert plan.policy is not None
    try:
        actions = np.asarray(plan.policy.act(observations, uniforms))
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"policy {plan.policy.name!r} raised {type(error).__name__}: {error}"
        ) from error
    num_actions = len(plan.world.candidate_actions)
    if actions.shape != uniforms.shape or not np.isin(actions, np.arange(num_actions)).all():
        raise ValueError(
            f"policy {plan.policy.name!r} must return one candidate action in 0..{num_actions - 1} "
            f"per row, {len(uniforms)} in all; got {actions}"
        )
    return actions.astype(int)


def stream(seed: int, block: int, purpose: int) -> np.random.Generator:
    """Random generator of a block for one purpose."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(block, purpose)))


def _initial_states(
    world: World, recipe: Recipe, block: int, num: int
) -> tuple[States, np.ndarray, str]:
    """States after a random number of random controls, their status and the first exception."""
    states = world.reset(num, stream(recipe.seed, block, _RESET))
    status, error = np.zeros(num, dtype=np.int8), ""
    least, most = recipe.warmup or (0, 0)
    if most == 0:  # a user's noise sampler may not support a horizon of zero
        return states, status, error
    rng = stream(recipe.seed, block, _WARMUP)
    lengths = rng.integers(least, most + 1, size=num)
    if world.continuous and np.isfinite([world.control_low, world.control_high]).all():
        size = (num, most, len(world.control_low))
        controls = rng.uniform(world.control_low, world.control_high, size)
    else:
        controls = world.candidate_actions[
            rng.integers(len(world.candidate_actions), size=(num, most))
        ]
    try:
        noise = world.sample_noise(num, most, rng)
    except ValueError as problem:
        raise ValueError(f"in a warmup of up to {most} steps: {problem}") from problem
    groups, order = [], []
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        group = take(states, rows)
        if length > 0:
            result = world.rollout(group, controls[rows, :length], noise[rows, :length])
            status[rows], error = result.status, error or result.error
            group = _replaced(result.states, group, result.status != Status.OK)
        groups.append(group)
        order.append(rows)
    return take(concatenate(groups), np.argsort(np.concatenate(order))), status, error


def _draw_arms(plan: Plan, rng: np.random.Generator, num: int) -> np.ndarray:
    """Sorted arms of each family, `[n, arms]`, drawn independently of its state.

    Controls from the box are numbered.
    """
    if plan.recipe.actions == "box":
        return np.tile(np.arange(plan.num_arms), (num, 1))
    if plan.subsets is not None:
        return plan.subsets[rng.integers(len(plan.subsets), size=num)]
    keys = rng.random((num, len(plan.world.candidate_actions)))
    return np.sort(np.argsort(keys, axis=1)[:, : plan.num_arms], axis=1)


def _draw_controls(plan: Plan, block: int, num: int) -> np.ndarray:
    """First controls of each family, `[n, arms, controls]`: a scrambled Sobol sequence.

    Consecutive points of the sequence are far apart, so the arms of a family are well spread.
    """
    from scipy.stats import qmc  # slow to import, and rarely needed

    size = len(plan.world.control_low)
    sequence = qmc.Sobol(size, rng=stream(plan.recipe.seed, block, _ARMS))
    power = int(np.ceil(np.log2(num * plan.num_arms)))
    points = sequence.random_base2(power)[: num * plan.num_arms]
    return plan.in_box(points.reshape(num, plan.num_arms, size))


def as_stored(continuation: np.ndarray) -> np.ndarray:
    """Later actions as they are stored: small integers, or controls as they are."""
    return continuation.astype(np.int16) if continuation.dtype.kind in "iu" else continuation


def _replaced(after: States, before: States, failed: np.ndarray) -> States:
    """The new states, with the old ones wherever a step failed, so that no state is NaN."""
    if not failed.any():
        return after
    return take(concatenate([after, before]), np.arange(len(failed)) + len(failed) * failed)


def dropped(blocks: Sequence[Block]) -> Counter[str]:
    """Dropped families of some blocks, counted by reason."""
    return sum((block.dropped for block in blocks), Counter())


def first_error(blocks: Sequence[Block]) -> str:
    """Message of the first exception in some blocks, or an empty string."""
    return next((block.error for block in blocks if block.error), "")
