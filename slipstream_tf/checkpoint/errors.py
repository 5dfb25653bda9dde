"""What is wrong with a checkpoint: which file, where in it, and what to do about it."""

import os


class CheckpointError(ValueError):
    """A checkpoint is damaged; nothing of it was restored.

    Attributes:
        path: the file.
        offset: bytes from its start to where it is wrong; None: the file as a whole is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        problem: str,
        remedy: str = "Restore another checkpoint, or copy the file again from where it is whole.",
        offset: int | None = None,
    ) -> None:
        """Says what is wrong.

        Args:
            path: the file.
            problem: what is wrong with it, without a full stop.
            remedy: what the user can do.
            offset: see above.
        """
        self.path, self.offset = os.fspath(path), offset
        where = self.path if offset is None else f"{self.path}, offset {offset}"
        super().__init__(f"{where}: {problem}. {remedy}")


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is whole, but not of this program or version; an older one is no remedy."""
