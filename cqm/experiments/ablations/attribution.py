"""What an error is made of: label noise, preprocessing, rank, sample size, and the rest, adding up.

The error of the paper's model on labels of single draws is the noise floor F plus (1 − F) times its
excess error. The excess error falls when a factor is improved: conditioned input instead of raw,
full rank instead of 8, five times as many states. How much each contributes depends on the order of
the improvements, so each is given its Shapley value, the average over all orders. What remains with
all of them is due to the network and its training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations

from cqm.experiments.intervals import estimate
from cqm.experiments.results import Row

FACTORS = ("preprocessing", "rank", "sample size")
"""What the ablation `data` varies on the paper's model."""
PARTS = ("label noise", *FACTORS, "network and training")
_METHODS = {
    frozenset[str](): "cqm",
    frozenset({"preprocessing"}): "cqm+effect",
    frozenset({"rank"}): "cqm-full-rank",
    frozenset({"preprocessing", "rank"}): "cqm-full-rank+effect",
}


def shapley(errors: Mapping[frozenset[str], float]) -> dict[str, float]:
    """How much each factor lowers an error, averaged over all orders of improving the factors.

    >>> errors = {frozenset(): 1.0, frozenset("a"): 0.4, frozenset("b"): 0.9, frozenset("ab"): 0.2}
    >>> {name: round(value, 6) for name, value in shapley(errors).items()}
    {'a': 0.65, 'b': 0.15}

    Args:
        errors: The error for every set of improved factors.
    """
    names = sorted(frozenset().union(*errors))
    if missing := [set(s) for s in _subsets(names) if s not in errors]:
        raise ValueError(f"errors are needed for every set of factors; missing: {missing}")
    num, shares = len(names), dict.fromkeys(names, 0.0)
    for name in names:
        for others in _subsets([other for other in names if other != name]):
            orders = math.factorial(len(others)) * math.factorial(num - len(others) - 1)
            gain = errors[others] - errors[others | {name}]
            shares[name] += orders / math.factorial(num) * gain
    return shares


def _subsets(names: Iterable[str]) -> list[frozenset[str]]:
    names = list(names)
    return [frozenset(s) for size in range(len(names) + 1) for s in combinations(names, size)]


def attribution(rows: Iterable[Row], domain: str) -> dict[str, float]:
    """Parts of the error of the paper's model on one domain, by `PARTS`; empty if fits are missing.

    Args:
        rows: Rows of the ablation `data`.
        domain: The domain.
    """
    own = [row for row in rows if row["domain"] == domain and row["draws"] == 1]
    largest = max((row["states"] for row in own if math.isfinite(row["states"])), default=0.0)
    errors: dict[frozenset[str], float] = {}
    for improved, method in _METHODS.items():
        for more, states in ((frozenset[str](), largest // 5), (frozenset({FACTORS[2]}), largest)):
            errors[improved | more] = _mean(
                row["value"]
                for row in own
                if (row["method"], row["measure"]) == (method, "excess_error")
                and row["states"] == states
            )
    floor = _mean(row["value"] for row in own if row["measure"] == "noise_floor")
    if not all(map(math.isfinite, [floor, *errors.values()])):
        return {}
    shares = shapley(errors)
    parts = {PARTS[0]: floor, **{name: (1 - floor) * shares[name] for name in FACTORS}}
    return {**parts, PARTS[-1]: (1 - floor) * errors[frozenset(FACTORS)]}


def _mean(values: Iterable[float]) -> float:
    return estimate(values).mean
