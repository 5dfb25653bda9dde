"""The training input pipeline: distributes batches over ranks and counts examples.

Examples are counted at three stages: when they are read, when this rank receives them, and when a
training step pulls them. At the end the counts are compared with the number of trained and skipped
examples, so that a lost example is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.baselines.segregation import segregate
from slipstream_tf.cli.settings import Settings
from slipstream_tf.distributed import Communicator, pad_to_equal_steps, prefetch_keys
from slipstream_tf.distributed.batches import element_of
from slipstream_tf.distributed.elastic import BlocksLeft
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.ops.features import num_rows
from slipstream_tf.sampling.classifier import weigh_last
from slipstream_tf.sampling.look_ahead import LookAhead
from slipstream_tf.sampling.notes import note_fraction

_ALL = BlocksLeft()


class TrainingInputs:
    """Provides the training batches of a rank over all epochs.

    The data of all epochs is divided into blocks of equal size, and block i goes to rank
    i % `comm.size`. If the engine drops examples, a block has `settings.read_batch_size` examples,
    and each rank regroups the kept examples into batches of `settings.batch_size`. Otherwise a
    block is a batch, and a step of the job trains `comm.size` consecutive blocks.

    Args:
        settings: The settings of the run.
        dataset: One epoch of training examples, `(features, label)`, in batches of any size. The
            same on all ranks.
        comm: The communicator of the job.
        embeddings: The embedding layer. Tables on disk start to load the rows of each batch before
            the batch is trained.
        slipstream: The engine, which may drop examples, or None.
        hot_keys: Result of `profile_hot_keys`. If given, hot and cold examples are in separate
            batches.
        left: The numbers of the blocks that no rank has trained on. Defaults to all blocks.

    Attributes:
        dataset: The batches of this rank.
        read: Number of examples read so far, for all ranks, int64 variable on the CPU.
        seen: Number of these examples in blocks of this rank, int64 variable on the CPU. Examples
            that the engine drops are included.
        pulled: Value of `seen` for the batch that a step last received, int64 variable on the CPU.
            Unlike `seen`, it excludes examples that are prepared ahead for later steps.
        counts_as_read: Whether `taken` counts blocks that were read instead of trained steps. True
            if the engine drops examples, because the number of blocks per step then varies.
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
        # If no rank drops examples, all ranks have the same number of batches. Otherwise the ranks
        # must agree in each step whether there is another batch.
        are_even = comm.size > 1 and not leaves
        at_once = settings.batch_size * comm.size if are_even else settings.read_batch_size
        if left == _ALL:
            dataset = _all_epochs(settings, dataset, at_once)
        else:
            dataset = left.of(_all_epochs(settings, dataset, self._block)).rebatch(at_once)
        dataset = _counted(dataset, self.read)
        if hot_keys is not None:
            # Separate before the ranks take their parts, so that a step is hot on all ranks or on
            # none.
            dataset = segregate(dataset, hot_keys, settings.batch_size * comm.size)
        dataset = (
            slice_of_rank(dataset, settings.batch_size, comm)
            if are_even
            else batches_of_rank(dataset, comm)
        )
        dataset = _counted(self._reading.read(dataset), self.seen)
        if slipstream is not None:
            # Batches are refilled only if the engine drops examples.
            batch_size = settings.batch_size if slipstream.settings.skips_examples else None
            dataset = slipstream.drop_examples(dataset, batch_size)
            if settings.control == "random":
                # Weight a small last batch as the matched run does.
                dataset = weigh_last(dataset, settings.batch_size)
        if not are_even:
            # The exchange about the next batch overlaps with the training of the current one.
            dataset = pad_to_equal_steps(dataset, comm, note_fraction)
        requests_ahead = comm.size > 1 and not are_even
        dataset = self._handed_out(
            embeddings.prefetch_rows(dataset), ahead=requests_ahead or embeddings.store.spills
        )
        dataset = dataset.with_options(_options(settings))
        self.dataset = prefetch_keys(dataset) if settings.prefetch else dataset

    def taken(self, steps: int) -> int:
        """Returns how many of the blocks in `left` this rank has consumed.

        Args:
            steps: Number of steps that this rank has trained since the start of this process.
        """
        if not self.counts_as_read:
            return steps
        return -(-(int(self.seen.numpy()) - self._begun_at) // self._block)

    def begin_at(self, seen: int, is_counting: bool) -> None:
        """Initializes the counters of a resumed elastic run.

        Args:
            seen: Number of examples that all ranks received before the restart.
            is_counting: Whether this rank includes them in `seen` and `pulled`. Set it on exactly
                one rank, because these counters are summed over ranks.
        """
        self.read.assign_add(seen)
        if is_counting:
            self._begun_at = seen
            self.seen.assign_add(seen)
            self.pulled.assign_add(seen)

    def wait_until_idle(self) -> None:
        """Waits until no batch is being prepared in the background."""
        if self._slipstream is not None:
            self._slipstream.wait_until_idle()
        self._asking.wait_until_idle()
        self._reading.wait_until_idle()

    def _handed_out(self, dataset: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
        """Stores the matching value of `seen` in `pulled` for each batch.

        With an engine, or if `ahead` is true, the next batch is prepared while a batch trains.
        `seen` then already includes the next batch.
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


def batches_of_rank(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    """Returns every `size`-th batch of a dataset, starting at batch `rank`."""
    return dataset if comm.size == 1 else dataset.shard(comm.size, comm.rank)


def slice_of_rank(dataset: tf.data.Dataset, batch_size: int, comm: Communicator) -> tf.data.Dataset:
    """Returns this rank's slice of each global batch.

    The relative size of the slice is attached to the features (see `note_fraction`), so that the
    loss of a small or empty slice gets the right weight.

    Args:
        dataset: Elements are (features, label) of `comm.size * batch_size` examples. The last
            element may be smaller, so that the slice of a rank may be empty.
        batch_size: Number of examples per rank.
        comm: The communicator of the job.
    """

    @tf.autograph.experimental.do_not_convert
    def own(features: Any, label: tf.Tensor) -> Any:
        begin = comm.rank * batch_size
        features, part = tf.nest.map_structure(
            lambda whole: whole[begin : begin + batch_size], (features, label)
        )
        rows, of_all = tf.size(part), tf.size(label)
        return note_fraction((features, part), tf.cast(rows * comm.size / of_all, tf.float32))

    return dataset.map(own)


def inputs_of_rank(inputs: int, batch_size: int, comm: Communicator) -> int:
    """Returns the number of examples that this rank receives from `batches_of_rank`.

    Args:
        inputs: Number of examples of all ranks.
        batch_size: Number of examples per batch.
        comm: The communicator of the job.
    """
    batches, rest = divmod(inputs, batch_size)
    own = len(range(comm.rank, batches, comm.size)) * batch_size
    return own + rest if batches % comm.size == comm.rank else own


def _all_epochs(settings: Settings, dataset: tf.data.Dataset, at_once: int) -> tf.data.Dataset:
    """Returns the examples of all epochs and ranks in batches of `at_once`.

    All epochs are one dataset, so that batches stay full at the end of an epoch and
    `max_examples` can end any epoch.
    """
    dataset = dataset.repeat(settings.epochs).rebatch(at_once)
    for limit in (settings.max_examples, settings.stop_after):
        if limit is not None:
            dataset = _first_inputs(dataset, limit)
    return dataset


def _first_inputs(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Limits a dataset to `count` examples; cuts the last batch."""

    @tf.autograph.experimental.do_not_convert
    def cut(seen: tf.Tensor, batch: Any) -> Any:
        kept = tf.minimum(_size(batch), count - seen)
        return seen + kept, tf.nest.map_structure(lambda part: part[:kept], batch)

    @tf.autograph.experimental.do_not_convert
    def is_any(*batch: Any) -> tf.Tensor:
        return _size(batch) > 0

    return dataset.scan(tf.constant(0, tf.int64), cut).take_while(is_any)


def _counted(dataset: tf.data.Dataset, counter: tf.Variable) -> tf.data.Dataset:
    """Adds the number of examples of each batch to `counter`."""

    @tf.autograph.experimental.do_not_convert
    def count(*batch: Any) -> Any:
        with tf.control_dependencies([counter.assign_add(_size(batch))]):
            return tf.nest.map_structure(tf.identity, batch)

    return dataset.map(count)


def _size(batch: Any) -> tf.Tensor:
    return num_rows(batch[1])


def _options(settings: Settings) -> tf.data.Options:
    options = tf.data.Options()
    # Only `LookAhead` may prepare batches in the background, because `wait_until_idle` waits for it
    # before counters are read and iterators are saved. Therefore tf.data must not add prefetching.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    if settings.threads is not None:
        options.threading.private_threadpool_size = settings.threads
    return options
