"""Typed wrappers over the C++ ops; the library is loaded when the first op is called.

Import the module you need, e.g. `from slipstream_tf.ops import drift`.
"""
