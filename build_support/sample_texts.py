"""Draws docstrings and C++ headers at random, for readers who do not know the project.

    python build_support/sample_texts.py --docstrings=30 --headers=20 --seed=0

Prints each docstring with its name and signature, and the comments of each header with the lines
that they describe. Ask a reader to explain each text in one sentence without the code, and compare
the answers with the code.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import random
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yields (title, docstring) of public classes, functions and methods of public modules."""
    for path in sorted((ROOT / "slipstream_tf").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(owner, (ast.Module, ast.ClassDef)):
                continue
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            for node in owner.body:
                is_definition = isinstance(node, (ast.ClassDef, ast.FunctionDef))
                if not is_definition or f"{prefix}{node.name}".startswith("_"):
                    continue
                text = ast.get_docstring(node)
                if text and not node.name.startswith("_"):
                    arguments = "" if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
                    title = f"{'.'.join(parts)}: {prefix}{node.name}({arguments})"
                    yield title, text


def headers() -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the headers of the C++ core, without guards and includes."""
    for path in sorted((ROOT / "cc_ops" / "core").rglob("*.h")):
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith("#")]
        yield str(path.relative_to(ROOT)), "\n".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--docstrings", type=int, default=30)
    parser.add_argument("--headers", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    texts = draw.sample(list(public_docstrings()), options.docstrings)
    texts += draw.sample(list(headers()), options.headers)
    for number, (title, text) in enumerate(texts, 1):
        print(f"## {number}. {title}\n\n{text}\n")


if __name__ == "__main__":
    main()
