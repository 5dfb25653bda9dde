"""Streams Parquet files or folders into batches.

Key columns contain ids or text, see `to_ids`. If a column contains lists, the keys are a dictionary
by field, with a RaggedTensor for each column of lists.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset
import tensorflow as tf

from slipstream_tf._compat import record_batch_size
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.data.readers.base import BatchReader, Rows
from slipstream_tf.data.readers.hashing import hash_strings, keys_of_ids, signed
from slipstream_tf.data.spec import MISSING_KEY, DataSpec, require_columns

ROWS_AT_ONCE = 32_768
KEY_TYPES = (
    "integers, numbers without a fraction, booleans, dates, times, text, bytes, or lists of these, "
    "for a key column"
)
ALLOWED_IDS = "a 64-bit integer (if the numbers are floats: at most 2**53, the exact integers)"
_MAX_FLOAT_ID = float(1 << 53)
# Approximate number of positions that are shuffled at a time: 256 KiB.
_ROWS_OF_A_PART = 1 << 15


class ParquetReader(BatchReader):
    """Reads Parquet files of any size in batches.

    The files of a folder, at any depth, are read in the order of their paths. Rows are numbered
    over all files. Row i, from 0, belongs to the test part if `i // 100 % 10 == 9`, else to the
    training part. The rows of the training part with `i // 100 % 10 == 8` are also the validation
    part.

    Rows with a missing label, a label outside [0, 1] or an infinite dense value are skipped. They
    are counted in `bad_lines`, with the row number in the file, from 1, as the line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str],
        batch_size: int,
        *,
        label: str,
        keys: Sequence[str],
        dense: Sequence[str] = (),
        shuffle_seed: int | None = None,
        **options: Any,
    ):
        """Reads the names and types of the columns.

        Args:
            path: A file, a folder of files with the same columns, or an ordered sequence of such
                files.
            batch_size: Number of examples in a batch.
            label: Column of the label: numbers in [0, 1] or booleans.
            keys: Columns of the categorical fields: types of `to_ids`, or lists of these. A missing
                value becomes `MISSING_KEY`. Missing values within a list are dropped, and a
                missing list is empty. Integers are their own keys, except -1 and -2, see
                `hashing.keys_of_ids`.
            dense: Columns of numbers, used without a transformation. A missing number (null) is
                NaN; see `models.Standardization`.
            shuffle_seed: Seed of the file order. Pass e of this reader, from 0, reads the files in
                the order that `(seed, e)` determines. The parts do not change. None reads the files
                in order.
            **options: Options of all readers: `part` (`"train"`, `"valid"`, `"test"`, or None for
                all rows), `hold_out` (whether to exclude the rows of `"valid"` from `"train"`) and
                `strict` (whether the first unusable row raises an error).

        Raises:
            FileNotFoundError: If the file does not exist or the folder has no Parquet files.
            ValueError: If a file is not a Parquet file, a column is missing or has an unsupported
                type, or another argument is out of range.
        """
        super().__init__(batch_size, **options)
        place = "ParquetReader"
        if shuffle_seed is not None:
            require_integer("shuffle_seed", shuffle_seed, 0, None, place)
        self._label = label
        self._keys, self._dense = _column_names(label, keys, dense)
        self._columns = (label, *self._dense, *self._keys)
        # The number of usable rows is only known after reading.
        self.spec = DataSpec("parquet", self._keys, len(self._dense))
        self._shuffle_seed = shuffle_seed
        self._table: pa.Table | None = None
        several = [path] if isinstance(path, (str, os.PathLike)) else path
        paths = [os.fspath(one) for one in several]
        self._path, self._is_listed = paths[0], len(paths) > 1
        self._data = _dataset(paths)
        require_columns(self._columns, self._data.schema.names, self._path)
        self._check_types()
        self._lists = {name for name in self._keys if is_list(self._type(name))}

    def dataset(self) -> tf.data.Dataset:
        """Returns a dataset of the batches. Each iteration reads the files again."""
        batches = super().dataset()
        # Make RaggedTensors in the graph, which is many times faster than in Python.
        if not self._lists:
            return batches
        return record_batch_size(batches.map(self._with_ragged), self._batch_size)

    def in_memory(self, shuffle_seed: int) -> "ParquetReader":
        """Loads all examples; returns a reader that shuffles them each pass.

        The peak of memory is the size of the examples plus the size of the largest column.

        Args:
            shuffle_seed: Seed of the order. Pass e of the reader, from 0, has the order that
                `(shuffle_seed, e)` determines.

        Raises:
            ValueError: If a file is damaged.
        """
        table = pa.concat_tables(self._with_bad_lines(self._rows(0)))
        for index, name in enumerate(table.column_names):
            # Contiguous columns are faster to gather from. One at a time, so that only one column
            # is in memory twice.
            joined = pa.chunked_array([table[name].combine_chunks()])
            table = table.set_column(index, name, joined)
        shuffled: Any = self.in_batches_of(self._batch_size)
        shuffled._table, shuffled._shuffle_seed = table, shuffle_seed
        return shuffled

    def _key_spec(self) -> Any:
        if not self._lists:
            return super()._key_spec()
        flat = tf.TensorSpec([None], tf.int64)
        return {name: (flat, flat) if name in self._lists else flat for name in self._keys}

    def _with_ragged(self, features: Any, label: tf.Tensor) -> Any:
        keys = dict(features["keys"])
        for name in self._lists:
            keys[name] = tf.RaggedTensor.from_row_splits(*keys[name], validate=False)
        return {**features, "keys": keys}, label

    def _type(self, name: str) -> pa.DataType:
        return self._data.schema.field(name).type

    def _check_types(self) -> None:
        numbers = "integers, floating-point numbers or booleans, for a label or dense column."
        keys = f"{KEY_TYPES}."
        for name in (self._label, *self._dense, *self._keys):
            kind = self._type(name)
            is_of_keys = name in self._keys
            element = kind.value_type if is_of_keys and is_list(kind) else kind
            if not (is_key(element) if is_of_keys else is_number(element)):
                raise ValueError(
                    f"{self._path}: column {name!r} has the type {kind}. Expected "
                    f"{keys if is_of_keys else numbers}"
                )

    def _rows(self, number: int) -> Iterator[pa.Table]:
        """Yields tables of up to `ROWS_AT_ONCE` usable rows, in the pass's order."""
        if self._table is not None and self._shuffle_seed is not None:
            order = random_order(
                len(self._table), np.random.default_rng([self._shuffle_seed, number])
            )
            for begin in range(0, len(order), ROWS_AT_ONCE):
                yield self._table.take(pa.array(order[begin : begin + ROWS_AT_ONCE]))
            return
        first = 0
        for known_first, fragment in self._files(number):
            begin = first = first if known_first is None else known_first
            for batch in self._record_batches(fragment):
                table = pa.Table.from_batches([batch])
                rows = np.arange(first, first + len(table))
                try:
                    yield self._usable(table, rows, fragment, begin)
                except pa.ArrowException as error:
                    raise ValueError(f"{fragment.path}: the file is damaged: {error}") from error
                first += len(batch)

    def _files(self, number: int) -> Iterator[tuple[int | None, Any]]:
        """Yields (number of the first row, file) in the pass's order.

        The number is None if the file follows the previous one.
        """
        fragments = list(self._data.get_fragments())
        if not self._is_listed:
            fragments.sort(key=lambda fragment: fragment.path)
        if self._shuffle_seed is None:
            yield from ((None, fragment) for fragment in fragments)
            return
        generator = np.random.default_rng([self._shuffle_seed, number])
        try:
            ends = np.cumsum([fragment.count_rows() for fragment in fragments])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{self._path}: a file of the data is damaged or unreadable: {error}"
            ) from error
        for index in generator.permutation(len(fragments)):
            yield int(ends[index - 1]) if index else 0, fragments[index]

    def _record_batches(self, fragment: Any) -> Iterator[pa.RecordBatch]:
        try:
            require_columns(self._columns, fragment.physical_schema.names, fragment.path)
            yield from fragment.to_batches(
                schema=self._data.schema,
                columns=list(self._columns),
                batch_size=ROWS_AT_ONCE,
                batch_readahead=2,
                fragment_readahead=1,
            )
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{fragment.path}: the file is damaged or unreadable, or its column types differ "
                f"from the first file: {error}"
            ) from error

    def _usable(self, table: pa.Table, rows: np.ndarray, fragment: Any, begin: int) -> pa.Table:
        if self._part is not None:
            is_wanted = self._is_wanted(int(rows[0]) if len(rows) else 0, len(rows))
            table, rows = table.filter(pa.array(is_wanted)), rows[is_wanted]
        label = to_numbers(table[self._label], np.nan)
        is_good = (label >= 0) & (label <= 1)
        reasons = [(self._label, ~is_good, "a number from 0 to 1")]
        for name in self._dense:
            is_bad = np.isinf(to_numbers(table[name], 0.0))
            reasons.append((name, is_bad, "a finite number or a missing value"))
            is_good &= ~is_bad
        for name in self._keys:
            is_bad = have_malformed_ids(table[name])
            reasons.append((name, is_bad, f"{ALLOWED_IDS} or a missing value"))
            is_good &= ~is_bad
        for i in np.flatnonzero(~is_good):
            name, _, allowed = next(reason for reason in reasons if reason[1][i])
            text = f"{name} is {table[name][int(i)].as_py()}; expected {allowed}"
            self.bad_lines.add(fragment.path, int(rows[i]) - begin + 1, text)
        return table if is_good.all() else table.filter(pa.array(is_good))

    def _batches(self, number: int = 0) -> Iterator[Any]:
        size = self._batch_size
        waiting: pa.Table | None = None
        for table in self._with_bad_lines(self._rows(number)):
            waiting = table if waiting is None else pa.concat_tables([waiting, table])
            full = len(waiting) // size * size
            if full:
                yield from self._elements(waiting.slice(0, full))
                waiting = waiting.slice(full)
        if waiting is not None and len(waiting):
            yield from self._elements(waiting)

    def _elements(self, table: pa.Table) -> Iterator[Any]:
        label = to_numbers(table[self._label], np.nan)
        dense = np.empty((len(table), len(self._dense)), np.float32)
        for column, name in enumerate(self._dense):
            dense[:, column] = to_numbers(table[name], np.nan)
        flat = [name for name in self._keys if name not in self._lists]
        keys = np.empty((len(table), len(flat)), np.int64)
        for column, name in enumerate(flat):
            keys[:, column] = to_keys(table[name])
        lists = {name: to_list_keys(table[name]) for name in self._lists}
        rows = Rows(label, dense, keys)
        for begin in range(0, len(table), self._batch_size):
            batch = rows.slice(begin, self._batch_size)
            if lists:
                by_name: dict[str, Any] = dict(zip(flat, batch.keys.T, strict=True))
                for name, (values, splits) in lists.items():
                    part = splits[begin : begin + self._batch_size + 1]
                    by_name[name] = (values[part[0] : part[-1]], part - part[0])
                batch.keys = by_name
            yield batch.element()


