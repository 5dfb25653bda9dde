"""distributed.exchange: names of collectives, and what travels."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.distributed import SingleProcess, exchange
from slipstream_tf.ops.exchange import SendBuffer


def test_eager_calls_of_one_collective_have_one_name():
    names = exchange.Names("test_eager")
    assert [names.of("a"), names.of("b"), names.of("a")] == [
        "slipstream.test_eager.a",
        "slipstream.test_eager.b",
        "slipstream.test_eager.a",
    ]


def test_objects_with_one_prefix_are_numbered():
    first, second = exchange.Names("test_numbers"), exchange.Names("test_numbers")
    assert first.of("a") == "slipstream.test_numbers.a"
    assert second.of("a") == "slipstream.test_numbers.1.a"


def test_every_graph_numbers_its_collectives_anew():
    names, seen = exchange.Names("test_graphs"), []

    @tf.function
    def step(x):
        seen.append([names.of("a"), names.of("a"), names.of("b")])
        return x

    step(tf.zeros([1]))
    step(tf.zeros([2]))  # traced again
    prefix = "slipstream.test_graphs"
    assert seen == [[f"{prefix}.a", f"{prefix}.a-1", f"{prefix}.b"]] * 2


def test_float32_travels_as_it_is_and_bfloat16_rounded():
    values = tf.constant([1.0, 1.0 + 2**-6, 1.0 + 2**-12, -3e38])
    assert exchange.to_wire(values, False) is values
    sent = exchange.to_wire(values, True)
    assert sent.dtype == tf.uint16
    got = exchange.from_wire(sent, True).numpy()
    np.testing.assert_array_equal(got[:3], [1.0, 1.0 + 2**-6, 1.0])
    np.testing.assert_allclose(got, values, rtol=2**-8)


def test_values_are_rounded_after_the_warmup():
    wire = exchange.Wire("bfloat16", warmup_steps=2)
    values = tf.constant([1.0, 1.0 + 2**-12, -3e38])
    splits = tf.constant([1, 0, 2])

    @tf.function
    def there_and_back(step):
        rounds = wire.rounds(step)
        sent = exchange.to_wire(values, rounds)
        return sent, exchange.splits_on_wire(splits, rounds), exchange.from_wire(sent, rounds)

    for step in range(4):
        sent, parts, got = there_and_back(tf.constant(step))
        assert sent.dtype == tf.uint16
        assert sent.shape == [3 if step >= 2 else 6]
        assert parts.numpy().tolist() == ([1, 0, 2] if step >= 2 else [2, 0, 4])
        assert (got.numpy() == values.numpy()).tolist() == [True, step < 2, step < 2]
    assert wire.rounds(tf.constant(1)).numpy() == False  # noqa: E712
    assert exchange.Wire("bfloat16").rounds(tf.constant(0)) is True
    assert exchange.Wire("float32", warmup_steps=2).rounds(tf.constant(3)) is False


def test_more_than_can_be_sent_is_refused():
    assert exchange.splits_of(tf.constant([3, 2**31 - 1], tf.int64), "keys").dtype == tf.int32
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"keys for one rank.*2\^31 - 1"):
        exchange.splits_of(tf.constant([3, 2**31], tf.int64), "keys")


def rows_of(sizes, keys, values) -> SendBuffer:
    return SendBuffer(
        tf.constant([sizes], tf.int64), tf.constant(keys, tf.int64), tf.constant(values, tf.float32)
    )


def test_rows_of_one_process_stay_where_they_are():
    own = rows_of([1, 0], [4], [1.0, 2.0])
    names = exchange.Names("test_alone")
    got = exchange.gather_rows(SingleProcess(), own, names, "rows", "gradients", True)
    assert got is own


def test_settings_of_the_wire_are_checked():
    with pytest.raises(ValueError, match=r"wire_dtype.*float16"):
        exchange.Wire("float16")
    with pytest.raises(ValueError, match=r"wire_warmup_steps.*-1"):
        exchange.Wire("bfloat16", warmup_steps=-1)


def test_all_ranks_get_the_rows_of_all(run_as_ranks):
    sent = [rows_of([1, 1], [4, 5], [1, 2, 3]), rows_of([0, 0], [], []), rows_of([0, 1], [6], [4])]
    names = exchange.Names("test_rows")

    def program(comm):
        return exchange.gather_rows(comm, sent[comm.rank], names, "rows", "gradients", True)

    for got in run_as_ranks(3, program):
        assert got.sizes.numpy().tolist() == [[1, 1], [0, 0], [0, 1]]
        assert got.keys.numpy().tolist() == [4, 5, 6]
        assert got.values.numpy().tolist() == [1, 2, 3, 4]
