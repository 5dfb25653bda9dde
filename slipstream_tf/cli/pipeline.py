"""The examples of a run, shared out to its ranks, and counted where they pass.

In: a reader's data set and the settings. Out: this rank's batches of all epochs. Examples are
    counted where they are read, where they come in and where a step pulls them, apart from the
    count of those
trained: an example lost between them would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.baselines.segregation import segregate
from slipstream_tf.cli.settings import Settings
from slipstream_tf.distributed import Communicator, even_ends, with_next
from slipstream_tf.distributed.batches import element_of
from slipstream_tf.distributed.elastic import BlocksLeft
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.ops.features import num_rows
from slipstream_tf.sampling.classifier import weigh_last
from slipstream_tf.sampling.look_ahead import LookAhead
from slipstream_tf.sampling.notes import note_share

_ALL = BlocksLeft()


class TrainingInputs:
    """The batches that a rank trains.

    Batch i of the data goes to rank i % size, so that a step of the job is `comm.size` batches in a
    row.

    Args:
        settings: of the run.
        dataset: the training part, one pass of it, as all ranks read it; batches of any size.
        comm: the ranks.
        embeddings: the tables; those on disk are told of each batch ahead.
        slipstream: the engine, which may leave examples out; or None.
        hot_keys: of `profile_hot_keys`: hot and cold examples come in batches of their own.
        left: blocks that are to be trained, of `read_batch_size` examples where some are left out,
            else of `batch_size`.

    Attributes:
        dataset: the batches.
        read, seen, pulled: int64 variables on the CPU: examples that were read by now, that came in
            to this rank, and that had come in when the batch that is pulled had been made.
        counts_as_read: whether a rank's blocks are read at another pace than its steps.
    """

    def __init__(
        self,
        settings: Settings,
        dataset: tf.data.Dataset,
        comm: Communicator,
        embeddings: EmbeddingCollection,
        slipstream: Slipstream | None,
        hot_keys: Sequence[Any] | None,
        left: BlocksLeft = _ALL,
    ) -> None:
        with tf.device("CPU:0"):
            self.read, self.seen, self.pulled = (
                tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)
            )
        self._slipstream, self._reading, self._asking = slipstream, LookAhead(), LookAhead()
        leaves = slipstream is not None and slipstream.settings.skips_examples
        self.counts_as_read = leaves
        self._block = settings.read_batch_size if leaves else settings.batch_size
        self._begun_at = 0
        # Else ranks must ask each other whether there are more, and how many.
        are_even = comm.size > 1 and not leaves
        at_once = settings.batch_size * comm.size if are_even else settings.read_batch_size
        if left == _ALL:
            dataset = _all_epochs(settings, dataset, at_once)
        else:
            dataset = left.of(_all_epochs(settings, dataset, self._block)).rebatch(at_once)
        dataset = _counted(dataset, self.read)
        if hot_keys is not None:
            # Before ranks take their parts: a step is hot on all of them, or on none.
            dataset = segregate(dataset, hot_keys, settings.batch_size * comm.size)
        dataset = (
            part_of_rank(dataset, settings.batch_size, comm)
            if are_even
            else share_of_rank(dataset, comm)
        )
        dataset = _counted(self._reading.read(dataset), self.seen)
        if slipstream is not None:
            # Where nothing leaves, batches stay as they are.
            batch_size = settings.batch_size if slipstream.settings.skips_examples else None
            dataset = slipstream.leave_out(dataset, batch_size)
            if settings.control == "random":
                # As what it is a control of.
                dataset = weigh_last(dataset, settings.batch_size)
        if not are_even:
            # Ranks ask each other for the next batch while one trains.
            dataset = even_ends(dataset, comm, note_share)
        requests_ahead = comm.size > 1 and not are_even
        dataset = self._handed_out(
            embeddings.announced(dataset), ahead=requests_ahead or embeddings.store.spills
        )
        dataset = dataset.with_options(_options(settings))
        self.dataset = with_next(dataset) if settings.prefetch else dataset

    def taken(self, steps: int) -> int:
        """Returns how many of the blocks that were left this rank has taken.

        Args:
            steps: that it has trained since.
        """
        if not self.counts_as_read:
            return steps
        return -(-(int(self.seen.numpy()) - self._begun_at) // self._block)

    def begin_at(self, seen: int, is_counting: bool) -> None:
        """Counts on from examples that came in before the blocks that are left.

        Args:
            seen: of all ranks together.
            is_counting: whether this rank counts them; one does.
        """
        self.read.assign_add(seen)
        if is_counting:
            self._begun_at = seen
            self.seen.assign_add(seen)
            self.pulled.assign_add(seen)

    def settle(self) -> None:
        """Waits until no batch is being made."""
        if self._slipstream is not None:
            self._slipstream.settle()
        self._asking.settle()
        self._reading.settle()

    def _handed_out(self, dataset: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
        """Notes in `pulled` what `seen` was when the batch that is pulled had been made.

        With an engine, or `ahead`, batches are made while the ones before train; `seen` is ahead
        then.
        """
        spec = dataset.element_spec

        @tf.autograph.experimental.do_not_convert
        def note(*parts: Any) -> Any:
            return element_of(spec, parts), self.seen.read_value()

        @tf.autograph.experimental.do_not_convert
        def hand_out(batch: Any, count: tf.Tensor) -> Any:
            with tf.control_dependencies([self.pulled.assign(count)]):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        noted = dataset.map(note)
        if self._slipstream is not None:
            noted = self._slipstream.read_ahead(noted)
        elif ahead:
            noted = self._asking.read(noted)
        return noted.map(hand_out)


def share_of_rank(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    """Returns batches rank, rank + size, rank + 2 * size, ... of a data set of batches."""
    return dataset if comm.size == 1 else dataset.shard(comm.size, comm.rank)


def part_of_rank(dataset: tf.data.Dataset, batch_size: int, comm: Communicator) -> tf.data.Dataset:
    """Returns this rank's part of each batch of all ranks, with its share noted.

    Args:
        dataset: (features, label), in batches of `comm.size * batch_size`; the last may be smaller,
            of which a rank may have no part.
        batch_size: examples of a rank.
        comm: the ranks.
    """

    @tf.autograph.experimental.do_not_convert
    def own(features: Any, label: tf.Tensor) -> Any:
        begin = comm.rank * batch_size
        features, part = tf.nest.map_structure(
            lambda whole: whole[begin : begin + batch_size], (features, label)
        )
        rows, of_all = tf.size(part), tf.size(label)
        return note_share((features, part), tf.cast(rows * comm.size / of_all, tf.float32))

    return dataset.map(own)


def inputs_of_rank(inputs: int, batch_size: int, comm: Communicator) -> int:
    """Returns how many of so many examples, in batches, are this rank's share."""
    batches, rest = divmod(inputs, batch_size)
    own = len(range(comm.rank, batches, comm.size)) * batch_size
    return own + rest if batches % comm.size == comm.rank else own


