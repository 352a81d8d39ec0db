"""Our own worlds for the study of worlds: small step functions, each hard in its own way.

`linear-gain`, `linear-noise`, `clock`, `battery`, `inventory`, `shop`, `units` and `feedback` are
hand-written; `random-SEED` is drawn from a generator. Other names are passed to `load_world`; a
suffix such as `+64` adds a nuisance of 64 dimensions, and `@state` chooses the later actions by a
policy that depends on the state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cqm.branches.recipe import Policy, draw_actions
from cqm.worlds.contract import World
from cqm.worlds.function import FunctionWorld, State
from cqm.worlds.loading import load_world

Propensities = Callable[[np.ndarray], np.ndarray]  # from observations to `[n, actions]`
Setting = tuple[World, "str | Policy"]
"""A world and the continuation of its branches."""


def load(name: str, seed: int = 0) -> Setting:
    """A world of the study by its name, and the continuation that it is branched under.

    Args:
        name: A name from `WORLDS`, `random-SEED`, or a name for `load_world`, optionally followed
            by `+DIMENSION` for a nuisance and by `@state` for a policy that sees the state.
        seed: Random seed for the mixing of a nuisance.

    >>> load("units")[0].feature_names
    ('sin', 'cos', 'speed')
    >>> len(load("reacher-easy+64", seed=7)[0].feature_names)
    70
    """
    if name in WORLDS:
        return WORLDS[name]()
    kind, _, number = name.partition("-")
    if kind == "random" and number.isdecimal():
        return random_world(int(number))
    mixed, at, policy = name.partition("@")
    base, plus, dimension = mixed.partition("+")
    if plus and not dimension.isdecimal():
        raise ValueError(f"a nuisance must be a number of dimensions, as in +64; got {name!r}")
    if at and policy != "state":
        raise ValueError(f"the only policy is @state; got {name!r}")
    world = load_world(base, nuisance=int(dimension or 0), seed=seed)
    return world, policy_with(state_behaviour(world)) if at else "uniform"


def state_behaviour(world: World, seed: int = 0) -> Propensities:
    """Propensities that depend on the native state, each at least 0.4 of the uniform one."""
    num_actions = len(world.candidate_actions)
    size = len(world.native.observation_names)
    weights = np.random.default_rng(seed).standard_normal((size, num_actions)) / np.sqrt(size)

    def propensities(observations: np.ndarray) -> np.ndarray:
        native = world.native_observations(observations)
        scores = np.exp(3 * np.tanh(native) @ weights)
        return 0.6 * scores / scores.sum(axis=1, keepdims=True) + 0.4 / num_actions

    return propensities


def policy_with(propensities_fn: Propensities) -> Policy:
    """The policy that draws actions with these propensities."""
    return Policy("state", lambda seen, uniforms: draw_actions(propensities_fn(seen), uniforms))


def linear(*, gain: bool) -> FunctionWorld:
    """A linear system whose noise multiplies the effect of the action.

    Args:
        gain: Whether the effect also depends on the third coordinate of the state.
    """
    drift = np.array([[0.9, 0.1, 0.0], [-0.1, 0.85, 0.1], [0.0, 0.05, 0.95]])
    push = np.array([0.5, -0.3, 0.2])
    spread = np.array([0.8, 1.0, 1.0, 1.0])

    def step(state: State, action: np.ndarray, noise: np.ndarray) -> State:
        strength = 1 + np.tanh(2 * state[:, 2:]) if gain else 1.0
        moved = action * push * strength * (1 + noise[:, :1])
        return state @ drift.T + moved + 0.1 * noise[:, 1:]

    return FunctionWorld(
        step,
        lambda num, rng: rng.normal(size=(num, 3)),
        exogenous=lambda num, horizon, rng: rng.normal(size=(num, horizon, 4)) * spread,
        candidate_actions=[[-1.0], [0.0], [1.0]],
        feature_names=["x", "y", "z"],
        observation_names=["x", "y", "z"],
        name="linear-gain" if gain else "linear-noise",
    )


def clock() -> FunctionWorld:
    """A phase that no action moves decides how long an effect lasts."""

    def step(state: State, action: np.ndarray, _: np.ndarray) -> State:
        kept = 0.5 + 0.45 * np.sin(state["phase"])
        return {"level": kept * state["level"] + action[:, 0], "phase": state["phase"] + 0.3}

    def observe(state: State) -> np.ndarray:
        return np.column_stack([state["level"], np.cos(state["phase"]), np.sin(state["phase"])])

    def initial(num: int, rng: np.random.Generator) -> State:
        return {"level": rng.normal(size=num), "phase": rng.uniform(0, 2 * np.pi, num)}

    return FunctionWorld(
        step,
        initial,
        features=lambda before, action, noise, after: observe(after),
        observe=observe,
        candidate_actions=[[-1.0], [0.0], [1.0]],
        feature_names=["level", "cos", "sin"],
        observation_names=["level", "cos", "sin"],
        name="clock",
    )


def battery() -> FunctionWorld:
    """Buy, wait or sell at a price that reverts to its mean; storage is limited."""

    def initial(num: int, rng: np.random.Generator) -> State:
        return {"stored": rng.uniform(0, 4, num), "price": rng.normal(30, 12, num)}

    def step(state: State, power: np.ndarray, shock: np.ndarray) -> State:
        stored = np.clip(state["stored"] + power[:, 0], 0, 4)
        return {"stored": stored, "price": 30 + 0.9 * (state["price"] - 30) + shock[:, 0]}

    def features(before: State, power: np.ndarray, shock: np.ndarray, after: State) -> np.ndarray:
        sold = before["stored"] - after["stored"]
        return np.column_stack([sold * before["price"], after["stored"], np.abs(sold)])

    return FunctionWorld(
        step,
        initial,
        features=features,
        exogenous=lambda num, horizon, rng: rng.normal(0, 5, (num, horizon, 1)),
        candidate_actions=[[1.0], [0.0], [-1.0]],
        feature_names=["income", "stored", "wear"],
        observation_names=["stored", "price"],
        name="battery",
    )


def inventory() -> FunctionWorld:
    """Ordering stock under random demand, whose mean differs from state to state."""

    def initial(num: int, rng: np.random.Generator) -> State:
        return {"stock": rng.uniform(0, 20, num), "mean": rng.uniform(2, 8, num)}

    def step(state: State, order: np.ndarray, luck: np.ndarray) -> State:
        left = state["stock"] + order[:, 0] - state["mean"] * luck[:, 0]
        return {"stock": np.clip(left, 0, 40), "mean": state["mean"]}

    def features(before: State, order: np.ndarray, luck: np.ndarray, after: State) -> np.ndarray:
        demand = before["mean"] * luck[:, 0]
        sold = np.minimum(before["stock"] + order[:, 0], demand)
        return np.column_stack([sold, after["stock"], demand - sold, order[:, 0]])

    return FunctionWorld(
        step,
        initial,
        features=features,
        exogenous=lambda num, horizon, rng: rng.gamma(2.0, 0.5, (num, horizon, 1)),
        candidate_actions=[[0.0], [4.0], [8.0], [12.0]],
        feature_names=["sold", "stock", "lost", "ordered"],
        observation_names=["stock", "mean"],
        name="inventory",
    )


def shop() -> FunctionWorld:
    """Pricing two products; the only feature is the profit."""

    def initial(num: int, rng: np.random.Generator) -> State:
        return {"taste": rng.normal(0, 0.5, (num, 2)), "stock": rng.uniform(0, 10, (num, 2))}

    def demand(state: State, prices: np.ndarray, luck: np.ndarray) -> np.ndarray:
        wanted: np.ndarray = np.exp(state["taste"] - 0.5 * prices + 0.3 * luck)
        return wanted

    def step(state: State, prices: np.ndarray, luck: np.ndarray) -> State:
        left = np.maximum(state["stock"] - demand(state, prices, luck), 0)
        return {"taste": 0.9 * state["taste"], "stock": left + 1.0}

    def features(before: State, prices: np.ndarray, luck: np.ndarray, after: State) -> np.ndarray:
        sold = np.minimum(before["stock"], demand(before, prices, luck))
        profit: np.ndarray = (sold * prices).sum(axis=1, keepdims=True)
        return profit

    return FunctionWorld(
        step,
        initial,
        features=features,
        exogenous=lambda num, horizon, rng: rng.normal(size=(num, horizon, 2)),
        candidate_actions=[[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]],
        feature_names=["profit"],
        name="shop",
    )


def units() -> FunctionWorld:
    """A noisy pendulum whose features differ in scale by six orders of magnitude."""

    def initial(num: int, rng: np.random.Generator) -> State:
        return np.column_stack([rng.uniform(-np.pi, np.pi, num), rng.normal(size=num)])

    def step(state: State, torque: np.ndarray, noise: np.ndarray) -> State:
        angle, speed = state.T
        faster = speed + 0.1 * (torque[:, 0] - np.sin(angle) - 0.1 * speed) + 0.05 * noise[:, 0]
        return np.column_stack([angle + 0.1 * faster, faster])

    def features(before: State, torque: np.ndarray, noise: np.ndarray, after: State) -> np.ndarray:
        angle, speed = after.T
        return np.column_stack([1000 * np.sin(angle), np.cos(angle), 0.001 * speed])

    return FunctionWorld(
        step,
        initial,
        features=features,
        observe=lambda state: np.column_stack(
            [np.cos(state[:, 0]), np.sin(state[:, 0]), state[:, 1]]
        ),
        exogenous=lambda num, horizon, rng: rng.normal(size=(num, horizon, 1)),
        candidate_actions=[[-2.0], [-1.0], [0.0], [1.0], [2.0]],
        feature_names=["sin", "cos", "speed"],
        name="units",
    )


def feedback(num_actions: int, scale: float = 1.0) -> Policy:
    """A policy that pushes back: the larger the first observation, the likelier the first action.

    A fifth of the actions are uniformly random; the others are the first or the last candidate.

    Args:
        num_actions: Number of candidate actions.
        scale: Unit of the first observation.
    """

    def act(observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        first = 0.5 * (1 + np.tanh(observations[:, 0] / scale))
        steered = np.where(uniforms < 0.2 + 0.8 * first, 0, num_actions - 1)
        return np.where(uniforms < 0.2, (5 * num_actions * uniforms).astype(int), steered)

    return Policy("feedback", act)


WORLDS: dict[str, Callable[[], Setting]] = {
    "linear-gain": lambda: (linear(gain=True), "uniform"),
    "linear-noise": lambda: (linear(gain=False), "uniform"),
    "clock": lambda: (clock(), "uniform"),
    "battery": lambda: (battery(), "uniform"),
    "inventory": lambda: (inventory(), "uniform"),
    "shop": lambda: (shop(), "uniform"),
    "units": lambda: (units(), "uniform"),
    "feedback": lambda: (linear(gain=True), feedback(3)),
}
"""The hand-written worlds, by name."""


def random_world(seed: int) -> Setting:
    """A random world: a linear or nonlinear system, and a context that no action moves.

    The following are random: the dimensions of both, the noise (none, additive, or also multiplying
    the effects), what modulates the effects (nothing, the state or the context), the strength of
    the nonlinearity, the units (spread over six orders of magnitude in half of the worlds), whether
    there is an extra bounded feature, two to five actions, and the continuation (a policy in 30% of
    the worlds).

    >>> world, continuation = random_world(0)
    >>> world.name, len(world.candidate_actions)
    ('random-0', 2)
    """
    rng = np.random.default_rng([16, seed])
    size, num_controls, context = (int(rng.integers(*ends)) for ends in ((2, 7), (1, 3), (0, 4)))
    drift = rng.normal(size=(size, size))
    drift *= rng.uniform(0.6, 0.98) / np.abs(np.linalg.eigvals(drift)).max()
    push = 0.5 * rng.normal(size=(num_controls, size))
    noise = rng.choice(["none", "additive", "multiplicative"])
    modulation = rng.choice(["none", "state", "context"])
    bend = 0.3 * rng.choice([0.0, 0.5, 1.0])
    weights = rng.normal(size=(size + context, size)) / np.sqrt(size + context)
    context_drift = rng.normal(size=(context, context))
    if context:
        context_drift *= 0.95 / np.abs(np.linalg.eigvals(context_drift)).max()
    six_decades = rng.random() < 0.5
    scales = 10.0 ** rng.uniform(-3, 3, size + context) if six_decades else np.ones(size + context)
    has_extra = rng.random() < 0.5
    direction = rng.normal(size=size)
    actions = rng.uniform(-1, 1, (int(rng.integers(2, 6)), num_controls))
    continuation = feedback(len(actions), scales[0]) if rng.random() < 0.3 else "uniform"

    def step(state: State, action: np.ndarray, drawn: np.ndarray) -> State:
        both = np.concatenate([state["x"], state["c"]], axis=1)
        moved = action @ push
        if modulation == "state":
            moved = moved * (1 + np.tanh(state["x"] @ weights[:size]))
        elif modulation == "context":
            moved = moved * (1 + np.tanh(2 * state["c"] @ weights[size:]))
        if noise == "multiplicative":
            moved = moved * (1 + 0.8 * drawn[:, :1])
        after = state["x"] @ drift.T + bend * np.tanh(both @ weights) + moved
        later = state["c"] @ context_drift.T
        if noise != "none":
            after, later = after + 0.2 * drawn[:, 1 : 1 + size], later + 0.2 * drawn[:, 1 + size :]
        return {"x": after, "c": later}

    def initial(num: int, rng: np.random.Generator) -> State:
        return {"x": rng.normal(size=(num, size)), "c": rng.normal(size=(num, context))}

    def observe(state: State) -> np.ndarray:
        both: np.ndarray = np.concatenate([state["x"], state["c"]], axis=1)
        return both * scales

    def features(before: State, action: np.ndarray, drawn: np.ndarray, after: State) -> np.ndarray:
        seen = observe(after)
        return np.column_stack([seen, np.tanh(after["x"] @ direction)]) if has_extra else seen

    def exogenous(num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=(num, horizon, 1 + size + context))

    names = [*(f"x{i}" for i in range(size)), *(f"c{i}" for i in range(context))]
    world = FunctionWorld(
        step,
        initial,
        features=features,
        observe=observe,
        exogenous=None if noise == "none" else exogenous,
        candidate_actions=actions,
        feature_names=[*names, "extra"] if has_extra else names,
        observation_names=names,
        name=f"random-{seed}",
    )
    return world, continuation
