"""A battery at home: charge, wait or discharge this hour, for tariffs chosen afterwards.

A house has solar panels, a battery of 8 kWh and a choice of four tariffs. Weather and market prices
are random and follow the time of day. Branches show what one hour of charging or discharging
changes over 12 hours: energy bought by day and at night, energy sold, the market value of what is
bought, and wear. After that hour, the battery's usual rule stores surplus and covers the house. A
tariff is a reward: a price on each of these quantities. To check the answers, brute force simulates
every action a thousand times at every hour of the day.

    python examples/battery.py
"""

from pathlib import Path

import numpy as np
import tyro
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import cqm

CAPACITY, EFFICIENCY = 8.0, 0.9  # kWh; share of the charged energy that is stored
ACTIONS = {"charge": 1.5, "wait": 0.0, "discharge": -1.5}  # kWh per hour
COLOURS = ("#0072b2", "#e8e4d8", "#e69f00")
TARIFFS = {  # euros per kWh; wear costs the same under each of them
    "flat": "-0.30 * day - 0.30 * night + 0.08 * sold - 0.01 * wear",
    "cheap nights": "-0.38 * day - 0.10 * night + 0.08 * sold - 0.01 * wear",
    "feed-in bonus": "-0.30 * day - 0.30 * night + 0.34 * sold - 0.01 * wear",
    "market price": "-market - 0.12 * day - 0.12 * night + 0.05 * sold - 0.01 * wear",
}


def conditions(state):
    """Consumption minus solar power (kW), and the market price (euros per kWh)."""
    peak = lambda at, width: np.exp(-((((state["hour"] - at + 12) % 24 - 12) / width) ** 2))
    load = 0.7 + 0.8 * peak(7.5, 1.5) + 1.5 * peak(19, 2.5)
    price = 0.14 + 0.16 * peak(19, 2.5) + 0.05 * peak(7.5, 2) - 0.07 * peak(13, 3)
    solar = np.maximum(3.0 + state["weather"], 0) * peak(12.5, 3.2)
    return load - solar, np.maximum(price + state["price"], 0)


def initial(num, rng):
    """Any charge and hour; random weather and prices."""
    weather, price = rng.standard_normal((2, num)) * [[0.8], [0.03]]
    stored, hour = rng.uniform(0, CAPACITY, num), rng.integers(0, 24, num) + 0.0
    return {"stored": stored, "hour": hour, "weather": weather, "price": price}


def every_hour(num, rng):
    """A quarter charged, at every hour of a day with usual weather and prices."""
    zero, hour = np.zeros(num), np.arange(num) % 24.0
    return {"stored": zero + CAPACITY / 4, "hour": hour, "weather": zero, "price": zero}


def step(state, power, shock):
    """One hour: move energy; weather and price drift back to normal."""
    stored = np.clip(state["stored"] + power[:, 0], 0, CAPACITY)
    weather, price = 0.8 * state["weather"] + shock[:, 0], 0.8 * state["price"] + shock[:, 1]
    return {"stored": stored, "hour": (state["hour"] + 1) % 24, "weather": weather, "price": price}


def features(state, power, shock, after):
    """Energy bought by day and at night, energy sold (kWh), market cost (euros) and wear (kWh)."""
    moved, (load, price) = after["stored"] - state["stored"], conditions(state)
    grid = load + np.where(moved > 0, moved / EFFICIENCY, moved)
    bought, day = np.maximum(grid, 0), (state["hour"] >= 6) & (state["hour"] < 22)
    sold = np.maximum(-grid, 0)
    return np.column_stack([bought * day, bought * ~day, sold, bought * price, np.abs(moved)])


def observe(state):
    """What the controller sees: charge, net load, market price and the time of day."""
    angle = 2 * np.pi * state["hour"] / 24
    return np.column_stack([state["stored"], *conditions(state), np.sin(angle), np.cos(angle)])


