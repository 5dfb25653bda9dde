"""Runs the examples in the docstrings of all public classes and functions."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

GLOBALS = {"np": np, "tf": tf, "keras": keras, "slip": slip}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Public names of slip.initializers, which is a module without an `__all__`.
INITIALIZERS = ("Constant", "RandomNormal", "RandomUniform", "TruncatedNormal", "Zeros", "get")


def public_packages() -> Iterator[Any]:
    """Yields slipstream_tf and its public packages that have an `__all__`, outer packages first."""
    yield slip
    for found in pkgutil.walk_packages(slip.__path__, "slipstream_tf."):
        is_public = not any(part.startswith("_") for part in found.name.split("."))
        if found.ispkg and is_public:
            package = importlib.import_module(found.name)
            if hasattr(package, "__all__"):
                yield package


def public_objects() -> dict[str, Any]:
    """Returns each public class and function under its shortest public name."""
    objects: dict[str, Any] = {}
    seen = set()
    for package in sorted(public_packages(), key=lambda package: package.__name__.count(".")):
        prefix = package.__name__.replace("slipstream_tf", "slip", 1)
        for name in package.__all__:
            value = getattr(package, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and id(value) not in seen:
                seen.add(id(value))
                objects[f"{prefix}.{name}"] = value
    for name in INITIALIZERS:
        objects[f"slip.initializers.{name}"] = getattr(slip.initializers, name)
    return objects


def docstrings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for the docstring of an object and the docstrings of its methods."""
    yield name, value.__doc__ or ""
    if inspect.isclass(value):
        for member, attribute in vars(value).items():
            function = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
            if inspect.isroutine(function):
                yield f"{name}.{member}", function.__doc__ or ""


def examples(name: str, text: str) -> doctest.DocTest:
    """Parses the examples of a docstring."""
    return doctest.DocTestParser().get_doctest(text, dict(GLOBALS), name, None, None)


PUBLIC = public_objects()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstring_example_runs(name):
    for part, text in docstrings(name, PUBLIC[name]):
        test, output = examples(part, text), []
        failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=output.append)
        assert failed == 0, "".join(output)


def test_every_public_name_has_an_example():
    assert [name for name, value in PUBLIC.items() if ">>>" not in (value.__doc__ or "")] == []
