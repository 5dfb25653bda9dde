"""Damaged or unfit .npz files: one kind of error, which names the file; no value is changed."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream_tf.inputs.readers import globo, registry
from slipstream_tf.inputs.readers.arrays import ArrayReader
from slipstream_tf.inputs.spec import DataSpec

FRAPPE = {"train_x": np.arange(400).reshape(40, 10), "train_y": np.arange(40) % 2}
GLOBO = {name: np.ones(50, np.int32) for name in globo._COLUMNS}


def damaged(content, begin, end):
    return content[:begin] + b"\xff" * (end - begin) + content[end:]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("arrays", [FRAPPE, GLOBO], ids=["frappe", "globo"])
@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[:-100],
        lambda content: damaged(content, 150, 190),
        lambda content: b"",
        lambda content: b"user,article\n1,2\n",
    ],
    ids=["cut off", "overwritten", "empty", "text"],
)
def test_a_damaged_file_is_a_value_error_that_names_it(tmp_path, arrays, save, harm):
    path = tmp_path / "data.npz"
    save(path, **arrays)
    assert registry.open_data(path, "train", 4).spec.num_examples
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match=r"data\.npz' is no \.npz file of arrays, or damaged: ."):
        registry.open_data(path, "train", 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({**FRAPPE, "train_x": np.full((40, 10), 1.7)}, "'train_x' is of type float64; allowed"),
        ({**FRAPPE, "train_x": np.full((40, 10), "a")}, "'train_x' is of type <U1; allowed"),
        ({**FRAPPE, "train_x": np.full((40, 10), 1 << 63, "u8")}, "'train_x' has 92233720368547"),
        ({**FRAPPE, "train_y": np.full(40, 7)}, r"'train_y' has 7 at \(0,\); allowed: 0 or 1"),
        ({**FRAPPE, "train_y": np.full(40, np.nan)}, "'train_y' has nan"),
        ({**FRAPPE, "train_y": np.ones((40, 1))}, r"do not fit: .*label \(40, 1\)"),
        ({**FRAPPE, "train_y": np.array(1)}, r"do not fit: .*label \(1,\)"),
        ({**GLOBO, "user": np.full(50, 1.5)}, "'user' is of type float64; allowed: integers"),
        ({**GLOBO, "user": np.full(50, 1 << 40)}, "'user' has 1099511627776; allowed: -2147483648"),
        ({**GLOBO, "os": np.ones(49, np.int32)}, r"'os': \(49,\).*allowed: all of one \[clicks\]"),
        ({"click_ts": np.ones(3, np.int32)}, r"no columns \['user',"),
        ({"a": np.ones(3)}, r"no array of globo .*found \['a'\]"),
    ],
)
def test_unfit_arrays_are_named(tmp_path, arrays, message):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        registry.open_data(path, "train", 4)


def test_a_single_array_is_no_data_set(tmp_path):
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ValueError, match=r"one\.npz' is no .*: it holds a single array"):
        registry.open_data(tmp_path / "one.npz", "train", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.zeros((3, 1))}, "Keys of 'x' are of type float64"),
        ({"label": np.array([0, np.inf, 1])}, r"Label of 'x' has inf at \(1,\)"),
        ({"dense": np.array([[0.0], [1.0], [np.nan]])}, r"Dense of 'x' has nan at \(2, 0\)"),
        ({"label": np.zeros(())}, "do not fit"),
        ({"dense": None}, "do not fit"),
    ],
)
def test_unfit_arrays_in_memory_are_named(change, message):
    arrays = {"keys": np.zeros((3, 1), int), "label": np.zeros(3), "dense": np.zeros((3, 1))}
    with pytest.raises(ValueError, match=message):
        ArrayReader(DataSpec("x", ("a",), 1), batch_size=2, **{**arrays, **change})
