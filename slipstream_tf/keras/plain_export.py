"""Lets TensorFlow and Keras write SavedModels by themselves: `model.export`, `tf.saved_model.save`.

In: a store, while a SavedModel is being written. Out: lookups by TensorFlow's own ops, and the rows
in variables, as `slip.export.saved_model` has them. The variables hold the rows of the last
SavedModel written so: what was traced for it is used again the next time.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf.export.serving import ServedTable, ServingStore, encoded


class ExportedRows:
    """The rows of a store as SavedModels have them.

    Attributes:
        serving: the store to look up in while a SavedModel is traced.
    """

    def __init__(self, store: Any, place: str) -> None:
        """Makes variables without rows: a function that is traced again can make none.

        Args:
            store: an embedding store.
            place: whose it is, for errors.
        """
        self._store, self._place = store, place
        with tf.init_scope():
            self._tables = [
                ServedTable(table, np.empty(0, np.int64), np.empty((0, table.dim), np.float32))
                for table in store.tables
            ]
        self.serving = ServingStore(self._tables)

    def stands_in_for(self, store: Any) -> bool:
        """Whether a lookup of a store, now, is for a SavedModel that is being written.

        Raises:
            ValueError: it is, and several ranks have the rows.
        """
        if store is not self._store or not _compat.is_saving_model():
            return False
        if store.comm is not None and store.comm.size > 1:
            allowed = "slip.export.saved_model(model, path), which all ranks call"
            raise invalid("model", f"one of {store.comm.size} ranks", self._place, allowed)
        return True

    def trackables(self) -> dict[str, Any]:
        """Returns what a SavedModel has of the rows, as they are now."""
        for table in self._tables:
            contents = self._store.export_table(table.config.name)
            table.keys.assign(contents["keys"])
            table.rows.assign(encoded(table.config, contents["rows"], None)["rows"])
        return {f"served_{table.config.name}": table for table in self._tables}
