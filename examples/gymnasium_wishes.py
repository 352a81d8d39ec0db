"""Gymnasium: one model, and a wish that changes halfway through the episode.

The environment is loaded by name: LunarLander-v3 if Box2D is installed, Acrobot-v1 otherwise.
Branches from random play show what each action changes over the next steps, and one model is
fitted to them. The environment's own reward is not used. Instead, the model acts on a wish: an
acrobot that hangs still first swings up, then comes to rest again; a lander first climbs, then
descends. Changing the wish changes one argument; nothing is learned again.

Two things check the model: branches with many draws in states that it has not seen, and episodes of
the environment itself.

    python examples/gymnasium_wishes.py
"""

import importlib.util
from pathlib import Path

import gymnasium
import numpy as np
import tyro
from matplotlib.figure import Figure

import cqm

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#9a9a9a"


def acrobot(observations):
    """Height of the tip (m) and mechanical energy (J) of the acrobot, `[n, 2]`."""
    cos1, sin1, cos2, sin2, speed1, speed2 = observations.T[:6]
    both = cos1 * cos2 - sin1 * sin2  # cosine of the sum of the two angles
    inertia = 3.5 + cos2, 1.25 + 0.5 * cos2, 1.25
    kinetic = inertia[0] * speed1**2 / 2 + inertia[1] * speed1 * speed2 + inertia[2] * speed2**2 / 2
    return np.column_stack([-cos1 - both, kinetic - 9.8 * (1.5 * cos1 + 0.5 * both)])


def lander(observations):
    """Height and climbing speed of the lander, in the environment's units, `[n, 2]`."""
    return observations[:, [1, 3]]


SETTINGS = {
    "Acrobot-v1": {
        "actions": ["left", "no torque", "right"],
        "features": (acrobot, ["height", "energy"]),
        "labels": ["height of the tip (m)", "energy (J)"],
        "wishes": {"swing up": "energy", "come to rest": "-energy"},
        "warmup": (0, 150),
        "steps": (70, 100),
    },
    "LunarLander-v3": {
        "actions": ["no engine", "left engine", "main engine", "right engine"],
        "features": (lander, ["height", "climb"]),
        "labels": ["height", "climbing speed"],
        "wishes": {"climb": "climb", "descend": "-climb"},
        "warmup": (0, 20),
        "steps": (50, 50),
    },
}


def episodes(name, choose, num):
    """Quantities of `num` episodes of the environment itself, `[steps, num, quantities]`."""
    setting = SETTINGS[name]
    envs = [gymnasium.make(name).unwrapped for _ in range(num)]
    seen = np.array([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    path = [setting["features"][0](seen)]
    for step in range(sum(setting["steps"])):
        actions = choose(seen, step)
        seen = np.array([env.step(int(a))[0] for env, a in zip(envs, actions, strict=True)])
        path.append(setting["features"][0](seen))
    return np.array(path)


def draw(path, name, acted, random):
    """The two quantities over time: random actions, the first wish, then the second."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    switch, label = SETTINGS[name]["steps"][0], SETTINGS[name]["labels"]
    first, second = SETTINGS[name]["wishes"]
    later = range(switch, len(acted))
    for k, axis in enumerate(figure.subplots(1, 2)):
        own, other = (path[:, : (1, None)[k], k] for path in (acted, random))  # left: one episode
        axis.plot(other, color=GREY, lw=0.8, label="random actions")
        axis.plot(own[: switch + 1], color=BLUE, lw=1.5, label=f"wish: {first}")
        axis.plot(later, own[switch:], color=ORANGE, lw=1.5, label=f"wish: {second}")
        axis.set_title(("one episode", f"{acted.shape[1]} episodes")[k])
        axis.axvline(switch, color="black", ls=":", lw=1.5)
        axis.set(xlabel="step of the episode", ylabel=label[k])
    lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{name}: the wish changes at the dotted line")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("gymnasium_wishes.png")) -> dict:
    """Fit one model of an environment, check it, and let it act on two wishes.

    Args:
        small: Few states and episodes, to try it out.
        figure: File to write the figure to.
    """
    box2d = all(importlib.util.find_spec(package) for package in ("Box2D", "pygame"))
    name = "LunarLander-v3" if box2d else "Acrobot-v1"
    setting = SETTINGS[name]
    features = cqm.worlds.UserFeatures(*setting["features"])
    world = cqm.load_world(name, features=features, action_names=setting["actions"])
    assert cqm.check_world(world)
    recipe = {"horizon": 5, "warmup": setting["warmup"]}
    branches = cqm.collect(world, states=400 if small else 1000, seed=0, **recipe)
    model = cqm.EffectModel(candidates="ridge").fit(branches)  # no wish so far
    held_out = cqm.collect(world, states=80, draws=16 if small else 32, seed=1, **recipe)
    held_out, new = held_out.split(40)
    model.calibrate(held_out)

    wishes = {wish: cqm.Query.formula(text, world) for wish, text in setting["wishes"].items()}
    truth, facts = new.effects().mean(axis=1), {}
    print(f"{name}: is the chosen action the best one of the branches in {len(new)} new states?")
    for wish, query in wishes.items():
        verdict = model.certify(new.observations, query)
        right = verdict.action == (truth @ query.weights).argmax(axis=1)
        sure = verdict.separable
        print(f"  {wish:13} right in {right.sum()}; certain in {sure.sum()}", end="")
        print(f", of which right {right[sure].sum()}")
        facts[wish] = float(right.mean())

    rng, (first, second) = np.random.default_rng(0), wishes.values()
    switch, num = setting["steps"][0], 4 if small else 10
    acted = episodes(name, lambda o, step: model.act(o, first if step < switch else second), num)
    random = episodes(name, lambda o, _: rng.integers(len(setting["actions"]), size=len(o)), num)
    draw(figure, name, acted, random)
    (up, down), label = wishes, setting["labels"][1]
    print(f"{label[0].upper()}{label[1:]} in the environment, mean of {num} episodes:")
    print(f"  {'':14} {'start':>7} {f'after {up}':>18} {f'after {down}':>20}")
    for text, path in (("model", acted), ("random actions", random)):
        start, middle, end = path[[0, switch, -1], :, 1].mean(axis=1)
        print(f"  {text:14} {start:7.2f} {middle:18.2f} {end:20.2f}")
        facts[text] = (float(middle - start), float(end - middle))
    return facts


if __name__ == "__main__":
    tyro.cli(main)
