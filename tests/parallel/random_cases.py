"""Compares tables on ranks with one process in random cases, for test_programs.py.

Arguments: placement of the tables, number of cases, seed. The placement "prefetched" is sharded and
prefetches most batches one step ahead. A case consists of a store, a policy and some steps. All are
drawn from (seed, number of the case), so that every rank can compute the batches of all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import distributed, initializers, optimizers
from slipstream_tf.config import Storage, Table
from slipstream_tf.distributed import Communicator, ReplicatedStore, ShardedStore
from slipstream_tf.ops.features import PADDING_KEY, FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdateCounts, UpdatePolicy
from slipstream_tf.tables import NativeStore

MODES = ("apply", "mask", "movement", "interval")
RULES: dict[str, Callable[[], optimizers.SparseOptimizer]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1, 0.1, 1e-7),
}
# Tolerance of rows and slots, compared with the single process.
TOLERANCES = {
    "float32": {"rtol": 2e-5, "atol": 2e-6},
    "bfloat16": {"rtol": 2e-2, "atol": 1e-2},
    "float16": {"rtol": 5e-3, "atol": 2e-3},
    "int8": {"rtol": 5e-2, "atol": 5e-2},
}
STORAGES = (Storage(), Storage("bfloat16"), Storage("float16"), Storage("bfloat16", "bfloat16"))
ADDED_UP = [f.name for f in dataclasses.fields(UpdateCounts) if f.name != "deferred_bytes"]


def make_store(case: Case, rule: Any, comm: Communicator) -> Any:
    """Returns the store under test."""
    wire = {"wire_dtype": case.wire_dtype, "wire_warmup_steps": case.wire_warmup_steps}
    if case.placement == "replicated":
        return ReplicatedStore(case.tables, rule, comm, **wire)
    prefetch = case.placement == "prefetched"
    return ShardedStore(case.tables, rule, comm, **wire, prefetch=prefetch)


@dataclasses.dataclass(frozen=True)
class Case:
    """The random choices of a case.

    Attributes:
        number: Number of the case.
        placement: "replicated", "sharded" or "prefetched".
        mode: One of `MODES`.
        rule: One of `RULES`.
        wire_dtype: Dtype of gradients in messages.
        wire_warmup_steps: Number of steps before gradients are rounded to `wire_dtype`.
        tables: Tables with different dims.
        specs: Features, at least one per table.
        layouts: Layout of each feature: "single", "ragged" or "padded".
        largest_key: Exclusive upper bound of the keys.
        sizes: Batch sizes, int [steps, ranks].
        is_traced: Whether steps run in a tf.function. Ranks trace it at different times.
        policies: The policy set before step 1, and optionally a second one set in the middle.
        are_prefetched: bool [steps]. Whether the keys of the batch are prefetched a step ahead.
    """

    number: int
    placement: str
    mode: str
    rule: str
    wire_dtype: str
    wire_warmup_steps: int
    tables: tuple[Table, ...]
    specs: tuple[FeatureSpec, ...]
    layouts: tuple[str, ...]
    largest_key: int
    sizes: np.ndarray
    is_traced: bool
    policies: tuple[UpdatePolicy, ...]
    are_prefetched: np.ndarray

    def tolerance(self, wire_dtype: str) -> dict[str, float]:
        """Returns the tolerance for the wire dtype and the storage dtypes."""
        dtypes = {wire_dtype}
        for table in self.tables:
            dtypes |= {table.storage.dtype, table.storage.slot_dtype}
        return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda found: found["rtol"])

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same batch size in every step."""
        return bool((self.sizes == self.sizes[:, :1]).all())

    @property
    def is_deferred(self) -> bool:
        """Whether gradients may be deferred."""
        return self.mode in ("movement", "interval")

    @property
    def equals_simulated_ranks(self) -> bool:
        """Whether one process with simulated ranks computes the same result.

        It splits its batches evenly and rounds no gradient. If memory for deferred gradients is
        scarce, sums that reach the maximum age free memory at another time. In a sharded table,
        ranks estimate a movement from the smallest accumulator of a row.
        """
        is_scarce = any(0 < policy.max_rows < 1000 for policy in self.policies)
        is_decided = self.placement == "replicated" or self.mode == "interval" or self.rule == "sgd"
        is_alike = self.is_even and self.wire_dtype == "float32" and not is_scarce and is_decided
        return not self.is_deferred or is_alike

    @property
    def equals_plain_after_flush(self) -> bool:
        """Whether deferring makes no difference after a flush."""
        return not self.is_deferred or self.rule == "sgd"


