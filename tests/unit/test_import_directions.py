"""Tests that imports in the package point down and have no cycles.

The order is: cli > baselines > keras, models > sampling > ... > tables > ops. The checker reads the
sources of the installed package with `ast`. It also checks where outside packages may be imported.
The tests run it on made-up trees, too.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream_tf

PACKAGE = "slipstream_tf"
LEVELS = (
    {"ops"},
    {"policies"},
    {"tables"},
    {"engine"},
    {"checkpoint"},
    {"data", "distributed", "export", "telemetry"},
    {"sampling"},
    {"keras", "models"},
    {"baselines"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
LEAVES = {"_compat", "_utils", "_version", "config", "initializers", "optimizers"}
# The first of a pair may import the second, although both are in the same layer.
SAME_LEVEL = {("models", "keras"), ("data", "telemetry"), ("export", "data")}
TF_KERAS = ("tf.keras", "tensorflow.keras")
# Outside package -> the subpackages or modules that may import it.
RESTRICTED = {
    "keras": {"keras", "models", "baselines", "cli", "_compat"},
    "tf_keras": set(),
    # The doctor imports them in child processes to check whether they work.
    "horovod": {"distributed.horovod", "_utils.agent", "cli.checks"},
    "sparse_operation_kit": {"tables.sok.table", "cli.checks"},
    "inspect": set(),  # No code may depend on its caller.
}


def modules_of(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (dotted name below the package, file); "" is the package itself."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        yield ".".join(parts), path


def imported_names(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all imports, including `import_module("x")`."""
    package = [PACKAGE, *module.split(".")] if module else [PACKAGE]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = node.args[0]
            if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in TF_KERAS:
            yield node.lineno, "keras"


def violations(root: Path) -> list[str]:
    """Returns a line for each forbidden import in the sources below `root`."""
    found = []
    for module, path in modules_of(root):
        room = module.split(".")[0]
        if not room:
            continue  # The package itself exports names of all subpackages and loads them lazily.
        for line, name in imported_names(path, module):
            problem = _problem(module, room, name)
            if problem:
                found.append(f"{path.relative_to(root)}:{line}: {problem}")
    return found


def _problem(module: str, room: str, name: str) -> str | None:
    if room not in LEVEL and room not in LEAVES:
        return f"the room {room!r} has no place in the order of rooms"
    parts = name.split(".")
    if parts[:2] == ["tensorflow", "keras"]:
        parts = parts[1:]
    if parts[0] != PACKAGE:
        places = RESTRICTED.get(parts[0])
        if places is None or {room, module} & places:
            return None
        return f"{parts[0]} may be imported in {sorted(places)} only"
    target = parts[1] if len(parts) > 1 else ""
    if target in LEAVES or target == room or target == "__version__":
        return None
    if room in LEAVES:
        return f"the leaf {room} imports {name}"
    if target not in LEVEL:
        return f"imports {name}, which is no room and no leaf"
    if LEVEL[target] < LEVEL[room] or (room, target) in SAME_LEVEL:
        return None
    return f"{room} imports {name}, which is not below it"


def imports_between_modules(root: Path) -> dict[str, set[str]]:
    """Returns the imported modules of the package for each of its modules.

    Imports in functions count, because they only delay an import cycle. Imports for type checkers
    count, because a reader of one module must know the other. The imports of a package's `__init__`
    count only for modules that import a name of the package, not one of its modules.
    """
    files = dict(modules_of(root))
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for _, name in imported_names(path, module):
            parts = name.split(".")
            if parts[0] != PACKAGE:
                continue
            target = ".".join(parts[1:])
            while target and target not in files:  # Find the longest prefix that is a module.
                target = target.rpartition(".")[0]
            graph[module] |= {target} & set(files)
    return graph


def circles(root: Path) -> list[list[str]]:
    """Returns the strongly connected components with at least two modules, each sorted."""
    graph = imports_between_modules(root)
    reached: dict[str, set[str]] = {}
    for module in graph:
        found: set[str] = set()
        waiting = [module]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        reached[module] = found
    components = {
        tuple(sorted(m for m in reached[module] if module in reached[m])) for module in graph
    }
    return sorted(list(component) for component in components if component)


def test_installed_package_has_no_import_cycles() -> None:
    root = Path(slipstream_tf.__file__).parent
    assert {"ops.table", "config"} <= imports_between_modules(root)["tables.native"]
    assert circles(root) == []


def test_installed_package_imports_lower_layers_only() -> None:
    root = Path(slipstream_tf.__file__).parent
    names = [name for name, _ in modules_of(root)]
    assert {"ops.table", "tables.native", "engine.tracker", "keras", "cli.train"} <= set(names)
    assert violations(root) == []


