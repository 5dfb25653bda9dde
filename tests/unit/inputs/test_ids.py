"""with_ids: numbers by place, and numbers by content that no order, batch or padding changes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.inputs import with_ids
from slipstream_tf.inputs.ids import hash_inputs
from slipstream_tf.inputs.notes import take_notes

MASK = (1 << 64) - 1


def mix(value):
    value &= MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 31


def reference(value, is_key=False):
    """Hash of one input's component in plain Python: a number, or nested lists of them."""
    if isinstance(value, list):
        parts = [reference(part, is_key) for part in value]
        placed = (mix(p + mix(i + 0xD1B54A32D192ED03)) for i, p in enumerate(parts) if p)
        return sum(placed) & MASK
    if is_key and value == -1:
        return 0
    if isinstance(value, float):
        value = int(np.float32(value).view(np.int32))
    return mix(value + 0x9E3779B97F4A7C15)


def inputs(seed, count=40):
    generator = np.random.default_rng(seed)
    bags = [generator.integers(-(1 << 62), 1 << 62, n).tolist() for n in np.arange(count) % 4]
    nested = [[bag, bag[:1]] if bag else [] for bag in bags]
    return {
        "bag": bags,
        "deep": nested,
        "padded": [[*bag[:2], -1][: len(bag) + 1] for bag in bags],
        "dense": generator.normal(size=(count, 2)).astype(np.float32),
        "label": generator.integers(0, 2, count).astype(np.float32),
    }


def batch_of(data, rows, extra_padding=0):
    def ragged(name):
        values = [data[name][i] for i in rows]
        return tf.ragged.constant(values, tf.int64, ragged_rank=2 if name == "deep" else 1)

    padded = tf.RaggedTensor.from_row_lengths(
        tf.constant([k for i in rows for k in data["padded"][i]], tf.int64),
        [len(data["padded"][i]) for i in rows],
    )
    padded = padded.to_tensor(-1)
    padded = tf.pad(padded, [[0, 0], [0, extra_padding]], constant_values=-1)
    keys = {"bag": ragged("bag"), "deep": ragged("deep"), "padded": padded}
    dense, label = (tf.constant(data[name][rows]) for name in ("dense", "label"))
    return {"keys": keys, "dense": dense}, label


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 100),
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=9),
    extra_padding=st.integers(0, 3),
)
def test_hash_against_plain_python_whatever_the_batch(seed, rows, extra_padding):
    data = inputs(seed)
    got = hash_inputs(*batch_of(data, rows, extra_padding))
    expected = []
    for i in rows:
        keys = [reference(data[name][i], True) for name in ("bag", "deep", "padded")]
        dense = [float(value) for value in data["dense"][i]]
        parts = [*keys, reference(dense), reference(float(data["label"][i]))]
        placed = (mix(p + mix(j + 0xD1B54A32D192ED03)) for j, p in enumerate(parts) if p)
        expected.append(sum(placed) & MASK >> 1)
    assert got.numpy().tolist() == expected


def matrix(count=100, batch_size=7):
    keys = np.arange(count * 2, dtype=np.int64).reshape(count, 2)
    pairs = tf.data.Dataset.from_tensor_slices(({"keys": keys}, np.arange(count) % 2))
    return pairs, pairs.batch(batch_size)


def ids_by_key(dataset):
    result = {}
    for features, *_ in dataset:
        for key, number in zip(features["keys"].numpy()[:, 0], features["id"].numpy(), strict=True):
            assert result.setdefault(key, number) == number
    return result


def test_by_hash_is_the_same_in_every_order_and_batch():
    pairs, batches = matrix()
    first = ids_by_key(with_ids(batches, by="hash"))
    assert len(set(first.values())) == 100 and min(first.values()) >= 0
    again = with_ids(pairs.shuffle(100).repeat(3).batch(13), by="hash")
    assert ids_by_key(again) == first


def test_every_part_of_an_input_counts_and_its_notes_do_not():
    base = {
        "keys": {"a": tf.constant([[1, 2]], tf.int64), "b": tf.constant([[2]], tf.int64)},
        "dense": tf.constant([[0.5, 1.0]], tf.float16),
        "double": tf.constant([1.0], tf.float64),
        "text": tf.constant(["x"]),
        "flag": tf.constant([True]),
        "byte": tf.constant([3], tf.uint8),
    }
    label = tf.constant([1.0])
    changed = [
        ({**base, "keys": {**base["keys"], "a": tf.constant([[2, 1]], tf.int64)}}, label),
        ({**base, "keys": {"a": base["keys"]["b"], "b": base["keys"]["a"]}}, label),
        ({**base, "dense": tf.constant([[1.0, 0.5]], tf.float16)}, label),
        ({**base, "double": tf.constant([2.0], tf.float64)}, label),
        ({**base, "text": tf.constant(["y"])}, label),
        ({**base, "flag": tf.constant([False])}, label),
        ({**base, "byte": tf.constant([4], tf.uint8)}, label),
        (base, tf.constant([0.0])),
    ]
    hashes = {int(hash_inputs(*element)[0]) for element in [(base, label), *changed]}
    assert len(hashes) == 1 + len(changed)
    noted = {**base, "id": tf.constant([5]), "skippable": tf.constant([True])}
    assert int(hash_inputs(noted, label)[0]) == int(hash_inputs(base, label)[0])


