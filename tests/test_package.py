"""The package as a user, an editor and a type checker first meet it."""

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import sklearn.base

import cqm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("worlds", "branches", "logs", "models", "experiments")


def run(code):
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_public_name_resolves():
    for name in cqm.__all__:
        assert getattr(cqm, name) is not None
    assert set(cqm.__all__) <= set(dir(cqm))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'centre'; available: .*'quotient'"):
        _ = cqm.centre


def test_importing_loads_no_simulator_and_no_compiler():
    heavy = ("numpy", "jax", "mujoco", "dm_control", "gymnasium", "scipy", "matplotlib", "rich")
    assert run(f"import cqm, json, sys; print(json.dumps([*sys.modules.keys() & {heavy}]))") == []


def test_importing_any_module_leaves_environment_and_root_logger_alone():
    changed = run(
        """
import importlib, json, logging, os, pkgutil
os.environ.pop("MUJOCO_GL", None)
def settings():
    root = logging.getLogger()
    return dict(os.environ), list(root.handlers), list(root.filters), root.level, logging.root
before, changed = settings(), []
import cqm
for module in pkgutil.walk_packages(cqm.__path__, "cqm."):
    importlib.import_module(module.name)
    if settings() != before:
        changed.append(module.name)
        before = settings()
print(json.dumps(changed))
"""
    )
    assert changed == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_the_docs_mention_resolves(page):
    paths = sorted(set(re.findall(r"\bcqm(?:\.[A-Za-z_]\w*)+", page.read_text())))
    paths = [path for path in paths if not path.endswith((".py", ".md", ".fish"))]
    assert run(f"import cqm\nfor path in {paths}:\n    eval(path)\nprint('null')") is None


def test_the_map_names_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = set(re.findall(r"`(\w+)/?`", text))
    modules = [path for path in (ROOT / "cqm").rglob("*.py") if path.name != "__init__.py"]
    # Baselines are not listed one by one: their registry lists them.
    listed = [path for path in modules if path.parent.name != "methods"]
    assert len(listed) > 60
    assert sorted(path.stem for path in listed if path.stem not in rooms) == []


def test_the_lock_names_versions_and_no_addresses():
    lines = (ROOT / "requirements.lock").read_text().splitlines()[1:]
    assert len(lines) > 50
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)


def build(target, directory):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = directory.iterdir()
    return file


def test_the_wheel_has_types_and_nothing_but_the_package(tmp_path):
    names = set(zipfile.ZipFile(build("wheel", tmp_path)).namelist())
    assert {"cqm/py.typed", "cqm/__init__.pyi", "cqm/worlds/__init__.pyi"} <= names
    assert {name.partition("/")[0] for name in names} == {"cqm", f"cqm-{cqm.__version__}.dist-info"}


def test_the_sdist_has_all_that_the_tests_read(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = (".github", "benchmarks", "cqm", "docs", "examples", "results", "tests")
    assert set(folders) <= {name.partition("/")[0] for name in names}
    assert not [name for name in names if "_build/" in name or "__pycache__" in name]
    if not (ROOT / ".git").exists():
        return  # these are the tests of an unpacked sdist, which has no other list of its files
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    tracked = {name for name in listed.splitlines() if (ROOT / name).exists()}
    assert len(tracked) > 300
    assert sorted(tracked - names) == []


USER_SCRIPT = """
import cqm
world = cqm.load_world("cartpole-swingup", nuisance=4, seed=7)
branches = cqm.collect(world, states=200, per_step=True, seed=7)
report = cqm.audit(branches)
model = cqm.EffectModel(width=64).fit(branches)
query = cqm.Query.formula("pole_cos - 0.1 * cart_velocity", world)
actions = model.act(branches.observations, query)
rankings = model.rank(branches.observations, [query, query])
verdict = model.certify(branches.observations, query, confidence=0.9)
summary = model.summary()
from_logs = cqm.ResidualModel(members=2).fit(cqm.Logs.load("plant-logs"))
loaded = cqm.load_model("reacher-model")
"""
ARRAY = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]"
USER_TYPES = {
    "world": "cqm.worlds.contract.World",
    "branches": "cqm.branches.dataset.Branches",
    "report": "cqm.worlds.check.Report",
    "model": "cqm.models.effect.EffectModel",
    "query": "cqm.queries.Query",
    "actions": ARRAY,
    "rankings": ARRAY,
    "verdict": "cqm.verdicts.Verdict",
    "summary": "str",
    "from_logs": "cqm.models.residual.ResidualModel",
    "loaded": "cqm.models.estimator.Estimator",
    "cqm.worlds.FunctionWorld.name": "str",
}


