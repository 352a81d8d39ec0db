"""Inventory: how much to order today, for every price that accounting may come up with.

A shop orders one product every morning; an order arrives the next morning. Demand is random, and
demand that cannot be served is lost. How much to order depends on what a lost sale and a unit kept
overnight cost, and nobody agrees on that. So the prices are left open: branches show what each
order changes (units sold, lost, kept and bought) compared with the others, and the prices are
chosen afterwards. On the six days after the first, the shop buys its standing order of 20 units.

The figure maps the best order over the two prices. To check the map, brute force simulates every
order thousands of times in the states shown. The model never sees any of these simulations.

    python examples/inventory.py
"""

from pathlib import Path

import numpy as np
import tyro
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import cqm

ORDERS = np.array([0.0, 20.0, 40.0])  # units
MEAN_DEMAND, SPREAD, PERSISTENCE = 20.0, 0.3, 0.6  # units per day; of log demand
PRICE, COST, DAYS = 3.0, 1.0, 7  # euros per unit sold, euros per unit bought, horizon
STOCKS = (10.0, 30.0, 50.0)  # units, with nothing due and average demand yesterday
COLOURS = ("#f3e6b3", "#7fb8da", "#1b4f8a")


def initial(num, rng):
    """Stock in the morning, units due tomorrow morning, and yesterday's demand level."""
    due, level = rng.choice(ORDERS, num), SPREAD * rng.standard_normal(num)
    return {"stock": rng.uniform(0, 60, num), "due": due, "level": level}


def step(state, order, shock):
    """One day: demand is served from stock, then the units that are due arrive."""
    level = PERSISTENCE * state["level"] + shock[:, 0]
    left = np.maximum(state["stock"] - MEAN_DEMAND * np.exp(level), 0)
    return {"stock": left + state["due"], "due": order[:, 0], "level": level}


def features(state, order, shock, after):
    """Units sold, lost, kept overnight and bought."""
    demand = MEAN_DEMAND * np.exp(after["level"])
    sold = np.minimum(state["stock"], demand)
    return np.column_stack([sold, demand - sold, state["stock"] - sold, order[:, 0]])


def shocks(num, horizon, rng):
    """What is new in each day's log demand."""
    return SPREAD * np.sqrt(1 - PERSISTENCE**2) * rng.standard_normal((num, horizon, 1))


def make_world():
    """The shop as a world."""
    return cqm.FunctionWorld(
        step,
        initial,
        features=features,
        exogenous=shocks,
        candidate_actions=ORDERS[:, None],
        action_names=["order 0", "order 20", "order 40"],
        feature_names=["sold", "lost", "kept", "bought"],
        observation_names=["stock", "due", "level"],
        name="shop",
    )


def brute_force(stock, draws, rng):
    """Mean totals of the features for every first order, `[orders, features]`."""
    shock = np.tile(shocks(draws, DAYS, rng), (len(ORDERS), 1, 1))
    state = {"stock": np.full(len(shock), stock), "due": 0.0, "level": 0.0}
    order, total = np.repeat(ORDERS, draws)[:, None], 0.0
    for day in range(DAYS):
        after = step(state, order, shock[:, day])
        total = total + features(state, order, shock[:, day], after)
        state, order = after, np.full_like(order, 20.0)
    return total.reshape(len(ORDERS), draws, -1).mean(axis=1)


def draw(path, lost_costs, kept_costs, answer, certain, best):
    """One map per stock: colours from the model, hatched if uncertain, lines from brute force."""
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    axes = figure.subplots(1, len(STOCKS), sharey=True)
    colours = {"cmap": ListedColormap(COLOURS), "vmin": -0.5, "vmax": 2.5}
    for k, axis in enumerate(axes):
        axis.pcolormesh(lost_costs, kept_costs, answer[..., k], **colours)
        if not certain[..., k].all():
            style = {"levels": [0.5, 1.5], "colors": "none", "hatches": ["////"]}
            axis.contourf(lost_costs, kept_costs, 1 - certain[..., k], **style)
        if np.ptp(best[..., k]):
            style = {"levels": [0.5, 1.5], "colors": "black", "linewidths": 2}
            axis.contour(lost_costs, kept_costs, best[..., k], **style)
        axis.set_title(f"{STOCKS[k]:.0f} in stock")
        axis.set_xlabel("lost sale (€)")
    axes[0].set_ylabel("unit kept overnight (€)")
    shown = [Patch(facecolor=COLOURS[a], label=f"order {ORDERS[a]:.0f}") for a in range(3)]
    shown.append(Patch(facecolor="white", hatch="////", label="not certain"))
    shown.append(Line2D([], [], color="black", lw=2, label="border by brute force"))
    figure.legend(handles=shown, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("How much to order today, for every pair of costs")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("inventory.png")) -> dict:
    """Fit once, then map the best order over two prices.

    Args:
        small: Few states and a coarse map, to try it out.
        figure: File to write the figure to.
    """
    states, draws, steps = (1000, 64, 7) if small else (4000, 512, 31)
    world = make_world()
    assert cqm.check_world(world)
    recipe = {"horizon": DAYS, "discount": 1.0, "warmup": (0, 0), "continuation": [0, 1, 0]}
    branches = cqm.collect(world, states=states, draws=16, seed=0, **recipe)
    model = cqm.EffectModel(candidates="ridge").fit(branches)  # no prices so far
    model.calibrate(cqm.collect(world, states=300, draws=draws, seed=1, **recipe))

    lost_costs, kept_costs = np.linspace(0, 10, steps), np.linspace(0, 1.5, steps)
    shelves, rng = np.array([[stock, 0, 0] for stock in STOCKS]), np.random.default_rng(2)
    truth = np.stack([brute_force(stock, 40 * draws, rng) for stock in STOCKS])
    answer, certain, best, loss = np.empty((4, steps, steps, len(STOCKS)))
    for i, j in np.ndindex(steps, steps):
        prices = {"sold": PRICE, "bought": -COST, "lost": -lost_costs[j], "kept": -kept_costs[i]}
        query = cqm.Query.named(prices, world)
        verdict = model.certify(shelves, query)
        values = truth @ query.weights
        answer[i, j], certain[i, j] = verdict.action, verdict.separable
        best[i, j] = values.argmax(axis=1)
        loss[i, j] = values.max(axis=1) - values[range(len(STOCKS)), verdict.action]
    draw(figure, lost_costs, kept_costs, answer, certain, best)

    print("States 0, 1 and 2 have 10, 30 and 50 units in stock.")
    print(model.certify(shelves, cqm.Query.formula("3*sold - bought - 2*lost - 0.2*kept", world)))
    same, sure = best == answer, certain == 1
    print(f"\nAgainst brute force, for {steps}² pairs of prices and {len(STOCKS)} stocks:")
    print(f"  answers that are certain       {sure.mean():6.1%}")
    print(f"  certain answers that are right {same[sure].mean():6.1%}")
    print(f"  all answers that are right     {same.mean():6.1%}")
    print(f"  largest loss by a wrong answer {loss.max():6.2f} € per week")
    return {"certain": sure.mean(), "certain_right": same[sure].mean(), "right": same.mean()}


if __name__ == "__main__":
    tyro.cli(main)