def random_order(count: int, random: np.random.Generator) -> np.ndarray:
    """Returns a random permutation of 0 to count - 1, int64 [count].

    All permutations are equally likely.

    For millions of elements it takes half the time of `random.permutation`: each element is
    assigned to a random part, and the parts are shuffled one by one in the cache.
    """
    parts = min(256, 1 + count // _ROWS_OF_A_PART)
    part = random.integers(parts, size=count, dtype=np.uint8)
    order = np.argsort(part, kind="stable")
    for own in np.split(order, np.cumsum(np.bincount(part, minlength=parts))[:-1]):
        random.shuffle(own)
    return order


def _column_names(
    label: str, keys: Sequence[str], dense: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the key and dense columns.

    Raises ValueError if a column is used more than once.
    """
    place = "ParquetReader"
    for argument, names in (("keys", keys), ("dense", dense)):
        if isinstance(names, str):
            allowed = f"a sequence of column names, for example [{names!r}]"
            raise invalid(argument, names, place, allowed)
    if not keys:
        raise invalid("keys", keys, place, "at least one column name")
    columns = (label, *dense, *keys)
    for name in columns:
        if columns.count(name) > 1:
            argument = "keys" if name in keys else "dense"
            allowed = "each column only once in `label`, `dense` and `keys`"
            raise invalid(argument, name, place, allowed)
    return tuple(keys), tuple(dense)


@contextlib.contextmanager
def opening(path: str) -> Iterator[None]:
    """Converts errors about invalid Parquet files to ValueError. System errors are unchanged."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # Only system errors have an errno. Arrow also raises OSError for damaged files.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{path}: the file is damaged or not a Parquet file: {error}") from error


def _dataset(paths: list[str]) -> pa_dataset.Dataset:
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no data file or folder {path!r}.")
    with opening(paths[0]):
        data = pa_dataset.dataset(paths if len(paths) > 1 else paths[0], format="parquet")
        data.schema.names  # noqa: B018  Decodes the names, which may raise.
    if not data.files:
        raise FileNotFoundError(f"The folder {paths[0]!r} contains no Parquet files.")
    return data


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a type is a list, including large and fixed-size lists."""
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a type is allowed for labels and dense columns."""
    return is_integer_or_boolean(kind) or _has_fractions(kind)


def is_integer_or_boolean(kind: pa.DataType) -> bool:
    """Returns whether a type is an integer type or the boolean type."""
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a type is a string or binary type."""
    types = pa.types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return is_string or types.is_binary(kind) or types.is_large_binary(kind)


def is_key(kind: pa.DataType) -> bool:
    """Returns whether a type is allowed for keys, or for list elements."""
    if pa.types.is_dictionary(kind):
        return is_integer_or_boolean(kind.value_type) or is_text(kind.value_type)
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return is_number(kind) or is_text(kind) or is_time


def _has_fractions(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def to_numbers(column: pa.ChunkedArray, null: float) -> np.ndarray:
    """Converts a column of numbers or booleans to float32 [n].

    Values beyond the range of float32 become infinite.

    Args:
        column: The column.
        null: Number that replaces nulls.
    """
    values = column.cast(pa.float64(), safe=False)
    filled = pc.fill_null(values, pa.scalar(null, pa.float64())).to_numpy()
    with np.errstate(over="ignore"):
        return filled.astype(np.float32)


def to_ids(column: Any) -> pa.Array:
    """Converts integers, floats, decimals, booleans, dates, times or text to ids, int64 [n].

    Integers of uint64 keep their 64 bits. Floats and decimals must be integers. The id of a date is
    the number of days since 1970. Timestamps (since 1970), times and durations are microseconds.
    Text is hashed.

    Nulls and NaN become null, and so do malformed ids, see `have_malformed_ids`.

    Args:
        column: Arrow array or chunked array.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_text(column.type):
        is_missing = column.is_null().to_numpy(zero_copy_only=False)
        return pa.array(hash_strings(column), mask=is_missing)
    types, kind = pa.types, column.type
    if types.is_floating(kind):
        numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
        is_id = (np.floor(numbers) == numbers) & (np.abs(numbers) <= _MAX_FLOAT_ID)
        return pa.array(np.where(is_id, numbers, 0).astype(np.int64), mask=~is_id)
    if types.is_decimal(kind):
        encoded = column.dictionary_encode()
        numbers = encoded.dictionary.to_pylist()
        distinct = [signed(int(n)) if n == int(n) else None for n in numbers]
        return pa.array(distinct, pa.int64()).take(encoded.indices)
    if types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.int32())
    # One unit of time, so that files with other units give the same ids.
    elif types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    elif types.is_time(kind):
        column = column.cast(pa.time64("us"), safe=False)
    elif types.is_duration(kind):
        column = column.cast(pa.duration("us"), safe=False)
    # Unsigned integers of 2**63 and more wrap around, which keeps them distinct.
    return column.cast(pa.int64(), safe=False)


