"""`cqm worlds`: which worlds can be branched."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from cqm.cli.shared import Json, WorldName, print_table


@dataclass(frozen=True)
class WorldsList:
    """List the worlds that can be loaded by name, their sizes and how their states are cloned.

    Example: cqm worlds list
    """

    json: Json = False

    def run(self) -> int:
        """Print the list."""
        from cqm.worlds import load_world, suite

        rows = []
        for name in suite.task_names():
            world = load_world(name)
            rows.append(
                {
                    "world": name,
                    "observations": len(world.observation_names),
                    "controls": len(world.control_low),
                    "actions": len(world.candidate_actions),
                    "cloned by": world.cloning,
                }
            )
        if self.json:
            print(json.dumps(rows, indent=2))
        else:
            print_table(rows)
            print("Gymnasium environments can be loaded by id, such as CartPole-v1.")
        return 0


@dataclass(frozen=True)
class WorldsCheck:
    """Check that a world can be cloned and branched.

    Example: cqm worlds check reacher-easy
    """

    name: WorldName
    states: int = 6
    """Number of states to check."""
    seed: int = 0
    """Random seed for states, controls and noise."""
    json: Json = False

    def run(self) -> int:
        """Print the report; returns 1 if a check failed."""
        from cqm.worlds import check_world, load_world

        report = check_world(load_world(self.name), num=self.states, seed=self.seed)
        print(json.dumps(asdict(report), indent=2) if self.json else report)
        return 0 if report else 1


@dataclass(frozen=True)
class Worlds:
    """List worlds, or check that one can be branched.

    Example: cqm worlds list
    """

    command: (
        Annotated[WorldsList, tyro.conf.subcommand("list", prefix_name=False)]
        | Annotated[WorldsCheck, tyro.conf.subcommand("check", prefix_name=False)]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.command.run()
