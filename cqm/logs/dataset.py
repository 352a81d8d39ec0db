"""Logs: trajectories with one action per decision, for users who cannot clone their system's state.

Each row holds one decision and its outcome: the observation, the action taken, the later actions,
and the features of every step. Nothing was branched, so an estimator must separate the effect of an
action from everything else that differs between trajectories. `Logs.coverage` tells whether the
logs make this possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cqm import storage
from cqm.arguments import (
    different_texts,
    flag,
    generator,
    instance,
    mapping,
    output_directory,
    path as checked_path,
    real_numbers,
    shown,
    texts,
    whole_number,
    whole_number_or_none,
)
from cqm.branches.dataset import Branches, as_branches, split_size
from cqm.branches.families import Families
from cqm.branches.recipe import Continuation, Recipe, draw_actions
from cqm.columns import Column
from cqm.display import data_frame, named_columns
from cqm.logs.files import SHARDS, description, read_logs, write_logs
from cqm.logs.roles import MissingValues, Roles, logs_from_table
from cqm.logs.trajectories import Trajectories
from cqm.logs.validate import (
    AXES,
    candidate_rows,
    check_axes,
    check_logs,
    discrete_actions,
    equal_steps,
    integers,
    named_actions,
    propensity_rows,
)
from cqm.names import checked_action_names
from cqm.table_files import read_csv, read_parquet
from cqm.tables import as_table
from cqm.worlds.contract import World
from cqm.worlds.identity import stored_identity

if TYPE_CHECKING:
    from cqm.logs.shards import ShardedLogs

MAX_TRAJECTORIES = 10**9  # to record
PropensityFn = Callable[[np.ndarray], np.ndarray]  # observations [n, d] -> [n, actions]
BehaviourFn = Callable[[np.ndarray], np.ndarray]  # an observation [d] -> probabilities [actions]


@dataclass(frozen=True, eq=False, repr=False)
class Logs(Trajectories):
    """Trajectories of the same length, each starting with a decision.

    Use `Logs.from_arrays` to make logs from your own arrays.
    """

    observations: np.ndarray  # [n, observations], at the decision
    actions: np.ndarray  # [n, horizon], candidate actions: the decision and the later actions
    features: np.ndarray  # [n, horizon, features], of every step
    candidate_actions: np.ndarray  # [actions, controls]
    propensities: np.ndarray | None  # [n, actions], of the decision; None if unknown
    observation_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    recipe: Recipe  # horizon, discount and the law of the later actions
    world: Mapping[str, Any]  # identity of the recorded system
    groups: np.ndarray | None = None  # [n], one number per episode; None if rows are independent
    action_names: tuple[str, ...] = ()  # one per candidate action; by default their indices
    families: np.ndarray | None = None  # [n, 2], seed and index in branches; None if unknown
    columns: tuple[Column, ...] = ()  # the table that the observations were made from, if any

    def __post_init__(self) -> None:
        check_logs(self)
        names = checked_action_names(self.action_names or None, self.num_actions)
        object.__setattr__(self, "action_names", names)

    @classmethod
    def from_arrays(
        cls,
        observations: ArrayLike,
        actions: ArrayLike,
        features: ArrayLike,
        *,
        num_actions: int | None = None,
        candidate_actions: ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        propensities: ArrayLike | None = None,
        groups: ArrayLike | None = None,
        continuation: str | Sequence[float] = "behaviour",
        discount: float = 0.95,
        observation_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        features_are_next_observation: bool = False,
        world: Mapping[str, Any] | None = None,
    ) -> Logs:
        """Make logs from your own arrays.

        Args:
            observations: Observation at each decision, `[n, observations]`.
            actions: Indices or names of the candidate actions taken, `[n, horizon]`, or `[n]` for
                one step.
            features: Features of every step, `[n, horizon, features]`.
            num_actions: Number of candidate actions; by default the largest action index plus one.
            candidate_actions: Their controls, `[actions, controls]`; by default their indices.
            action_names: Their names; by default the names in `actions`, sorted, or their indices
                if `actions` has no names.
            propensities: Probabilities of the candidate actions at each decision, `[n, actions]`,
                or `[actions]` if all decisions share them; estimated by default.
            groups: Episode number of each row, `[n]`. Rows of one episode stay together when data
                are split, so that no model is tested on an episode it learned from.
            continuation: Law of the later actions: `uniform`, one probability per candidate
                action, or a name for a behaviour that depends on the state and is estimated.
            discount: Discount factor of the outcome.
            observation_names: Names of the observations; `obs_0`, ... by default.
            feature_names: Names of the features; `feature_0`, ... by default.
            features_are_next_observation: Whether the features of a step are the observation of
                the next state; the names of the observations then also name the features. You can
                instead give features and observations the same names.
            world: Identity of the world, needed to calibrate a model with branches of that world.

        >>> rng = np.random.default_rng(0)
        >>> actions = rng.integers(2, size=(6, 1))
        >>> Logs.from_arrays(rng.normal(size=(6, 3)), actions, actions[..., None] + 0.5)
        Logs(logs, 6 trajectories, 2 actions, horizon 1, discount 0.95, propensities unknown)
        """
        observations = real_numbers("observations", observations)
        flag("features_are_next_observation", features_are_next_observation)
        actions, action_names = named_actions(equal_steps("actions", actions), action_names)
        actions = discrete_actions(actions)
        actions = actions[:, None] if actions.ndim == 1 else actions
        features = real_numbers("features", equal_steps("features", features))
        check_axes(observations=observations, actions=actions, features=features)
        if num_actions is None and candidate_actions is None and action_names is not None:
            num_actions = len(texts("action_names", action_names))
        candidates = candidate_rows(actions, num_actions, candidate_actions)
        law = Continuation.of(continuation)
        if law.open_loop:
            law.probabilities(len(candidates))  # raises if they do not fit
        if propensities is not None:
            propensities = propensity_rows(propensities, len(observations), len(candidates))
        if observation_names is None:
            observation_names = [f"obs_{i}" for i in range(observations.shape[1])]
        if feature_names is None:
            plain = [f"feature_{i}" for i in range(features.shape[2])]
            feature_names = observation_names if features_are_next_observation else plain
        observation_names = texts("observation_names", observation_names)
        feature_names = texts("feature_names", feature_names)
        if features_are_next_observation and list(feature_names) != list(observation_names):
            raise ValueError(
                "features that are the next observation must share its names, "
                f"{list(observation_names)}; got {list(feature_names)}"
            )
        return cls(
            observations,
            actions,
            features,
            candidates,
            propensities,
            different_texts("observation_names", observation_names),
            different_texts("feature_names", feature_names),
            Recipe(
                states=max(1, len(observations)),
                horizon=max(1, actions.shape[1]),
                discount=discount,
                warmup=None,
                continuation=law,
                per_step=True,
            ),
            {"name": "logs", "kind": "logs"} if world is None else _identity(world),
            None if groups is None else integers("groups", equal_steps("groups", groups)),
            checked_action_names(action_names, len(candidates)),
        )

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        observations: Sequence[str],
        action: str,
        outcomes: Sequence[str],
        propensities: str | Mapping[str, str] | None = None,
        episode: str | None = None,
        time: str | None = None,
        categorical: Sequence[str] = (),
        missing: MissingValues = "error",
    ) -> Logs:
        """Make logs from a table with one decision and its outcomes per row.

        Each row is one trajectory of one step: the outcomes become features, and other columns are
        ignored. Text, categories and booleans among the observations become indicators, one for
        each category but the first. `logs.columns` remembers how, so that models can be asked about
        tables with the same columns.

        Args:
            frame: A table from pandas, Polars or PyArrow, or a dictionary of columns.
            observations: Columns known before the action is chosen.
            action: Column of the action taken. Its values become the action names, in order.
            outcomes: Columns of numbers that follow from the action.
            propensities: With two actions, the column with the probability of the action that was
                taken; otherwise a column for each action, by the action's name. Estimated by
                default.
            episode: Column that tells which rows belong together, such as those of one patient;
                they stay together when data are split.
            time: Column to sort the rows by, of numbers or text such as 2024-05-31; rows of one
                episode stay together.
            categorical: Observations whose numbers are codes, to be treated as text.
            missing: What to do about missing values: raise an `error`; `drop` their rows; or fill
                in the `mean` of the observation and add an indicator. Missing text then becomes a
                category. Actions and outcomes are never filled in.

        >>> table = {"age": [30, 40, 50, 60], "drug": ["no", "yes"] * 2, "pain": [5, 4, 6, 3]}
        >>> Logs.from_frame(table, observations=["age"], action="drug", outcomes=["pain"])
        Logs(logs, 4 trajectories, 2 actions (no, yes), horizon 1, discount 0.95, propensities
        unknown)
        """
        roles = Roles(
            observations, action, outcomes, propensities, episode, time, categorical, missing
        )
        return logs_from_table(as_table(frame, "the table", roles.columns), roles)[0]

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        observations: Sequence[str],
        action: str,
        outcomes: Sequence[str],
        propensities: str | Mapping[str, str] | None = None,
        episode: str | None = None,
        time: str | None = None,
        categorical: Sequence[str] = (),
        missing: MissingValues = "error",
        delimiter: str | None = None,
        encoding: str = "utf-8",
    ) -> Logs:
        """Make logs from a CSV file whose first row has the column names; see `from_frame`.

        Empty cells, `NA`, `N/A`, `NaN` and `null` are missing values. The delimiter is detected by
        default: comma, semicolon (with decimal commas), tab or bar.
        """
        roles = Roles(
            observations, action, outcomes, propensities, episode, time, categorical, missing
        )
        table = read_csv(path, roles.columns, delimiter=delimiter, encoding=encoding)
        return logs_from_table(table, roles)[0]

    @classmethod
    def from_parquet(
        cls,
        path: str | Path,
        *,
        observations: Sequence[str],
        action: str,
        outcomes: Sequence[str],
        propensities: str | Mapping[str, str] | None = None,
        episode: str | None = None,
        time: str | None = None,
        categorical: Sequence[str] = (),
        missing: MissingValues = "error",
    ) -> Logs:
        """Make logs from a Parquet file (extra `parquet`); see `from_frame`."""
        roles = Roles(
            observations, action, outcomes, propensities, episode, time, categorical, missing
        )
        return logs_from_table(read_parquet(path, roles.columns), roles)[0]

    @classmethod
    def from_branches(
        cls,
        branches: Branches,
        *,
        propensities: ArrayLike | PropensityFn | None = None,
        rng: np.random.Generator,
    ) -> Logs:
        """Logs with one randomly chosen arm of every family, as in an ordinary log.

        Args:
            branches: Branches with all arms and every step; the first draw of each family is used.
            propensities: Probabilities of the first action, `[actions]` or `[n, actions]`, or a
                function that computes them from the observations; uniform by default.
            rng: Random generator that chooses the arms.
        """
        branches = as_branches("branches", branches)
        generator("rng", rng)
        branches.require_menu("Logs.from_branches")
        branches.require_all_arms()
        observations, num = branches.observations, len(branches)
        if callable(propensities):
            try:
                propensities = propensities(observations)
            except Exception as error:  # a user's function may raise anything
                raise ValueError(f"propensities raised {type(error).__name__}: {error}") from error
        if propensities is None:
            propensities = np.full(branches.num_actions, 1 / branches.num_actions)
        rows = propensity_rows(propensities, num, branches.num_actions)
        first = draw_actions(rows, rng.random(num))
        steps, later = branches.step_features, branches.continuation[:, 0]
        families = np.arange(num)
        later = later[families, first if later.shape[1] > 1 else 0]
        return cls(
            observations,
            np.concatenate([first[:, None], later], axis=1),
            steps[families, 0, first],
            branches.candidate_actions,
            rows,
            branches.observation_names,
            branches.feature_names,
            replace(branches.recipe, arms=None, draws=1, states=max(1, num)),
            dict(branches.world),
            action_names=branches.action_names,
            families=np.stack([branches.family_seeds, branches.index], axis=1),
        )

    @classmethod
    def from_gymnasium(
        cls,
        env: Any,
        *,
        trajectories: int,
        horizon: int,
        behaviour: BehaviourFn | None = None,
        candidate_actions: ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        stride: int | None = None,
        discount: float = 0.95,
        world: World | None = None,
        seed: int = 0,
        out: str | Path | None = None,
    ) -> Logs | ShardedLogs:
        """Record a Gymnasium environment, without cloning it; see `cqm.logs.sources`.

        Args:
            env: An environment, or the id of a registered one.
            trajectories: Number of windows to record.
            horizon: Steps per window.
            behaviour: Function from a flat observation to the probabilities of the candidate
                actions, which are kept as propensities; uniform by default.
            candidate_actions: `[actions, controls]`; by default all actions of a Discrete space.
            action_names: Their names; by default those of the world, or else their indices.
            stride: Steps between the starts of consecutive windows; by default the horizon, so that
                the windows do not overlap.
            discount: Discount factor of the outcome.
            world: A world made from the same environment; the logs take its identity and names,
                and its branches can calibrate a model.
            seed: Random seed for the environment and the actions.
            out: Directory to write the logs to, in shards, so that their number does not matter;
                rerun the call to resume it. By default they are held in memory.
        """
        from cqm.logs.sources import recorded, windows

        law = "uniform" if behaviour is None else "behaviour"
        _check_windows(trajectories, horizon, stride, seed, world)
        with recorded(env, behaviour, candidate_actions, seed) as source:
            return windows(
                source, trajectories, horizon, stride, discount, law, world, action_names, seed, out
            )

    @classmethod
    def from_minari(
        cls,
        dataset: Any,
        *,
        horizon: int,
        candidate_actions: ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        tolerance: float = 1e-6,
        trajectories: int | None = None,
        stride: int | None = None,
        discount: float = 0.95,
        continuation: str | Sequence[float] = "behaviour",
        world: World | None = None,
        seed: int = 0,
        out: str | Path | None = None,
    ) -> Logs | ShardedLogs:
        """Logs from a Minari data set, with unknown propensities; see `cqm.logs.sources`.

        Args:
            dataset: A data set, or the id of a local one.
            horizon: Steps per window.
            candidate_actions: `[actions, controls]`; by default all actions of a Discrete space.
                Each logged action is assigned to the nearest candidate; it is an error if their
                distance exceeds the tolerance.
            action_names: Their names; see `Logs.from_gymnasium`.
            tolerance: Largest distance between a logged action and its candidate. With a large
                tolerance, a candidate's effect is an average over the actions near it.
            trajectories: Maximum number of windows; all by default.
            stride: Steps between the starts of consecutive windows; by default the horizon.
            discount: Discount factor of the outcome.
            continuation: Law of the later actions; see `Logs.from_arrays`.
            world: A world made from the same environment; see `Logs.from_gymnasium`.
            seed: Random seed for the placeholder actions after a termination, which have no effect.
            out: Directory to write the logs to, in shards; see `Logs.from_gymnasium`.
        """
        from cqm.logs.sources import read_minari, windows

        if trajectories is not None:
            whole_number("trajectories", trajectories, least=1)
        _check_windows(1, horizon, stride, seed, world)
        source = read_minari(dataset, candidate_actions, tolerance)
        return windows(
            source,
            trajectories,
            horizon,
            stride,
            discount,
            continuation,
            world,
            action_names,
            seed,
            out,
        )

    @classmethod
    def from_episodes(
        cls,
        episodes: Iterable[Mapping[str, Any]],
        *,
        horizon: int,
        num_actions: int | None = None,
        candidate_actions: ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        stride: int | None = None,
        discount: float = 0.95,
        continuation: str | Sequence[float] = "behaviour",
        observation_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        features_are_next_observation: bool = False,
        world: Mapping[str, Any] | None = None,
        out: str | Path | None = None,
    ) -> Logs | ShardedLogs:
        """Cut episodes of any number and length into windows, each a decision and its outcome.

        A window lies within one episode, so an episode shorter than the horizon has none, and the
        last steps of an episode are decisions of no window. If episodes end because of what the
        actions did, this would select windows by their outcome: add the steps that follow, such as
        features of zero and an indicator.

        Args:
            episodes: Mappings with `observations` `[steps, observations]`, `actions` `[steps]`,
                `features` `[steps, features]` and, if known, `propensities` `[steps, actions]`. An
                iterator is read once, one episode at a time.
            horizon: Steps per window.
            num_actions: Number of candidate actions. If neither this nor `candidate_actions` nor
                `action_names` is given, the largest action index plus one; with `out`, one of the
                three is needed.
            candidate_actions: Their controls; see `Logs.from_arrays`.
            action_names: Their names; see `Logs.from_arrays`.
            stride: Steps between the starts of consecutive windows; by default the horizon, so that
                the windows do not overlap.
            discount: Discount factor of the outcome.
            continuation: Law of the later actions; see `Logs.from_arrays`.
            observation_names: Names of the observations; `obs_0`, ... by default.
            feature_names: Names of the features; `feature_0`, ... by default.
            features_are_next_observation: See `Logs.from_arrays`.
            world: Identity of the world; see `Logs.from_arrays`.
            out: Directory to write the logs to, in shards, so that their number does not matter;
                rerun the call to resume it. By default they are held in memory.

        >>> rng = np.random.default_rng(0)
        >>> def episode(steps):
        ...     seen, actions = rng.normal(size=(steps, 2)), rng.integers(2, size=steps)
        ...     return {"observations": seen, "actions": actions, "features": seen + 1}
        >>> Logs.from_episodes([episode(7), episode(3), episode(12)], horizon=4, stride=2)
        Logs(logs, 7 trajectories, 2 actions, horizon 4, discount 0.95, propensities unknown)
        """
        from cqm.logs.windows import cut, gathered

        _check_windows(1, horizon, stride, 0, None)
        if out is not None and num_actions is None and candidate_actions is None:
            if action_names is None:
                raise ValueError(
                    "with `out`, the candidate actions must be known before all episodes are read; "
                    "pass num_actions, candidate_actions or action_names"
                )
            num_actions = len(texts("action_names", action_names))

        def make(**arrays: Any) -> Logs:
            return cls.from_arrays(
                **arrays,
                num_actions=num_actions,
                candidate_actions=candidate_actions,
                action_names=action_names,
                continuation=continuation,
                discount=discount,
                observation_names=observation_names,
                feature_names=feature_names,
                features_are_next_observation=features_are_next_observation,
                world=world,
            )

        return gathered(
            cut(episodes, horizon, stride or horizon),
            make,
            out,
            nothing=f"no episode has a window of {horizon} steps",
        )

    def __len__(self) -> int:
        return len(self.observations)

    def __getitem__(self, rows: slice | np.ndarray) -> Logs:
        try:
            rows = rows if isinstance(rows, slice) else _row_numbers(rows, len(self))
            np.arange(len(self))[rows]
        except (TypeError, ValueError, IndexError):
            raise ValueError(
                "logs can only be indexed by slices or arrays of row numbers below "
                f"{len(self)}; got {shown(rows)}"
            ) from None
        return replace(self, **{name: values[rows] for name, values in self.row_arrays().items()})

    def split(self, test: int | float) -> tuple[Logs, Logs]:
        """Split into training and test trajectories; `test` is a number or a share of them.

        Groups are never divided: with groups, the test set may be larger than requested.
        """
        num = split_size(test, len(self), "trajectories")
        if self.groups is None:
            return self[: len(self) - num], self[len(self) - num :]
        _, first, number = np.unique(self.groups, return_index=True, return_inverse=True)
        from_last = np.argsort(-first)
        reached = np.cumsum(np.bincount(number)[from_last]) >= num
        chosen = np.isin(number, from_last[: reached.argmax() + 1])
        if chosen.all():
            raise ValueError(
                f"test must leave some of the {len(first)} groups for each set; got {test}, which "
                "takes all of them"
            )
        return self[~chosen], self[chosen]

    def with_propensities(self, propensities: ArrayLike | None) -> Logs:
        """The same logs with different propensities; None to estimate them."""
        if propensities is not None:
            propensities = propensity_rows(propensities, len(self), self.num_actions)
        return replace(self, propensities=propensities)

    @property
    def first_actions(self) -> np.ndarray:
        """Action taken at each decision, `[n]`."""
        return self.actions[:, 0]

    @property
    def outcomes(self) -> np.ndarray:
        """Discounted feature sums, `[n, features]`."""
        return self.recipe.discounted(self.features)

    @property
    def known_families(self) -> Families:
        """The families of branches that these logs were made from; none for other logs.

        Older logs lack the index of each family and store only the seed, so all families of that
        seed are returned. A stored warm-up shows that such logs were made from branches.
        """
        if self.families is not None:
            return Families.of(*self.families.T)
        if self.recipe.warmup is not None:
            return Families.whole_seed(self.recipe.seed)
        return Families.none()

    def row_arrays(self) -> dict[str, Any]:
        """The arrays with one row per trajectory, by name."""
        return {name: getattr(self, name) for name in self.array_names()}

    def array_names(self) -> list[str]:
        """Names of the arrays with one row per trajectory."""
        return [name for name in AXES if getattr(self, name) is not None]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of one of the arrays."""
        return getattr(self, name)[start:stop]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per trajectory."""
        return data_frame(
            {
                "action": self.first_actions,
                "action_name": np.array(self.action_names)[self.first_actions],
                **named_columns("observation", self.observation_names, self.observations),
                **named_columns("outcome", self.feature_names, self.outcomes),
            }
        )

    def digest(self) -> str:
        """A checksum of the trajectories and of what describes them."""
        return storage.sha256_json([description(self), storage.sha256_arrays(self.row_arrays())])

    def save(self, directory: str | Path) -> None:
        """Write the arrays and a description with their checksum."""
        place = output_directory("directory", directory)
        if (place / SHARDS).exists():
            raise ValueError(f"{place} contains logs in shards; choose another directory")
        write_logs(self, place)

    @classmethod
    def load(cls, directory: str | Path) -> Logs:
        """Load logs that `save` or a `LogWriter` wrote; raises if the files are damaged."""
        logs = cls.open(directory)
        return logs if isinstance(logs, Logs) else logs.load()

    @classmethod
    def open(cls, directory: str | Path) -> Logs | ShardedLogs:
        """Open logs on disk: those in shards stay there, others are loaded."""
        from cqm.logs.shards import ShardedLogs

        place = checked_path("directory", directory)
        if (place / SHARDS).exists():
            return ShardedLogs.open(place)
        return read_logs(cls, place)


def _identity(world: Any) -> dict[str, Any]:
    """The identity of a world, which may be given as the world itself."""
    if isinstance(world, World):
        return stored_identity(world)
    return dict(mapping("world", world, "the identity of a world, such as world.identity()"))


def _row_numbers(rows: Any, num: int) -> np.ndarray:
    """Row numbers, or one True or False per row, as an array."""
    array = np.asarray(rows)
    if array.ndim != 1 or (array.dtype.kind not in "biu" and array.size):
        raise ValueError
    return array if array.size else np.zeros(0, int)


def _check_windows(
    trajectories: int, horizon: int, stride: int | None, seed: int, world: World | None
) -> None:
    whole_number("trajectories", trajectories, least=1, most=MAX_TRAJECTORIES)
    whole_number("horizon", horizon, least=1)
    whole_number_or_none("stride", stride, least=1)
    whole_number("seed", seed, least=0)
    if world is not None:
        instance("world", world, World, "a World or None")
