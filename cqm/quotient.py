"""The quotient: futures indexed by action, modulo whatever all actions share.

Every function takes arrays `[..., actions, features]`, one row per action; leading axes are states,
draws or anything else. NumPy input is converted to float64; JAX arrays stay JAX arrays, and every
function can be traced. Under `jit` only shapes are checked; concrete values are checked in full.

A *reference* ρ is a full-support distribution over the actions: `None` for uniform, `[actions]`
for a fixed one, `[..., actions]` for one per state.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import (
    generator,
    indices,
    instance,
    number,
    real_numbers,
    sequence,
    shown,
    whole_number,
)
from cqm.arrays import Array, broadcasts, floats, known_values, namespace, resolution
from cqm.capacity import require_memory
from cqm.names import MAX_ACTIONS

Reference: TypeAlias = ArrayLike | None


def center(outcomes: Array, reference: Reference = None) -> Array:
    """Effects: outcomes minus their reference-weighted mean over actions (eq. center).

    >>> center([[1.0, 5.0], [3.0, 5.0]]).tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    >>> center([[1.0], [3.0]], reference=[0.75, 0.25]).tolist()
    [[-0.5], [1.5]]
    """
    outcomes = _actions_and_features("outcomes", outcomes)
    weights = as_reference(reference, outcomes)
    return outcomes - (weights[..., None] * outcomes).sum(axis=-2, keepdims=True)


def recenter(effects: Array, reference: Reference = None) -> Array:
    """Effects under a different reference, computed without the outcomes (remark on the reference).

    Changing the reference shifts all actions alike, so it is enough to centre the effects again;
    the reference they were centred with before does not matter.

    >>> recenter(center([[1.0], [3.0]]), reference=[0.75, 0.25]).tolist()
    [[-0.5], [1.5]]
    """
    return center(effects, reference)


def equivalent(f: Array, g: Array, *, tolerance: float | None = None) -> Array:
    """Whether two models differ only by what all actions share, per leading index.

    The tolerance is relative to the larger of the two models at that index. The default is 1e-9, or
    more if the precision of the arrays requires it.

    >>> bool(equivalent([[1.0], [3.0]], [[11.0], [13.0]]))
    True
    """
    f, g = _actions_and_features("f", f), _actions_and_features("g", g)
    _same_shape("f", f, "g", g)
    tolerance = resolution(f - g) if tolerance is None else number("tolerance", tolerance, least=0)
    distance, size_f, size_g = (abs(x).max(axis=(-2, -1)) for x in (center(f - g), f, g))
    return (distance <= tolerance * size_f) | (distance <= tolerance * size_g)


def contrast(effects: Array, *, action: ArrayLike, baseline: ArrayLike) -> Array:
    """The effect of taking `action` rather than `baseline`, `[..., features]`.

    Both are action indices, or integer arrays that broadcast to the leading axes.

    >>> contrast([[1.0, 5.0], [3.0, 5.0]], action=1, baseline=0).tolist()
    [2.0, 0.0]
    """
    effects = _actions_and_features("effects", effects)
    xp, last = namespace(effects, action, baseline), effects.shape[-2] - 1

    def rows(name: str, index: Array) -> Array:
        concrete = known_values(name, index)
        if concrete is not None and not (
            np.issubdtype(concrete.dtype, np.integer)
            and np.all((concrete >= 0) & (concrete <= last))
        ):
            raise ValueError(f"{name} must hold action indices in 0..{last}; got {shown(index)}")
        if not broadcasts(np.shape(index), effects.shape[:-2]):
            raise ValueError(
                f"{name} must be one index or broadcast to the leading axes "
                f"{list(effects.shape[:-2])}; "
                f"got shape {np.shape(index)}"
            )
        index = xp.broadcast_to(xp.asarray(index), effects.shape[:-2])
        return xp.take_along_axis(effects, index[..., None, None], axis=-2)[..., 0, :]

    return rows("action", action) - rows("baseline", baseline)


def inner_product(f: Array, g: Array, reference: Reference = None) -> Array:
    """⟨F, G⟩ = Σ_a ρ(a) F(a)ᵀG(a), per leading index (thm. projection).

    >>> float(inner_product([[1.0], [3.0]], [[2.0], [4.0]]))
    7.0
    """
    f, g = _actions_and_features("f", f), _actions_and_features("g", g)
    _same_shape("f", f, "g", g)
    return (as_reference(reference, f) * (f * g).sum(axis=-1)).sum(axis=-1)


def norm(f: Array, reference: Reference = None) -> Array:
    """The norm induced by `inner_product` (thm. projection).

    Centring minimises it among equivalent arrays.

    >>> float(norm([[3.0], [-3.0]]))
    3.0
    """
    return inner_product(f, f, reference) ** 0.5


def centered_loss(predicted: Array, outcomes: Array, reference: Reference = None) -> Array:
    """Mean over states of Σ_a ρ(a) ‖C_ρ predicted − C_ρ outcomes‖².

    With the uniform reference this is eq. cqm-loss, which weights all actions equally.

    >>> float(centered_loss([[0.0], [2.0]], [[5.0], [9.0]]))
    1.0
    """
    residuals = center(_residuals(predicted, outcomes), reference)
    return inner_product(residuals, residuals, reference).mean()


def pairwise_loss(predicted: Array, outcomes: Array, reference: Reference = None) -> Array:
    """Mean over states of ½ Σ_ab ρ(a)ρ(b) ‖predicted differences − outcome differences‖².

    Equal to `centered_loss` for every reference (eq. center-pairwise-identity), but without
    centring. `edge_loss` averages over a subset of the pairs, without weights.

    >>> float(pairwise_loss([[0.0], [2.0]], [[5.0], [9.0]]))
    1.0
    """
    residuals = _residuals(predicted, outcomes)
    weights = as_reference(reference, residuals)
    differences = residuals[..., :, None, :] - residuals[..., None, :, :]
    pairs = weights[..., :, None] * weights[..., None, :]
    return (pairs * (differences**2).sum(axis=-1)).sum(axis=(-2, -1)).mean() / 2


def effect_rank(effects: Array, *, tolerance: float | None = None) -> Array:
    """The rank of the effects of each state, at most actions − 1 (thm. rank).

    Singular values below `tolerance` times the largest are treated as zero. The default is 1e-9, or
    more if the precision of the array requires it.

    >>> int(effect_rank([[1.0, 2.0], [-1.0, -2.0]]))
    1
    """
    effects = _actions_and_features("effects", effects)
    _not_infinite("effects", effects)
    given = None if tolerance is None else number("tolerance", tolerance, least=0)
    tolerance = resolution(effects) if given is None else given
    values = namespace(effects).linalg.svd(effects, compute_uv=False)
    return (values > tolerance * values[..., :1]).sum(axis=-1)


@dataclass(frozen=True)
class EffectSpectrum:
    """How the effects of many states spread over feature directions."""

    energies: Array  # [features], mean squared effect along each direction, largest first
    directions: Array  # [features, features], one orthonormal direction per row
    pointwise_bound: int  # upper bound on the rank of a single state's effects

    def rank(self, *, tolerance: float | None = None) -> int:
        """Rank of the pooled effects; energies below `tolerance` × the largest are ignored."""
        given = None if tolerance is None else number("tolerance", tolerance, least=0)
        tolerance = resolution(self.energies) ** 2 if given is None else given
        return int(np.sum(np.asarray(self.energies) > tolerance * float(self.energies[0])))

    def captured(self, rank: int) -> float:
        """The share of the effect energy that the best decoder of this rank can express."""
        rank = whole_number("rank", rank, least=0)
        energies = np.asarray(self.energies, float)
        total = np.sum(energies)
        return float(np.sum(energies[:rank]) / total) if total > 0 else 1.0


def effect_spectrum(effects: Array) -> EffectSpectrum:
    """The spectrum of the pooled effects, which a decoder shared by all states must span.

    A single state's effects have rank at most actions − 1, but their subspace may rotate
    from state to state (remark on pointwise rank): compare `rank()` with `pointwise_bound`.

    >>> rotating = center([[[1.0, 0.0], [-1.0, 0.0]], [[0.0, 1.0], [0.0, -1.0]]])
    >>> spectrum = effect_spectrum(rotating)
    >>> spectrum.pointwise_bound, spectrum.rank()
    (1, 2)
    """
    effects = _actions_and_features("effects", effects)
    _not_infinite("effects", effects)
    xp, pooled = namespace(effects), effects.reshape(-1, effects.shape[-1])
    _, values, directions = xp.linalg.svd(pooled, full_matrices=pooled.shape[0] < pooled.shape[1])
    missing = pooled.shape[1] - len(values)
    energies = xp.concatenate([values**2, xp.zeros(missing, values.dtype)]) / pooled.shape[0]
    return EffectSpectrum(energies, directions, pointwise_bound=effects.shape[-2] - 1)


@dataclass(frozen=True)
class ComparisonGraph:
    """Which pairs of actions are compared, in the order and orientation they were given.

    An edge (a, b) stands for the difference "a minus b". Each pair may be listed only once, in
    either orientation; the class methods list it with the smaller action first, in sorted order.

    >>> ComparisonGraph(3, ((2, 0), (0, 1))).edges
    ((2, 0), (0, 1))
    >>> ComparisonGraph.star(3).edges
    ((0, 1), (0, 2))
    """

    num_actions: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_actions", checked_num_actions(self.num_actions))
        actions, given = range(self.num_actions), pairs_of_actions(self.edges)
        bad = [(a, b) for a, b in given if a == b or a not in actions or b not in actions]
        if bad:
            raise ValueError(
                f"edges must join two different actions in 0..{self.num_actions - 1}; got {bad}"
            )
        edges = tuple((int(a), int(b)) for a, b in given)
        counts = Counter((min(edge), max(edge)) for edge in edges)
        if repeated := sorted(pair for pair, count in counts.items() if count > 1):
            raise ValueError(
                "edges must list each pair of actions once, in either orientation; "
                f"got more than one edge between the actions of {repeated}"
            )
        object.__setattr__(self, "edges", edges)

    @classmethod
    def _unordered(cls, num_actions: int, edges: Iterable[tuple[int, int]]) -> ComparisonGraph:
        """The pairs without repetition, sorted, with the smaller action first."""
        return cls(num_actions, tuple(sorted({(min(edge), max(edge)) for edge in edges})))

    @classmethod
    def complete(cls, num_actions: int) -> ComparisonGraph:
        """Every pair of actions."""
        actions = range(checked_num_actions(num_actions))
        pairs = len(actions) * (len(actions) - 1) // 2
        what, advice = f"a graph of {pairs:,} edges", "compare fewer actions"
        require_memory(what, 100 * pairs, advice)
        return cls(num_actions, tuple(itertools.combinations(actions, 2)))

    @classmethod
    def star(cls, num_actions: int, hub: int = 0) -> ComparisonGraph:
        """Every action compared with one hub."""
        actions = range(checked_num_actions(num_actions))
        hub = whole_number("hub", hub, least=0, most=len(actions) - 1)
        return cls._unordered(num_actions, ((hub, a) for a in actions if a != hub))

    @classmethod
    def path(cls, num_actions: int) -> ComparisonGraph:
        """Every action compared with the next."""
        actions = range(checked_num_actions(num_actions))
        return cls(num_actions, tuple(itertools.pairwise(actions)))

    @classmethod
    def random(
        cls, num_actions: int, rng: np.random.Generator, *, extra_edges: int = 0
    ) -> ComparisonGraph:
        """A random connected graph: a random tree plus `extra_edges` more edges."""
        num_actions = checked_num_actions(num_actions)
        extra_edges = whole_number("extra_edges", extra_edges, least=0)
        order = generator("rng", rng).permutation(num_actions)
        tree = [(int(order[rng.integers(i)]), int(order[i])) for i in range(1, num_actions)]
        present = cls._unordered(num_actions, tree).edges
        absent = sorted(set(cls.complete(num_actions).edges) - set(present))
        chosen = rng.permutation(len(absent))[:extra_edges]
        return cls._unordered(num_actions, [*present, *(absent[i] for i in chosen)])

    @classmethod
    def from_families(cls, num_actions: int, arms: ArrayLike) -> ComparisonGraph:
        """The union of the comparisons made by families with the given arms `[n, arms]`.

        A family compares every pair of its own arms. Effects are identified if the union connects
        all actions and the arms were chosen independently of the state.

        >>> ComparisonGraph.from_families(3, [[0, 1], [1, 2]]).edges
        ((0, 1), (1, 2))
        """
        num_actions = checked_num_actions(num_actions)
        rows = real_numbers("arms", arms, ("families", "arms"))
        if rows.shape[1] < 2:
            raise ValueError(f"arms must be [families, at least 2 arms]; got shape {rows.shape}")
        if not np.all(np.isfinite(rows) & (rows == np.floor(rows))):
            raise ValueError(f"arms must be indices of actions; got {shown(arms)}")
        subsets = np.unique(np.sort(rows.astype(np.int64), axis=1), axis=0).tolist()
        return cls._unordered(
            num_actions, (edge for row in subsets for edge in itertools.combinations(row, 2))
        )

    @classmethod
    def union(cls, graphs: Sequence[ComparisonGraph]) -> ComparisonGraph:
        """All comparisons of several graphs over the same actions."""
        for graph in sequence("graphs", graphs, "comparison graphs"):
            _checked_graph(graph)
        if len({graph.num_actions for graph in graphs}) != 1:
            raise ValueError(
                "a union needs at least one graph, all with the same actions; got num_actions "
                f"{[graph.num_actions for graph in graphs]}"
            )
        edges = (edge for graph in graphs for edge in graph.edges)
        return cls._unordered(graphs[0].num_actions, edges)

    @property
    def arms(self) -> tuple[int, ...]:
        """The actions that take part in at least one comparison."""
        return tuple(sorted({action for edge in self.edges for action in edge}))

    def components(self) -> list[tuple[int, ...]]:
        """The connected components, each sorted; an action without edges is a component."""
        component = list(range(self.num_actions))
        for a, b in self.edges:
            old, new = component[b], component[a]
            component = [new if c == old else c for c in component]
        groups: dict[int, list[int]] = {}
        for action, label in enumerate(component):
            groups.setdefault(label, []).append(action)
        return sorted(tuple(group) for group in groups.values())

    def check_connected(self, among: Iterable[int] | None = None) -> None:
        """Raise unless the comparisons join all actions, or all of `among`.

        Pass `among=graph.arms` to check a single family; leave it out for a union of families.

        >>> ComparisonGraph(4, ((0, 1), (2, 3))).check_connected()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the comparison graph is not connected: components (0, 1), (2, 3); ...
        """
        actions = range(self.num_actions)
        wanted = set(actions if among is None else map(int, indices("among", among)))
        if strangers := sorted(wanted - set(actions)):
            raise ValueError(
                f"among must hold actions in 0..{self.num_actions - 1}; got {strangers}"
            )
        parts = [part for part in self.components() if wanted & set(part)]
        if len(parts) > 1:
            raise ValueError(
                f"the comparison graph is not connected: components {', '.join(map(str, parts))}; "
                "contrasts between components cannot be identified"
            )

    def differences(self, outcomes: Array) -> Array:
        """First minus second action along each edge, `[..., edges, features]`."""
        outcomes = _actions_and_features("outcomes", outcomes)
        if outcomes.shape[-2] != self.num_actions:
            raise ValueError(
                f"the graph compares {self.num_actions} actions; got outcomes of "
                f"{outcomes.shape[-2]}, shape {outcomes.shape}"
            )
        first, second = np.array(self.edges, dtype=int).reshape(-1, 2).T
        return outcomes[..., first, :] - outcomes[..., second, :]


def effects_from_differences(
    graph: ComparisonGraph, differences: Array, reference: Reference = None
) -> Array:
    """Centred effects from the differences along the edges of a connected graph (thm. pairwise).

    Args:
        graph: The pairs that were compared, which must connect all actions.
        differences: First minus second action for each edge, in the order of
            `graph.edges`, `[..., edges, features]`. Differences that contradict each other around a
            cycle are reconciled by least squares.
        reference: The reference that the effects are centred with.

    >>> graph = ComparisonGraph.path(3)
    >>> print(effects_from_differences(graph, [[-1.0], [-2.0]]).round(12))
    [[-1.33333333]
     [-0.33333333]
     [ 1.66666667]]
    """
    _checked_graph(graph)
    differences = floats("differences", differences)
    if differences.ndim < 2 or differences.shape[-2] != len(graph.edges):
        raise ValueError(
            f"differences must be [..., {len(graph.edges)} edges, features]; "
            f"got shape {differences.shape}"
        )
    graph.check_connected()
    incidence = graph.differences(np.eye(graph.num_actions))
    return center(np.linalg.pinv(incidence).astype(differences.dtype) @ differences, reference)


def edge_loss(graph: ComparisonGraph, predicted: Array, outcomes: Array) -> Array:
    """Mean squared error of the predicted differences along a graph's edges (eq. pairwise-loss).

    On the complete graph of n actions it is 2n/(n − 1) times the uniform `centered_loss`.

    >>> float(edge_loss(ComparisonGraph.complete(2), [[0.0], [2.0]], [[5.0], [9.0]]))
    4.0
    """
    if not _checked_graph(graph).edges:
        raise ValueError("the graph has no edges; a loss needs at least one comparison")
    residuals = _residuals(predicted, outcomes)
    return (graph.differences(residuals) ** 2).sum(axis=-1).mean()


def as_reference(reference: Reference, outcomes: Array) -> Array:
    """The reference, checked, as an array that broadcasts against `outcomes[..., 0]`."""
    if not hasattr(outcomes, "ndim") or not hasattr(outcomes, "dtype"):
        outcomes = real_numbers("outcomes", outcomes)
    if outcomes.ndim < 2 or outcomes.shape[-2] < 2:
        raise ValueError(
            "a reference needs outcomes of [..., at least 2 actions, features]; "
            f"got shape {outcomes.shape}"
        )
    num_actions = outcomes.shape[-2]
    # `float` is float64 for NumPy and JAX's default precision for JAX.
    dtype = float if namespace(outcomes) is np else outcomes.dtype
    if reference is None:
        return np.full(num_actions, 1.0 / num_actions, dtype=dtype)
    weights = floats("reference", reference).astype(dtype)
    if weights.shape[-1:] != (num_actions,) or not broadcasts(weights.shape, outcomes.shape[:-1]):
        raise ValueError(
            f"reference must be [{num_actions}] or {list(outcomes.shape[:-1])}; "
            f"got shape {weights.shape}"
        )
    concrete = known_values("reference", reference)
    if concrete is not None:
        if np.any(concrete <= 0):
            raise ValueError(
                "reference must have full support, every entry above 0; "
                f"got a smallest entry of {concrete.min()}"
            )
        sums = concrete.sum(axis=-1, dtype=float)
        if np.any(abs(sums - 1) > 1e-6):
            worst = sums.flat[abs(sums - 1).argmax()]
            raise ValueError(f"reference must sum to 1 over the actions; got {worst}")
    # A reference rounded to float32 sums to one only approximately and would not centre exactly.
    return weights / weights.sum(axis=-1, keepdims=True)


def checked_num_actions(num_actions: int) -> int:
    """The number of actions, checked: at least 2 are needed for a comparison."""
    return whole_number("num_actions", num_actions, least=2, most=MAX_ACTIONS)


def pairs_of_actions(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Edges as pairs of whole numbers."""
    try:
        return [(a, b) for a, b in (indices("an edge", edge) for edge in edges)]
    except (TypeError, ValueError):
        raise ValueError(
            f"edges must be pairs of actions, such as ((0, 1), (1, 2)); got {shown(edges)}"
        ) from None


def _checked_graph(graph: ComparisonGraph) -> ComparisonGraph:
    return instance("graph", graph, ComparisonGraph, "a ComparisonGraph")


def _not_infinite(name: str, values: Array) -> None:
    """Refuse infinity, of which a decomposition would make NaN or an error of its own."""
    concrete = known_values(name, values)
    if concrete is not None and np.isinf(concrete).any():
        raise ValueError(f"{name} must be finite; got {np.isinf(concrete).sum()} infinite values")


def _actions_and_features(name: str, values: Array) -> Array:
    values = floats(name, values)
    if values.ndim < 2 or values.shape[-2] < 2:
        raise ValueError(
            f"{name} must be [..., at least 2 actions, features]; got shape {values.shape}"
        )
    return values


def _residuals(predicted: Array, outcomes: Array) -> Array:
    predicted = _actions_and_features("predicted", predicted)
    outcomes = _actions_and_features("outcomes", outcomes)
    _same_shape("predicted", predicted, "outcomes", outcomes)
    return predicted - outcomes


def _same_shape(name_f: str, f: Array, name_g: str, g: Array) -> None:
    if f.shape != g.shape:
        raise ValueError(
            f"{name_f} and {name_g} must have the same shape; got {f.shape} and {g.shape}"
        )
