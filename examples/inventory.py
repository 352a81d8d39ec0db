"""The effects of replenishment orders: a multi-product inventory under correlated demand.

Four products share a warehouse. Each period the manager chooses order-up-to levels. The difference
between each level and the inventory position (on hand plus on order) is ordered, reduced
proportionally if the warehouse would overflow, and arrives one period later. Demand that cannot be
served from stock is lost. Demand is log-normal, driven by one factor common to all products and one
factor per product. The factors are AR(1) processes that orders cannot influence.

Demand dominates the outcome of a branch, so two branches with different first orders differ mostly
by chance unless the *same* demand drives both; simulation practice calls this common random
numbers. Paired branches share the demand and all later orders, so their difference is the effect of
the first order alone. The script checks that the simulator can be branched, then prints the effects
and the variance of a paired contrast relative to that of an independent one.

    python examples/inventory.py
"""

from __future__ import annotations

import numpy as np

from cqm.worlds.check import check_world
from cqm.worlds.contract import take
from cqm.worlds.function import FunctionWorld

PRODUCTS = ("bread", "milk", "fruit", "fish")
MEAN_DEMAND = np.array([40.0, 30.0, 20.0, 10.0])
UNIT_COST = np.array([1.0, 1.2, 2.0, 5.0])
FIXED_COST = 15.0  # per order and product
HOLDING_COST = 0.1 * UNIT_COST  # per unit and period
CAPACITY = 220.0  # units on hand and on order
PERSISTENCE = 0.7  # autocorrelation of the demand factors
COMMON_SPREAD, PRODUCT_SPREAD = 0.4, 0.2  # standard deviations of log demand

ACTIONS = {  # order-up-to levels
    "order nothing": 0.0 * MEAN_DEMAND,
    "all low": 1.5 * MEAN_DEMAND,
    "all high": 3.0 * MEAN_DEMAND,
    "staples": MEAN_DEMAND * [3.0, 3.0, 0.0, 0.0],
    "fresh": MEAN_DEMAND * [0.0, 0.0, 3.0, 3.0],
}
FEATURES = (
    *(f"stock_{product}" for product in PRODUCTS),
    *(f"sales_{product}" for product in PRODUCTS),
    *(f"lost_{product}" for product in PRODUCTS),
    "order_cost",
    "holding_cost",
)
TOTALS = ("stock", "sales", "lost", "ordering", "holding")


def initial(num, rng):
    """Uniform stock from zero to one period's mean demand, and independently as much on order."""
    return {
        "stock": MEAN_DEMAND * rng.uniform(0.0, 1.0, (num, 4)),
        "on_order": MEAN_DEMAND * rng.uniform(0.0, 1.0, (num, 4)),
    }


def sample_demand(num, horizon, rng):
    """Correlated log-normal demand `[num, horizon, products]` from its stationary distribution."""
    factors = np.empty((num, horizon, 5))  # the common factor first
    factors[:, 0] = rng.standard_normal((num, 5))
    for t in range(1, horizon):
        shock = rng.standard_normal((num, 5))
        factors[:, t] = PERSISTENCE * factors[:, t - 1] + np.sqrt(1 - PERSISTENCE**2) * shock
    log_demand = COMMON_SPREAD * factors[:, :, :1] + PRODUCT_SPREAD * factors[:, :, 1:]
    return MEAN_DEMAND * np.exp(log_demand - (COMMON_SPREAD**2 + PRODUCT_SPREAD**2) / 2)


def step(state, level, demand):
    """Order up to the level, receive the previous order and serve demand."""
    position = state["stock"] + state["on_order"]
    order = np.maximum(level - position, 0.0)
    room = CAPACITY - position.sum(axis=1, keepdims=True)
    wanted = order.sum(axis=1, keepdims=True)
    order = order * np.clip(room / np.maximum(wanted, 1e-9), 0.0, 1.0)
    return {"stock": np.maximum(position - demand, 0.0), "on_order": order}


def features(state, level, demand, following):
    """The `FEATURES` of one period; a query later puts prices on them."""
    sales = state["stock"] + state["on_order"] - following["stock"]
    order = following["on_order"]
    order_cost = order @ UNIT_COST + FIXED_COST * (order > 0).sum(axis=1)
    holding_cost = following["stock"] @ HOLDING_COST
    return np.column_stack([following["stock"], sales, demand - sales, order_cost, holding_cost])


def make_world() -> FunctionWorld:
    """The inventory as a world."""
    return FunctionWorld(
        step,
        initial,
        features=features,
        exogenous=sample_demand,
        candidate_actions=np.stack(list(ACTIONS.values())),
        action_names=list(ACTIONS),
        feature_names=FEATURES,
        observation_names=[f"{v}_{p}" for v in ("stock", "on_order") for p in PRODUCTS],
        name="inventory",
    )


def contrasts(world, state, rng, *, paired, draws=400, horizon=12, discount=0.95):
    """Discounted features of each action minus those of "order nothing".

    Paired branches share the demand and all orders after the first; independent branches do not.
    Returns an array `[draws, actions - 1, features]`.
    """
    arms = len(world.candidate_actions)
    shape = (draws, 1 if paired else arms, horizon)
    controls = world.candidate_actions[rng.integers(arms, size=shape)]
    noise = world.sample_noise(shape[0] * shape[1], horizon, rng).reshape(*shape, -1)
    if paired:
        controls, noise = np.repeat(controls, arms, axis=1), np.repeat(noise, arms, axis=1)
    controls[:, :, 0] = world.candidate_actions
    branches = world.rollout(
        take(state, np.zeros(draws * arms, int)),
        controls.reshape(-1, *controls.shape[2:]),
        noise.reshape(-1, *noise.shape[2:]),
    )
    outcome = np.einsum("nhd,h->nd", branches.features, discount ** np.arange(horizon))
    outcome = outcome.reshape(draws, arms, -1)
    return outcome[:, 1:] - outcome[:, :1]


def totals(values):
    """Stock, sales and lost sales, each summed over the products, and the two costs."""
    groups = np.split(values, [4, 8, 12, 13], axis=-1)
    return np.stack([group.sum(axis=-1) for group in groups], axis=-1)


def main() -> None:
    """Check the world, then compare paired with independent branches at a few states."""
    world = make_world()
    print(check_world(world), "\n")
    print("Effect of the first order, compared with ordering nothing, on totals over the products,")
    print("for 12 periods at discount 0.95. Last column: variance of a paired contrast relative to")
    print("that of an independent one, averaged over the five totals.")
    rng = np.random.default_rng(0)
    for _ in range(3):
        state = world.reset(1, rng)
        paired = totals(contrasts(world, state, rng, paired=True))
        independent = totals(contrasts(world, state, rng, paired=False))
        share = (paired.var(axis=0) / independent.var(axis=0)).mean(axis=-1)
        print(f"\nstock {state['stock'][0].round()}, on order {state['on_order'][0].round()}")
        print(f"{'':10}" + "".join(f"{title:>10}" for title in TOTALS) + f"{'variance':>10}")
        for row, action in enumerate(list(ACTIONS)[1:]):
            effect = paired[:, row].mean(axis=0)
            print(f"{action:10}" + "".join(f"{v:10.1f}" for v in effect) + f"{share[row]:10.1%}")


if __name__ == "__main__":
    main()
