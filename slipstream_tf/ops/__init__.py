"""Typed wrappers of the C++ ops, which are loaded on first use.

Import the module that you need, for example `from slipstream_tf.ops import drift`.
"""