def _all_epochs(settings: Settings, dataset: tf.data.Dataset, at_once: int) -> tf.data.Dataset:
    """All epochs in a row, limited: what all ranks train together, in batches of `at_once`.

    One data set over all epochs keeps batches full across their ends, and lets a limit fall in any.
    """
    dataset = dataset.repeat(settings.epochs).rebatch(at_once)
    for limit in (settings.max_examples, settings.stop_after):
        if limit is not None:
            dataset = _first_inputs(dataset, limit)
    return dataset


def _first_inputs(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Ends a dataset of batches after `count` examples; the last batch may become smaller."""

    @tf.autograph.experimental.do_not_convert
    def cut(seen: tf.Tensor, batch: Any) -> Any:
        kept = tf.minimum(_size(batch), count - seen)
        return seen + kept, tf.nest.map_structure(lambda part: part[:kept], batch)

    @tf.autograph.experimental.do_not_convert
    def is_any(*batch: Any) -> tf.Tensor:
        return _size(batch) > 0

    return dataset.scan(tf.constant(0, tf.int64), cut).take_while(is_any)


def _counted(dataset: tf.data.Dataset, counter: tf.Variable) -> tf.data.Dataset:
    """Adds the size of every batch that passes to `counter`."""

    @tf.autograph.experimental.do_not_convert
    def count(*batch: Any) -> Any:
        with tf.control_dependencies([counter.assign_add(_size(batch))]):
            return tf.nest.map_structure(tf.identity, batch)

    return dataset.map(count)


def _size(batch: Any) -> tf.Tensor:
    return num_rows(batch[1])


def _options(settings: Settings) -> tf.data.Options:
    options = tf.data.Options()
    # Nothing but `LookAhead` works ahead, which those who count and save wait for.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    if settings.threads is not None:
        options.threading.private_threadpool_size = settings.threads
    return options
