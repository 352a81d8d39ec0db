"""The training loop behind every model and every baseline.

Updates are compiled into one program that runs a chunk of them; progress, checkpoints and metrics
happen between chunks. The batch of an update depends only on (seed, step), so an interrupted
training run that is resumed gives the same model, bit for bit, on the same machine with the same
versions and threads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from cqm import storage
from cqm.arguments import choice, number, whole_number, whole_number_or_none
from cqm.capacity import require_memory, size_text
from cqm.display import counted
from cqm.models.checkpoint import Checkpoint
from cqm.models.network import num_members
from cqm.models.training_log import TrainingLog
from cqm.progress import duration, is_shown, progress, say

Model = TypeVar("Model", bound=eqx.Module)
Batch = dict[str, Array]
LossFn = Callable[[Any, Batch, Array, Any], Array]  # model, batch, random key, target -> loss
MemberLossFn = Callable[[Any, Batch], Array]  # one member, its own batch -> loss
_CHECKPOINT = ".checkpoint.safetensors"  # end of a checkpoint's name
_TIMED_UPDATES = 8
_MOST = 2**31 - 1  # JAX counts updates in 32 bits
MAX_SEED = 2**32 - 1  # JAX's random keys have 32 bits


@dataclass(frozen=True)
class Training:
    """Settings of the training loop; the defaults are the paper's."""

    updates: int = 4_000
    """Number of gradient steps."""
    batch_size: int = 256
    """Batch size, in states."""
    learning_rate: float = 3e-4
    """AdamW learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Whether the learning rate stays constant or decays to zero along a cosine."""
    weight_decay: float = 1e-5
    """AdamW weight decay."""
    clip: float = 10.0
    """Gradients are clipped to this global norm."""
    target_every: int = 0
    """Updates between copies to the target network; 0 for no target network."""
    chunk: int = 250
    """Updates compiled into one call; checkpoints are written between chunks."""
    seed: int | None = None
    """Random seed for batches and for the loss; None for the model's own seed."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = {}
        for name in ("updates", "batch_size", "chunk"):
            values[name] = whole_number(name, getattr(self, name), least=1, most=_MOST)
        for name in ("learning_rate", "clip"):
            values[name] = number(name, getattr(self, name), above=0)
        choice("schedule", self.schedule, ("constant", "cosine"))
        values["weight_decay"] = number("weight_decay", self.weight_decay, least=0)
        values["target_every"] = whole_number(
            "target_every", self.target_every, least=0, most=_MOST
        )
        values["seed"] = whole_number_or_none("seed", self.seed, least=0, most=MAX_SEED)
        for name, value in values.items():  # plain numbers, which JSON and JAX take
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Training({', '.join(changed)})"

    def with_seed(self, seed: int) -> Training:
        """The same settings with a seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def optimiser(self, updates: Any) -> optax.GradientTransformation:
        """Gradient clipping followed by AdamW, for a number of updates that may be traced."""
        rate: Any = self.learning_rate
        if self.schedule == "cosine":
            rate = lambda step: self.learning_rate * (1 + jnp.cos(jnp.pi * step / updates)) / 2
        return optax.chain(
            optax.clip_by_global_norm(self.clip), optax.adamw(rate, weight_decay=self.weight_decay)
        )


class Source(Protocol):
    """Provides the rows that batches are drawn from."""

    @property
    def num(self) -> int | None:
        """Batches are drawn from this many rows at the start of a window; None for all."""

    def window(self, chunk: int) -> Batch:
        """The rows for one chunk of updates; the same number of rows for every chunk."""


@dataclass(frozen=True)
class InMemory:
    """A source that holds all rows in memory."""

    arrays: Batch  # [rows, ...] each
    num: int | None = None

    def window(self, chunk: int) -> Batch:
        """All rows."""
        return self.arrays


@dataclass(frozen=True)
class Trained(Generic[Model]):
    """A fitted model and its losses."""

    model: Model
    losses: np.ndarray  # [chunks], mean over each chunk


class _State(eqx.Module):
    """Everything a checkpoint holds besides the losses."""

    model: Any
    optimiser: Any
    target: Any = None  # only with a target network


