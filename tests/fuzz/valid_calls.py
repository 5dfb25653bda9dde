"""Makes one valid call of every Slipstream* op.

The calls create the objects that they need. Outputs of one op are inputs of the next, for example
packed rows, plans and exported windows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

# Calls an op by name with arguments, inputs as arrays, and returns the op's result.
Call = Callable[..., Any]

KEYS = np.array([5, 7, 5, 9, -1])
IDS = np.arange(5)
FLAGS = np.array([1, 0, 1], np.uint8)
# Feature 1: keys [batch]. Feature 2: row splits and weights. Feature 3: a column of a [batch,
# width] tensor.
FEATURES: dict[str, Any] = {
    "keys": [np.array([5, 7, 9]), np.array([1, 1, 2, 4]), np.array([[1, 5], [7, 2], [3, 3]])],
    "row_splits": [np.array([0, 2, 2, 4])],
    "weights": [np.float32([1, 0.5, 2, 0])],
    "feature_keys": [0, 1, 2],
    "feature_column": [-1, -1, 1],
    "feature_splits": [-1, 0, -1],
    "feature_weights": [-1, 0, -1],
    "feature_table": [0, 1, 0],
    "padding_keys": [-1, -1, -1],
    "has_padding": [True, False, True],
}
# Skip settings of a classifier.
SETTINGS = {
    "threshold": np.float32(0.6),
    "random_fraction": np.float64(0),
    "keep_rate": np.float64(0.1),
}
LOOKUP = {
    **FEATURES,
    "combiners": ["sum", "mean", "none"],
    "table_dims": [2, 3],
    "is_stacked": False,
    "num_outputs": 3,
}
RATE = np.float32(0.1)
ROUNDED = np.int32(3)  # Wire dtype int8.


def call_every_op(call: Call) -> None:
    """Calls all ops."""
    call_table_ops(call)
    call_sealing_ops(call)
    call_exchange_ops(call)
    call_deferred_gradients_ops(call)
    call_counting_ops(call)
    call_classifier_ops(call)
    call_pilot_ops(call)
    call_drift_classifier_ops(call)
    call_look_ahead_ops(call)


def call_table_ops(call: Call) -> None:
    """Calls the lookup, update, deferral, export and import ops of tables."""
    tables = _tables(call)
    looked_up = call("SlipstreamLookup", handles=tables, **LOOKUP)
    call("SlipstreamEvaluationLookup", handles=tables, **LOOKUP)
    update = {"handles": tables, "plan": looked_up.plan, "learning_rate": RATE}
    call("SlipstreamApplyGradients", gradients=_gradients(looked_up), **update)
    call_row_gradient_ops(call, looked_up)
    call("SlipstreamTableRelease", handle=_tables(call)[0])
    table = tables[0]
    keys = np.array([5, 7, 9])
    call("SlipstreamTableGather", handle=table, keys=keys, dim=2)
    call("SlipstreamTableCountAccesses", handles=tables, **FEATURES)
    call("SlipstreamTableHotKeys", handle=table, k=np.int64(2))
    call("SlipstreamTableDecayCounts", handle=table, factor=np.float32(0.5))
    call("SlipstreamTableSetRowFlags", handle=table, keys=keys, flags=FLAGS, create_missing=True)
    call("SlipstreamTableRowFlags", handle=table, keys=keys)
    snapshot = np.zeros((3, 2), np.float32)
    call("SlipstreamTableMeasure", handle=table, keys=keys, snapshot=snapshot, metric="l2")
    call("SlipstreamTableSetPolicy", handle=table, **_deferring())
    call("SlipstreamApplyGradients", gradients=_gradients(looked_up), **update)
    deferred = call("SlipstreamTableExportDeferred", handle=table)
    call("SlipstreamTableImportDeferred", handle=table, **_as_inputs(deferred))
    call("SlipstreamTableFlush", handle=table)
    call("SlipstreamTableUpdateCounts", handle=table)
    call("SlipstreamTableStatistics", handle=table)
    call("SlipstreamTableSpillStatistics", handle=table)
    call("SlipstreamTablePrefetchRows", handle=table, keys=keys)
    admission = call("SlipstreamTableExportAdmission", handle=table)
    call("SlipstreamTableImportAdmission", handle=table, **_as_inputs(admission))
    call("SlipstreamTableExportChanges", handle=table, since=np.array(0, np.int64))
    call("SlipstreamTableExportReplicas", handle=table)
    whole = call("SlipstreamTableExport", handle=table)
    call("SlipstreamTableImport", handle=table, **_as_inputs(whole))
    call("SlipstreamTableStep", handle=table)
    call("SlipstreamTableKeys", handle=table)
    call("SlipstreamTableWrite", handle=table, keys=keys, rows=snapshot)
    call("SlipstreamTableRemove", handle=table, keys=keys[:2])
    call("SlipstreamTableShrink", handle=table)
    call("SlipstreamTableClear", handle=table)


def call_row_gradient_ops(call: Call, looked_up: Any) -> None:
    """Calls the ops that connect the lookups of a step with its update."""
    anchors, pooled = [np.float32(0.0)], [value.numpy() for value in looked_up.pooled]
    call("SlipstreamRowSource", anchors=anchors, previous=[], store=0, apply="backward")
    # The source has no value, and its type is variant like the plan's.
    connected = {"source": looked_up.plan, "plan": looked_up.plan, "anchors": anchors, "ranks": 1}
    call("SlipstreamConnectRows", pooled=pooled, **connected)
    call("SlipstreamRowGradients", plan=looked_up.plan, gradients=_gradients(looked_up))


def call_exchange_ops(call: Call) -> None:
    """Calls the ops that exchange rows and gradients between ranks."""
    owners, copies, deferring = _tables(call), _tables(call), _tables(call)
    looked_up = call("SlipstreamLookup", handles=owners, **LOOKUP)
    update = {"gradients": _gradients(looked_up), "learning_rate": RATE}
    collected = {"handles": owners, "plan": looked_up.plan, "ranks": 2}
    found = call("SlipstreamCollectGradients", **collected, **update)
    received = {name: getattr(found, name).numpy() for name in ("sizes", "keys", "values")}
    call("SlipstreamMergeRows", ranks=2, row_floats=[2, 3], **received)
    packed = call("SlipstreamPackMessages", wire_dtype=ROUNDED, row_floats=[2, 3], **received)
    messages = packed.messages.numpy()
    call("SlipstreamUnpackMessages", messages=messages, ranks=2, row_floats=[2, 3])
    scale = np.array([0.5, 2.0], np.float32)[: len(owners)]
    call("SlipstreamApplyRows", handles=owners, learning_rate=RATE, scale=scale, **received)
    for table in deferring:
        call("SlipstreamTableSetPolicy", handle=table, is_exchanged=True, **_deferring())
    later = call("SlipstreamLookup", handles=deferring, **LOOKUP)
    call("SlipstreamCollectGradients", handles=deferring, plan=later.plan, **update)
    call("SlipstreamCollectDeferred", handles=deferring, ranks=2)

    combiners = LOOKUP["combiners"]
    routed = call("SlipstreamRouteKeys", handles=copies, ranks=2, combiners=combiners, **FEATURES)
    sizes, keys = routed.request_sizes.numpy(), routed.requests.numpy()
    wanted = {"sizes": sizes, "keys": keys}
    form = {"with_summary": np.True_, "wire_dtype": ROUNDED}
    messages = call("SlipstreamPullRows", handles=owners, **wanted, **form).messages.numpy()
    for training in (True, False):
        came = {"plan": routed.plan, "sizes": sizes, "requests": keys, "messages": messages}
        call("SlipstreamLookUpPulled", handles=copies, training=training, **came, **LOOKUP)


def call_deferred_gradients_ops(call: Call) -> None:
    """Calls the ops that mask and defer gradients of a variable's rows."""
    deferred, saturated = call("SlipstreamDeferredGradients", dim=2), call("SlipstreamKeySet")
    keys = np.array([5, 7, 9])
    call("SlipstreamKeySetAssign", handle=saturated, keys=keys)
    gradients = np.arange(6, dtype=np.float32).reshape(3, 2)
    call("SlipstreamMaskGradients", handle=saturated, keys=keys, gradients=gradients)
    call(
        "SlipstreamDeferredGradientsConfigure",
        handle=deferred,
        capacity=np.int64(16),
        max_rows=np.int64(8),
        max_age=np.int64(9),
        defers=True,
        by_movement=False,
    )
    added = call("SlipstreamAddDeferred", handle=deferred, keys=keys, gradients=gradients)
    call(
        "SlipstreamTakeDue",
        handle=deferred,
        saturated=saturated,
        keys=keys,
        indices=added.indices.numpy(),
        sums=added.sums.numpy(),
        may_wait=np.array([True, False, True]),
    )
    call("SlipstreamDeferredGradientsState", handle=deferred)
    sums = call("SlipstreamDeferredGradientsExport", handle=deferred)
    call("SlipstreamDeferredGradientsImport", handle=deferred, **_as_inputs(sums))
    call("SlipstreamDeferredGradientsFlush", handle=deferred)