def test_type_checkers_see_every_public_name() -> None:
    """Names that are imported on first use are also imported `if TYPE_CHECKING`."""
    tree = ast.parse(Path(slipstream_tf.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and node.body[1:])
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert {*seen, "__version__"} == set(slipstream_tf.__all__)
    for name, (module, _) in seen.items():
        found = getattr(slipstream_tf, name)
        assert found is getattr(importlib.import_module(str(module)), name)


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if not (path.parent / "__init__.py").exists():
            (path.parent / "__init__.py").write_text("", encoding="utf-8")
    return root


ALLOWED = {
    "ops/table.py": "import tensorflow as tf\nfrom slipstream_tf.config import Table",
    "tables/native.py": "from slipstream_tf.ops import table\nfrom .base import Store",
    "tables/sok/table.py": "import sparse_operation_kit as sok",
    "engine/tracker.py": "from ..tables import native\nfrom slipstream_tf._utils import errors",
    "distributed/horovod.py": "import horovod.tensorflow as hvd",
    "models/dots.py": "import keras\nfrom slipstream_tf.keras.layer import Layer",
    "cli/train.py": "from slipstream_tf import __version__, keras, models\nimport tensorflow.keras",
}


def test_checker_accepts_downward_imports(tmp_path: Path) -> None:
    assert violations(_tree(tmp_path, ALLOWED)) == []


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, []),
        (
            {"ops/a.py": "from slipstream_tf.ops import b", "ops/b.py": "from .a import f"},
            [["ops.a", "ops.b"]],
        ),
        (
            {
                "ops/a.py": "def f():\n    import slipstream_tf.ops.b",
                "ops/b.py": "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from slipstream_tf.ops.c import C",
                "ops/c.py": "import importlib\nimportlib.import_module('slipstream_tf.ops.a')",
                "ops/d.py": "from slipstream_tf.ops.a import f",
            },
            [["ops.a", "ops.b", "ops.c"]],
        ),
        (
            {"ops/__init__.py": "from .a import f", "ops/a.py": "from slipstream_tf.ops import g"},
            [["ops", "ops.a"]],
        ),
        (
            {"ops/__init__.py": "from .a import f", "ops/a.py": "", "ops/b.py": "from . import a"},
            [],
        ),
        (
            {
                **{f"ops/{n}.py": f"from . import {m}" for n, m in ("ab", "ba", "cd", "dc")},
                "ops/e.py": "from . import a, c",
            },
            [["ops.a", "ops.b"], ["ops.c", "ops.d"]],
        ),
        ({"ops/a.py": "from slipstream_tf.ops.a import f"}, [["ops.a"]]),
    ],
)
def test_checker_finds_import_cycles(
    tmp_path: Path, files: dict[str, str], found: list[list[str]]
) -> None:
    assert circles(_tree(tmp_path, {**ALLOWED, **files})) == found


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("ops/table.py", "from slipstream_tf.tables import native", "slipstream_tf.tables"),
        ("ops/table.py", "from ..engine import tracker", "slipstream_tf.engine"),
        ("ops/table.py", "from .. import tables", "slipstream_tf.tables"),
        ("ops/__init__.py", "from ..tables import native", "slipstream_tf.tables"),
        ("tables/native.py", "import slipstream_tf.data.readers", "slipstream_tf.data"),
        ("engine/x.py", "import keras", "keras may be imported"),
        ("engine/x.py", "from tensorflow import keras", "keras may be imported"),
        ("engine/x.py", "import tensorflow as tf\nx = tf.keras.Model", "keras may be"),
        ("engine/x.py", "def f():\n    import slipstream_tf.keras", "slipstream_tf.keras"),
        ("telemetry/x.py", "import slipstream_tf.data.readers", "slipstream_tf.data"),
        ("keras/x.py", "from slipstream_tf.models import DLRM", "slipstream_tf.models"),
        ("models/x.py", "from slipstream_tf.cli import train", "slipstream_tf.cli"),
        ("distributed/ends.py", "from horovod import tensorflow", "horovod may be imported"),
        ("cli/x.py", "import sparse_operation_kit", "sparse_operation_kit may be"),
        ("_compat.py", "def f():\n    import inspect", "inspect may be imported in [] only"),
        ("tables/x.py", "import importlib\nimportlib.import_module('keras')", "keras may be"),
        ("config.py", "from slipstream_tf.ops import table", "leaf config"),
        ("attic/x.py", "import os", "'attic' has no place"),
        ("ops/x.py", "from slipstream_tf import attic", "no room and no leaf"),
    ],
)
def test_checker_finds_forbidden_import(tmp_path: Path, file: str, text: str, named: str) -> None:
    found = violations(_tree(tmp_path, {**ALLOWED, file: text}))
    assert len(found) == 1, found
    assert found[0].startswith(f"{file}:") and named in found[0]
