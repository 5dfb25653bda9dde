"""The self-test for SOK in slipstream-doctor passes, and detects a lost update."""

from __future__ import annotations

from slipstream_tf.cli import self_test
from slipstream_tf.cli.flag_set import RunError
from slipstream_tf.tables import SokEmbeddingStore

self_test.sok_store()
SokEmbeddingStore._deliver = lambda *_: None
try:
    self_test.sok_store()
except RunError as error:
    assert "rows after the update: [[0.5" in str(error), error
    print("all checks passed")
