"""Draws the includes between folders of cc_ops/core and the imports between subpackages.

    python docs/pictures/graphs.py

Writes `includes.svg` and `imports.svg` to this folder. The folders are listed from the lowest to
the highest layer. An arrow on the right points to a lower layer. An arrow on the left would point
to a higher layer, which the tests of include and import directions forbid. `includes_before.svg`
and `imports_before.svg` show earlier sources, with their files assigned to today's folders.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from drawing import INK, MUTED, SATURATED, VARYING, Picture  # noqa: E402

INCLUDE = re.compile(r'#\s*include\s*"cc_ops/core/([^"]+)"')
CORE = (
    *("base", "gpu", "memory", "containers", "update/rules", "deferral", "table", "lookup"),
    *("update", "saturation", "hot_keys", "exchange"),
)
PACKAGE = (
    *("leaves", "ops", "policies", "tables", "engine", "checkpoint", "telemetry", "data"),
    *("distributed", "export", "sampling", "keras", "models", "baselines", "cli"),
)
Edges = collections.Counter[tuple[str, str]]


def sources(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the source files of the core without tests, by path in cc_ops/core."""
    found = sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cc"))
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {n: p for n, p in names.items() if "_test." not in n and "fuzz" not in n}


def includes(tree: pathlib.Path) -> tuple[dict[str, int], Edges]:
    """Returns the number of files per folder, and of includes between folders."""

    def room(name: str) -> str:
        return name.rpartition("/")[0]

    sizes: dict[str, int] = collections.Counter()
    edges: Edges = collections.Counter()
    for name, path in sources(tree / "cc_ops/core").items():
        sizes[room(name)] += 1
        for other in INCLUDE.findall(path.read_text(encoding="utf-8")):
            edges[room(name), room(other)] += 1
    return sizes, edges


def imports(tree: pathlib.Path) -> tuple[dict[str, int], Edges]:
    """Returns the number of modules per subpackage, and of imports between subpackages."""
    package = tree / "slipstream_tf"
    sizes: dict[str, int] = collections.Counter()
    edges: Edges = collections.Counter()

    def room(parts: list[str]) -> str:
        return parts[0] if parts and parts[0] in PACKAGE else "leaves"

    for path in sorted(package.rglob("*.py")):
        own = room(list(path.relative_to(package).with_suffix("").parts))
        if path == package / "__init__.py":
            continue
        sizes[own] += 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream_tf"):
                inner = (node.module or "").split(".")[1:]
                for name in [inner] if inner else [[alias.name] for alias in node.names]:
                    edges[own, room(name)] += 1
    return sizes, edges


def draw(rooms: tuple[str, ...], sizes: dict[str, int], edges: Edges, title: str) -> Picture:
    """Draws the folders as a list, and an arc for each dependency."""
    row = 34
    picture = Picture(60 + row * len(rooms), title)
    picture.text(240, 24, title, bold=True)
    height = {name: 54 + row * place for place, name in enumerate(rooms)}
    up = sum(
        n for (a, b), n in edges.items() if a in height and b in height and height[b] > height[a]
    )
    for (user, used), count in sorted(edges.items(), key=lambda edge: edge[1]):
        if user == used or user not in height or used not in height:
            continue
        begin, end = height[user], height[used]
        is_up = end > begin
        side, x = (-1, 165) if is_up else (1, 315)
        reach = x + side * (16 + 0.32 * abs(end - begin))
        bend = [(x, begin), (reach, begin + (end - begin) / 5), (reach, end - (end - begin) / 5)]
        color = VARYING if is_up else SATURATED
        picture.line([*bend, (x, end)], color, 0.8 + 0.5 * min(count, 9) ** 0.5, arrow=True)
    for name in rooms:
        picture.text(240, height[name] + 5, f"{name} ({sizes.get(name, 0)})", 14, INK)
    words = f"{up} arrows point to a higher layer" if up else "no arrow points to a higher layer"
    picture.text(240, 52 + row * len(rooms), f"number of files in brackets; {words}", 13, MUTED)
    return picture


def picture_of(kind: str) -> Picture:
    """Returns the picture of "includes" or "imports"."""
    rooms, read, where = {
        "includes": (CORE, includes, "cc_ops/core"),
        "imports": (PACKAGE, imports, "slipstream_tf"),
    }[kind]
    sizes, edges = read(ROOT)
    return draw(rooms, sizes, edges, f"{kind.capitalize()} between the folders of {where}")


def main() -> None:
    for kind in ("includes", "imports"):
        (HERE / f"{kind}.svg").write_text(picture_of(kind).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