def call_counting_ops(call: Call) -> None:
    """Calls the ops that count accesses and measure drift."""
    sketch = call("SlipstreamHotKeys", log2_width=4)
    call("SlipstreamCountAccesses", handle=sketch, keys=KEYS, counts=np.ones(5, bool))
    call("SlipstreamDecayAccesses", handle=sketch, factor=np.float64(0.5))
    call("SlipstreamEstimateAccesses", handle=sketch, keys=KEYS)
    call("SlipstreamHotKeyCandidates", handle=sketch)
    call("SlipstreamSortKeys", keys=[KEYS, IDS])
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    call("SlipstreamRowDrift", current=rows, snapshot=rows[::-1].copy(), metric="l2")


def call_classifier_ops(call: Call) -> None:
    """Calls the ops of the example classifier: classify by drift, export, import."""
    made = {"alpha": np.float64(0.5), "num_tables": 2, "reservoir_size": 8}
    classifier = call("SlipstreamClassifier", **made)
    tables, keys = np.array([0, 0, 1], np.int32), np.array([5, 7, 1])
    drift = np.float32([0, 0.5, np.inf])
    call("SlipstreamClassifierSetDrift", handle=classifier, tables=tables, keys=keys, drift=drift)
    call("SlipstreamClassifierConfigure", handle=classifier, **SETTINGS, mode="drift")
    found = call("SlipstreamClassifyInputs", handle=classifier, **FEATURES, window_batches=2)
    losses = {"losses": np.float32([0.1, 0.7, 2]), "labels": np.float32([0, 1, 1])}
    call(
        "SlipstreamRecordLosses",
        handle=classifier,
        skippable=found.skippable.numpy(),
        weights=np.ones(3, np.float32),
        **losses,
    )
    call("SlipstreamClassifierReservoirLosses", handle=classifier)
    drifts = {"tables": tables, "keys": keys, "drift": drift}
    call("SlipstreamClassifierReservoirScores", handle=classifier, **drifts)
    window = call("SlipstreamClassifierExportWindow", handle=classifier)
    call("SlipstreamClassifierImportWindow", handle=classifier, **_as_inputs(window))
    call("SlipstreamClassifierTakeLossStatistics", handle=classifier)
    call("SlipstreamClassifierEndWindow", handle=classifier)


