"""The command line: `cqm worlds`, `cqm collect`, `cqm audit`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from cqm.branches import Branches, Recipe

_Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORLD")]
_Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True)
class WorldsList:
    """List the worlds that load by name, with their sizes and how each is cloned.

    Example: cqm worlds list
    """

    json: bool = False
    """Print JSON instead of a table."""

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
            _print_table(rows)
            print("Gymnasium environments load by their id, as in 'CartPole-v1'.")
        return 0


@dataclass(frozen=True)
class WorldsCheck:
    """Run the world contract: can this world be cloned and branched?

    Example: cqm worlds check reacher-easy
    """

    name: _Name
    """A suite task such as reacher-easy, or a Gymnasium id such as CartPole-v1."""
    states: int = 6
    """States to check on."""
    seed: int = 0
    """Of the states, controls and noise."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the report; 1 where a check failed."""
        from cqm.worlds import check_world, load_world

        report = check_world(load_world(self.name), num=self.states, seed=self.seed)
        print(json.dumps(asdict(report), indent=2) if self.json else report)
        return 0 if report else 1


@dataclass(frozen=True)
class Collect:
    """Collect branches of a world into a directory; the same command continues after a stop.

    Example: cqm collect reacher-easy --nuisance 64 --states 20000 --seed 7 --out reacher
    """

    world: _Name
    """A suite task such as reacher-easy, or a Gymnasium id such as CartPole-v1."""
    out: Path
    """Directory for the branches."""
    recipe: tyro.conf.OmitArgPrefixes[Recipe] = field(default_factory=Recipe)
    nuisance: int = 0
    """Dimension of the autonomous process to mix in; the paper's is 64."""
    threads: int | None = None
    """Threads to simulate on; all cores by default."""
    cluster: str | None = None
    """Address of a Ray cluster to simulate on, or auto."""

    def run(self) -> int:
        """Collect, and say what there is."""
        from cqm.collection import collect
        from cqm.worlds import load_world

        world = load_world(self.world, nuisance=self.nuisance, seed=self.recipe.seed)
        settings = {name: getattr(self.recipe, name) for name in Recipe.__dataclass_fields__}
        branches = collect(
            world,
            out=self.out,
            threads=self.threads,
            cluster=self.cluster,
            show_progress=True,
            **settings,
        )
        dropped = ", ".join(f"{count} {why}" for why, count in branches.dropped.items())
        print(f"{branches}\ndropped: {dropped or 'none'}\nin {self.out}")
        return 0


@dataclass(frozen=True)
class Audit:
    """Check that stored branches are what they claim: the coupling certificate.

    Example: cqm audit reacher
    """

    directory: _Directory
    """Where the branches are."""
    families: int = 64
    """Families to look at."""
    seed: int = 0
    """Of the sample and of the fresh noise that is compared with."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the certificate; 1 where a check failed."""
        from cqm.coupling import audit

        certificate = audit(Branches.open(self.directory), families=self.families, seed=self.seed)
        print(json.dumps(asdict(certificate), indent=2) if self.json else certificate)
        return 0 if certificate else 1


@dataclass(frozen=True)
class Worlds:
    """See what can be branched."""

    command: (
        Annotated[WorldsList, tyro.conf.subcommand("list", prefix_name=False)]
        | Annotated[WorldsCheck, tyro.conf.subcommand("check", prefix_name=False)]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.command.run()


Command = (
    Annotated[Worlds, tyro.conf.subcommand("worlds", prefix_name=False)]
    | Annotated[Collect, tyro.conf.subcommand("collect", prefix_name=False)]
    | Annotated[Audit, tyro.conf.subcommand("audit", prefix_name=False)]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; mistakes are one line on standard error, not a traceback."""
    command = tyro.cli(
        Command,
        prog="cqm",
        description="Counterfactual Quotient Models: learn what actions change.",
        args=args,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    try:
        return command.run()
    except KeyboardInterrupt:
        print("cqm: stopped; the same command continues where it was", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"cqm: {error}", file=sys.stderr)
        return 2


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for row in ({key: key for key in rows[0]}, *rows):
        print("  ".join(f"{row[key]!s:<{width}}" for key, width in widths.items()).rstrip())


if __name__ == "__main__":
    sys.exit(main())
