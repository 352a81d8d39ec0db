"""A digest of the code behind a result, so that results of other code can be told apart.

The digest covers every module that a job can import: those it starts from and, followed statically
through `import` statements at any depth, all others of the same packages. It is taken from their
syntax trees without docstrings, so an edited comment, docstring or line break changes nothing.
Other packages are not followed; their versions are stored with a run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def code_digest(modules: Iterable[str], *, without: Iterable[str] = ()) -> str:
    """The digest of some modules and of all they import from their own packages and from cqm.

    Args:
        modules: Full names of the modules to start from.
        without: Modules that do not count; what they import does.
    """
    digests = module_digests(modules)
    for name in without:
        digests.pop(name, None)
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def module_digests(modules: Iterable[str]) -> dict[str, str]:
    """The digest of each module that the given ones can import, themselves included."""
    found, waiting = dict[str, str](), sorted(_with_parents(modules))
    tops = {name.partition(".")[0] for name in waiting} | {"cqm"}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], imported = _module(name)
            waiting += [other for other in imported if other.partition(".")[0] in tops]
    return found


@functools.cache
def _module(name: str) -> tuple[str, tuple[str, ...]]:
    """The digest of one module, and the modules that it imports."""
    path = _path(name)
    if path is None:
        raise ValueError(f"the source of module {name!r} was not found")
    tree = ast.parse(path.read_bytes())
    digest = hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return digest, tuple(sorted(_imports(tree, package)))


def _path(name: str) -> Path | None:
    """The source file of a module, which is not imported."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        path = path.parent.joinpath(*rest, "__init__.py")
        path = path if path.exists() else path.parent.with_suffix(".py")
    return path if path.suffix == ".py" and path.exists() else None


def _plain(node: Any) -> Any:
    """A syntax tree as nested lists, the same for all versions of Python; no docstrings."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return [type(node).__name__, *([name, _plain(value)] for name, value in fields)]
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    return node


def _is_docstring(node: Any) -> bool:
    """Whether a statement is only a text, as below a function's or a field's name."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant and isinstance(node.value.value, str)


def _imports(tree: ast.AST, package: str) -> set[str]:
    """Modules that are imported anywhere in a tree, and their parents."""
    names, own = set[str](), {package.partition(".")[0], "cqm"}
    local: dict[str, str] = {}  # what `import a.b` and `import a.b as c` call a package
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                local[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, package)
            names.add(origin)
            names |= {_defining(origin, alias.name, own) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {_defining(local[n], node.attr, own) for n in [node.value.id] if n in local}
    return _with_parents(names)


def _with_parents(names: Iterable[str]) -> set[str]:
    """Modules and the packages that contain them, which are imported first."""
    words = [name.split(".") for name in names]
    return {".".join(name[:i]) for name in words for i in range(1, len(name) + 1)}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree, in the order of the text, but for imports that only type checkers do."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _executed(other)
        else:
            yield from _executed(child)


def _origin(node: ast.ImportFrom, package: str) -> str:
    """The module that a `from` statement in a package names."""
    if not node.level:
        return node.module or ""
    base = package.split(".")
    return ".".join([*base[: len(base) - node.level + 1], *filter(None, [node.module])])


def _defining(package: str, name: str, own: set[str]) -> str:
    """The module behind a name of a package: itself one, loaded lazily from one, or the package."""
    if package.partition(".")[0] not in own:
        return package
    module = f"{package}.{name}"
    return module if _path(module) is not None else _lazy_names(package).get(name, package)


@functools.cache
def _lazy_names(package: str) -> dict[str, str]:
    """Where the names come from that a package loads when they are first used."""
    path = _path(package)
    stub = path and path.with_suffix(".pyi")
    if stub is None or not stub.exists():
        return {}
    return {
        alias.asname or alias.name: _origin(node, package)
        for node in ast.parse(stub.read_bytes()).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