def call_pilot_ops(call: Call) -> None:
    """Calls the ops that subsample by predicted loss and save the pilot."""
    classifier = call(
        "SlipstreamClassifier",
        alpha=np.float64(1),
        num_tables=2,
        pilot="fm",
        pilot_factors=2,
        pilot_memory_bytes=1 << 12,
    )
    call("SlipstreamClassifierConfigure", handle=classifier, **SETTINGS, mode="predicted_loss")
    labels = {"labels": np.float32([0, 1, 0.5]), "sample_weights": np.float32([1, 0, 2])}
    given = {**FEATURES, **labels, "predictions": np.zeros(0, np.float32)}
    call("SlipstreamSubsampleInputs", handle=classifier, **given)
    pilot = call("SlipstreamClassifierExportPilot", handle=classifier)
    call("SlipstreamClassifierImportPilot", handle=classifier, **_as_inputs(pilot))


def call_look_ahead_ops(call: Call) -> None:
    """Calls the ops of data sets that prepare batches ahead."""
    handle = call("SlipstreamLookAhead")
    call("SlipstreamLookAheadBeginWindow", handle=handle, batches=np.int64(3), pulled=np.int64(1))
    call(
        "SlipstreamAheadDataset",
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.range(3)),
        handle=handle,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    call("SlipstreamLookAheadWaitUntilIdle", handle=handle)


