"""The paper's published results as data, as printed, with their place in the paper."""

from __future__ import annotations

from dataclasses import dataclass

from cqm.experiments.methods import METHODS as REGISTRY

DOMAINS = {
    "cartpole-swingup": "Cartpole",
    "reacher-easy": "Reacher",
    "cheetah-run": "Cheetah",
    "walker-walk": "Walker",
}
METHODS = tuple(name for name, method in REGISTRY.items() if method.in_paper)
"""The paper's learned methods, in the order of its tables."""
NUM_SEEDS = 5
PROTOCOL = {"states": 20_000, "test_states": 4_000, "updates": 4_000}
"""Minimum sizes for a run to match the paper's experiment (subsection Models and protocol)."""


@dataclass(frozen=True)
class Published:
    """A number printed in the paper."""

    value: float
    half_width: float | None
    """Half-width of its interval; None if the paper prints none, so that ours is used instead."""
    text: str
    where: str
    """Label or place in the paper."""
    num_seeds: int | None = NUM_SEEDS
    """Number of seeds behind the number; None for a range."""


# Each table starts with its label in the paper and its columns, followed by one line per domain.
_TABLES = """
tab:dm-accuracy cqm world sf direct task-td cocoa
0.9998±0.0003 0.2521±0.1389 0.4236±0.0840 0.9904±0.0084 0.8407±0.0766 0.6445±0.0791
0.9553±0.0290 0.2598±0.0592 0.3456±0.0647 0.8534±0.0974 0.6769±0.0892 0.6316±0.1331
0.6411±0.0118 0.2693±0.0901 0.3713±0.0362 0.6115±0.0523 0.5338±0.0501 0.5957±0.0398
0.3134±0.0101 0.2989±0.0114 0.2719±0.0099 0.2665±0.0375 0.2900±0.0171 0.2268±0.0357
tab:dm-regret cqm world sf direct task-td cocoa
0.0000001±0.0000002 0.1909±0.0598 0.1412±0.0208 0.00007±0.00007 0.0139±0.0086 0.0850±0.0310
0.0011±0.0005 0.1561±0.0262 0.1095±0.0349 0.0039±0.0027 0.0167±0.0082 0.0192±0.0094
0.0542±0.0041 0.2044±0.0327 0.1450±0.0121 0.0606±0.0143 0.0894±0.0216 0.0627±0.0078
0.2427±0.0209 0.2536±0.0199 0.2716±0.0182 0.2847±0.0332 0.2604±0.0206 0.3125±0.0099
tab:dm-effect cqm world sf
0.000007 1.2182 1.0658
0.0385 1.0369 1.0125
0.4503 1.0228 1.0113
1.0453 1.6460 1.1585
"""


def _published(label: str) -> dict[tuple[str, str], Published]:
    """Numbers of one table by domain and method, from `value±half-width` or `value`."""
    header, *lines = _TABLES[_TABLES.index(label) :].splitlines()[: 1 + len(DOMAINS)]
    numbers = {}
    for domain, line in zip(DOMAINS, lines, strict=True):
        for method, text in zip(header.split()[1:], line.split(), strict=True):
            value, _, half = text.partition("±")
            numbers[domain, method] = Published(
                float(value), float(half) if half else None, text.replace("±", " ± "), label
            )
    return numbers


ACCURACY = _published("tab:dm-accuracy")
REGRET = _published("tab:dm-regret")
EFFECT_NMSE = _published("tab:dm-effect")
# One range for both absolute predictors, on Cartpole and Reacher. Two digits are printed, so the
# range extends by half a digit on both sides.
ABSOLUTE_NMSE = {
    (domain, method): Published(0.925, 0.01, "0.92–0.93", "paragraph on Cartpole and Reacher", None)
    for domain in ("cartpole-swingup", "reacher-easy")
    for method in ("world", "sf")
}
# From one representative seed.
CORRELATION = {
    ("reacher-easy", method): Published(
        value, None, str(value), "fig:reacher-alignment", num_seeds=1
    )
    for method, value in (("cqm", 0.986), ("world", 0.236), ("sf", 0.542))
}
