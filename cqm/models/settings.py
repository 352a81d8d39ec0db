"""Settings of the effect model, saved beside every fitted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cqm.branches.dataset import Branches
from cqm.models.preprocessing import Conditioning
from cqm.models.training import Training
from cqm.quotient import ComparisonGraph

Method = Literal["auto", "direct", "unrolled"]


@dataclass(frozen=True)
class EffectSettings:
    """How effects are learned."""

    method: Method = "auto"
    """`direct`, `unrolled`, or the second where the branches allow it."""
    conditioning: Conditioning = "effect"
    """Of the input: `none`, `whiten`, or `effect`: what actions move comes first."""
    rank: int | None = None
    """Of the shared decoder of `direct`; the rank of what effects span by default."""
    width: int = 256
    """Of the hidden layers."""
    members: int = 1
    """Networks of an ensemble, trained together and averaged."""
    reference: tuple[float, ...] | None = None
    """Distribution over actions that effects are centred at; uniform by default."""
    graph: ComparisonGraph | None = None
    """Along whose edges differences are matched, instead of centred outcomes."""
    draws: int = 64
    """Fresh continuations that `unrolled` averages over."""
    training: Training | None = None
    """Settings of the training loop, the seed included; those that suit the method by default.
    `unrolled` trains twice with them, on single steps and then on whole branches."""
    validation: float = 0.0
    """Share of the families held out; the network that is best on them is kept, and training stops
    early where it gets no better. 0 trains on all families to the end."""
    patience: int = 8
    """Chunks of updates without a better validation loss after which training stops."""
    memory_gb: float = 2.0
    """Gigabytes that the rows to learn from may take; a larger set is read from its shards window
    by window, see `cqm.models.stream`."""
    seed: int = 0
    """Of the initial networks, the fresh continuations and, by default, the batches."""

    def __post_init__(self) -> None:
        if self.method not in ("auto", "direct", "unrolled"):
            raise ValueError(f"method must be 'auto', 'direct' or 'unrolled'; got {self.method!r}")
        if self.conditioning not in ("none", "whiten", "effect"):
            raise ValueError(
                f"conditioning must be 'none', 'whiten' or 'effect'; got {self.conditioning!r}"
            )
        for name in ("width", "members", "draws", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be at least 1; got {self.rank}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be in [0, 1); got {self.validation}")
        if not self.memory_gb > 0:
            raise ValueError(f"memory_gb must be positive; got {self.memory_gb}")
        if self.reference is not None:
            object.__setattr__(self, "reference", tuple(map(float, self.reference)))

    def chosen_method(self, branches: Branches) -> Literal["direct", "unrolled"]:
        """`unrolled` where the continuation is all that is random in a branch, and known."""
        obstacles = {
            "features of every step (collect with per_step=True)": not branches.recipe.per_step,
            "a continuation that does not see the state": not branches.recipe.continuation.open_loop,
            "a world without noise of its own": "noise" in branches.array_names(),
            "no comparison graph": self.graph is not None,
            "no rank": self.rank is not None,
            "the conditioning 'effect'": self.conditioning != "effect",
        }
        missing = [what for what, absent in obstacles.items() if absent]
        if self.method == "unrolled" and missing:
            raise ValueError(f"the method 'unrolled' needs {', and '.join(missing)}")
        return "direct" if missing or self.method == "direct" else "unrolled"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EffectSettings:
        """From `dataclasses.asdict`, after it went through JSON."""
        values = dict(values)
        if values["training"] is not None:
            values["training"] = Training(**values["training"])
        if values["graph"] is not None:
            edges = tuple((a, b) for a, b in values["graph"]["edges"])
            values["graph"] = ComparisonGraph(values["graph"]["num_actions"], edges)
        if values["reference"] is not None:
            values["reference"] = tuple(values["reference"])
        return cls(**values)
