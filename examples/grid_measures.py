"""A finite world: what each action makes more or less likely, computed exactly and learned.

A boat drifts over a small bay. A current often carries it one cell to the east, and after the first
move the skipper turns at random. With finitely many states, the effect of the first move can be
computed exactly: how often each cell will be visited, minus the average over all moves. This
*effect measure* answers every reward: the advantage of a move is the sum over the cells of its
effect on the visits times the reward there. A model fitted to branches shows how close learning
comes. Two independent checks are simulated trips, and dynamic programming for two rewards.

    python examples/grid_measures.py
"""

from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

import cqm
from cqm import measures

BAY = [  # one character per cell: # is land, B the boat, H the port, R the reef
    "...#.....",
    "...#..H..",
    "..B......",
    "...R.....",
    ".........",
    "##....#..",
]
MOVES = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
CURRENT, DISCOUNT, HORIZON = 0.3, 0.95, 12  # probability of being carried east; per step; steps
CELLS = [(r, c) for r, row in enumerate(BAY) for c, mark in enumerate(row) if mark != "#"]
MARKS = {mark: i for i, (r, c) in enumerate(CELLS) if (mark := BAY[r][c]) in "BHR"}
REWARDS = {"reach the port": ("H", 1.0), "avoid the reef": ("R", -1.0)}


def move(row, column, south, east):
    """The index of the cell that a move leads to; land and the edge of the map block it."""
    cell = (row + south, column + east)
    return CELLS.index(cell if cell in CELLS else (row, column))


NEXT = np.array([[move(*cell, *change) for change in MOVES.values()] for cell in CELLS])


def step(state, action, luck):
    """One move, and with luck below `CURRENT` one more to the east."""
    moved = NEXT[state["cell"], action[:, 0].astype(int)]
    return {"cell": np.where(luck[:, 0] < CURRENT, NEXT[moved, 3], moved)}


def make_world():
    """The bay as a world that can be branched; a feature per cell counts its visits."""
    names, one_hot = [f"cell_{row}_{column}" for row, column in CELLS], np.eye(len(CELLS))
    return cqm.FunctionWorld(
        step,
        lambda num, rng: {"cell": rng.integers(len(CELLS), size=num)},
        features=lambda state, action, luck, after: one_hot[after["cell"]],
        observe=lambda state: one_hot[state["cell"]],
        exogenous=lambda num, horizon, rng: rng.random((num, horizon, 1)),
        candidate_actions=[[0], [1], [2], [3]],
        action_names=list(MOVES),
        feature_names=names,
        observation_names=names,
        continuous=False,
    )


def simulated(trips, rng):
    """Discounted visits from cell B by plain simulation, `[actions, cells]`."""
    cell, visits = np.full((4, trips), MARKS["B"]), np.zeros((4, len(CELLS)))
    action = np.repeat(np.arange(4)[:, None], trips, axis=1)
    for t in range(HORIZON):
        cell = NEXT[cell, action]
        cell = np.where(rng.random(cell.shape) < CURRENT, NEXT[cell, 3], cell)
        visits += DISCOUNT**t * np.array([np.bincount(one, minlength=len(CELLS)) for one in cell])
        action = rng.integers(4, size=cell.shape)
    return visits / trips


def values(reward):
    """Action values `[cells, actions]` by dynamic programming."""
    later = np.zeros((len(CELLS), 4))
    for _ in range(HORIZON):
        gain = reward + DISCOUNT * later.mean(axis=-1)  # of arriving in each cell
        later = (1 - CURRENT) * gain[NEXT] + CURRENT * gain[NEXT[:, 3]][NEXT]
    return later


def draw(path, exact):
    """The effect measure of every action in cell B, as a map."""
    figure, top = Figure(figsize=(6.4, 4.4), layout="constrained"), 0.75  # larger ones look alike
    for axis, name, effect in zip(figure.subplots(2, 2).flat, MOVES, exact, strict=True):
        picture = np.full((len(BAY), len(BAY[0])), np.nan)
        picture[tuple(np.transpose(CELLS))] = effect
        image = axis.imshow(picture, cmap="PuOr", vmin=-top, vmax=top)
        axis.set(facecolor="#555555", xticks=[], yticks=[], title=f"first {name}")
        for mark, text in (("B", "boat"), ("H", "port"), ("R", "reef")):
            axis.text(*CELLS[MARKS[mark]][::-1], text, ha="center", va="center", fontsize=7)
    figure.colorbar(image, ax=figure.axes, extend="both", label="change in expected visits")
    figure.suptitle("Where each first move leads: more likely purple, less likely orange")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("grid_measures.png")) -> dict:
    """Compute, draw, learn and check the effect measures of the bay.

    Args:
        small: Few branches and trips, to try it out.
        figure: File to write the figure to.
    """
    draws, trips = (16, 20_000) if small else (64, 200_000)
    everywhere = np.eye(len(CELLS))  # one-hot, in every cell
    law = (1 - CURRENT) * everywhere[NEXT] + CURRENT * everywhere[NEXT[NEXT, 3]]
    visits = measures.successor_measure(measures.FiniteMDP(law), discount=DISCOUNT, horizon=HORIZON)
    exact = measures.effect_measure(visits)  # [cells, actions, cells]
    print("First move of the boat, compared with the mean of all four; cells as (row, column):")
    for name, effect in zip(MOVES, exact[MARKS["B"]], strict=True):
        (more, fewer), most, least = measures.jordan_parts(effect), effect.argmax(), effect.argmin()
        print(f"  {name:5} shifts {more.sum():.2f} visits: {more[most]:+.2f} in", end=" ")
        print(f"{CELLS[most]}, {-fewer[least]:+.2f} in {CELLS[least]}, less elsewhere")
    error = np.abs(simulated(trips, np.random.default_rng(1)) - visits[MARKS["B"]]).max()
    print(f"Largest difference from {trips:,} simulated trips per move: {error:.4f} visits")

    world, recipe = make_world(), {"horizon": HORIZON, "discount": DISCOUNT, "warmup": (0, 0)}
    assert cqm.check_world(world)
    branches = cqm.collect(world, states=500, draws=draws, seed=0, **recipe)
    model = cqm.EffectModel(candidates="ridge").fit(branches)
    model.calibrate(cqm.collect(world, states=200, draws=draws, seed=1, **recipe))
    facts = {"simulation": error, "values": 0.0, "wrong": 0}
    facts["learned"] = np.sum((model.effect(everywhere) - exact) ** 2) / np.sum(exact**2)
    print(f"The model's squared error is {facts['learned']:.2%} of the size of the exact effects.")
    for name, (mark, amount) in REWARDS.items():
        reward = amount * everywhere[MARKS[mark]]
        truth, verdict = values(reward), model.certify(everywhere, reward, shift="ignore")
        gap = measures.integrate(exact, reward) - (truth - truth.mean(axis=1, keepdims=True))
        facts["values"] = max(facts["values"], np.abs(gap).max())
        order, sure = np.array([*MOVES])[np.argsort(-truth[MARKS["B"]])], verdict.separable
        right = truth[range(len(CELLS)), verdict.action] > truth.max(axis=1) - 1e-12
        facts["wrong"] += int((sure & ~right).sum())
        print(f"To {name}: {' > '.join(order)}. The model is right in {right.sum()} of", end=" ")
        print(
            f"{len(CELLS)} cells; certain in {sure.sum()}, right in {right[sure].sum()} of these."
        )
    draw(figure, exact[MARKS["B"]])
    return facts


if __name__ == "__main__":
    tyro.cli(main)
