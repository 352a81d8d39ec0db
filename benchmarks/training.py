"""Speed of training the paper's network against two peers in the same run.

`cqm.models.training.train` is measured as every model uses it, including the drawing of batches,
clipping and AdamW, from the second chunk on and therefore without compilation. *PyTorch* is the
same network, loss and optimiser, written in the straightforward way and run eagerly. The *limit* is
the matrix products of an update, forward and backward, as BLAS calls into allocated memory.

Each peer runs in a process of its own, pinned to the given cores, so that thread pools do not
interfere. PyTorch is not a dependency of the project; without it (`pip install torch`) its column
stays empty.

    python -m benchmarks.training
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

from benchmarks import write_csv

INPUTS, ACTIONS, FEATURES = 88, 5, 88  # walker with the paper's nuisance
WIDTH, RANK, EMBEDDING, BATCH, ROWS = 128, 8, 16, 256, 20_000


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    threads: tuple[int, ...] = (1, len(os.sched_getaffinity(0)))
    """Numbers of cores per peer; one row for each number."""
    updates: int = 1_000
    """Number of updates to time."""
    rounds: int = 3
    """Runs per peer; the fastest counts."""
    peer: str | None = None
    """Run only this peer, in this process, and print its milliseconds per update."""
    out: Path = Path("benchmarks/results/training.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    if settings.peer is not None:
        # Before any library starts its threads.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads[0]])
        print(json.dumps(PEERS[settings.peer](settings.updates, settings.threads[0])))
        return
    peers = [name for name in PEERS if name != "torch" or importlib.util.find_spec("torch")]
    if "torch" not in peers:
        print("PyTorch is not installed and is left out; pip install torch adds it\n")
    versions = {name: version(name) for name in ("jax", "equinox", "optax", "numpy")}
    versions["torch"] = version("torch") if "torch" in peers else ""
    rows = []
    for threads in dict.fromkeys(settings.threads):
        times: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(settings.rounds):
            # Alternating, so that other load on the machine affects all of them.
            for name in peers:
                times[name].append(run_alone(name, settings.updates, threads))
        best = {name: min(values) for name, values in times.items()}
        row: dict[str, object] = {"threads": threads, "updates": settings.updates}
        row |= {f"{name}_milliseconds": round(best.get(name, 0), 3) or "" for name in PEERS}
        ratio = round(best["torch"] / best["cqm"], 2) if "torch" in best else ""
        row["times_as_fast_as_torch"] = ratio
        row["share_of_limit"] = round(best["limit"] / best["cqm"], 3)
        rows.append({**row, **versions})
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_csv(settings.out, rows)
    print(f"\nwritten to {settings.out}")


def run_alone(peer: str, updates: int, threads: int) -> float:
    """Milliseconds per update of a peer in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", "--peer", peer]
    command += ["--updates", str(updates), "--threads", str(threads)]
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, "MUJOCO_GL": "disable", **dict.fromkeys(names, str(threads))}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def measure_cqm(updates: int, threads: int) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from cqm.models.network import Network
    from cqm.models.training import Training, train

    rng = np.random.default_rng(0)
    rows = {
        "inputs": rng.standard_normal((ROWS, INPUTS)).astype(np.float32),
        "targets": rng.standard_normal((ROWS, ACTIONS, FEATURES)).astype(np.float32),
    }
    network = Network(INPUTS, ACTIONS, FEATURES, rank=RANK, width=WIDTH, key=jax.random.key(0))

    def loss(network, batch, key, target):
        predicted = network.effects(batch["inputs"])
        return jnp.mean(jnp.sum((predicted - batch["targets"]) ** 2, axis=-1))

    ends = []
    chunk = 250
    updates = chunk * (1 + -(-updates // chunk))
    training = Training(updates=updates, batch_size=BATCH, chunk=chunk, seed=0)
    train(
        network,
        loss,
        rows,
        training,
        evaluate_fn=lambda model: ends.append(time.perf_counter()) or {},
        show_progress=False,
    )
    return 1e3 * (ends[-1] - ends[0]) / (chunk * (len(ends) - 1))


def measure_torch(updates: int, threads: int) -> float:
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def layers(*sizes: int) -> nn.Sequential:
        linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = layers(INPUTS, WIDTH, WIDTH, WIDTH)
            self.embedding = nn.Embedding(ACTIONS, EMBEDDING)
            self.head = layers(WIDTH + EMBEDDING, WIDTH, WIDTH, RANK)
            self.decoder = nn.Linear(RANK, FEATURES)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            state = self.encoder(inputs)[:, None].expand(-1, ACTIONS, -1)
            action = self.embedding.weight[None].expand(len(inputs), -1, -1)
            outcomes = self.decoder(self.head(torch.cat([state, action], dim=-1)))
            return outcomes - outcomes.mean(dim=1, keepdim=True)

    network = Network()
    inputs, targets = torch.randn(ROWS, INPUTS), torch.randn(ROWS, ACTIONS, FEATURES)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-4, weight_decay=1e-5)

    def update() -> None:
        chosen = torch.randint(ROWS, (BATCH,))
        error = (network(inputs[chosen]) - targets[chosen]) ** 2
        optimiser.zero_grad()
        error.sum(dim=-1).mean().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimiser.step()

    return milliseconds(update, updates)


def measure_limit(updates: int, threads: int) -> float:
    import numpy as np

    both = BATCH * ACTIONS
    # Rows, inputs and outputs of every layer; the head's first layer adds up state and action.
    forward = [(BATCH, INPUTS, WIDTH), *[(BATCH, WIDTH, WIDTH)] * 3, (ACTIONS, EMBEDDING, WIDTH)]
    forward += [(both, WIDTH, WIDTH), (both, WIDTH, RANK), (both, RANK, FEATURES)]
    # Backward: a product for each layer's weights and, except for the first, one for its input.
    backward = [(k, m, n) for m, k, n in forward] + [(m, n, k) for m, k, n in forward[1:]]
    rng = np.random.default_rng(0)
    ready = [
        tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n)))
        for m, k, n in forward + backward
    ]

    def update() -> None:
        for a, b, out in ready:
            np.matmul(a, b, out=out)

    return milliseconds(update, updates)


def milliseconds(update, updates: int) -> float:
    for _ in range(20):
        update()
    started = time.perf_counter()
    for _ in range(updates):
        update()
    return 1e3 * (time.perf_counter() - started) / updates


PEERS = {"cqm": measure_cqm, "torch": measure_torch, "limit": measure_limit}


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