def usual_rule(seen, uniforms):
    """Store surplus, cover the house, otherwise wait; the load is measured to within 0.5 kW."""
    return np.digitize(seen[:, 1] + uniforms - 0.5, [-0.3, 1.0])


def make_world(start=initial):
    """The house as a world."""
    return cqm.FunctionWorld(
        step,
        start,
        features=features,
        observe=observe,
        exogenous=lambda num, horizon, rng: rng.normal(0, [0.48, 0.018], (num, horizon, 2)),
        candidate_actions=[[power] for power in ACTIONS.values()],
        action_names=list(ACTIONS),
        feature_names=["day", "night", "sold", "market", "wear"],
        observation_names=["stored", "net_load", "price", "sin_hour", "cos_hour"],
    )


def draw(path, seen, answer, certain, best):
    """Above: the usual day. Below: the best action for every tariff and hour."""
    figure, hours = Figure(figsize=(6.4, 4.6), layout="constrained"), np.arange(24)
    top, axis = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    top.plot(hours, seen[:, 1], color="black", label="consumption minus solar (kW)")
    top.plot(hours, 10 * seen[:, 2], "--", color="#cc79a7", label="market price (10 ct/kWh)")
    axis.pcolormesh(hours, range(4), answer, cmap=ListedColormap(COLOURS), edgecolors="white")
    key = [Patch(alpha=0)] + [Patch(fc=c, label=a) for c, a in zip(COLOURS, ACTIONS, strict=True)]
    key += axis.plot(*np.argwhere(certain.T).T, "k.", ms=7, label="certain")
    key += axis.plot(*np.argwhere((answer != best).T).T, "kx", label="brute force disagrees")
    axis.set_yticks(range(4), TARIFFS)
    axis.set(xlabel="hour of the day", xticks=range(0, 24, 3), ylim=(3.5, -0.5))
    figure.legend(handles=[*top.lines, *key], loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Battery a quarter full: what to do in this hour")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("battery.png")) -> dict:
    """Fit once, then ask for the best action at every hour under each tariff.

    Args:
        small: Few states and draws, to try it out.
        figure: File to write the figure to.
    """
    states, draws, many = (1000, 32, 200) if small else (4000, 64, 1000)
    world = make_world()
    assert cqm.check_world(world)
    recipe = {"horizon": 12, "discount": 1.0, "warmup": (0, 0)}
    recipe["continuation"] = cqm.Policy("storing surplus and covering the house", usual_rule)
    branches = cqm.collect(world, states=states, draws=8, seed=0, **recipe)
    model = cqm.EffectModel(candidates="ridge").fit(branches)  # no tariff so far
    model.calibrate(cqm.collect(world, states=200, draws=draws, seed=1, **recipe))

    day = cqm.collect(make_world(every_hour), states=24, draws=many, seed=2, **recipe)
    truth, seen, rows = day.effects().mean(axis=1), day.observations, []
    print("Best action by hour, with the battery a quarter full (c charge, . wait, d discharge)")
    print(f"{'':14}{'0     6     12    18':24} same as brute force   largest loss")
    for tariff, reward in TARIFFS.items():
        query = cqm.Query.formula(reward, world)
        verdict, value = model.certify(seen, query, shift="ignore"), truth @ query.weights
        loss, best = value.max(axis=1) - value[range(24), verdict.action], value.argmax(axis=1)
        rows.append((verdict.action, verdict.separable, best, loss))
        text, same = "".join("c.d"[a] for a in verdict.action), (verdict.action == best).sum()
        print(f"{tariff:14}{text} {same:10} of 24 hours {100 * loss.max():9.1f} ct")
    answer, certain, best, loss = np.array(rows).swapaxes(0, 1)
    right, sure = answer == best, certain == 1
    print(f"Certain in {sure.sum()} of {sure.size} cases, right in {right[sure].sum()} of these.")
    draw(figure, seen, answer, sure, best)
    return {"same": right.mean(), "certain_right": right[sure].mean(), "loss": loss.max()}


if __name__ == "__main__":
    tyro.cli(main)
