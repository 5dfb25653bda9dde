"""Shares the data out to the ranks of a run, and adds up what they counted.

Every total is summed over ranks and is a collective.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf.distributed import Communicator
from slipstream_tf.distributed.agreement import gather_json
from slipstream_tf.inputs.spec import ID
from slipstream_tf.saturation.ranks import Ranks


def share_of_rank(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    """Returns batches rank, rank + size, rank + 2 * size, ... of a data set of batches."""
    return dataset if comm.size == 1 else dataset.shard(comm.size, comm.rank)


def share_by_id(dataset: tf.data.Dataset, batch_size: int, comm: Communicator) -> tf.data.Dataset:
    """Returns the inputs whose number belongs to this rank, the same ones in every pass.

    A rank remembers losses of its own inputs, which would go to another rank in another pass if
    whole batches were shared out.

    Args:
        dataset: batches (features, label) with features["id"].
        batch_size: of the batches that come out.
        comm: the ranks.
    """
    if comm.size == 1:
        return dataset

    def own(features: Any, label: Any) -> Any:
        is_own = tf.equal(tf.math.floormod(features[ID], comm.size), comm.rank)
        rows = tf.where(is_own)[:, 0]
        return tf.nest.map_structure(lambda part: tf.gather(part, rows), (features, label))

    return dataset.map(own).rebatch(batch_size)


def inputs_of_rank(inputs: int, batch_size: int, comm: Communicator) -> int:
    """Returns how many of so many inputs, in batches, are this rank's share."""
    batches, rest = divmod(inputs, batch_size)
    own = len(range(comm.rank, batches, comm.size)) * batch_size
    return own + rest if batches % comm.size == comm.rank else own


def total(comm: Communicator, count: int, name: str) -> int:
    """Returns the sum of the ranks' counts."""
    return int(comm.sum(tf.constant([count], tf.int64), "control", f"slipstream.total.{name}")[0])


def total_metrics(model: Any, comm: Communicator) -> dict[str, Any]:
    """Returns the loss, the streaming AUC and the trained inputs of all steps of all ranks.

    Means, confusion counts and input counts are sums, so that the ranks' are added up.

    Args:
        model: as `cli.build` makes it, trained.
        comm: the ranks.
    """
    if comm.size > 1:
        for index, variable in enumerate(model.metrics_variables):
            name = f"slipstream.metrics.{index}"
            variable.assign(comm.sum(variable.value, "control", name))
    results = model.get_metrics_result()
    return {
        "loss": float(results["loss"]),
        "auc": float(results["auc"]),
        "trained": int(results["trained"]),
    }


def total_gradient_rows(
    embeddings: Any, comm: Communicator, before: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Returns what became of each table's gradient rows, by table.

    Args:
        embeddings: the tables.
        comm: the ranks.
        before: rows of this rank by table and field, from parts of the run before this one.
    """
    names = [table.name for table in embeddings.tables]
    counts = []
    for name in names:
        now = embeddings.store.update_counts(name)
        more = {kind: getattr(now, kind) + rows for kind, rows in before.get(name, {}).items()}
        counts.append(dataclasses.replace(now, **more))
    totals = Ranks(comm).total_counts(counts, "gradient_rows")
    return {name: dataclasses.asdict(sums) for name, sums in zip(names, totals, strict=True)}


def traffic_record(comm: Communicator, before: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns the entry "ranks" of the record: how many there are, and what they sent so far.

    Args:
        comm: the ranks.
        before: bytes of this rank by kind that it does not count any more, from parts of the run
            before this one.

    Returns:
        size; bytes: kind -> bytes of all ranks; bytes_by_rank: the same of each, rank 0 first.
    """
    own = collections.Counter(before or {})
    own.update({kind: int(count) for kind, count in comm.traffic().bytes.items()})
    by_rank = gather_json(comm, dict(own), "slipstream.traffic")
    totals: collections.Counter[str] = collections.Counter()
    for of_rank in by_rank:
        totals.update(of_rank)
    return {"size": comm.size, "bytes": dict(totals), "bytes_by_rank": by_rank}
