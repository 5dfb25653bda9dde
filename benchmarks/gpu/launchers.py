"""Calls the CUDA launchers of c_api.cc on CuPy or NumPy arrays.

The functions are called through ctypes.

Pass NumPy arrays to a library that implements the launchers synchronously on the CPU. Every method
checks the error code and returns new arrays without synchronizing; the caller synchronizes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

_I64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _KeyTable(ctypes.Structure):
    _fields_ = [
        ("entries", _POINTER),
        ("bytes", _I64),
        ("capacity", _I64),
        ("seed", ctypes.c_uint64),
        ("has_free_key", _I64),
    ]


class _Buffers(ctypes.Structure):
    _fields_ = [
        ("keys", _POINTER),
        ("since", _POINTER),
        ("sums", _POINTER),
        ("capacity", _I64),
        ("dim", _I64),
    ]


class Launchers:
    """The launchers of one shared library, for arrays of one module.

    Args:
        library: Path of the shared library.
        xp: The array module: `cupy` or `numpy`.
    """

    def __init__(self, library: Path, xp: Any):
        self.xp = xp
        self._library = ctypes.CDLL(str(library))
        for name in ("compaction", "add_deferred", "take_due"):
            self._function(f"{name}_workspace").restype = _I64
        self._function("deferral_counts").restype = _I64
        self._function("new_key_set").restype = _POINTER

    def key_set(self, keys: np.ndarray) -> KeySet:
        """Builds a set of int64 keys and copies it to the device."""
        return KeySet(self, keys)

    def drift(self, current: Any, snapshot: Any) -> Any:
        """Returns the largest absolute change of each row: float32 [rows]."""
        rows, dim = current.shape
        found = self.xp.empty(rows, np.float32)
        self.call("row_drift", current, snapshot, _I64(rows), _I64(dim), found)
        return found

    def compact(
        self, keys: Any, rows: Any, masked: KeySet, *, deduplicate: bool = True
    ) -> tuple[Any, Any, Any]:
        """Drops the rows of masked keys and sums rows by key.

        Returns:
            Keys [n], rows [n, dim] and counts [2]. The first `counts[0]` rows are valid.
        """
        n, dim = rows.shape
        flag = ctypes.c_int(deduplicate)
        space, size = self._workspace("compaction", _I64(n), _I64(dim), flag)
        kept, sums, counts = self._empty((n,), np.int64), self._empty((n, dim)), self._counts(2)
        self.call("compact_rows", keys, rows, _I64(n), _I64(dim), ctypes.byref(masked.table), flag,
                  space, size, kept, sums, counts)  # fmt: skip
        return kept, sums, counts

    def buffers(self, capacity: int, dim: int) -> DeferralBuffers:
        """Allocates empty buffers for deferred gradients."""
        return DeferralBuffers(self, capacity, dim)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls an entry point on the current stream.

        Raises:
            RuntimeError: The call returned a CUDA error.
        """
        given = [self._pointer(a) if hasattr(a, "dtype") else a for a in arguments]
        error = self._function(name)(self._stream(), *given)
        if error:
            raise RuntimeError(f"slipstream_{name} returned CUDA error {error}.")

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"slipstream_{name}")

    def _pointer(self, array: Any) -> _POINTER:
        return _POINTER(array.ctypes.data if self.xp is np else array.data.ptr)

    def _stream(self) -> _POINTER:
        return _POINTER(0 if self.xp is np else self.xp.cuda.get_current_stream().ptr)

    def _empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        return self.xp.empty(shape, dtype)

    def _counts(self, n: int) -> Any:
        return self.xp.empty(n, np.int64)

    def _workspace(self, name: str, *arguments: Any) -> tuple[Any, _I64]:
        size = self._function(f"{name}_workspace")(*arguments)
        if size < 0:
            raise RuntimeError(f"slipstream_{name}_workspace failed.")
        return self.xp.empty(max(size, 1), np.uint8), _I64(size)


class KeySet:
    """An immutable set of int64 keys on the device."""

    def __init__(self, launchers: Launchers, keys: np.ndarray):
        keys = np.ascontiguousarray(keys, np.int64)
        handle = _POINTER(
            launchers._function("new_key_set")(keys.ctypes.data_as(_POINTER), _I64(keys.size))
        )
        if not handle:
            raise MemoryError(f"A key set of {keys.size} keys cannot be allocated.")
        self.table = _KeyTable()
        launchers._function("view_key_set")(handle, ctypes.byref(self.table))
        size = self.table.bytes
        on_host = ctypes.string_at(self.table.entries, size) if size else b"\0"
        self._entries = launchers.xp.asarray(np.frombuffer(on_host, np.uint8).copy())
        self.table.entries = launchers._pointer(self._entries).value
        launchers._function("delete_key_set")(handle)


class DeferralBuffers:
    """Deferred gradients of up to `capacity` rows on the device."""

    def __init__(self, launchers: Launchers, capacity: int, dim: int):
        xp = launchers.xp
        self._launchers, self._capacity, self._dim = launchers, capacity, dim
        self._keys = xp.full(capacity, np.iinfo(np.int64).min, np.int64)
        self._since, self._sums = xp.zeros(capacity, np.int64), xp.zeros((capacity, dim), "f4")
        pointers = map(launchers._pointer, (self._keys, self._since, self._sums))
        self._view = _Buffers(*(pointer.value for pointer in pointers), capacity, dim)
        self._step = 0

    def add(self, keys: Any, gradients: Any) -> tuple[Any, Any]:
        """Adds gradients to the deferred gradients.

        Returns:
            The buffer index of each key [n], and the sums [n, dim].
        """
        launchers, n = self._launchers, len(keys)
        space, size = launchers._workspace("add_deferred", _I64(n))
        indices = launchers._empty((n,), np.int64)
        sums = launchers._empty((n, self._dim))
        launchers.call("add_deferred", ctypes.byref(self._view), keys, gradients, _I64(n), space,
                       size, indices, sums)  # fmt: skip
        return indices, sums

    def take_due(
        self,
        keys: Any,
        indices: Any,
        sums: Any,
        may_wait: Any,
        max_age: int,
        max_due: int | None = None,
    ) -> tuple[Any, Any, Any]:
        """Removes the due rows. The other rows stay deferred.

        Args:
            keys: Keys of the step [n].
            indices: Buffer indices [n] from `add`.
            sums: Sums [n, dim] from `add`.
            may_wait: Whether each sum may wait [n].
            max_age: Age in steps at which a row is due.
            max_due: Maximum number of due rows, at least n. Default: n plus the capacity.

        Returns:
            Keys [max_due], sums [max_due, dim] and counts. The first `counts[1]` rows are valid.
        """
        launchers, n = self._launchers, len(keys)
        if max_due is None:
            max_due = n + self._capacity
        space, size = launchers._workspace("take_due", _I64(n), _I64(max_due))
        due = launchers._empty((max_due,), np.int64)
        due_sums = launchers._empty((max_due, self._dim))
        counts = launchers._counts(launchers._function("deferral_counts")())
        self._step += 1
        launchers.call("take_due", ctypes.byref(self._view), _I64(self._step), _I64(max_age), keys,
                       _I64(n), indices, sums, may_wait, _I64(max_due), space, size, due,
                       due_sums, counts)  # fmt: skip
        return due, due_sums, counts
