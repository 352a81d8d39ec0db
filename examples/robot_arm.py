"""Your own robot: an arm that reaches for goals nobody knew when the model was fitted.

The robot is a MuJoCo model, written below: two links on a table, a motor in each joint. Its
features suit the question: the position of the hand, and its squared distance from the shoulder.
The squared distance to *any* goal is then a weighted sum of features, because
(x - a)² + (y - b)² = (x² + y²) - 2 a x - 2 b y + constant. So a goal is a linear reward, and one
model of what the motors change answers all goals.

Branches with many draws check the single answers. Then the arm moves: at every step the model picks
the motor command for the goal, and MuJoCo itself simulates where the hand ends up.

    python examples/robot_arm.py
"""

from pathlib import Path

import mujoco
import numpy as np
import tyro
from matplotlib.figure import Figure

import cqm

XML = """
<mujoco model="arm">
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody>
    <body name="upper">
      <joint name="shoulder" axis="0 0 1" damping="0.5" armature="0.02"/>
      <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.02" contype="0" conaffinity="0"/>
      <body name="lower" pos="0.3 0 0">
        <joint name="elbow" axis="0 0 1" damping="0.3" armature="0.02"/>
        <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.02" contype="0" conaffinity="0"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="shoulder" ctrlrange="-1 1"/> <motor joint="elbow" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""
NAMES = ["rest", "shoulder left", "shoulder right", "elbow left", "elbow right"]
COMMANDS = [[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]]
LINK, START = 0.3, [0.0, 0.5]  # metres; joint angles in radians
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#9a9a9a"


def observation(qpos, qvel, extras):
    """The joints, then our own features: the hand's position and squared distance."""
    first, both = qpos[..., 0], qpos[..., 0] + qpos[..., 1]
    x, y = LINK * (np.cos(first) + np.cos(both)), LINK * (np.sin(first) + np.sin(both))
    joints = [f(angle) for angle in (first, qpos[..., 1]) for f in (np.sin, np.cos)]
    return np.stack([*joints, qvel[..., 0], qvel[..., 1], x, y, x**2 + y**2], axis=-1)


def initial(num, rng):
    """Any pose, moving a little."""
    return rng.uniform(-np.pi, np.pi, (num, 2)), rng.normal(0, 1, (num, 2)), {}


def make_world(start=initial):
    """The arm as a world."""
    return cqm.MujocoWorld(
        mujoco.MjModel.from_xml_string(XML),
        substeps=5,
        initial=start,
        observation=observation,
        observation_names=["sin1", "cos1", "sin2", "cos2", "speed1", "speed2", "x", "y", "reach2"],
        candidate_actions=COMMANDS,
        action_names=NAMES,
    )


def goal(x, y, world):
    """Minus the squared distance of the hand to a goal, up to a constant."""
    return cqm.Query.named({"reach2": -1.0, "x": 2 * x, "y": 2 * y}, world)


def reach(world, goals, choose, steps):
    """Positions of the hand on the way to each goal, `[steps, goals, 2]`, simulated by MuJoCo."""
    rest = make_world(lambda num, rng: (np.tile(START, (num, 1)), np.zeros((num, 2)), {}))
    states, path = rest.reset(len(goals), np.random.default_rng(0)), []
    for _ in range(steps):
        seen = world.observe(states)
        path.append(seen[:, 6:8])
        controls = world.candidate_actions[choose(seen)][:, None]
        states = world.rollout(states, controls, np.empty((len(goals), 1, 0))).states
    return np.array([*path, world.observe(states)[:, 6:8]])


def draw(path, goals, moved, random):
    """Left: the way to each goal. Right: the distance over time."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for k in range(len(goals)):
        left.plot(*moved[:, k].T, color=BLUE, lw=1.2, label="path of the hand" if k == 0 else None)
    left.plot(*goals.T, "x", color=ORANGE, ms=8, mew=2, label="goal")
    left.plot(*moved[0, 0], "o", color="black", label="start")
    left.set(xlabel="x (m)", ylabel="y (m)", aspect="equal")
    seconds = 0.05 * np.arange(len(moved))
    for points, colour, label in ((random, GREY, "random, median"), (moved, BLUE, "model, median")):
        distance = 100 * np.linalg.norm(points - goals, axis=2)
        right.plot(seconds, distance, color=colour, lw=0.8, alpha=0.6)
        right.plot(seconds, np.median(distance, axis=1), color=colour, lw=3, label=label)
    right.set(xlabel="time (s)", ylabel="distance to the goal (cm)", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"One model of the arm reaches {len(goals)} goals given afterwards")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("robot_arm.png")) -> dict:
    """Fit one model of the arm, check it, then reach for goals.

    Args:
        small: Few states and goals, to try it out.
        figure: File to write the figure to.
    """
    states, draws, num_goals = (500, 16, 6) if small else (3000, 64, 16)
    world = make_world()
    assert cqm.check_world(world)
    recipe = {"horizon": 8, "warmup": (0, 0)}
    branches = cqm.collect(world, states=states, draws=4, seed=0, **recipe)
    model = cqm.EffectModel(candidates="ridge").fit(branches)  # no goal so far
    held_out, new = cqm.collect(world, states=300, draws=draws, seed=1, **recipe).split(100)
    model.calibrate(held_out)

    rng, angle = np.random.default_rng(3), np.arange(num_goals) * 2 * np.pi / num_goals
    goals = np.column_stack([np.cos(angle), np.sin(angle)]) * rng.uniform(0.2, 0.55, (num_goals, 1))
    queries, truth = [goal(*place, world) for place in goals], new.effects().mean(axis=1)
    verdicts = [model.certify(new.observations, query) for query in queries]
    best = np.array([(truth @ query.weights).argmax(axis=1) for query in queries])
    right = np.array([verdict.action for verdict in verdicts]) == best
    sure = np.array([verdict.separable for verdict in verdicts])
    print(f"First command, for {num_goals} goals in {len(new)} new poses, against branches:")
    print(f"  right {right.mean():.1%}; certain {sure.mean():.1%}")
    print(f"  right where certain {right[sure].mean():.1%}")
    moved = reach(world, goals, lambda seen: np.diag(model.act(seen, queries)), 60)
    random = reach(world, goals, lambda seen: rng.integers(5, size=len(seen)), 60)
    draw(figure, goals, moved, random)
    near, far = (100 * np.linalg.norm(p - goals, axis=2) for p in (moved, random))
    print("Distance of the hand to the goal in MuJoCo (cm), median and largest over the goals:")
    for name, distance in (("start", near[0]), ("model, 3 s", near[-1]), ("random, 3 s", far[-1])):
        print(f"  {name:12} {np.median(distance):5.1f} {distance.max():6.1f}")
    return {"right": right.mean(), "wrong": (sure & ~right).mean(), "distance": near[-1].max()}


if __name__ == "__main__":
    tyro.cli(main)
