"""The command line; `cqm --help` lists the commands."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from cqm import __version__
from cqm.cli.branches import REGISTRY, Audit, Collect
from cqm.cli.experiments import Report, Reproduce
from cqm.cli.models import Ask, Fit
from cqm.cli.worlds import Worlds

Command = (
    Annotated[Worlds, tyro.conf.subcommand("worlds", prefix_name=False)]
    | Annotated[Collect, tyro.conf.subcommand("collect", prefix_name=False)]
    | Annotated[Audit, tyro.conf.subcommand("audit", prefix_name=False)]
    | Annotated[Fit, tyro.conf.subcommand("fit", prefix_name=False)]
    | Annotated[Ask, tyro.conf.subcommand("query", prefix_name=False)]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce", prefix_name=False)]
    | Annotated[Report, tyro.conf.subcommand("report", prefix_name=False)]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; report user errors in one line on standard error, without a traceback."""
    args = sys.argv[1:] if args is None else args
    if list(args) == ["--version"]:
        print(f"cqm {__version__}")
        return 0
    os.environ.setdefault("MUJOCO_GL", "disable")  # no command renders; servers have no display
    command = tyro.cli(
        Command,
        prog="cqm",
        description=f"Counterfactual Quotient Models {__version__}: learn what actions change.",
        args=args,
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
        ),
        registry=REGISTRY,
    )
    try:
        return command.run()
    except KeyboardInterrupt:
        print("cqm: interrupted; rerun the command to resume", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        problem = str(error)
        if isinstance(error, ModuleNotFoundError) and "matplotlib" in (error.name or ""):
            problem = "matplotlib is not installed; reports need pip install 'cqm[experiments]'"
        print(f"cqm: {problem}", file=sys.stderr)
        return 2