@pytest.mark.parametrize("by", ["position", "hash"])
def test_features_that_are_flat_or_no_mapping(by):
    pairs, batches = matrix(20)
    flat = batches.map(lambda f, y: ({"a": f["keys"][:, 0], "b": f["keys"]}, y))
    alone = batches.map(lambda f, y: (f["keys"], y))
    pair = batches.map(lambda f, y: ((f["keys"], tf.cast(y, tf.float32)), y))
    for form in (flat, alone, pair):
        noted = with_ids(form, by)
        ids = np.concatenate([f["id"].numpy() for f, _ in noted])
        assert len(set(ids.tolist())) == 20 and ids.dtype == np.int64
        for (features, label), (before, label_before) in zip(noted, form, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, take_notes(features)[0], before)
            np.testing.assert_array_equal(label, label_before)
    assert by == "position" or set(ids_of(alone)) == set(
        ids_of(pairs.shuffle(20).batch(3).map(lambda f, y: (f["keys"], y)))
    )


def ids_of(dataset):
    return [i for f, _ in with_ids(dataset, "hash") for i in f["id"].numpy().tolist()]


def test_the_width_of_padding_does_not_count_in_flat_features():
    label = tf.constant([1.0])
    narrow, wide = tf.constant([[5, -1]], tf.int64), tf.constant([[5, -1, -1]], tf.int64)
    assert hash_inputs({"bag": narrow}, label) == hash_inputs({"bag": wide}, label)
    assert hash_inputs(narrow, label) == hash_inputs(wide, label)


def test_hash_spreads_over_all_bits():
    keys = tf.reshape(tf.range(20_000, dtype=tf.int64), [-1, 1])
    ids = hash_inputs({"keys": keys}, tf.zeros(20_000)).numpy()
    assert len(set(ids)) == 20_000
    bits = (ids[:, None] >> np.arange(63)) & 1
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02


def test_by_position_counts_in_one_pass_and_anew_in_the_next():
    _, batches = matrix(20, 7)
    dataset = with_ids(batches)
    for _ in range(2):
        assert [f["id"].numpy().tolist() for f, _ in dataset] == [
            list(range(7)),
            list(range(7, 14)),
            list(range(14, 20)),
        ]
    assert dataset.cardinality() == 3
    assert dataset.element_spec[0]["id"] == tf.TensorSpec([None], tf.int64)


@pytest.mark.parametrize("by", ["position", "hash"])
def test_weights_ragged_features_static_sizes_and_empty_batches(by):
    def element(features, label):
        bag = tf.RaggedTensor.from_tensor(features["keys"])
        return {"keys": {"bag": bag}, "dense": features["keys"]}, label, label * 2

    pairs, _ = matrix(12)
    dataset = with_ids(pairs.batch(4, drop_remainder=True).map(element), by)
    assert dataset.element_spec[0]["id"] == tf.TensorSpec([4], tf.int64)
    for features, label, weight in dataset:
        assert set(features) == {"keys", "dense", "id"}
        np.testing.assert_array_equal(features["keys"]["bag"].to_tensor(), features["dense"])
        np.testing.assert_array_equal(weight, label * 2)
    empty = pairs.batch(4).map(lambda f, y: ({"keys": f["keys"][:0]}, y[:0]))
    assert all(features["id"].shape == [0] for features, _ in with_ids(empty, by))


def test_bad_arguments():
    pairs, batches = matrix()
    with pytest.raises(ValueError, match=r"Invalid `by`: 'row'.*'position', 'hash'"):
        with_ids(batches, by="row")
    with pytest.raises(ValueError, match=r"\(features, label\)"):
        with_ids(batches.map(lambda f, y: f))
    with pytest.raises(ValueError, match='without "id"'):
        with_ids(with_ids(batches))
    with pytest.raises(ValueError, match="first dimension"):
        with_ids(pairs)
    complex_features = batches.map(lambda f, y: ({**f, "c": tf.cast(y, tf.complex64)}, y))
    with pytest.raises(ValueError, match="complex64"):
        with_ids(complex_features, by="hash")
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([]),
        output_signature=({"keys": tf.TensorSpec(None, tf.int64)}, tf.TensorSpec([None])),
    )
    with pytest.raises(ValueError, match="known rank"):
        with_ids(unknown, by="hash")