def call_drift_classifier_ops(call: Call) -> None:
    """Calls the ops of the drift classifier for examples on a device."""
    classifier = call("SlipstreamDriftClassifier", alpha=np.float64(0.5), num_tables=2)
    tables, keys = np.array([0, 0, 1], np.int32), np.array([5, 7, 1])
    given = {"tables": tables, "keys": keys, "drift": np.float32([0, 0.5, 1])}
    call("SlipstreamDriftClassifierSetDrift", handle=classifier, **given)
    call(
        "SlipstreamDriftClassifierConfigure",
        handle=classifier,
        **SETTINGS,
        mode="drift",
    )
    inputs = {"keys": keys, "tables": tables, "row_splits": np.array([0, 2, 3])}
    call("SlipstreamClassifyByDrift", handle=classifier, **inputs)


def call_sealing_ops(call: Call) -> None:
    """Calls the ops that seal and read files of rows on disk."""
    folder = tempfile.mkdtemp()
    table = call("SlipstreamTable", table_name="s", dim=2, memory=4096, spill=folder)
    rows = np.zeros((200, 2), np.float32)
    call("SlipstreamTableWrite", handle=table, keys=np.arange(200), rows=rows)
    sealed = call("SlipstreamTableSeal", handle=table)
    for index in range(len(sealed.names)):
        call(
            "SlipstreamSaveSealedFile",
            files=sealed.files,
            index=np.int64(index),
            path=np.array(f"{folder}/saved-{index}"),
            copies=True,
        )
    of_first = np.flatnonzero(sealed.file_of == 0)[:2]
    call(
        "SlipstreamReadSealedRows",
        path=np.array(f"{folder}/saved-0"),
        offsets=sealed.offsets.numpy()[of_first],
        pages=sealed.pages.numpy()[of_first],
        pages_of_block=int(sealed.block[0]),
        dim=2,
        slots=0,
    )


def _tables(call: Call) -> list[Any]:
    return [
        call("SlipstreamTable", table_name="a", dim=2, rule="sgd", admit_after=2, expire_after=9),
        call(
            "SlipstreamTable",
            table_name="b",
            dim=3,
            rule="adagrad",
            rule_parameters=[0.1, 1e-7],
            capacity=90,
        ),
    ]


def _deferring() -> dict[str, Any]:
    """Returns settings that defer gradients up to a movement of 100."""
    numbers = {"movement": np.float32(100), "max_age": np.int64(50), "max_rows": np.int64(1000)}
    return {**numbers, "mode": "defer"}


def _gradients(looked_up: Any) -> list[np.ndarray]:
    return [np.full(pooled.shape, 0.25, np.float32) for pooled in looked_up.pooled]


def _as_inputs(outputs: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in outputs._asdict().items()}
