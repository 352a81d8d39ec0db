"""`cqm collect` and `cqm audit`: collect branches of a world, and check a stored set."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro import constructors

from cqm.branches import shards
from cqm.branches.dataset import Branches
from cqm.branches.recipe import Continuation, Recipe
from cqm.cli.shared import Directory, Json, WorldName, default, print_report, says_what_is_kept
from cqm.display import counted
from cqm.progress import say

REGISTRY = constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _continuation(info: constructors.PrimitiveTypeInfo) -> Any:
    """Read a continuation from `uniform`, `box` or one probability per candidate action."""

    def parsed(args: list[str]) -> Continuation:
        return Continuation.of(args[0] if len(args) == 1 else [float(arg) for arg in args])

    if info.type is Continuation:
        return constructors.PrimitiveConstructorSpec(
            "*",
            metavar="uniform|box|FLOAT [FLOAT ...]",
            instance_from_str=parsed,
            is_instance=lambda value: isinstance(value, Continuation),
            str_from_instance=lambda value: [str(value)],
        )


@dataclass(frozen=True)
class _Settings(Recipe):
    """How to collect the branches; these options and the world determine every stored byte."""

    arms: Annotated[
        int | Sequence[Sequence[int]] | None,
        tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)"),
    ] = None
    """Number of actions to branch per state, chosen at random; with --actions box, the number of
    controls."""


@dataclass(frozen=True)
class Collect:
    """Collect branches of a world and save them; rerun the command to resume it.

    Example: cqm collect reacher-easy --nuisance 64 --states 20000 --seed 7 --out reacher
    """

    world: WorldName
    out: Path
    """Directory for the branches."""
    settings: tyro.conf.OmitArgPrefixes[_Settings] = field(default_factory=_Settings)
    nuisance: int = 0
    """Dimension of the nuisance: a random process that no action affects, mixed into observations
    and features (64 in the paper)."""
    mixing_seed: int = 0
    """Random seed for the mixing matrix; use the same one for training and held-out branches."""
    action_names: Annotated[tuple[str, ...], default("their indices")] = ()
    """Names of the candidate actions, in order, to use in answers."""
    threads: Annotated[int | None, default("all cores")] = None
    """Number of simulation threads, or of processes for worlds that run Python code."""
    cluster: Annotated[str | None, default("this machine")] = None
    """Address of a Ray cluster to simulate on, or auto."""

    def run(self) -> int:
        """Collect, and print a summary."""
        say(f"Loading {self.world}")
        from cqm.branches.collect import DroppedWarning, collect
        from cqm.worlds import load_world

        world = load_world(
            self.world,
            nuisance=self.nuisance,
            seed=self.mixing_seed,
            action_names=self.action_names or None,
        )
        with (
            warnings.catch_warnings(action="ignore", category=DroppedWarning),  # printed below
            says_what_is_kept(self._kept),
        ):
            branches = collect(
                world,
                out=self.out,
                threads=self.threads,
                cluster=self.cluster,
                show_progress=True,
                **vars(self.settings),
            )
        print(f"{branches}\nsaved in {self.out}")
        return 0

    def _kept(self) -> str:
        """What a stopped collection leaves behind, in words."""
        complete, planned = shards.count(self.out)
        if not complete:
            return "nothing was kept; rerun the command to start again"
        return (
            f"kept {complete} of {counted(planned, 'shard')} in {self.out}; rerun the command to "
            "resume"
        )


@dataclass(frozen=True)
class Audit:
    """Check that stored branches differ only in their first action and replay bit for bit.

    Example: cqm audit reacher
    """

    directory: Directory
    """Directory of the branches."""
    families: Annotated[int | None, default("one per 256 states, at least 64, at most 1024")] = None
    """Number of families to replay; a family is the set of all branches from one state."""
    seed: int = 0
    """Random seed for choosing families and for the fresh noise used in the comparisons."""
    json: Json = False

    def run(self) -> int:
        """Print the report; returns 1 if a check failed."""
        say(f"Loading {self.directory}")
        from cqm.branches.audit import audit

        report = audit(Branches.open(self.directory), families=self.families, seed=self.seed)
        return print_report(report, self.json)
