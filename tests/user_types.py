"""A user's program that `make lint` checks with mypy, but that is not run.

Each `type: ignore` marks an error that mypy must report, because unused ones are errors, too.
"""

import numpy as np
from typing_extensions import assert_type

import slipstream_tf as slip

table = slip.Table("user", dim=4, initializer=slip.initializers.RandomUniform(seed=1))
assert_type(table, slip.Table)
slip.Table("item", 4, optimizer="adagrad", initializer="zeros")
assert_type(table.dim, int)
assert_type(slip.optimizers.Adagrad(0.1), slip.optimizers.Adagrad)

layer = slip.keras.Embedding(10, 4)
collection = slip.keras.EmbeddingCollection([table], optimizer="adagrad")
assert_type(layer.table("embedding").keys(), np.ndarray)
assert_type(layer.tables[0], slip.Table)
engine = slip.Slipstream(collection, window=slip.Window(steps=100))
assert_type(engine, slip.keras.Slipstream)
assert_type(engine.report(), slip.telemetry.savings_report.SavingsReport)

slip.Table("user", dmi=4)  # type: ignore[call-arg]
slip.Table("user", dim="4")  # type: ignore[arg-type]
slip.keras.Embedding(10)  # type: ignore[call-arg]
slip.Windwo()  # type: ignore[attr-defined]
slip.keras.Embeding(10, 4)  # type: ignore[attr-defined]
slip.Slipstream(collection, nonsense=1)  # type: ignore[call-arg]
slip.MaskGradients("0.5")  # type: ignore[arg-type]
