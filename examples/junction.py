"""A road junction: which road should get green, compared under identical arrivals.

Cars queue on two roads. Every 10 seconds the signal gives green to one of them; changing it costs 4
seconds. Arrivals are random and vary far more than one decision changes, so two simulations with
different signals differ mostly by luck. Branches share their arrivals, so this luck cancels, and
the difference is the effect of the signal alone. After the first 10 seconds, an ordinary controller
takes over and serves the longer queue. How much each road's waiting counts is decided afterwards.

The figure maps the best signal over the two queues. To check it, brute force simulates both signals
a thousand times in every state of a coarse grid.

    python examples/junction.py
"""

from pathlib import Path

import numpy as np
import tyro
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import cqm

SECONDS, LOST, FLOW = 10.0, 4.0, 0.5  # per step, per change; cars per second that pass at green
RATES = (0.18, 0.14)  # mean arrivals per second, north-south and east-west
COLOURS = ("#9ecae1", "#f2c179")
WISHES = {"all cars alike": "-ns - ew", "east-west counts three times": "-ns - 3 * ew"}
SIGNALS = ("green north-south", "green east-west")


def initial(num, rng):
    """Queues of up to 20 cars, and the road that has green."""
    ns, ew = rng.uniform(0, 20, (2, num))
    return {"ns": ns, "ew": ew, "green": rng.integers(0, 2, num) + 0.0}


def grid(num, rng):
    """A coarse grid of queues; the north-south road has green."""
    ns, ew = np.divmod(np.arange(num), 7)
    return {"ns": 3.0 * ns, "ew": 3.0 * ew, "green": np.zeros(num)}


def step(state, phase, arrivals):
    """Ten seconds: cars arrive, and the green road empties after the time lost by a change."""
    served = FLOW * (SECONDS - LOST * (phase[:, 0] != state["green"]))
    ns = np.maximum(state["ns"] + arrivals[:, 0] - served * (phase[:, 0] == 0), 0)
    ew = np.maximum(state["ew"] + arrivals[:, 1] - served * (phase[:, 0] == 1), 0)
    return {"ns": ns, "ew": ew, "green": phase[:, 0]}


def features(state, phase, arrivals, after):
    """Car minutes of waiting on each road, and changes of the signal."""
    changed = phase[:, 0] != state["green"]
    return np.column_stack([after["ns"] * SECONDS / 60, after["ew"] * SECONDS / 60, changed])


def sample_arrivals(num, horizon, rng):
    """Cars that arrive in ten seconds on each road; platoons make the numbers vary a lot."""
    return SECONDS * np.array(RATES) * rng.exponential(1.0, (num, horizon, 2))


def longer_queue(seen, uniforms):
    """The usual controller: green for the longer queue, counted to within 3 cars."""
    return (seen[:, 1] - seen[:, 0] + 6 * seen[:, 2] > 6 * uniforms).astype(int)


def make_world(start=initial):
    """The junction as a world."""
    return cqm.FunctionWorld(
        step,
        start,
        features=features,
        exogenous=sample_arrivals,
        candidate_actions=[[0.0], [1.0]],
        action_names=SIGNALS,
        feature_names=["ns", "ew", "changes"],
        observation_names=["queue_ns", "queue_ew", "green"],
        continuous=False,
    )


def draw(path, queues, answers, certains, truth, spreads):
    """Two maps of the best signal, and how much luck identical arrivals remove."""
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 0.95))
    for k, (axis, wish) in enumerate(zip(axes, WISHES, strict=False)):
        coarse, style = 3.0 * np.arange(7), {"colors": "none", "hatches": ["////"]}
        axis.pcolormesh(queues, queues, answers[k].T, cmap=ListedColormap(COLOURS), vmin=0, vmax=1)
        axis.contourf(queues, queues, 1.0 - certains[k].T, levels=[0.5, 1.5], **style)
        axis.contour(coarse, coarse, truth[k].T, levels=[0], colors="black", linewidths=2.5)
        axis.set(xlabel="cars north-south", xlim=(0, 10), title=wish.replace("t c", "t\nc"))
    axes[0].set_ylabel("cars waiting east-west")
    names = ("separate\narrivals", "identical\narrivals")
    axes[2].bar(names, spreads, color=("#b0b0b0", "#0072b2"))
    axes[2].set(ylabel="spread (car minutes)", title="luck in one\ncomparison")
    shown = [Patch(facecolor=c, label=name) for c, name in zip(COLOURS, SIGNALS, strict=True)]
    shown.append(Patch(facecolor="white", hatch="////", label="not certain"))
    shown += [Line2D([], [], color="black", lw=2.5, label="border by brute force")]
    figure.legend(handles=shown, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("North-south is green. Which road is next, for 10 seconds?")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("junction.png")) -> dict:
    """Fit once, then map the best signal for two wishes.

    Args:
        small: Few states and draws, to try it out.
        figure: File to write the figure to.
    """
    states, draws, many = (2000, 32, 400) if small else (3000, 128, 1000)
    world, recipe = make_world(), {"horizon": 12, "discount": 1.0, "warmup": (0, 0)}
    recipe["continuation"] = cqm.Policy("longer queue", longer_queue)
    assert cqm.check_world(world)
    branches = cqm.collect(world, states=states, draws=8, seed=0, **recipe)
    model = cqm.EffectModel(candidates="ridge").fit(branches)  # no wish so far
    model.calibrate(cqm.collect(world, states=200, draws=draws, seed=1, **recipe))

    coarse = cqm.collect(make_world(grid), states=49, draws=many, seed=2, **recipe)
    queues, answers, certains, gains, facts = np.linspace(0, 18, 37), [], [], [], {}
    seen = np.stack([*np.meshgrid(queues, queues, indexing="ij"), np.zeros((37, 37))], axis=-1)
    print(f"Against brute force in {len(coarse)} states, where north-south has green:")
    for wish, reward in WISHES.items():
        query = cqm.Query.formula(reward, world)
        verdict = model.certify(seen.reshape(-1, 3), query, shift="ignore")  # a grid, no sample
        answers.append(verdict.action.reshape(37, 37))
        certains.append(verdict.separable.reshape(37, 37))
        value = coarse.effects().mean(axis=1) @ query.weights
        gains.append((value[:, 1] - value[:, 0]).reshape(7, 7))
        here = model.certify(coarse.observations, query, shift="ignore")
        sure, right = here.separable, here.action == value.argmax(axis=1)
        loss = np.abs(gains[-1].ravel())[~right].max(initial=0)
        print(f"  {wish}: right in {right.sum()}, largest loss {loss:.2f} car minutes;", end=" ")
        print(f"certain in {sure.sum()}, of which right {right[sure].sum()}")
        facts[wish] = (right.mean(), (sure & ~right).sum())
    total = coarse.outcomes[24] @ cqm.Query.formula(WISHES["all cars alike"], world).weights
    own, paired = np.sqrt(total.var(axis=0).sum()), (total[:, 1] - total[:, 0]).std()
    print(
        f"With 9 cars on each road, one comparison spreads by {own:.1f} car minutes with separate"
    )
    print(f"arrivals and by {paired:.1f} with identical ones, which saves", end=" ")
    print(f"{1 - (paired / own) ** 2:.0%} of the simulations.")
    draw(figure, queues, answers, certains, gains, (own, paired))
    return facts | {"gain": (own / paired) ** 2}


if __name__ == "__main__":
    tyro.cli(main)