def draw_case(seed: int, number: int, ranks: int, placement: str) -> Case:
    """Returns a random case, the same on all ranks."""
    random = np.random.default_rng([seed, number, ranks])
    mode = MODES[number % len(MODES)]
    dims = random.choice([1, 2, 3, 4, 8, 17], int(random.integers(1, 4)), replace=False)
    # A sum in another order may round a row to a neighboring value. Then simulated ranks may
    # estimate another movement.
    kinds = STORAGES[: 1 if mode == "movement" or random.random() < 0.7 else None]
    tables = [
        Table(
            f"t{i}",
            int(d),
            initializer=initializers.RandomUniform(seed=number + i),
            storage=kinds[random.integers(len(kinds))],
        )
        for i, d in enumerate(dims)
    ]
    owners = [*range(len(tables)), *random.integers(0, len(tables), random.integers(0, 3))]
    specs = [
        FeatureSpec(f"f{i}", f"t{t}", str(random.choice(["sum", "mean", "sqrtn"])))
        for i, t in enumerate(owners)
    ]
    steps, is_even = int(random.integers(3, 8)), bool(random.random() < 0.5)
    sizes = random.integers(0, 7, (steps, ranks))
    if is_even:
        sizes[:] = random.integers(0, 7, (steps, 1))
    elif random.random() < 0.3:
        sizes[:, random.integers(ranks)] = 0
    policies = [_draw_policy(random, mode)]
    if mode != "apply" and random.random() < 0.3:
        others = MODES[:2] if mode == "mask" else MODES[2:]
        policies.append(_draw_policy(random, str(random.choice(others))))
    return Case(
        number=number,
        placement=placement,
        mode=mode,
        rule=str(random.choice(list(RULES))),
        wire_dtype=str(random.choice(["float32"] * 7 + ["bfloat16", "float16", "int8"])),
        tables=tuple(tables),
        specs=tuple(specs),
        layouts=tuple(
            map(str, random.choice(["single", "single", "ragged", "padded"], len(specs)))
        ),
        largest_key=int(1 << random.integers(0, 9)),
        sizes=sizes,
        is_traced=bool(random.random() < 0.1),
        policies=tuple(policies),
        are_prefetched=(random.random(steps) < 0.8) & (placement == "prefetched"),
        wire_warmup_steps=int(random.choice([0, 2])),
    )


def _draw_policy(random: np.random.Generator, mode: str) -> UpdatePolicy:
    if mode in ("apply", "mask"):
        return UpdatePolicy(mode)
    return UpdatePolicy(
        "defer",
        trigger=mode,
        movement=float(random.choice([0.005, 0.02, 1e9])),
        max_age=int(random.integers(1, 6)),
        # An equal part for each of the 64 shards, for any number of ranks.
        max_rows=int(random.choice([0, 64, 1 << 20])),
    )


