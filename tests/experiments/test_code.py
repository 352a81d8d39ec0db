"""The digest of code changes with what a job would compute, and with nothing else."""

import importlib
import itertools
import subprocess
import sys

import pytest

from cqm.experiments.code import code_digest, module_digests
from cqm.experiments.methods import METHODS
from cqm.experiments.studies.benchmark import Benchmark
from cqm.experiments.studies.logs import PRESETS, LogsStudy

SOURCE = '''"""A module."""
import json

from .other import number


def double(x):
    """Twice x."""
    # a comment
    def inner():
        from . import hidden
        return hidden.VALUE
    return 2 * x + number + inner()
'''

NUMBERS = itertools.count()  # of packages: digests are remembered by name


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes a package of one module, or of several, under a new name each time."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(source=SOURCE, **others):
        files = {"main": source, "other": "number = 1\n", "hidden": "VALUE = 3\n", **others}
        name = f"package{next(NUMBERS)}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        for module, text in files.items():
            (tmp_path / name / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        return {k.partition(".")[2]: v for k, v in module_digests([f"{name}.main"]).items()}

    return digest


def test_comments_docstrings_and_layout_do_not_count(package):
    edited = SOURCE.replace("a comment", "another").replace("Twice x.", "Double.")
    edited = edited.replace('"""A module."""\n', "").replace("2 * x", "(2 *\n        x)")
    assert package(edited) == package()


@pytest.mark.parametrize(
    ("old", "new"),
    [("2 * x", "3 * x"), ("2 * x", "2.0 * x"), ("number + ", ""), ("def double(x)", "def d(x)")],
)
def test_any_other_change_counts(package, old, new):
    assert package(SOURCE.replace(old, new))["main"] != package()["main"]


def test_a_field_loses_its_docstring_but_not_its_default(package):
    first = package('class A:\n    x: str = "one"\n    """Help."""\n')
    assert package('class A:\n    x: str = "one"\n    """Another help."""\n') == first
    assert package('class A:\n    x: str = "two"\n    """Help."""\n') != first


def test_imports_are_followed_inside_functions_too(package):
    assert set(package()) == {"", "main", "other", "hidden"}
    assert package(hidden="VALUE = 4\n")["hidden"] != package()["hidden"]


def test_imports_for_type_checkers_do_not_count(package):
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import other\n"
    assert set(package(source)) == {"", "main"}


def test_names_that_a_package_loads_lazily_are_followed():
    found = module_digests(["cqm.experiments.studies.logs"])
    assert "cqm.worlds.loading" in found  # for cqm.load_world
    assert "cqm.models.residual" in found


def test_a_module_may_be_left_out_but_what_it_imports_counts():
    whole = code_digest(["cqm.experiments.methods"])
    assert code_digest(["cqm.experiments.methods"], without=["cqm.experiments.methods"]) != whole


def test_unknown_modules_are_named():
    with pytest.raises(ValueError, match=r"module 'no_such_module' was not found"):
        code_digest(["no_such_module"])


@pytest.mark.parametrize("method", ["cocoa", "default", "world-ensemble"])
def test_every_module_that_a_job_imports_is_covered(method):
    modules = ["cqm.experiments.studies.benchmark", "cqm.experiments.job", METHODS[method].module]
    code = f"import sys, {', '.join(modules)}; print(*(m for m in sys.modules if m[:3] == 'cqm'))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert set(loaded.stdout.split()) <= set(module_digests(modules))


def test_methods_that_share_no_code_have_their_own_digest():
    from cqm.experiments.protocol import preset

    study = Benchmark(preset("smoke"))
    digests = {
        method: study.code({"domain": "reacher-easy", "seed": 7, "method": method})
        for method in ("zero", "cocoa", "cocoa+effect", "ceilings", "nobody knows")
    }
    assert digests["cocoa"] == digests["cocoa+effect"]
    assert len(set(digests.values())) == 4
    assert digests["nobody knows"] is None
    assert LogsStudy(PRESETS["smoke"]).code({}) not in digests.values()
