"""Each theorem's test notices when a function under it is broken."""

import functools
import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_theory

TABLE = Path(__file__).parent.parent / "docs" / "theory.md"
LABELS = {
    "thm:duality",
    "prop:zero-mass",
    "thm:gauge",
    "cor:minimal",
    "thm:pairwise",
    "thm:projection",
    "thm:cancellation",
    "prop:paired-variance",
    "thm:rank",
    "prop:prototype-error",
    "thm:regret",
    "cor:feature-regret",
    "prop:reward-error",
    "cor:combined-regret",
    "prop:dual-recovery",
    "eq:center-pairwise-identity",
    "eq:hindsight-ratio",
    "def:measure-quotient",
    "def:projected-quotient",
    "rem:measure-and-feature",
    "rem:reference",
    "rem:capacity",
    "rem:coupling",
    "rem:shared-decoder",
}


def table():
    """Label → (functions, test) from the documentation."""
    rows = {}
    for line in TABLE.read_text().splitlines():
        if re.match(r"\| `\w+:", line):
            label, _, functions, test = (cell.strip() for cell in line.strip("|").split("|"))
            rows[label.strip("`")] = re.findall(r"`([\w.]+)`", functions), test.strip("`")
    return rows


def scaled(factor):
    return lambda result: result * factor


def wrong(result):
    """A result that is clearly not the right one, whatever its kind."""
    if isinstance(result, tuple):
        return tuple(wrong(part) for part in result)
    if hasattr(result, "directions"):
        return replace(result, directions=result.directions[::-1], energies=result.energies[::-1])
    result = np.asarray(result)
    if result.dtype == bool:
        return ~result
    if np.issubdtype(result.dtype, np.integer):
        return result + 1
    return result * 1.3 + 0.1 * np.random.default_rng(0).standard_normal(result.shape)


def mutants():
    for label, (functions, test) in table().items():
        for function in functions:
            if function.startswith("bounds."):
                yield pytest.param(function, scaled(0.8), test, id=f"{label}-{function}-small")
                yield pytest.param(function, scaled(1.25), test, id=f"{label}-{function}-loose")
            else:
                yield pytest.param(function, wrong, test, id=f"{label}-{function}")


def test_every_label_is_documented_with_its_test():
    rows = table()
    assert set(rows) == LABELS
    for label, (_, test) in rows.items():
        assert test == "test_" + label.replace(":", "_").replace("-", "_")
        assert hasattr(test_theory, test)
    written = {name for name in dir(test_theory) if name.startswith("test_")}
    assert written == {test for _, test in rows.values()}


@pytest.mark.parametrize(("function", "spoil", "test"), list(mutants()))
def test_breaking_a_function_breaks_its_theorem(function, spoil, test, monkeypatch):
    check = getattr(test_theory, test).hypothesis.inner_test
    check(0)  # passes as it is

    module_name, name = function.rsplit(".", 1)
    module = importlib.import_module(f"cqm.{module_name}")
    right = getattr(module, name)

    @functools.wraps(right)
    def broken(*args, **kwargs):
        return spoil(right(*args, **kwargs))

    def check_many():
        for seed in range(20):
            check(seed)

    monkeypatch.setattr(module, name, broken)
    with pytest.raises((AssertionError, ValueError)):
        check_many()
