"""What a callback can tell of the others in its `fit`.

In: the call by which Keras gives a callback its parameters. Out: all callbacks of that `fit`.
"""

import sys
from typing import Any

import keras


class AmongOthers(keras.callbacks.Callback):
    """A callback that knows those beside it.

    No version of Keras 3 tells it of them. But its parameters come from Keras's list of all, and a
    `fit` gives its callbacks one dictionary of parameters, which no other `fit` has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lists: list[list[Any]] = []

    def set_params(self, params: dict[str, Any]) -> None:
        """Takes over the parameters, and notes which lists they come from."""
        super().set_params(params)
        self._lists = _lists_that_call()

    def beside(self) -> list[Any]:
        """Returns the callbacks of the `fit` that this was last given to, itself included.

        They are in order; there are none before the first `fit`.
        """
        members = [member for found in self._lists for member in found]
        found = {
            id(member): member
            for member in members
            if isinstance(member, keras.callbacks.Callback) and member.params is self.params
        }
        return list(found.values())


def _lists_that_call() -> list[list[Any]]:
    """The callbacks of each list whose method is being run by this thread, the outer ones first."""
    found: list[list[Any]] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            found.insert(0, owner.callbacks)
        frame = frame.f_back
    return found