def draw_batch(
    case: Case, seed: int, step: int, rank: int
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns a rank's random keys and the gradients of its loss.

    The keys are lists of int64 [n] per example, by feature.
    """
    random = np.random.default_rng([seed, case.number, step, rank])
    size = int(case.sizes[step, rank])
    dims = {table.name: table.dim for table in case.tables}
    keys, gradients = {}, []
    for spec, layout in zip(case.specs, case.layouts, strict=True):
        lengths = np.ones(size, int) if layout == "single" else random.integers(0, 4, size)
        drawn = random.integers(0, case.largest_key, int(lengths.sum()))
        keys[spec.name] = np.split(drawn, np.cumsum(lengths)[:-1]) if size else []
        gradients.append(random.normal(0, 0.3, (size, dims[spec.table])).astype(np.float32))
    return keys, gradients


def as_inputs(case: Case, keys: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Returns the keys in the layout of each feature.

    The layouts are int64 [n], int64 [n, 4] and ragged.
    """
    inputs: dict[str, Any] = {}
    for spec, layout in zip(case.specs, case.layouts, strict=True):
        bags = keys[spec.name]
        flat = np.concatenate([np.empty(0, np.int64), *bags]).astype(np.int64)
        if layout == "single":
            inputs[spec.name] = tf.constant(flat)
        elif layout == "ragged":
            inputs[spec.name] = tf.RaggedTensor.from_row_lengths(
                tf.constant(flat), tf.constant([len(bag) for bag in bags], tf.int64)
            )
        else:
            padded = np.full((len(bags), 4), PADDING_KEY, np.int64)
            for row, bag in zip(padded, bags, strict=True):
                row[: len(bag)] = bag
            inputs[spec.name] = tf.constant(padded)
    return inputs


def trainer(case: Case, store: Any) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that trains one step and returns the pooled rows."""

    def train(
        inputs: dict[str, Any], gradients: list[Any], next_inputs: dict[str, Any] | None
    ) -> list[tf.Tensor]:
        pooled, plan = store.lookup(pack(inputs, case.specs), training=True)
        if next_inputs is not None:
            store.prefetch_keys(pack(next_inputs, case.specs))
        pooled = [tf.identity(rows) for rows in pooled]
        with tf.control_dependencies(pooled):
            update = store.apply_gradients(plan, gradients)
        with tf.control_dependencies([] if update is None else [update]):
            return [tf.identity(rows) for rows in pooled]

    return tf.function(train, autograph=False) if case.is_traced else train


def of_all_ranks(store: Any, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Joins values of a sharded store, each from its key's owner.

    This is a collective.
    """
    if not isinstance(store, ShardedStore):
        return values
    own = store.owners(store.tables[0].name, keys) == store.comm.rank
    zeros = np.where(own[:, None], values, np.float32(0))
    return store.comm.sum(tf.constant(zeros), "control", "test.rows").numpy()


def rows_and_slots(store: Any, table: Table, keys: np.ndarray) -> np.ndarray:
    """Returns rows and slots by key, float32 [n, dim + slots].

    Keys without a row have their initial values.
    """
    rows = store.gather(table.name, keys)[0].numpy()
    exported = store.export_table(table.name)
    slots = np.full((keys.size, exported["slots"].shape[1]), 0.1, np.float32)
    place = {key: i for i, key in enumerate(exported["keys"].tolist())}
    for i, key in enumerate(keys.tolist()):
        if key in place:
            slots[i] = exported["slots"][place[key]]
            # Has up to 24 bits, because slots may store 8 to 16 bits of a row.
            whole = exported["rows"][place[key]]
            require_nearest(rows[i], whole, table.storage.dtype)
            rows[i] = whole
    return of_all_ranks(store, keys, np.concatenate([rows, slots], axis=1))


def require_nearest(read: np.ndarray, whole: np.ndarray, dtype: str) -> None:
    """Asserts that `read` is `whole` rounded to the dtype."""

    def nearest(values: np.ndarray) -> np.ndarray:
        return tf.cast(tf.cast(values, dtype), tf.float32).numpy()

    np.testing.assert_array_equal(nearest(read), read)
    # Halfway between two values, both are nearest.
    np.testing.assert_array_equal(np.abs(read - whole), np.abs(nearest(whole) - whole))


def require_same_bits(comm: Communicator, arrays: Sequence[np.ndarray], what: str) -> None:
    """Asserts that the arrays are equal on all ranks.

    Compares a digest. This is a collective.
    """
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    own = tf.constant(np.frombuffer(digest.digest(), np.int64))
    digests = comm.gather(own, "control", "test.digest").numpy()
    assert (digests == digests[0]).all(), f"{what} differ between ranks: {digests}"


class Comparison:
    """A case on the ranks, and the same case in this process."""

    def __init__(self, case: Case, comm: Communicator, seed: int):
        self.case, self.comm, self.seed = case, comm, seed
        rule = RULES[case.rule]()
        self.store = make_store(case, rule, comm)
        self.simulated = NativeStore(case.tables, rule)
        self.plain = NativeStore(case.tables, rule)
        self.train = trainer(case, self.store)
        self.seen: dict[str, set[int]] = {table.name: set() for table in case.tables}
        for table in case.tables:
            self.simulated.set_update_policy(table.name, UpdatePolicy(ranks=comm.size))

    def run(self) -> None:
        """Trains and compares."""
        middle = len(self.case.sizes) // 2
        for step in range(len(self.case.sizes)):
            if step == 1:
                self._set_policy(self.case.policies[0])
            if step == middle and step > 1 and len(self.case.policies) > 1:
                self._set_policy(self.case.policies[1])
            self._step(step)
        self._compare_before_flush()
        self._compare_after_flush()

    def _set_policy(self, policy: UpdatePolicy) -> None:
        """Sets a policy, and flags random keys that had gradients.

        Such keys have rows on all ranks.
        """
        random = np.random.default_rng([self.seed, self.case.number, 99])
        for table in self.case.tables:
            name = table.name
            simulated = dataclasses.replace(
                policy, ranks=self.comm.size, max_rows=policy.max_rows * self.comm.size
            )
            self.store.set_update_policy(name, policy)
            self.simulated.set_update_policy(name, simulated)
            if policy.mode == "mask":
                self.plain.set_update_policy(name, policy)
            elif self.case.mode == "mask":
                self.plain.set_update_policy(name, UpdatePolicy())
        for table in self.case.tables:
            known = np.array(sorted(self.seen[table.name]), np.int64)
            flagged = known[random.random(known.size) < 0.5]
            for store in (self.store, self.simulated, self.plain):
                store.set_row_flags(table.name, flagged, np.full(flagged.size, SATURATED))

    def _step(self, step: int) -> None:
        case, comm = self.case, self.comm
        batches = [draw_batch(case, self.seed, step, rank) for rank in range(comm.size)]
        keys, gradients = batches[comm.rank]
        next_inputs = None
        if step + 1 < len(case.sizes) and case.are_prefetched[step + 1]:
            next_inputs = as_inputs(case, draw_batch(case, self.seed, step + 1, comm.rank)[0])
        given = as_inputs(case, keys), list(map(tf.constant, gradients))
        pooled = self.train(*given, next_inputs)
        union = {n: [bag for batch, _ in batches for bag in batch[n]] for n in keys}
        parts = zip(*(own for _, own in batches), strict=True)
        averaged = [tf.constant(np.concatenate(part) / np.float32(comm.size)) for part in parts]
        inputs = as_inputs(case, union)
        begin = int(case.sizes[step, : comm.rank].sum())
        own = slice(begin, begin + int(case.sizes[step, comm.rank]))
        is_exact = step < case.wire_warmup_steps
        tolerance = case.tolerance("float32" if is_exact else case.wire_dtype)
        for store in (self.simulated, self.plain):
            wanted, plan = store.lookup(pack(inputs, case.specs), training=True)
            if store is self.simulated and case.equals_simulated_ranks:
                for got, rows in zip(pooled, wanted, strict=True):
                    np.testing.assert_allclose(got, rows[own], **tolerance)
            store.apply_gradients(plan, averaged)
        for spec in case.specs:
            bags = union[spec.name]
            self.seen[spec.table].update(*(bag.tolist() for bag in bags))

    def _keys_of(self, table: Table) -> np.ndarray:
        return np.array(sorted(self.seen[table.name]), np.int64)

    def _compare_before_flush(self) -> None:
        rows = []
        for table in self.case.tables:
            keys = self._keys_of(table)
            own = self.store.gather(table.name, keys)[0].numpy()
            rows.append(of_all_ranks(self.store, keys, own))
            if self.case.equals_simulated_ranks:
                wanted = self.simulated.gather(table.name, keys)[0].numpy()
                np.testing.assert_allclose(
                    rows[-1], wanted, **self.case.tolerance(self.case.wire_dtype)
                )
                self._compare_counts(table)
        require_same_bits(self.comm, rows, "rows before the flush")

    def _compare_counts(self, table: Table) -> None:
        counts = self.store.update_counts(table.name)
        own = tf.constant([[getattr(counts, name) for name in ADDED_UP]], tf.int64)
        total = self.comm.gather(own, "control", "test.counts").numpy().sum(0)
        wanted = self.simulated.update_counts(table.name)
        if self.case.is_even:
            expected = {name: getattr(wanted, name) for name in ADDED_UP}
            got = dict(zip(ADDED_UP, total.tolist(), strict=True))
            assert got == expected, f"{got}, but {expected} with simulated ranks"

    def _compare_after_flush(self) -> None:
        self.store.flush()
        self.simulated.flush()
        states = []
        for table in self.case.tables:
            keys = self._keys_of(table)
            states.append(rows_and_slots(self.store, table, keys))
            assert self.store.update_counts(table.name).deferred_now == 0
            tolerance = self.case.tolerance(self.case.wire_dtype)
            if self.case.equals_simulated_ranks:
                wanted = rows_and_slots(self.simulated, table, keys)
                np.testing.assert_allclose(states[-1], wanted, **tolerance)
            if self.case.equals_plain_after_flush:
                wanted = rows_and_slots(self.plain, table, keys)
                np.testing.assert_allclose(states[-1], wanted, **tolerance)
        require_same_bits(self.comm, states, "rows and slots")


def main() -> None:
    """Runs all cases and prints the first case that fails."""
    placement, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    comm = distributed.init()
    tf.get_logger().setLevel("ERROR")  # Every size causes a new trace, which is intended.
    start = time.perf_counter()
    for number in range(count):
        case = draw_case(seed, number, comm.size, placement)
        try:
            Comparison(case, comm, seed).run()
        except Exception:
            print(f"rank {comm.rank}: {case}", file=sys.stderr, flush=True)
            raise
    seconds = time.perf_counter() - start
    print(f"rank {comm.rank} of {comm.size}: {count} cases equal, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
