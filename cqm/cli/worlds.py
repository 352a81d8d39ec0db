"""`cqm worlds`: which worlds can be branched."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from cqm.cli.shared import Json, WorldName, print_report
from cqm.display import text_table
from cqm.progress import say


@dataclass(frozen=True)
class WorldsList:
    """List the worlds that can be loaded by name, with their sizes and cloning methods.

    Example: cqm worlds list
    """

    json: Json = False

    def run(self) -> int:
        """Print the list."""
        from cqm.worlds.catalogue import task_sizes
        from cqm.worlds.simulators import missing_simulators

        rows = task_sizes()
        if self.json:
            print(json.dumps(rows, indent=2))
        else:
            print(text_table(rows))
            print("Gymnasium environments can be loaded by id, such as CartPole-v1.")
            if missing := missing_simulators():
                print(f"Not installed: {', '.join(missing)}. To install: pip install 'cqm[sim]'")
        return 0


@dataclass(frozen=True)
class WorldsCheck:
    """Check that a world can be cloned and branched.

    Example: cqm worlds check reacher-easy
    """

    name: WorldName
    states: int = 16
    """Number of states to check."""
    seed: int = 0
    """Random seed for states, controls and noise."""
    json: Json = False

    def run(self) -> int:
        """Print the report; returns 1 if a check failed."""
        say(f"Loading {self.name}")
        from cqm.worlds import check_world, load_world

        report = check_world(load_world(self.name), num=self.states, seed=self.seed)
        return print_report(report, self.json)


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
