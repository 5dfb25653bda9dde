"""Calls every Slipstream* op with random attributes, shapes and values.

    calling_ops.py SEED CASES SECONDS JOURNAL

Each call must return a result or raise an error that a caller can catch. The program writes each
call to the journal before it runs, so that the journal names a call that ended the process. The
first calls are one valid call per op. Later calls vary these and other calls that worked. Inputs
include outputs, handles and plans of earlier calls.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from valid_calls import call_every_op

sys.path.append(str(Path(__file__).resolve().parents[1]))
from all_rules import ALL_RULES

from slipstream_tf.ops import _loader

# Includes TensorFlow's own memory. With this limit an absurd size fails as on a small machine.
MAX_MEMORY = 12 << 30
EXPECTED = (tf.errors.OpError, TypeError, ValueError, OverflowError)
NEVER = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
# Name of the update rule -> number of its parameters.
RULES = {rule: len(parameters) for rule, parameters in (r.op_rule() for r in ALL_RULES)}
HUGE = (2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
NUMBERS = {
    name: getattr(tf, name).as_numpy_dtype
    for name in ("int64", "int32", "uint8", "float32", "float64", "bool")
}


def op_names(library: Any) -> list[str]:
    """Returns the names of all ops of the library, sorted."""
    return sorted(n for n in dir(library) if op_def_registry.get(n) and n.startswith("Slipstream"))


class Fuzzer:
    """Calls ops at random, depending on the seed and on earlier calls."""

    def __init__(self, library: Any, seed: int):
        """Receives the module of the op library."""
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.library = library
        self.names = op_names(library)
        self.makers = [n for n in self.names if self._makes_resource(n)]
        # (name of the op that created it, handle or plan).
        self.handles: list[tuple[str, tf.Tensor]] = []
        self.plans: list[tuple[str, tf.Tensor]] = []
        self.arrays: list[np.ndarray] = []
        # Inputs and outputs, by name, of calls that worked. An output of one op is an input of
        # another.
        self.records: list[dict[str, Any]] = []
        self.worked: dict[str, list[dict[str, Any]]] = {n: [] for n in self.names}
        self.kinds: dict[str, set[str]] = {n: set() for n in self.names}
        self.handles += [("nothing", _uninitialised()), ("variable", tf.Variable([1.0]).handle)]
        self.handles += _valid_handles(library)
        self.kept_handles = len(self.handles)
        self.plans += [("nothing", _other_variant())]
        self.kept_plans = len(self.plans)
        # Valid calls that are never discarded. They are the base of random variations.
        self.valid: dict[str, list[dict[str, Any]]] = {n: [] for n in self.names}
        self._turns: list[str] = []

    def keep(self, name: str, arguments: dict[str, Any]) -> None:
        """Stores a valid call, and protects all current handles and plans."""
        if name not in self.makers:
            self.valid[name].append(arguments)
        self.kept_handles, self.kept_plans = len(self.handles), len(self.plans)

    def _makes_resource(self, name: str) -> bool:
        outputs = op_def_registry.get(name).output_arg
        return len(outputs) == 1 and outputs[0].type == tf.resource.as_datatype_enum

    def case(self) -> tuple[str, dict[str, Any]]:
        """Returns an op's name and its arguments for the next call."""
        r = self.random
        if not self._turns:
            self._turns = r.sample(self.names, len(self.names))
        name = r.choice(self.makers) if r.random() < 0.1 else self._turns.pop()
        known = self.worked[name] if r.random() < 0.5 else self.valid[name]
        if known and r.random() < 0.7:
            return name, self._varied(name, dict(r.choice(known)))
        self._draw_sizes()
        definition = op_def_registry.get(name)
        wanted = {_SAME.get(a.name, a.name) for a in definition.input_arg}
        sources = [s for s in self.records if len(wanted & s.keys()) > 1]
        self.source = r.choice(sources) if sources and r.random() < 0.5 else {}
        arguments: dict[str, Any] = {a.name: self._attribute(name, a) for a in definition.attr}
        for argument in definition.input_arg:
            arguments[argument.name] = self._input(name, argument, arguments)
        # TensorFlow infers these attributes.
        inferred = {n for a in definition.input_arg for n in (a.number_attr, a.type_attr)}
        return name, {n: v for n, v in arguments.items() if n not in inferred}

    def _draw_sizes(self) -> None:
        r = self.random
        self.rows, self.dim = r.choice((0, 1, 2, 3, 5, 17)), r.choice((2, 2, 2, 1, 4))
        self.features, self.tables = r.choice((1, 1, 1, 2, 3)), r.choice((1, 1, 1, 2))
        self.source: dict[str, Any] = {}
        self.rule = "sgd"

    def _varied(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        r = self.random
        self._draw_sizes()
        definition = op_def_registry.get(name)
        for _ in range(r.choice((0, 1, 1, 2))):
            parts = [p for p in (*definition.attr, *definition.input_arg) if p.name in arguments]
            if not parts:
                break
            part = r.choice(parts)
            if part in list(definition.attr):
                arguments[part.name] = self._attribute(name, part)
            elif r.random() < 0.5 and isinstance(arguments[part.name], np.ndarray):
                arguments[part.name] = self._damaged(arguments[part.name])
            elif isinstance(arguments[part.name], list) and r.random() < 0.5:
                arguments[part.name] = self._with_one_other(name, part, arguments[part.name])
            elif isinstance(arguments[part.name], list):
                count = {part.number_attr: len(arguments[part.name])}
                arguments[part.name] = self._input(name, part, count)
            else:
                dtype = arguments[part.name].dtype
                arguments[part.name] = self._tensor(name, tf.as_dtype(dtype), part.name)
        return arguments

    def _with_one_other(self, name: str, part: Any, given: list[Any]) -> list[Any]:
        if not given:
            return given
        place = self.random.randrange(len(given))
        one = given[place]
        is_array = isinstance(one, np.ndarray)
        other = self._damaged(one) if is_array else self._tensor(name, one.dtype, part.name)
        return [*given[:place], other, *given[place + 1 :]]

    def _damaged(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind not in "biuf":
            return array
        r, flat = self.random, array.copy().reshape(-1)
        kind = r.randrange(5)
        if kind == 0 and flat.size:
            flat[r.randrange(flat.size)] = self._values(array.dtype, (1,))[0]
            return flat.reshape(array.shape)
        if kind == 1 and array.ndim:
            return array[: r.randrange(len(array) + 1)]
        if kind == 2 and array.ndim:
            return np.concatenate([array, array])
        if kind == 3:
            return flat if array.ndim != 1 else array[:, None]
        return self._values(array.dtype, array.shape)

    def _attribute(self, name: str, attr: Any) -> Any:
        r = self.random
        if attr.allowed_values.list.s and attr.type == "string":
            return r.choice(attr.allowed_values.list.s).decode() if r.random() < 0.97 else "other"
        if attr.allowed_values.list.s:
            allowed = [s.decode() for s in attr.allowed_values.list.s]
            return [r.choice(allowed) for _ in range(self._length())]
        if attr.type == "type":
            return r.choice((tf.int32, tf.int64, tf.int64, tf.float32, tf.float32, tf.uint16))
        if attr.type == "bool":
            return r.random() < 0.5
        if attr.type == "float":
            return float(self._values(np.dtype(np.float32), (1,))[0])
        if attr.name == "rule":
            self.rule = r.choice(list(RULES))
            return self.rule if r.random() < 0.97 else "other"
        if attr.type == "string":
            return r.choice(("t", "t", "t", ""))
        if attr.type == "list(float)":
            length = RULES[self.rule] if attr.name == "rule_parameters" else r.choice((0, 5))
            length = length if r.random() < 0.95 else r.randrange(12)
            return [float(v) for v in self._values(np.dtype(np.float32), (length,))]
        if attr.type == "list(int)":
            if attr.name == "table_dims":
                return [self.dim] * self.tables
            if r.random() < 0.1:
                return [r.choice((-1, 0, 1, 2**31 - 1)) for _ in range(self._length())]
            columns = (-1, 0) if attr.name == "feature_column" else (-1,)
            tables = [r.randrange(self.tables) for _ in range(self.features)]
            named = {"feature_keys": list(range(self.features)), "feature_table": tables}
            return named.get(attr.name, [r.choice(columns) for _ in range(self.features)])
        if attr.name == "num_outputs" and r.random() < 0.1:
            # TensorFlow allocates a node with this number of outputs before it validates the
            # attribute.
            return r.choice((-1, 0, -(2**40), 1000))
        if attr.name != "num_outputs" and r.random() < 0.1:
            return r.choice((-1, 0, -(2**40), *HUGE))
        if attr.name in ("num_keys", "num_gradients", "num_outputs"):
            return self.features
        if attr.name in ("num_tables", "num_splits", "num_weights"):
            return self.tables if attr.name == "num_tables" else r.choice((0, 0, 0, 1))
        small = (0, 1, 2, 3, 4, 8, 12, 100)
        return max(r.choice(small), attr.minimum if attr.has_minimum else 0)

    def _length(self) -> int:
        return self.features if self.random.random() < 0.95 else self.random.randrange(5)

    def _input(self, name: str, argument: Any, arguments: dict[str, Any]) -> Any:
        dtype = tf.as_dtype(argument.type) if argument.type else arguments[argument.type_attr]
        if not argument.number_attr:
            return self._tensor(name, dtype, argument.name)
        count = arguments[argument.number_attr]
        if not 0 <= count < 8 or self.random.random() < 0.02:
            count = self.random.randrange(4)
        made = [self._tensor(name, dtype, argument.name) for _ in range(count)]
        arguments[argument.number_attr] = len(made)
        return made

    def _tensor(self, name: str, dtype: tf.DType, what: str) -> Any:
        # A NumPy dtype if a tensor was replaced by an array.
        r, dtype = self.random, tf.as_dtype(dtype)
        if r.random() < 0.01:
            dtype = r.choice((tf.int32, tf.float64, tf.string, tf.int64))
        if dtype == tf.string:
            return np.array([b"text"])
        given = self.source.get(_SAME.get(what, what))
        if given is not None and r.random() < 0.95:
            return given
        if dtype in (tf.resource, tf.variant):
            pool = self.handles if dtype == tf.resource else self.plans
            wanted = {_handle_kind(name), *self.kinds[name]}
            known = [item for item in pool if item[0] in wanted]
            handle = r.choice(known if known and r.random() < 0.9 else pool)
            if dtype == tf.resource and r.random() < 0.02:
                return tf.gather(tf.stack([handle[1]] * 2), tf.range(r.randrange(3)))
            return handle[1]
        if self.arrays and r.random() < 0.3:
            alike = [a for a in self.arrays if a.dtype == dtype.as_numpy_dtype]
            if alike:
                return r.choice(alike)
        n, d = self.rows, self.dim
        shapes = ((), (n,), (n, d), (n + 1,), (d,), (n, d, 2), (0,), (1,), (2, 1))
        shape = r.choice(shapes) if r.random() < 0.15 else _usual_shape(what, n, d)
        if what == "row_splits" and r.random() < 0.8:
            return np.sort(self.numpy.permutation(np.resize([0, n, *range(n)], n + 1)))
        if what == "sizes" and r.random() < 0.8:
            return np.array([[n]])
        return self._values(np.dtype(dtype.as_numpy_dtype), shape)

    def _values(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        kind = self.random.randrange(8)
        if dtype.kind == "b":
            return self.numpy.integers(0, 2, shape).astype(bool)
        if dtype.kind == "f":
            values = self.numpy.normal(size=shape)
            if kind < 2:
                odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, 1e-42, -1.0, 1.0]
                values = self.numpy.choice(odd, shape)
            elif kind < 6:
                values = np.abs(values) % 1.0
            return np.asarray(values).astype(dtype)
        limits = np.iinfo(dtype)
        if kind == 0:
            odd = [
                limits.min,
                limits.max,
                limits.max - 1,
                -1 if limits.min else 0,
                0,
                limits.max // 2,
            ]
            return np.array(self.numpy.choice(np.array(odd, dtype), shape), dtype)
        if kind == 1:
            return np.array(self.numpy.integers(limits.min, limits.max, shape, dtype))
        if kind == 2 and shape:
            return np.cumsum(self.numpy.integers(0, 2, shape), axis=0).astype(dtype)
        if kind == 3:
            return np.array(self.numpy.integers(0, 1000, shape) % limits.max, dtype)
        if kind == 4 and shape:
            return np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        return np.array(self.numpy.integers(0, 6, shape), dtype)

    def call(self, name: str, arguments: dict[str, Any], mode: str) -> tuple[str, Any]:
        """Calls an op and stores its outputs for later calls.

        Returns:
            (kind of the error, the error), or ("", the results) if the call succeeded.
        """
        function = getattr(self.library, name)
        try:
            results = _called(function, arguments, mode)
            outputs = tf.nest.flatten(results)
        except EXPECTED as error:
            if isinstance(error, NEVER) or not str(error):
                raise AssertionError(f"{name} raises {type(error).__name__}: {error}") from error
            return type(error).__name__, error
        except AssertionError as error:
            # TensorFlow raises this error during tracing for a tensor with an unsupported dtype.
            if str(error) != "Unreachable":
                raise
            return "TypeError", error
        self._learn(name, arguments)
        self._record(name, arguments, results)
        for output in outputs:
            if not isinstance(output, tf.Tensor):
                continue
            if output.dtype == tf.resource:
                self.handles.append((name, output))
            elif output.dtype == tf.variant:
                self.plans.append((name, output))
            elif 0 < output.shape.num_elements() <= 1000:
                self.arrays.append(output.numpy())
        # Drop the oldest handles, which frees their tables.
        self.handles[self.kept_handles :] = self.handles[self.kept_handles :][-40:]
        self.plans[self.kept_plans :] = self.plans[self.kept_plans :][-10:]
        self.arrays = self.arrays[-150:]
        return "", results

    def _record(self, name: str, arguments: dict[str, Any], results: Any) -> None:
        record = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
        names = [a.name for a in op_def_registry.get(name).output_arg]
        parts = list(results) if isinstance(results, tuple) else [results]
        for output, value in zip(names, parts, strict=False):
            first = value[0] if isinstance(value, list) and value else value
            if not isinstance(first, tf.Tensor) or first.dtype == tf.resource:
                continue
            if first.dtype == tf.variant:
                record[output] = first
            elif all((size or 0) < 1000 for size in first.shape):
                record[output] = first.numpy()
        if len(record) > 1:
            self.records = [*self.records[-60:], record]

    def _learn(self, name: str, arguments: dict[str, Any]) -> None:
        given = tf.nest.flatten(list(arguments.values()))
        for maker, handle in self.handles + self.plans:
            if any(value is handle for value in given):
                self.kinds[name].add(maker)
        if name in self.makers:
            return
        self.worked[name].append(arguments)
        if len(self.worked[name]) > 30:
            self.worked[name].pop(self.random.randrange(30))


def _handle_kind(name: str) -> str:
    """Returns the kind of handle that an op usually expects.

    The fuzzer passes other kinds as well.
    """
    for part, kind in (
        ("DriftClassifier", "SlipstreamDriftClassifier"),
        ("ClassifyByDrift", "SlipstreamDriftClassifier"),
        ("Classif", "SlipstreamClassifier"),
        ("RecordLosses", "SlipstreamClassifier"),
        ("DeferredGradients", "SlipstreamDeferredGradients"),
        ("AddDeferred", "SlipstreamDeferredGradients"),
        ("TakeDue", "SlipstreamDeferredGradients"),
        ("HotKeyC", "SlipstreamHotKeys"),
        ("Accesses", "SlipstreamHotKeys"),
        ("KeySet", "SlipstreamKeySet"),
        ("MaskGradients", "SlipstreamKeySet"),
    ):
        if part in name and "Collect" not in name:
            return kind
    return "SlipstreamTable"


def _valid_handles(library: Any) -> list[tuple[str, tf.Tensor]]:
    """Creates objects of each kind, so that every op has valid handles."""
    classifier = {"alpha": 1.0, "num_tables": 1, "reservoir_size": 8, "seed": 0}
    rule = {"rule": "adagrad", "rule_parameters": [0.1, 1e-7]}
    makers: list[tuple[str, dict[str, Any]]] = [
        ("SlipstreamTable", {"table_name": "a", "dim": 2}),
        ("SlipstreamTable", {"table_name": "b", "dim": 2, "capacity": 9, **rule}),
        ("SlipstreamTable", {"table_name": "c", "dim": 2, "capacity": 9, "eviction": "lru"}),
        ("SlipstreamClassifier", classifier),
        ("SlipstreamDriftClassifier", {"alpha": 1.0, "num_tables": 1, "seed": 0}),
        ("SlipstreamDeferredGradients", {"dim": 2}),
        ("SlipstreamHotKeys", {"log2_width": 4}),
        ("SlipstreamKeySet", {}),
    ]
    return [(name, getattr(library, name)(**arguments)) for name, arguments in makers]


# Gradients have the shape of the pooled lookup results.
_SAME = {"gradients": "pooled"}
_SCALARS = frozenset(("alpha", "learning_rate", "threshold", "random_fraction", "keep_rate"))
_SCALARS |= {"factor", "k", "movement", "max_age", "max_rows", "capacity", "with_summary"}
_SCALARS |= {"wire_dtype"}
_MATRICES = frozenset(("gradients", "rows", "slots", "sums", "values", "current", "snapshot"))


def _usual_shape(what: str, rows: int, dim: int) -> tuple[int, ...]:
    if what in _SCALARS:
        return ()
    return (rows, dim) if what in _MATRICES else (rows,)


def _uninitialised() -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="never made")


def _other_variant() -> tf.Tensor:
    shape = tf.constant([], tf.int32)
    return tf.raw_ops.EmptyTensorList(
        element_shape=shape, max_num_elements=1, element_dtype=tf.float32
    )


def _called(function: Any, arguments: dict[str, Any], mode: str) -> Any:
    if mode == "eager":
        return function(**arguments)
    if mode == "constants":
        return tf.function(lambda: function(**arguments), autograph=False)()
    fed = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
    rest = {n: v for n, v in arguments.items() if n not in fed}
    names = list(fed)

    def inner(*values: tf.Tensor) -> Any:
        return function(**rest, **dict(zip(names, values, strict=True)))

    signature = [tf.TensorSpec(None, fed[n].dtype) for n in names]
    return tf.function(inner, input_signature=signature, autograph=False)(
        *[tf.constant(fed[n]) for n in names]
    )


def _described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {value.reshape(-1)[:20].tolist()}"
    if isinstance(value, list):
        return [_described(v) for v in value]
    return value if isinstance(value, (bool, int, float, str)) else str(type(value).__name__)


def main(seed: int, cases: int, seconds: float, journal: Path) -> None:
    """Calls ops until `cases` calls are done or `seconds` have passed."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    fuzzer = Fuzzer(_loader.library(), seed)
    results: dict[str, dict[str, int]] = {name: {} for name in fuzzer.names}
    end = time.monotonic() + seconds
    with open(journal, "w") as file:

        def called(number: int, name: str, arguments: dict[str, Any], mode: str) -> tuple[str, Any]:
            reported = {n: _described(v) for n, v in arguments.items()}
            file.seek(0)
            file.truncate()
            file.write(
                json.dumps({"case": number, "op": name, "mode": mode, "arguments": reported})
            )
            file.flush()
            error, found = fuzzer.call(name, arguments, mode)
            kind = error or ("valid" if number < 0 else "result")
            results[name][kind] = results[name].get(kind, 0) + 1
            return error, found

        def valid(name: str, **arguments: Any) -> Any:
            # Convert scalars to 0-dimensional arrays, the form of randomly drawn arguments.
            given = {
                n: np.asarray(v) if isinstance(v, np.generic) else v for n, v in arguments.items()
            }
            error, found = called(-1, name, given, "eager")
            assert not error, f"a valid call of {name} raises {error}: {found}"
            fuzzer.keep(name, given)
            return found

        call_every_op(valid)
        for number in range(cases):
            if time.monotonic() > end:
                break
            name, arguments = fuzzer.case()
            mode = fuzzer.random.choice(("eager", "eager", "eager", "constants", "fed"))
            called(number, name, arguments, mode)
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
