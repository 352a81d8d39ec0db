"""The one training loop: every model and every baseline is fitted by it.

Updates are compiled into chunks of `lax.scan`; progress, checkpoints and metrics fall between
chunks. The batch of an update is a function of (seed, step) alone, so a training that was
interrupted continues to the same model, bit for bit, on the same machine with the same versions
and threads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from cqm import storage
from cqm.models.training_log import Metrics
from cqm.progress import progress

Model = TypeVar("Model", bound=eqx.Module)
Batch = dict[str, Array]
LossFn = Callable[[Any, Batch, Array, Any], Array]  # model, batch, random key, target -> loss


@dataclass(frozen=True)
class Training:
    """How a model is fitted; the defaults are the paper's."""

    updates: int = 4_000
    """Gradient steps."""
    batch_size: int = 256
    """States a step."""
    learning_rate: float = 3e-4
    """Of AdamW."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Whether the learning rate falls to zero along a cosine."""
    weight_decay: float = 1e-5
    """Of AdamW."""
    clip: float = 10.0
    """Largest norm of the gradient."""
    target_every: int = 0
    """Updates between copies to the target network; 0 for none."""
    chunk: int = 250
    """Updates compiled into one call; checkpoints fall between chunks."""
    seed: int = 0
    """Of the batches and of whatever the loss draws."""

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule must be 'constant' or 'cosine'; got {self.schedule!r}")

    def optimiser(self) -> optax.GradientTransformation:
        """Clipping, then AdamW."""
        rate: Any = self.learning_rate
        if self.schedule == "cosine":
            rate = optax.cosine_decay_schedule(self.learning_rate, self.updates)
        return optax.chain(
            optax.clip_by_global_norm(self.clip), optax.adamw(rate, weight_decay=self.weight_decay)
        )


class Source(Protocol):
    """Where batches come from."""

    def window(self, chunk: int) -> Batch:
        """The rows that the batches of a chunk are drawn from; the same number for every chunk."""


@dataclass(frozen=True)
class InMemory:
    """All rows, at every chunk."""

    arrays: Batch  # [rows, ...] each

    def window(self, chunk: int) -> Batch:
        """All rows."""
        return self.arrays


@dataclass(frozen=True)
class Validation:
    """Held-out rows: the model that was best on them is kept, not the last one."""

    rows: Mapping[str, Any]  # [rows, ...] each
    patience: int  # chunks without a better loss after which the training stops


@dataclass(frozen=True)
class Trained(Generic[Model]):
    """A fitted model and how the loss went."""

    model: Model
    losses: np.ndarray  # [chunks], mean over each chunk
    validation_losses: np.ndarray = field(default_factory=lambda: np.empty(0))  # [chunks] or none
    updates: int = 0  # that were made


class _State(eqx.Module):
    """All that a checkpoint holds besides the losses."""

    model: Any
    optimiser: Any
    target: Any = None  # where there is a target network
    best: Any = None  # where there is validation