def strict_mypy(directory, script):
    """What mypy says of a user's script; the largest libraries are skipped to save time."""
    (directory / "script.py").write_text(script)
    large = ("jax", "equinox", "optax", "scipy", "gymnasium", "matplotlib", "rich", "tyro", "ray")
    skipped = ",".join(f"{name}.*" for name in large)
    (directory / "mypy.ini").write_text(
        f"[mypy]\nfollow_imports = silent\n[mypy-{skipped}]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=mypy.ini", "script.py"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True).stdout


def test_type_checkers_know_the_type_of_every_result(tmp_path):
    said = strict_mypy(tmp_path, USER_SCRIPT + "".join(f"reveal_type({x})\n" for x in USER_TYPES))
    assert re.findall('Revealed type is "(.*)"', said) == list(USER_TYPES.values()), said
    assert "error" not in said


def test_type_checkers_see_mistakes(tmp_path):
    said = strict_mypy(
        tmp_path, "import cqm\ncqm.EffectModel(widht=64)\ncqm.centre\ncqm.collect(3, state=4)\n"
    )
    assert 'Unexpected keyword argument "widht"' in said
    assert 'Module has no attribute "centre"' in said
    assert 'Unexpected keyword argument "state"' in said


ESTIMATORS = ["EffectModel", "ResidualModel", "HindsightModel"]
EXPLICIT = [
    *ESTIMATORS,
    *(f"{name}.fit" for name in ESTIMATORS),
    *("EffectModel.paper", "EffectModel.calibrate", "EffectModel.certify"),
    *("collect", "load_world", "audit", "check_world", "load_model"),
    *("Recipe", "Training", "Nuisance", "FunctionWorld", "GymWorld", "MujocoWorld"),
    *(f"Logs.{name}" for name in ("from_arrays", "from_gymnasium", "from_minari")),
    *(f"Query.{name}" for name in ("vector", "direction", "named", "formula", "goal", "samples")),
]


def resolve(path):
    return functools.reduce(getattr, path.split("."), cqm)


@pytest.mark.parametrize("path", EXPLICIT)
def test_no_signature_hides_its_parameters(path):
    parameters = inspect.signature(resolve(path)).parameters.values()
    assert parameters
    assert not [p for p in parameters if p.kind == p.VAR_KEYWORD]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_list_every_parameter(name):
    """Keyword-only, stored untouched, and each with its line of help."""
    estimator = getattr(cqm, name)
    parameters = inspect.signature(estimator).parameters
    assert {"width", "members", "training", "seed"} <= parameters.keys()
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert estimator().get_params() == {name: p.default for name, p in parameters.items()}
    for parameter in parameters:
        assert re.search(rf"^ +{parameter}: \S", estimator.__doc__, re.M), parameter


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scikit_learn_clones_estimators(name):
    estimator = getattr(cqm, name)
    training = cqm.Training(updates=10)
    model = estimator(width=32, members=3, training=training, seed=5)
    copy = sklearn.base.clone(model)
    assert type(copy) is estimator
    assert copy is not model
    assert copy.get_params() == model.get_params()
    assert copy.get_params()["training"] == training
    assert copy.set_params(members=1) is copy
    assert (copy.members, model.members) == (1, 3)
    assert repr(model).startswith(f"{name}(")
    assert "members=3" in repr(model)
    with pytest.raises(ValueError, match="widht"):
        copy.set_params(widht=3)


def imported(path):
    """The names within `cqm` that a file imports anywhere, except for type checking only."""
    package = ["cqm", *path.relative_to(ROOT / "cqm").parts[:-1]]

    def walk(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cqm":
            public = getattr(cqm, node.attr)  # as in cqm.collect after a plain import
            yield getattr(public, "__module__", f"cqm.{node.attr}")
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    names = {name.removesuffix(".__version__") for name in walk(ast.parse(path.read_text()))}
    return {name for name in names if name.startswith("cqm.")}


def import_graph():
    """Which rooms import which: packages of `cqm`, and its top-level modules."""
    graph = {}
    for path in sorted((ROOT / "cqm").rglob("*.py")):
        room = path.relative_to(ROOT / "cqm").with_suffix("").parts[0]
        if room == "__init__":
            continue  # lists the public names of all rooms, and is imported by none
        rooms = {name.split(".")[1] for name in imported(path)}
        graph.setdefault(room, set()).update(rooms - {room})
    return graph


def test_no_room_imports_another_in_a_circle():
    graph = import_graph()
    assert set(PACKAGES) <= graph.keys()
    assert "quotient" in graph["branches"]  # the graph is not empty by mistake
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other: {' -> '.join(error.args[1][::-1])}")


def test_nothing_in_the_library_imports_experiments():
    importers = {room for room, names in import_graph().items() if "experiments" in names}
    assert importers == {"cli"}
