"""Imports SOK, when a store is made, and wraps optimizers for it. The only file that imports it.

In: an optimizer of the user's. Out: one that SOK can use; or an error that says what is allowed.
"""

import importlib
import sys
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid

OPTIMIZERS = (
    "tf.compat.v1.train.AdagradOptimizer or another of tf.compat.v1.train, sok.SGD, or "
    "tf_keras.optimizers.legacy.Adagrad or another of them (with TF_USE_LEGACY_KERAS=1 in the "
    "environment before TensorFlow is imported)"
)
_MISSING = (
    "SOK cannot be imported: {error}. It needs an NVIDIA GPU: pip install merlin-sok, or give "
    "store='native'."
)


def open_sok() -> Any:
    """Imports SOK and, where the program did not, starts it and the Horovod that it talks by.

    Raises:
        ImportError: there is no SOK, or it cannot be loaded here.
    """
    try:
        sok = importlib.import_module("sparse_operation_kit")
    except Exception as error:  # SOK raises plain Exceptions where its libraries are missing.
        raise ImportError(_MISSING.format(error=error)) from error
    talk = sok.communication
    if not talk.hvd.is_initialized():
        talk.hvd.init()
    if talk._COMM_TOOL is None:
        # Its default replaces tf.keras.optimizers for the whole program.
        sok.init(use_legacy_optimizer=False)
    return sok


def require_lookup_sparse() -> None:
    """Raises RuntimeError if `sok.lookup_sparse` cannot run with this Python."""
    if not hasattr(importlib, "find_loader"):
        version = ".".join(map(str, sys.version_info[:2]))
        raise RuntimeError(
            "sok.lookup_sparse of merlin-sok 2.1.0 calls importlib.find_loader, which Python 3.12 "
            f"took out; this is Python {version}. Use Python 3.11, or look rows up with "
            "store='sok', which needs no lookup_sparse."
        )


def wrap_optimizer(optimizer: Any) -> Any:
    """Makes an optimizer able to update `sok.DynamicVariable`s: `sok.OptimizerWrapper`, checked.

    Args:
        optimizer: of `tf.compat.v1.train`, or a legacy one of Keras 2. What SOK made already
            (`sok.SGD`, `sok.OptimizerWrapper`) is returned as it is.

    Raises:
        ValueError: SOK cannot use it, as the optimizers of Keras 3; the error says which it can.
    """
    sok = open_sok()
    if type(optimizer).__module__.startswith(sok.__name__ + "."):
        return optimizer
    is_first = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    is_legacy = any(base.__name__ == "OptimizerV2" for base in type(optimizer).__mro__)
    if is_first or is_legacy:
        try:
            return sok.OptimizerWrapper(optimizer)
        except (AttributeError, KeyError):
            # A legacy optimizer in a program whose tf.keras is Keras 3.
            pass
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    raise invalid("optimizer", kind, "SOK's variables", OPTIMIZERS) from None


def slots_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    """Returns a variable's slots by name; none before the optimizer has made them.

    Args:
        optimizer: what `wrap_optimizer` returned, or None.
        variable: a `sok.DynamicVariable`.
    """
    # SOK's wrappers know what they made; `sok.SGD` has nothing.
    if not hasattr(optimizer, "get_slot_names"):
        return {}
    found = {}
    for name in optimizer.get_slot_names():
        try:
            slot = optimizer.get_slot(variable, name)
        except KeyError:  # Of the legacy optimizers, before the first step.
            slot = None
        if slot is not None:
            found[name] = slot
    return found
