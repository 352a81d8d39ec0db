"""The command line; `cqm --help` lists the commands."""

import contextlib
import functools
import operator
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from cqm import __version__
from cqm.cli.branches import REGISTRY, Audit, Collect
from cqm.cli.experiments import Ablate, Report, Reproduce
from cqm.cli.logs import LogsCheck, LogsCommand, LogsEffects, LogsImport
from cqm.cli.models import Ask, Fit, Refute
from cqm.cli.worlds import Worlds, WorldsCheck, WorldsList
from cqm.names import unknown
from cqm.progress import say

COMMANDS: dict[str, type] = {
    "worlds": Worlds,
    "worlds list": WorldsList,
    "worlds check": WorldsCheck,
    "collect": Collect,
    "audit": Audit,
    "logs": LogsCommand,
    "logs import": LogsImport,
    "logs check": LogsCheck,
    "logs effects": LogsEffects,
    "fit": Fit,
    "query": Ask,
    "refute": Refute,
    "reproduce": Reproduce,
    "ablate": Ablate,
    "report": Report,
}
_ANY: Any = functools.reduce(
    operator.or_,
    (
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)]
        for name, kind in COMMANDS.items()
        if " " not in name
    ),
)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; report user errors in one line on standard error, without a traceback."""
    os.environ.setdefault("MUJOCO_GL", "disable")  # no command renders; servers have no display
    try:
        with _plain_output():
            return _run(list(sys.argv[1:] if args is None else args))
    except KeyboardInterrupt as stop:  # which says what was kept, if the command knows
        print(f"cqm: interrupted; {str(stop) or 'rerun the command'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `cqm worlds list | head -1`; nobody reads what is still to come
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as if the signal had ended the process
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        problem = str(error)
        if isinstance(error, MemoryError):
            problem = f"there is not enough memory ({problem}); choose smaller sizes"
        if isinstance(error, ModuleNotFoundError) and "matplotlib" in (error.name or ""):
            problem = "matplotlib is not installed; reports need it: pip install 'cqm[experiments]'"
        print(f"cqm: {problem}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _plain_output() -> Iterator[None]:
    """Print each warning once, in one line, and flush while an error can still be reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", UserWarning, append=True)
        warnings.showwarning = lambda message, *_, **__: say(f"cqm: warning: {message}")
        try:
            yield
        finally:
            sys.stdout.flush()


def _run(args: list[str]) -> int:
    if args == ["--version"]:
        print(f"cqm {__version__}")
        return 0
    grouped = {name.split()[0] for name in COMMANDS if " " in name}
    words = 2 if args[0:1] and args[0] in grouped and args[1:2] and args[1][:1] != "-" else 1
    name = " ".join(args[:words])
    if name in COMMANDS:
        # Parsed on its own, so that messages name its arguments and its own help.
        kind, prog, description, args = COMMANDS[name], f"cqm {name}", None, args[words:]
    elif args and not args[0].startswith("-"):
        raise unknown("command", name, list(COMMANDS))
    else:
        kind, prog = _ANY, "cqm"
        description = f"Counterfactual Quotient Models {__version__}: learn what actions change."
    command: Any = tyro.cli(
        kind,
        prog=prog,
        description=description,
        args=args,
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
        ),
        registry=REGISTRY,
    )
    return command.run()
