"""Loads the library that Bazel built into TensorFlow and calls an op.

The ops themselves are tested in tests/ops, through the Python package.
"""

import os
import unittest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

# Bazel starts tests in the root of their run-time files.
LIBRARY = os.path.join(os.getcwd(), "cc_ops", "_slipstream_ops.so")


class LibraryTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ops = tf.load_op_library(LIBRARY)

    def test_stamp_names_this_tensorflow(self):
        with open(LIBRARY, "rb") as file:
            content = file.read()
        version = tf.__version__.split("-")[0].split("rc")[0]
        self.assertIn(f"slipstream-build:tf={version};".encode(), content)

    def test_row_drift(self):
        current = np.float32([[3, 4], [1, 1], [np.nan, 0]])
        snapshot = np.float32([[0, 0], [1, 1], [0, 0]])
        expected = {"linf": [4, 0, np.nan], "l2": [5, 0, np.nan]}
        for metric, drift in expected.items():
            result = self.ops.slipstream_row_drift(
                current=current, snapshot=snapshot, metric=metric
            )
            np.testing.assert_array_equal(result, np.float32(drift))


if __name__ == "__main__":
    unittest.main()