def train(
    model: Model,
    loss_fn: LossFn,
    source: Source | Mapping[str, Array],
    training: Training,
    *,
    directory: str | Path | None = None,
    name: str = "training",
    identity: str = "",
    validation: Validation | None = None,
    evaluate_fn: Callable[[Model], Mapping[str, float]] | None = None,
    show_progress: bool | None = None,
) -> Trained[Model]:
    """Fit a model by stochastic gradient steps on a loss.

    Args:
        model: Where to start.
        loss_fn: `(model, batch, key, target) -> scalar`; the target is a copy of the model from
            some updates ago, or None where the training has no target network.
        source: Rows to draw batches from.
        training: The settings.
        directory: Where to keep a checkpoint, from which an interrupted training continues, and
            the metrics.
        name: Of the files there.
        identity: Of model and data; a checkpoint of another is refused.
        validation: Rows to choose the best model by, and when to stop early.
        evaluate_fn: More metrics of the model, taken after each chunk.
        show_progress: See `cqm.progress.progress`.
    """
    if isinstance(source, Mapping):
        source = InMemory({key: jnp.asarray(values) for key, values in source.items()})
    optimiser = training.optimiser()
    # Copies, because the compiled loop takes the memory of what it is given.
    state = _State(
        _copy(model),
        optimiser.init(eqx.filter(model, eqx.is_inexact_array)),
        target=_copy(model) if training.target_every else None,
        best=_copy(model) if validation is not None else None,
    )
    patience = training.updates if validation is None else validation.patience
    files, step, losses, held_out = None, 0, list[float](), list[float]()
    if directory is not None:
        settings = {**asdict(training), "patience": patience, "identity": identity}
        files = _Files(Path(directory), name, settings)
        step, losses, held_out, state = files.load(state)
    key = jax.random.key(training.seed)
    run = _compiled_chunk(loss_fn, training)
    measure = None if validation is None else _compiled_validation(loss_fn, validation, training)
    with (
        progress(name, training.updates, unit="updates", done=step, show=show_progress) as advance,
        contextlib.closing(files) if files is not None else contextlib.nullcontext(),
    ):
        while step < training.updates and _chunks_since_best(held_out) < patience:
            num = min(training.chunk, training.updates - step)
            # Not given a name, which would keep a window alive while the next is read.
            state, loss = run(state, source.window(step // training.chunk), key, step, num)
            step += num
            losses.append(_finite(float(loss), name, step))
            metrics = {"loss": losses[-1]}
            if measure is not None:
                held_out.append(_finite(float(measure(state)), name, step))
                metrics["validation_loss"] = held_out[-1]
                if _chunks_since_best(held_out) == 0:
                    state = replace(state, best=_copy(state.model))
            if evaluate_fn is not None:
                metrics |= evaluate_fn(state.model)
            if files is not None:
                files.save(step, losses, held_out, state, metrics)
            advance(num)
    model = state.model if validation is None else state.best
    return Trained(model, np.array(losses), np.array(held_out), step)


def by_member(batch: Mapping[str, Array], members: int) -> Batch:
    """A batch as one of its own for each member of an ensemble, `[members, ...]`."""
    return {
        name: values.reshape(members, len(values) // members, *values.shape[1:])
        for name, values in batch.items()
    }


def _copy(model: Model) -> Model:
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)


def _chunks_since_best(losses: list[float]) -> int:
    return len(losses) - 1 - int(np.argmin(losses)) if losses else 0


def _finite(loss: float, name: str, step: int) -> float:
    if not np.isfinite(loss):
        raise ValueError(
            f"{name}: the loss is {loss} after {step} updates; "
            "check the data, or lower the learning rate"
        )
    return loss


def _compiled_validation(
    loss_fn: LossFn, validation: Validation, training: Training
) -> Callable[[_State], Array]:
    """The mean loss over held-out rows, in batches as large as those of the training."""
    num = len(next(iter(validation.rows.values())))
    # The last batch is filled up from the start, so that all have one size.
    chosen = np.arange(-(-num // training.batch_size) * training.batch_size) % num
    batches = {
        name: jnp.asarray(
            np.asarray(rows)[chosen].reshape(-1, training.batch_size, *rows.shape[1:])
        )
        for name, rows in validation.rows.items()
    }
    key = jax.random.key(training.seed)  # the same at every chunk, so that losses compare

    @eqx.filter_jit
    def measure(batches: Batch, state: _State) -> Array:
        losses = jax.lax.map(lambda b: loss_fn(state.model, b, key, state.target), batches)
        return jnp.mean(losses)

    return lambda state: measure(batches, state)


def _compiled_chunk(loss_fn: LossFn, training: Training) -> Callable:
    optimiser = training.optimiser()

    def update(state: _State, window: Batch, key: Array) -> tuple[_State, Array]:
        rows = next(iter(window.values())).shape[0]
        batch_key, loss_key = jax.random.split(key)
        chosen = jax.random.randint(batch_key, (training.batch_size,), 0, rows)
        batch = {name: values[chosen] for name, values in window.items()}
        loss, gradient = eqx.filter_value_and_grad(loss_fn)(
            state.model, batch, loss_key, state.target
        )
        changes, optimiser_state = optimiser.update(
            gradient, state.optimiser, eqx.filter(state.model, eqx.is_inexact_array)
        )
        model = eqx.apply_updates(state.model, changes)
        return replace(state, model=model, optimiser=optimiser_state), loss

    @eqx.filter_jit(donate="all-except-first")
    def run(arguments: tuple, state: _State) -> tuple[_State, Array]:
        window, key, first, num = arguments
        arrays, static = eqx.partition(state, eqx.is_array)

        def body(arrays: Any, step: Array) -> tuple[Any, Array]:
            state = eqx.combine(arrays, static)
            if training.target_every:
                fresh = step % training.target_every == 0
                target = jax.tree.map(
                    lambda new, old: jnp.where(fresh, new, old) if eqx.is_array(new) else new,
                    state.model,
                    state.target,
                )
                state = replace(state, target=target)
            state, loss = update(state, window, jax.random.fold_in(key, step))
            return eqx.filter(state, eqx.is_array), loss

        arrays, losses = jax.lax.scan(body, arrays, first + jnp.arange(num))
        return eqx.combine(arrays, static), jnp.mean(losses)

    return lambda state, window, key, first, num: run((window, key, jnp.asarray(first), num), state)


class _Files:
    """The checkpoint and the metrics of one training."""

    def __init__(self, directory: Path, name: str, settings: Mapping[str, Any]):
        self.settings = settings
        self.checkpoint = storage.inside(directory, f"{name}.checkpoint.safetensors")
        directory.mkdir(parents=True, exist_ok=True)
        self.metrics = Metrics(directory, name)

    def close(self) -> None:
        self.metrics.close()

    def save(
        self,
        step: int,
        losses: list[float],
        held_out: list[float],
        state: _State,
        metrics: Mapping[str, float],
    ) -> None:
        leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
        arrays = {f"leaf.{i:04d}": np.asarray(leaf)[None] for i, leaf in enumerate(leaves)}
        arrays |= {"losses": np.array(losses), "held_out": np.array(held_out)}
        metadata = {"step": str(step), "training": json.dumps(self.settings)}
        metadata["sha256"] = storage.sha256_arrays(arrays)
        storage.write_pieces(self.checkpoint, storage.encode_arrays([arrays], metadata))
        self.metrics.write(step, metrics)

    def load(self, state: _State) -> tuple[int, list[float], list[float], _State]:
        if not self.checkpoint.exists():
            return 0, [], [], state
        arrays, static = eqx.partition(state, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        values, metadata = storage.read_arrays(self.checkpoint)
        if json.loads(metadata["training"]) != self.settings:
            raise ValueError(
                f"{self.checkpoint} is of another training or other data; "
                "remove it or choose another directory"
            )
        if storage.sha256_arrays(values) != metadata.get("sha256"):
            raise storage.DamagedFileError(
                f"{self.checkpoint} is damaged: its checksum is wrong; remove it to start again"
            )
        losses, held_out = (values.pop(name).tolist() for name in ("losses", "held_out"))
        stored = [values[name][0] for name in sorted(values)]
        if len(stored) != len(leaves) or any(
            old.shape != new.shape for old, new in zip(stored, leaves, strict=True)
        ):
            raise ValueError(
                f"{self.checkpoint} is of a model of another size; remove it or choose another "
                "directory"
            )
        arrays = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in stored])
        return int(metadata["step"]), losses, held_out, eqx.combine(arrays, static)
