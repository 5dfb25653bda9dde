"""SOK still has the traps that docs/sok.md lists for its Python code.

With TF_USE_LEGACY_KERAS=1, tf.keras is Keras 2. Note: if a check fails, SOK was fixed. Update the
page then.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile

import horovod.tensorflow as hvd
import keras
import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf
import tf_keras

IS_KERAS_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
first, legacy = tf.compat.v1.train, tf_keras.optimizers.legacy


def table(name: str | None = None, keys=(), **settings):
    made = sok.DynamicVariable(
        dimension=2, initializer="0.5", var_type="hybrid", name=name,
        init_capacity=64, max_capacity=64, **settings,
    )  # fmt: skip
    if keys:
        made.sparse_read(tf.constant(keys, tf.int64))
    return made


def update(optimizer, variable, key: int = 1) -> None:
    rows, keys = tf.ones([1, 2]), tf.constant([key], tf.int64)
    optimizer.apply_gradients([(tf.IndexedSlices(rows, keys, tf.constant([64, 2])), variable)])


def raises(kind, text: str, function, *arguments) -> None:
    try:
        function(*arguments)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


def keys_of(variable) -> list[int]:
    return sorted(sok.export(variable)[0].numpy().tolist())


def check_start() -> None:
    before = tf.keras.optimizers
    sok.init()
    assert (tf.keras.optimizers is not before) == IS_KERAS_2
    raises(RuntimeError, "more than once", sok.init)


def check_variables() -> None:
    assert table(max_capacty=1).config_dict["max_capacty"] == 1
    assert sok.DynamicVariable(dimension=1, initializer="0").backend_type == "hybrid"
    evaluated = table(keys=[3, 4])
    assert keys_of(evaluated) == [3, 4]
    if sys.version_info >= (3, 12):
        bags = tf.RaggedTensor.from_row_lengths(tf.constant([3], tf.int64), [1])
        raises(AttributeError, "find_loader", sok.lookup_sparse, [evaluated], [bags])


def check_memory() -> None:
    deleted = table(keys=[3, 4])
    handle = deleted.handle
    del deleted
    gc.collect()
    size = lambda: sok.raw_ops.dummy_var_shape(handle, key_type=tf.int64, dtype=tf.float32)  # noqa: E731
    assert size()[0] == 2
    tf.raw_ops.DestroyResourceOp(resource=handle)
    raises(tf.errors.NotFoundError, "does not exist", size)


def check_optimizers() -> None:
    raises(
        AttributeError, "_create_slots", sok.OptimizerWrapper, keras.optimizers.Adagrad(0.1)
    )  # fmt: skip
    if IS_KERAS_2:
        sok.OptimizerWrapper(legacy.Adagrad(0.1))
    else:
        raises(KeyError, "accumulator", sok.OptimizerWrapper, legacy.Adagrad(0.1))
    static = sok.Variable(np.ones((64, 2)), dtype=tf.float32)
    wrapped = sok.OptimizerWrapper(first.AdagradOptimizer(0.1))
    raises(AttributeError, "to_static", update, wrapped, static)
    update(first.AdagradOptimizer(0.1), static)


def check_files() -> None:
    wrapped = sok.OptimizerWrapper(first.AdagradOptimizer(0.1))
    trained = table("first")
    update(wrapped, trained)
    with tempfile.TemporaryDirectory() as folder:
        sok.dump(folder, [trained], wrapped)
        assert sorted(os.listdir(folder)) == ["first_0-key", "first_0-weight"]
        raises(Exception, "accumulator is not exist", sok.load, folder, [trained], wrapped)
        raises(Exception, "OptimizerWrapper", sok.dump, folder, [trained], sok.SGD(0.1))
        raises(Exception, "don't have value", sok.dump, folder, [table("empty")])
    if IS_KERAS_2:
        wrapped = sok.OptimizerWrapper(legacy.Adam(0.1))
        trained = table("second", keys=[7, 8])
        update(wrapped, trained)
        with tempfile.TemporaryDirectory() as folder:
            sok.dump(folder, [trained], wrapped)
            names = {name.removeprefix("second_0-") for name in os.listdir(folder)}
            assert names == {"key", "weight", "Adam-m", "Adam-v"}
            raises(Exception, "not divisible by key_num", sok.load, folder, [trained], wrapped)


def check_names_of_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sok.dump(folder, [table("a/b", keys=[1]), table("a_b", keys=[2, 3])])
        assert sorted(os.listdir(folder)) == ["a_b_0-key", "a_b_0-weight"]
        loaded = table("a/b", keys=[9])
        sok.load(folder, [loaded])
        assert keys_of(loaded) == [2, 3, 9]
    names = [sok.DynamicVariable(dimension=1, initializer="0", var_type="hbm").name for _ in "ab"]
    prefix, number = names[0].removesuffix(":0").rsplit("_", 1)
    assert names[1] == f"{prefix}_{int(number) + 1}:0"


def main() -> None:
    hvd.init()
    check_start()
    check_variables()
    check_memory()
    check_optimizers()
    check_files()
    check_names_of_files()
    print("all checks passed")


if __name__ == "__main__":
    main()