@dataclass(frozen=True)
class Objective:
    """A loss with the programs compiled for it, so that several training runs can share them.

    They are released together with the objective: a process that keeps hundreds crashes.
    """

    loss_fn: Callable
    programs: dict[Any, Callable] = field(default_factory=dict)

    @classmethod
    def of(cls, loss: Callable | Objective) -> Objective:
        """The objective itself, or a new one for a loss."""
        return loss if isinstance(loss, Objective) else cls(loss)


Stage = tuple[str, MemberLossFn | Objective, Training]  # name, loss and settings of a run


def train(
    model: Model,
    loss: LossFn | Objective,
    source: Source | Mapping[str, Any],
    training: Training,
    *,
    directory: str | Path | None = None,
    name: str = "training",
    identity: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    evaluate_fn: Callable[[Model], Mapping[str, float]] | None = None,
    later_fn: Callable[[], float] = lambda: 0.0,
    show_progress: bool | None = None,
) -> Trained[Model]:
    """Fit a model by stochastic gradient descent.

    Args:
        model: The initial model.
        loss: `(model, batch, key, target) -> scalar`; the target is an earlier copy of the model,
            or None without a target network. Runs that share an objective compile once.
        source: Rows to draw batches from.
        training: Settings, including the seed.
        directory: Where to write a checkpoint, from which an interrupted run resumes, and the
            training log.
        name: Prefix of the output files.
        identity: JSON values that identify model and data; a checkpoint with another identity is
            refused.
        defaults: Values for entries of `identity` that an older checkpoint lacks, so that a new
            setting does not invalidate it.
        evaluate_fn: Further metrics of the model, computed after each chunk.
        later_fn: Estimates how many seconds the remaining training runs take; called only if
            progress is shown.
        show_progress: See `cqm.progress.progress`.
    """
    if training.seed is None:
        raise ValueError("training needs a seed; got Training(seed=None)")
    if isinstance(source, Mapping):
        source = InMemory({key: jnp.asarray(values) for key, values in source.items()})
    optimiser = training.optimiser(training.updates)
    # Copies, because the compiled loop reuses the memory of its arguments.
    state = _State(
        _copy(model),
        optimiser.init(eqx.filter(model, eqx.is_inexact_array)),
        target=_copy(model) if training.target_every else None,
    )
    files, step, losses = None, 0, list[float]()
    if directory is not None:
        settings = {"training": asdict(training), **(identity or {})}
        filled_in = {"training": asdict(Training()), **(defaults or {})}
        files = _Files(Path(directory), name, settings, filled_in)
        step, losses, state = files.load(state)
        if 0 < step < training.updates:
            say(f"{name}: resuming after {step:,} of {training.updates:,} updates", show_progress)
    key = jax.random.key(training.seed)
    shown = step < training.updates and is_shown(show_progress)
    with (
        progress(
            name,
            training.updates,
            unit="updates",
            done=step,
            first="compiling",
            show=show_progress,
        ) as advance,
        contextlib.closing(files) if files is not None else contextlib.nullcontext(),
    ):
        later = later_fn() if shown else 0.0  # compiles the later trainings, and times them
        run = _chunk_fn(Objective.of(loss), training, compiled_fn=lambda: advance(0))
        while step < training.updates:
            num = min(training.chunk, training.updates - step)
            # The window is not given a name, which would keep it in memory while the next one is
            # read.
            state, mean = run(
                state, source.window(step // training.chunk), source.num, key, step, num
            )
            step += num
            losses.append(_finite(float(mean), name, step))
            metrics = {"loss": losses[-1]}
            if evaluate_fn is not None:
                metrics |= evaluate_fn(state.model)
            if files is not None:
                files.save(step, losses, state, metrics)
            left = advance(num) + later
            if shown and left >= 1:
                say(f"Expected time: {duration(left)}")
            shown = False
    return Trained(state.model, np.array(losses))


def train_members(
    networks: Model,
    loss: MemberLossFn | Objective,
    source: Source | Mapping[str, Any],
    training: Training,
    **options: Any,
) -> Trained[Model]:
    """Train the members of an ensemble side by side, each on batches of its own.

    Args:
        networks: The members, stacked along the first axis of every array.
        loss: `(member, batch) -> scalar`; besides the rows, the batch has a random number between
            0 and 1 for each of them, `uniform`.
        source: Rows to draw batches from.
        training: Settings; the batch size is that of one member.
        **options: Further arguments of `train`.
    """
    members = num_members(networks)
    objective = Objective.of(loss)

    def mean_loss(networks: Any, batch: Batch, key: Array, target: Any) -> Array:
        own = {
            name: values.reshape(members, len(values) // members, *values.shape[1:])
            for name, values in batch.items()
        }
        own["uniform"] = jax.random.uniform(key, (members, training.batch_size))
        return jnp.sum(eqx.filter_vmap(objective.loss_fn)(networks, own)) / members

    together = replace(training, batch_size=members * training.batch_size)
    shared = Objective(mean_loss, objective.programs)
    return train(networks, shared, source, together, **options)


def expected_seconds(
    train_fn: Callable[..., Any],
    model: Model,
    loss: Callable | Objective,
    source: Source | Mapping[str, Any],
    training: Training,
) -> float:
    """How long `train` or `train_members` would take, measured on a few updates of a copy."""
    rows = source if isinstance(source, Mapping) else InMemory(source.window(0), source.num)
    short = replace(training, updates=2 * _TIMED_UPDATES, chunk=_TIMED_UPDATES)
    ended: list[float] = []  # the first chunk is compiled, the second is timed

    def note_time(model: Model) -> dict[str, float]:
        ended.append(time.monotonic())
        return {}

    train_fn(model, loss, rows, short, evaluate_fn=note_time, show_progress=False)
    return training.updates * (ended[1] - ended[0]) / _TIMED_UPDATES


def stacked_members(make_fn: Callable[[Array], Model], members: int, seed: int) -> Model:
    """The initial members of an ensemble, stacked; `make_fn` takes a random key."""
    check_network_size(make_fn, members)
    return eqx.filter_vmap(make_fn)(jax.random.split(jax.random.key(seed), members))


def check_network_size(make_fn: Callable[[Array], Model], members: int = 1) -> None:
    """Raise `ValueError` if this machine has too little memory to train such networks."""
    one = eqx.filter_eval_shape(make_fn, jax.random.key(0))
    arrays = jax.tree.leaves(eqx.filter(one, lambda leaf: hasattr(leaf, "dtype")))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    what = f"training {counted(members, 'network')} of {size_text(num_bytes)}"
    # The parameters, their gradient, and AdamW's two moments.
    require_memory(what, 4 * members * num_bytes, "choose a smaller width or fewer members")


def _copy(model: Model) -> Model:
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)


def _finite(loss: float, name: str, step: int) -> float:
    if not np.isfinite(loss):
        raise ValueError(
            f"{name}: the loss is {loss} after {step} updates; "
            "check the data or lower the learning rate"
        )
    return loss


def _chunk_fn(objective: Objective, training: Training, compiled_fn: Callable[[], Any]) -> Callable:
    """A function that makes a number of updates; it calls `compiled_fn` once it is compiled.

    The numbers of updates and rows are data, so that one program serves runs of any length.
    """

    def update(
        state: _State, window: Batch, rows: Array, updates: Array, key: Array
    ) -> tuple[_State, Array]:
        batch_key, loss_key = jax.random.split(key)
        chosen = jax.random.randint(batch_key, (training.batch_size,), 0, rows)
        batch = {name: values[chosen] for name, values in window.items()}
        loss, gradient = eqx.filter_value_and_grad(objective.loss_fn)(
            state.model, batch, loss_key, state.target
        )
        changes, optimiser_state = training.optimiser(updates).update(
            gradient, state.optimiser, eqx.filter(state.model, eqx.is_inexact_array)
        )
        model = eqx.apply_updates(state.model, changes)
        return replace(state, model=model, optimiser=optimiser_state), loss

    def run(
        arrays: Any, window: Batch, key: Array, numbers: dict[str, Array], *, static: Any
    ) -> tuple[Any, Array]:
        def body(step: Array, carried: tuple[Any, Array]) -> tuple[Any, Array]:
            arrays, total = carried
            state = eqx.combine(arrays, static)
            if training.target_every:
                fresh = step % training.target_every == 0
                target = jax.tree.map(
                    lambda new, old: jnp.where(fresh, new, old) if eqx.is_array(new) else new,
                    state.model,
                    state.target,
                )
                state = replace(state, target=target)
            rows, updates = numbers["rows"], numbers["updates"]
            state, loss = update(state, window, rows, updates, jax.random.fold_in(key, step))
            return eqx.filter(state, eqx.is_array), total + loss

        first, num = numbers["first"], numbers["num"]
        arrays, total = jax.lax.fori_loop(first, first + num, body, (arrays, jnp.zeros(())))
        return arrays, total / num

    def compile_and_run(
        state: _State, window: Batch, rows: int | None, key: Array, first: int, num: int
    ) -> tuple[_State, Array]:
        arrays, static = eqx.partition(state, eqx.is_array)
        rows = next(iter(window.values())).shape[0] if rows is None else rows
        numbers = {"rows": rows, "updates": training.updates, "first": first, "num": num}
        arguments = (arrays, window, key, {k: jnp.asarray(v) for k, v in numbers.items()})
        leaves, structure = jax.tree.flatten((arrays, window))
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        same = replace(training, updates=1, chunk=1, seed=0), structure, kinds
        if same not in objective.programs:
            program = jax.jit(functools.partial(run, static=static), donate_argnums=0)
            objective.programs[same] = program.lower(*arguments).compile()
            compiled_fn()
        arrays, loss = objective.programs[same](*arguments)
        return eqx.combine(arrays, static), loss

    return compile_and_run


def checkpointed_updates(directory: Path) -> dict[str, int]:
    """Updates made by each training run whose checkpoint is in a directory, by name."""
    steps = {}
    for path in sorted(directory.glob(f"*{_CHECKPOINT}")):
        with contextlib.suppress(ValueError, KeyError), storage.open_arrays(path) as file:
            steps[path.name.removesuffix(_CHECKPOINT)] = int((file.metadata() or {})["step"])
    return steps


class _Files:
    """The checkpoint and the log of one training run."""

    def __init__(
        self, directory: Path, name: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]
    ):
        self.settings = json.loads(storage.canonical_json(settings))
        self.defaults = json.loads(storage.canonical_json(defaults))
        self.checkpoint = storage.inside(directory, f"{name}{_CHECKPOINT}")
        directory.mkdir(parents=True, exist_ok=True)
        self.log = TrainingLog(directory, name)

    def close(self) -> None:
        self.log.close()

    def save(
        self,
        step: int,
        losses: list[float],
        state: _State,
        metrics: Mapping[str, float],
    ) -> None:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array))]
        # In this order, so that a kill in between loses no line; `resume` drops one too many.
        self.log.write(step, metrics)
        Checkpoint(step, self.settings, losses, leaves).write(self.checkpoint)

    def load(self, state: _State) -> tuple[int, list[float], _State]:
        if not self.checkpoint.exists():
            self.log.resume(0)
            return 0, [], state
        arrays, static = eqx.partition(state, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        stored = Checkpoint.read(self.checkpoint)
        self._check_settings(stored.settings)
        if len(stored.leaves) != len(leaves) or any(
            (old.shape, old.dtype) != (new.shape, new.dtype)
            for old, new in zip(stored.leaves, leaves, strict=True)
        ):
            raise ValueError(
                f"{self.checkpoint} belongs to a model of a different size; remove it or choose "
                "another directory"
            )
        arrays = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in stored.leaves])
        state = eqx.combine(arrays, static)
        self.log.resume(stored.step)
        return stored.step, [*stored.losses], state

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another run; settings that it lacks count as their defaults."""
        stored = storage.with_defaults(settings, self.defaults)
        if changes := storage.differences(stored, self.settings):
            raise ValueError(
                f"{self.checkpoint} belongs to a run with different settings or data:\n{changes}\n"
                "remove it or choose another directory"
            )
