"""Since when keys have not changed."""

from __future__ import annotations

import numpy as np

from slipstream_tf.tables.sok.store import UnchangedKeys


def of(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


def test_keys_keep_their_time_while_they_stay() -> None:
    unchanged = UnchangedKeys()
    unchanged.replace(of(5, 3), 1.0)
    unchanged.replace(of(3, 7, 5), 2.0)
    assert sorted(unchanged.since(1.5)) == [3, 5]
    assert sorted(unchanged.since(2.0)) == [3, 5, 7]
    assert unchanged.since(0.5).size == 0
    # One that was away was updated meanwhile.
    unchanged.replace(of(7), 3.0)
    unchanged.replace(of(7, 5), 4.0)
    assert unchanged.since(3.0).tolist() == [7]


def test_nothing_is_known_of_keys_that_were_forgotten() -> None:
    unchanged = UnchangedKeys()
    assert unchanged.since(9.0).size == 0
    unchanged.replace(of(1), 1.0)
    unchanged.forget()
    assert unchanged.since(9.0).size == 0
    unchanged.replace(of(), 2.0)
    assert unchanged.since(9.0).dtype == np.int64
