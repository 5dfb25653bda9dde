"""Lists all messages that users can see, so that a person can read them one after the other.

    python build_support/list_messages.py                 # all messages
    python build_support/list_messages.py --sample=30     # a random sample, --seed=0

Each line has the kind, the file and line, and the text with {expressions} in braces. The kinds are
"error" (exceptions of Python, statuses of C++), "log" (logging and warnings), "help" (help texts of
flags) and "text" (other texts that programs print or return for reports).
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import random
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LOGS = {"warning", "error", "info", "log_first_n", "warn"}
_MIN_WORDS = 3
_CC_ERROR = re.compile(
    r"(?:[A-Z]\w*Error|return (?:InvalidArgument|DataLoss|ResourceExhausted))\((.*?)\);", re.DOTALL
)
_CC_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
Message = tuple[str, pathlib.Path, int, str]


def text_of(node: ast.AST) -> str:
    """Returns the text of a string expression; other expressions appear in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else f"{{{node.value}}}"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return f"{{{ast.unparse(node)}}}"


def kind_of(call: ast.Call, raised: set[int]) -> str:
    """Returns the kind of the messages among the arguments of a call."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if id(call) in raised or name.endswith("Error") or name in {"invalid", "does_nothing"}:
        return "error"
    if name in _LOGS:
        return "log"
    return "help" if name == "Flag" else "text"


def python_messages(path: pathlib.Path) -> Iterator[Message]:
    """Yields the messages of a Python file: string arguments of at least three words."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    assigned: dict[str, list[ast.Assign]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "invalid":
            # A variable that holds the text has the value of the last assignment above.
            parts = []
            for part in node.args:
                above = [
                    a for a in assigned.get(getattr(part, "id", ""), []) if a.lineno < part.lineno
                ]
                last = max(above, key=lambda a: a.lineno).value if above else part
                is_text = isinstance(last, (ast.Constant, ast.JoinedStr, ast.BinOp))
                parts.append(text_of(last if is_text else part))
            text = "Invalid `{}`: {} for {}. Expected {}.".format(*parts, "{place}", "{allowed}")
            yield "error", path, node.lineno, " ".join(text.split())
        elif isinstance(node, ast.Call):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if not isinstance(argument, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                    continue
                text = " ".join(text_of(argument).split())
                if len(re.sub(r"\{.*?\}", "", text).split()) >= _MIN_WORDS:
                    yield kind_of(node, raised), path, argument.lineno, text


def cc_messages(path: pathlib.Path) -> Iterator[Message]:
    """Yields the error messages of a C++ file; expressions between its literals appear as {}."""
    source = path.read_text(encoding="utf-8")
    for found in _CC_ERROR.finditer(source):
        text = "{}".join(_CC_TEXT.findall(found[1]))
        if len(text.split()) >= _MIN_WORDS:
            yield "error", path, source.count("\n", 0, found.start()) + 1, text


def messages() -> list[Message]:
    """Returns all messages of the package and of the op library, by file and line."""
    found = [m for p in (ROOT / "slipstream_tf").rglob("*.py") for m in python_messages(p)]
    for path in (*(ROOT / "cc_ops").rglob("*.cc"), *(ROOT / "cc_ops").rglob("*.h")):
        if not path.stem.endswith("_test") and "testing" not in path.parts:
            found += cc_messages(path)
    return sorted(found, key=lambda message: message[1:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--kinds", default="error,log,help,text", help="kinds to list, separated by commas"
    )
    parser.add_argument("--sample", type=int, help="number of messages to draw at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sample")
    options = parser.parse_args()
    found = [message for message in messages() if message[0] in options.kinds.split(",")]
    if options.sample is not None:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    for kind, path, line, text in found:
        print(f"{kind:5} {path.relative_to(ROOT)}:{line}: {text}")


if __name__ == "__main__":
    main()