def to_keys(column: Any) -> np.ndarray:
    """Converts a column to keys, int64 [n].

    Values become ids by `to_ids`, and ids become keys by `keys_of_ids`. Nulls become `MISSING_KEY`.

    Args:
        column: Arrow array or chunked array.
    """
    ids = to_ids(column)
    keys = keys_of_ids(pc.fill_null(ids, 0).to_numpy())
    if not ids.null_count:
        return keys
    return np.where(ids.is_null().to_numpy(zero_copy_only=False), MISSING_KEY, keys)


def have_malformed_ids(column: Any) -> np.ndarray:
    """Returns which rows have a float or decimal that is no id, bool [n].

    Args:
        column: Arrow array or chunked array of ids or lists of ids.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    of_list = is_list(column.type)
    if not _has_fractions(column.type.value_type if of_list else column.type):
        return np.zeros(len(column), bool)
    values = pc.list_flatten(column) if of_list else column
    is_missing = pc.is_null(values, nan_is_null=pa.types.is_floating(values.type))
    is_bad = pc.and_not(to_ids(values).is_null(), is_missing).to_numpy(zero_copy_only=False)
    if not of_list:
        return is_bad
    result = np.zeros(len(column), bool)
    result[np.repeat(np.arange(len(column)), list_lengths(column))[is_bad]] = True
    return result


def lists_of(values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Returns lists of int64 without nulls.

    Args:
        values: int64 [total], the values of all lists. Nulls are dropped.
        lengths: int [n], lengths of the lists.
    """
    present, splits = _present(values, lengths)
    return pa.LargeListArray.from_arrays(pa.array(splits), present).cast(pa.list_(pa.int64()))


def _present(values: pa.Array, lengths: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    """Returns the values of lists without nulls, and the row_splits int64 [n + 1] of the lists."""
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if not values.null_count:
        return values, splits
    is_present = values.is_valid().to_numpy(zero_copy_only=False)
    return values.drop_null(), np.concatenate([[0], np.cumsum(is_present)])[splits]


def list_lengths(column: Any) -> np.ndarray:
    """Returns the lengths of lists, int64 [n]; 0 for null lists."""
    return pc.fill_null(pc.list_value_length(column).cast(pa.int64()), 0).to_numpy()


def to_list_keys(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Converts a column of lists to keys.

    Returns:
        (keys int64 [total], row_splits int64 [n + 1]), see `list_ids`.
    """
    ids, splits = list_ids(column)
    return keys_of_ids(ids.to_numpy()), splits


def list_ids(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    """Converts a column of lists to ids, see `to_ids`.

    Nulls within a list are dropped, and a null list is empty.

    Returns:
        (ids int64 [total], row_splits int64 [n + 1]).
    """
    return _present(to_ids(pc.list_flatten(column)), list_lengths(column))
