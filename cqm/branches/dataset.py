"""Branches: a set of branch families, in memory or in a directory.

Stored features are native, that is, as the simulator returned them, next to one nuisance path per
draw if the world has a nuisance. They are mixed when read. `cqm.branches.shards` defines the files.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cqm import storage
from cqm.arguments import (
    instance,
    mapping,
    number,
    output_directory,
    path as checked_path,
    sequence,
    shown,
    whole_number,
)
from cqm.branches import shards as shard_files
from cqm.branches.export import branch_columns, write_parquet
from cqm.branches.families import Families, in_words, stored_seed
from cqm.branches.recipe import BLOCK, Recipe
from cqm.branches.shards import Shard
from cqm.display import counted, data_frame, html_facts
from cqm.names import bracketed, checked_action_names, shortened
from cqm.quotient import Reference, center
from cqm.worlds.contract import NoiseKind
from cqm.worlds.nuisance import mix

Read = Callable[[str], np.ndarray]  # reads an array by name
_NEEDED = {"world", "recipe", "candidate_actions", "feature_names", "observation_names"}


class Part(NamedTuple):
    """Consecutive families of one shard."""

    shard: Shard
    start: int
    stop: int
    seed: int  # of the collection, which differs between the parts of a combined set


class Branches:
    """Families of branches: the outcome of every arm in each state, under shared randomness.

    Reading is lazy: an array is read when its property is used, and a slice of the set reads
    only its own rows.

    >>> import cqm
    >>> branches = cqm.collect(cqm.load_world("cartpole-swingup"), states=8, horizon=3)
    >>> branches.effects().shape  # states, draws, actions, features
    (8, 1, 3, 5)
    >>> len(branches[:6])
    6
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        shards: Sequence[Shard],
        *,
        mixing: Mapping[str, np.ndarray] | None = None,
        directory: Path | None = None,
        parts: Sequence[Part] | None = None,
    ):
        mapping("manifest", manifest, "settings, as Branches.open reads them")
        missing = sorted(_NEEDED - set(manifest))
        if missing:
            raise ValueError(
                f"a manifest needs {missing}; open a directory with Branches.open, or collect"
            )
        for shard in sequence("shards", shards, "shards"):
            instance("a shard", shard, Shard, "a MemoryShard or a FileShard")
        self.manifest, self.directory = manifest, directory
        self.recipe = Recipe.from_json(manifest["recipe"])
        self.candidate_actions = np.array(manifest["candidate_actions"])  # [actions, controls]
        given = manifest.get("action_names")
        self.action_names = checked_action_names(given, len(self.candidate_actions))
        self.feature_names = tuple(manifest["feature_names"])
        self.observation_names = tuple(manifest["observation_names"])
        self._shards, self._mixing = list(shards), mixing
        self._first_shards = self._shards[:1]  # one of each collection, whose shards are alike
        if parts is None:
            seed = stored_seed(self.recipe.seed)
            parts = [Part(shard, 0, shard.num_families, seed) for shard in shards]
        self._parts = list(sequence("parts", parts, "parts of shards"))

    @classmethod
    def open(cls, directory: str | Path) -> Branches:
        """Open a set on disk; reads only names and sizes."""
        directory = checked_path("directory", directory)
        manifest = shard_files.read_manifest(directory)
        return cls(
            manifest,
            shard_files.open_all(directory, manifest),
            mixing=shard_files.read_mixing(directory, manifest),
            directory=directory,
        )

    def __len__(self) -> int:
        return sum(part.stop - part.start for part in self._parts)

    def __repr__(self) -> str:
        recipe, seeds = self.recipe, ", ".join(map(str, self.seeds))
        dropped = f"; dropped while collecting: {self.why_dropped}" if self.dropped else ""
        return (
            f"Branches({self.world['name']}, {counted(len(self), 'family')} of "
            f"{self._arms_in_words}, {counted(recipe.draws, 'draw')}, "
            f"horizon {recipe.horizon}, discount {recipe.discount}, "
            f"seed{'s' if len(self.seeds) > 1 else ''} {seeds}{dropped})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "families": f"{len(self):,} of {self._arms_in_words}",
            "actions": shortened(self.action_names),
            "observations": shortened(self.observation_names),
            "features": shortened(self.feature_names),
            "horizon": self.recipe.horizon,
            "discount": self.recipe.discount,
            "draws per state": self.recipe.draws,
            "later actions": self.recipe.continuation.describe(self.action_names),
            "seed": ", ".join(map(str, self.seeds)),
            "dropped families": self.why_dropped or "none",
            "directory": self.directory or "none (in memory)",
        }
        return html_facts(f"Branches of {self.world['name']}", facts)

    def __getitem__(self, rows: slice) -> Branches:
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise ValueError(
                f"branches can only be indexed by slices without a step; got {shown(rows)}"
            )
        for name in ("start", "stop"):
            if (bound := getattr(rows, name)) is not None:
                whole_number(f"the {name} of a slice", bound)
        first, last, _ = rows.indices(len(self))
        parts, offset = [], 0
        for part in self._parts:
            start, stop = part.start, part.stop
            begin = max(start, start + first - offset)
            end = min(stop, start + last - offset)
            if begin < end:
                parts.append(part._replace(start=begin, stop=end))
            offset += stop - start
        chosen = copy.copy(self)
        chosen._parts = parts or [self._parts[0]._replace(start=0, stop=0)]
        return chosen

    def split(self, test: int | float) -> tuple[Branches, Branches]:
        """Split into training and test states; `test` is a number of states or a share of them."""
        num = split_size(test, len(self), "states")
        return self[: len(self) - num], self[len(self) - num :]

    def batches(self, size: int = 16 * BLOCK) -> Iterator[Branches]:
        """Iterate over consecutive pieces, so that the whole set need not be in memory at once."""
        size = whole_number("size", size, least=1)
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def block_starts(self) -> np.ndarray:
        """Positions where blocks start, `[blocks]`; reading one block touches no other."""
        starts, offset = [], 0
        for _, start, stop, _ in self._parts:
            aligned = range(start - start % BLOCK, stop, BLOCK)
            starts += [offset + max(begin, start) - start for begin in aligned]
            offset += stop - start
        return np.array(starts, np.int64)

    def fingerprint(self) -> str:
        """Checksum of the set, computed from the stored checksums of its shards."""
        parts = [(part.shard.checksum, part.start, part.stop) for part in self._parts]
        content = json.dumps([self.manifest, parts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def world(self) -> Mapping[str, Any]:
        """Stored identity of the world."""
        return self.manifest["world"]

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards that hold the families; a slice has whole shards, even if it uses few rows."""
        return tuple(self._shards)

    @property
    def seeds(self) -> list[int]:
        """Seed of the collection; several for a combined set."""
        return self.manifest.get("combined_seeds", [self.recipe.seed])

    @property
    def features_are_next_observation(self) -> bool:
        """Whether the features of a step are the observation of the next state.

        True if both have the same names, or if the world is a `FunctionWorld` with the default
        `features` and `observe`. Mixed features and observations have the same names whatever they
        are made of.
        """
        functions = self.world.get("functions", {})
        own_features = "feature_maps" in self.world or functions.get("features") is not None
        if self.feature_names == self.observation_names:
            return self.nuisance is None or not own_features
        plain = self.world["kind"] == "function" and self.nuisance is None and not own_features
        same_number = len(self.feature_names) == len(self.observation_names)
        return plain and functions.get("observe") is None and same_number

    @property
    def num_actions(self) -> int:
        """Number of candidate actions."""
        return len(self.candidate_actions)

    @property
    def num_arms(self) -> int:
        """Number of arms (candidate actions tried) per family."""
        arms = self.recipe.arms
        if arms is None:
            return self.num_actions
        return arms if isinstance(arms, int) else len(arms[0])

    @property
    def box(self) -> np.ndarray | None:
        """Bounds of the controls, `[2, controls]`; None if no control was drawn from a box."""
        return np.array(self.manifest["box"], float) if self.manifest.get("box") else None

    @property
    def has_menu(self) -> bool:
        """Whether first actions are candidate actions, and not controls from the box."""
        return self.recipe.actions == "menu"

    @property
    def _arms_in_words(self) -> str:
        if not self.has_menu:
            return f"{self.num_arms} controls from the box"
        return f"{self.num_arms}/{self.num_actions} arms{bracketed(self.action_names)}"

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped families, counted by reason."""
        return dict(sum((Counter(shard.dropped) for shard in self._shards), Counter()))

    @property
    def why_dropped(self) -> str:
        """Why families were dropped, in words; empty if none were."""
        words = {"raised": "raised an exception"}
        return ", ".join(f"{num:,} {words.get(why, why)}" for why, num in self.dropped.items())

    @property
    def nuisance(self) -> Mapping[str, Any] | None:
        """Parameters of the nuisance; None if the world has none."""
        return self.world.get("nuisance")

    @property
    def noise_kind(self) -> NoiseKind:
        """The kind of the world's noise; see `cqm.worlds.NoiseKind`.

        Seeds count as `none` if no family of the set drew from its generator. Sets from earlier
        versions, or with undeclared noise, do not store the kind; it is taken to be `signal` for a
        `FunctionWorld` and `seeds` otherwise.
        """
        if self[:0].noise.shape[-1] == 0:
            return "none"
        inferred: NoiseKind = "signal" if self.world["kind"] == "function" else "seeds"
        kind: NoiseKind = self.manifest.get("noise_kind", inferred)
        return "none" if kind == "seeds" and not self._may_have_drawn() else kind

    @property
    def noise(self) -> np.ndarray:
        """Noise of the world, shared by the arms, `[n, draws, horizon, width]`; width may be 0."""
        if "noise" not in self.array_names():
            return np.empty((len(self), self.recipe.draws, self.recipe.horizon, 0))
        noise = self.array("noise")
        return noise.reshape(*noise.shape[:3], math.prod(noise.shape[3:]))

    @property
    def observations(self) -> np.ndarray:
        """Observation of each state, `[n, observations]`."""
        return self._mixed(
            "observations", lambda read: read("observation"), lambda read: read("nuisance_start")
        )

    @property
    def outcomes(self) -> np.ndarray:
        """Discounted feature sums, `[n, draws, arms, features]`."""
        return self._mixed("features", lambda read: read("outcome"), self._common)

    def effects(self, reference: Reference = None) -> np.ndarray:
        """Centred outcomes, `[n, draws, actions, features]`.

        Controls from the box are centred over those of their own family. Outcomes are centred
        before mixing, so that signals common to the branches cancel exactly.
        """
        self.require_all_arms()
        return self._mixed(
            "features",
            lambda read: center(read("outcome"), reference),
            lambda read: _centered_or_zero(self._common(read), reference),
        )

    @property
    def first_features(self) -> np.ndarray:
        """Features of the first step of every branch, `[n, draws, arms, features]`."""
        return self._mixed(
            "features", lambda read: read("first"), lambda read: read("nuisance")[..., 0, :]
        )

    @property
    def step_features(self) -> np.ndarray:
        """Features of every step, `[n, draws, arms, horizon, features]`; needs `per_step`."""
        self._require_steps()
        return self._mixed("features", lambda read: read("steps"), lambda read: read("nuisance"))

    def step_effects(self, reference: Reference = None) -> np.ndarray:
        """Undiscounted effects at every step, `[n, draws, horizon, actions, features]`."""
        self.require_all_arms()
        self._require_steps()
        return self._mixed(
            "features",
            lambda read: center(np.swapaxes(read("steps"), 2, 3), reference),
            lambda read: _centered_or_zero(np.swapaxes(read("nuisance"), 2, 3), reference),
        )

    @property
    def arms(self) -> np.ndarray:
        """The candidate action of each arm of each family, `[n, arms]`."""
        self.require_menu("arms")
        return self.array("arms").astype(np.int64)

    @property
    def first_controls(self) -> np.ndarray:
        """Controls of the first step of every branch, `[n, arms, controls]`."""
        if self.has_menu:
            return self.candidate_actions[self.arms]
        return self.array("first_controls")

    @property
    def later_controls(self) -> np.ndarray:
        """Controls after the first step, `[n, draws, arms or 1, horizon − 1, controls]`."""
        if self.recipe.continuation.on_box:
            return self.array("continuation")
        return self.candidate_actions[self.continuation]

    @property
    def continuation(self) -> np.ndarray:
        """Candidate actions after the first, `[n, draws, arms or 1, horizon − 1]`."""
        if self.recipe.continuation.on_box:
            raise ValueError(
                "the later actions of this set are controls from the box, not candidate actions; "
                "use later_controls"
            )
        return self.array("continuation").astype(np.int64)

    @property
    def index(self) -> np.ndarray:
        """Index of each state in its collection, `[n]`."""
        return self.array("index")

    @property
    def families(self) -> Families:
        """The families of the set by seed and index, even if it was combined or sliced."""
        parts = [
            Families.of(seed, shard.read("index", slice(start, stop)))
            for shard, start, stop, seed in self._parts
        ]
        return Families.none().union(*parts)

    @property
    def family_seeds(self) -> np.ndarray:
        """Collection seed of each family, `[n]`; see `cqm.branches.families`."""
        sizes = [part.stop - part.start for part in self._parts]
        return np.repeat(np.array([part.seed for part in self._parts], np.int64), sizes)

    @property
    def states(self) -> dict[str, np.ndarray]:
        """Stored simulator states, for `World.restore`."""
        names = [name for name in self.array_names() if name.startswith("state.")]
        return {name.removeprefix("state."): self.array(name) for name in names}

    @property
    def mixing(self) -> Mapping[str, np.ndarray] | None:
        """Stored matrices that mix the nuisance into observations and features, if there is one."""
        return self._mixing

    def array_names(self) -> list[str]:
        """Names of the stored arrays; in a combined set, of those that every collection has."""
        names = [shard.names() for shard in self._first_shards]
        return [name for name in names[0] if all(name in others for others in names[1:])]

    def array(self, name: str) -> np.ndarray:
        """A stored array as it is, in native coordinates, without the nuisance mixed in."""
        if not isinstance(name, str) or name not in self.array_names():
            raise ValueError(f"unknown array {shown(name)}; available: {self.array_names()}")
        return np.concatenate([s.read(name, slice(a, b)) for s, a, b, _ in self._parts])

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per branch; see `cqm.branches.export`."""
        return data_frame(branch_columns(self))

    def to_parquet(self, path: str | Path) -> None:
        """Write one row per branch to a Parquet file, for analysis elsewhere."""
        file = checked_path("path", path)
        if file.is_dir():
            raise ValueError(f"path must be the path of a file; {file} is a directory")
        output_directory("path", file.parent)
        write_parquet(self, file)

    def verify(self) -> None:
        """Check every byte of the set against its checksums."""
        for shard in self._shards:
            shard.verify()

    def _mixed(
        self,
        what: Literal["observations", "features"],
        native_fn: Callable[[Read], np.ndarray],
        nuisance_fn: Callable[[Read], np.ndarray],
    ) -> np.ndarray:
        """Native values, mixed with the nuisance if the world has one.

        Mixing is done in whole blocks counted from the start of a shard, whichever rows are wanted,
        because the rounding of a matrix product depends on its number of rows.
        """
        results = []
        for shard, start, stop, _ in self._parts:
            begin = start - start % BLOCK
            rows = slice(begin, min(-(-stop // BLOCK) * BLOCK, shard.num_families))

            read = functools.partial(shard.read, rows=rows)
            values = native_fn(read)
            if self._mixing is not None and self.nuisance is not None:
                scaled = self.nuisance["amplitude"] * nuisance_fn(read).astype(float)
                scaled = np.broadcast_to(scaled, (*values.shape[:-1], scaled.shape[-1]))
                values = mix(scaled, values, self._mixing[what])
            results.append(values[start - begin : stop - begin])
        return np.concatenate(results)

    def _may_have_drawn(self) -> bool:
        """Whether any family used its seeds; also True if that is not recorded."""
        return any(
            "drew" not in shard.names() or bool(shard.read("drew", slice(start, stop)).any())
            for shard, start, stop, _ in self._parts
            if start < stop
        )

    def _common(self, read: Read) -> np.ndarray:
        """Discounted sum of the nuisance path, `[n, draws, arms or 1, dimension]`."""
        return self.recipe.discounted(read("nuisance"))

    def require_all_arms(self) -> None:
        """Raise if a family lacks an arm for some candidate action."""
        if self.has_menu and self.num_arms < self.num_actions:
            raise ValueError(
                f"each family branches {self.num_arms} of {self.num_actions} actions, so its "
                "effects cannot be centred alone; use pairwise differences of `outcomes`"
            )

    def require_menu(self, what: str) -> None:
        """Raise if first actions are controls from the box."""
        if not self.has_menu:
            raise ValueError(
                f"{what} needs first actions from the menu; the first actions of this set are "
                "controls from the box; collect with actions='menu'"
            )

    def _require_steps(self) -> None:
        if not self.recipe.per_step:
            raise ValueError("features of every step were not stored; collect with per_step=True")


def split_size(test: int | float, num: int, what: str) -> int:
    """Size of the test set of a split, given as a number or as a share; neither set is empty."""
    if isinstance(test, float | np.floating):
        size = round(float(np.clip(number("test", test), -1, 2)) * num)
    else:
        size = whole_number("test", test)
    if not 0 < size < num:
        raise ValueError(
            f"test must leave some of the {num} {what} for each set; got {test}, which is {size}"
        )
    return size


def as_branches(name: str, value: Any) -> Branches:
    """Branches, or those in a directory."""
    if isinstance(value, str | Path):
        return Branches.open(value)
    return instance(name, value, Branches, "Branches or their directory")


def combine(sets: Sequence[Branches | str | Path]) -> Branches:
    """Combine sets of the same world and recipe that were collected with different seeds.

    A set may be given as its directory.

    >>> import cqm
    >>> world = cqm.load_world("cartpole-swingup")
    >>> len(combine([cqm.collect(world, states=4, seed=seed) for seed in (1, 2)]))
    8
    """
    given = [as_branches("a set", each) for each in sequence("sets", sets, "branches")]
    if not given:
        raise ValueError("combine needs at least one set of branches; got none")
    first = given[0]
    for other in given[1:]:
        changes = storage.differences(_comparable(first), _comparable(other))
        if changes:
            raise ValueError("branches of different configurations cannot be combined:\n" + changes)
    seen = Families.none()
    for branches in given:
        if shared := seen.overlap(branches.families):
            raise ValueError(
                f"the sets to combine share {in_words(shared)}; collect them with different seeds"
            )
        seen = seen.union(branches.families)
    seeds = {seed for branches in given for seed in branches.seeds}
    several: dict[str, Any] = {"combined_seeds": sorted(seeds)} if len(seeds) > 1 else {}
    kinds = {b.manifest["noise_kind"] for b in given if "noise_kind" in b.manifest}
    if kinds:  # seeds claim less than a signal
        several["noise_kind"] = kinds.pop() if len(kinds) == 1 else "seeds"
    combined = Branches(
        {**first.manifest, **several},
        list({id(shard): shard for branches in given for shard in branches._shards}.values()),
        mixing=first._mixing,
        parts=[part for branches in given for part in branches._parts],
    )
    combined._first_shards = [shard for branches in given for shard in branches._first_shards]
    return combined


def _comparable(branches: Branches) -> dict[str, Any]:
    """The parts of a manifest that sets to be combined must share; the world fixes the mixing."""
    own = ("num_shards", "blocks_per_shard", "mixing", "combined_seeds", "noise_kind")
    shared = {name: value for name, value in branches.manifest.items() if name not in own}
    return {**shared, "recipe": {**branches.recipe.to_json(), "seed": None, "states": None}}


def _centered_or_zero(common: np.ndarray, reference: Reference) -> np.ndarray:
    """Nuisance part of the effects: zero if the branches share one path."""
    return np.zeros_like(common) if common.shape[-2] <= 1 else center(common, reference)
