"""Runs a program as a single process or as a rank.

In a job, only rank 0 prints results. Errors inside an `agreed` block, such as an invalid flag, are
exchanged and printed once, by rank 0. Any other error is printed by the rank that raised it,
together with the rank number. The launcher then stops the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from absl import logging

from slipstream_tf._utils import agent
from slipstream_tf.cli import flag_set as flag_sets
from slipstream_tf.cli.flag_set import FlagSet, ProgramError, RunError, StoppedError, UsageError

if TYPE_CHECKING:
    from slipstream_tf.distributed import Communicator

_Prepared = TypeVar("_Prepared")
_INTERRUPTED = 130  # Exit code of shells for SIGINT.
_CLOSED_PIPE = 141  # Exit code of shells for SIGPIPE.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Part of Horovod's error message on the remaining ranks after a rank has ended.
_GONE = "Horovod has been shut down"


class AgreedError(ProgramError):
    """An error of at least one rank, raised on all ranks."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def run_program(
    flag_set: FlagSet, main: Callable[[dict[str, Any], frozenset[str]], None], arguments: Any = None
) -> int:
    """Runs a program as a single process; prints errors as one line.

    Args:
        flag_set: The flags of the program.
        main: Function that is called with the result of `FlagSet.parse`.
        arguments: Command line arguments without the program name. Defaults to `sys.argv[1:]`.

    Returns:
        The exit code: 0, `USAGE_ERROR`, `RUN_ERROR`, `STOPPED`, 130 after Ctrl-C, or 141 if the
        reader of stdout, for example `head`, has closed the pipe.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    logging.set_verbosity(logging.WARNING)
    try:
        if _asks_for_help(arguments):
            print(flag_set.help_text(flag_sets.FULL_HELP in arguments))
        else:
            main(*flag_set.parse(arguments))
        # Otherwise a closed pipe would cause a traceback when the interpreter exits.
        sys.stdout.flush()
    except ProgramError as error:
        print(f"{flag_set.program}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"{flag_set.program}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        if not agent.is_stdout_closed():
            raise
        return _CLOSED_PIPE
    return 0


def run_rank(
    flag_set: FlagSet,
    prepare: Callable[[dict[str, Any], frozenset[str]], _Prepared],
    carry_out: Callable[..., None],
    arguments: Sequence[str] | None = None,
    is_elastic: Callable[[_Prepared], bool] = lambda _: False,
) -> int:
    """Runs a program as a rank of a launched job.

    Args:
        flag_set: The flags of the program.
        prepare: Function that is called with the result of `FlagSet.parse`. It must not run any
            TensorFlow operation, because `distributed.init` still configures the threads.
        carry_out: Function that is called with the result of `prepare` and the communicator. In an
            elastic job it also receives the keyword argument `job`.
        arguments: Command line arguments without the program name. Defaults to `sys.argv[1:]`.
        is_elastic: Function that returns whether the job is elastic, given the result of `prepare`.

    Returns:
        The exit code, see `run_program`.
    """
    own_rank = agent.rank() or 0
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if _asks_for_help(arguments):
        return 0 if own_rank else run_program(flag_set, lambda *_: None, arguments)
    # All ranks log the same warnings, so only rank 0 shows them.
    logging.set_verbosity(logging.ERROR if own_rank else logging.WARNING)
    prepared: _Prepared | None = None
    problem: UsageError | RunError | None = None
    try:
        prepared = prepare(*flag_set.parse(arguments))
    except (UsageError, RunError) as error:
        problem = error
    comm: Communicator | None = None
    try:
        import_tensorflow()
        from slipstream_tf.distributed import elastic, init

        def start(ranks: Communicator, **optional: Any) -> None:
            nonlocal comm
            comm = ranks
            with agreed(comm, "flags"):
                if problem is not None:
                    raise problem
            assert prepared is not None
            carry_out(prepared, comm, **optional)

        if prepared is not None and is_elastic(prepared):
            elastic.run(lambda job: start(job.comm, job=job))
        else:
            start(init())
    except StoppedError as error:  # Only raised in a job with one rank.
        print(f"{flag_set.program}: {error}", file=sys.stderr, flush=True)
        return error.code
    except AgreedError as error:
        assert comm is not None
        if comm.rank == 0:
            print(f"{flag_set.program}: {error}", file=sys.stderr, flush=True)
        from slipstream_tf._utils.agreement import gather_json

        # The launcher stops all ranks when the first one exits with an error. Wait here until
        # rank 0 has printed the message.
        gather_json(comm, None, "slipstream.error_printed")
        return error.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and agent.is_stdout_closed():
            return _CLOSED_PIPE
        message, is_expected = _describe(error)
        print(f"{flag_set.program}: rank {own_rank}: {message}", file=sys.stderr, flush=True)
        if not is_expected:
            raise
        return error.code if isinstance(error, ProgramError) else flag_sets.RUN_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


@contextlib.contextmanager
def agreed(comm: Communicator, name: str) -> Iterator[None]:
    """Raises an error on all ranks if its block fails on any.

    The end of the block is a collective. Note: the block must not contain a collective itself,
    because a rank that raises before it would leave the other ranks waiting.

    Args:
        comm: The communicator. With a single rank, errors pass through unchanged.
        name: Name of the block, the same on all ranks.

    Raises:
        AgreedError: If at least one rank raised a UsageError or RunError in the block.
    """
    if comm.size == 1:
        yield
        return
    from slipstream_tf._utils.agreement import gather_json

    own: list[Any] = [0, ""]
    try:
        yield
    except (UsageError, RunError) as error:
        own = [error.code, str(error)]
    found = gather_json(comm, own, f"slipstream.agreed.{name}")
    wrong = [rank for rank, (code, _) in enumerate(found) if code]
    if not wrong:
        return
    code, message = found[wrong[0]]
    if any(other != found[wrong[0]] for other in found):
        message = f"rank {wrong[0]}: {message}"
    raise AgreedError(code, message)


def make_output(path: str, flag: str = "output", is_file: bool = False) -> None:
    """Creates the folder of an output and checks that it is writable.

    Call it before a long run, so that the run does not fail when it writes its results.

    Args:
        path: Path of the folder, which may already exist. If `is_file`, path of the file.
        flag: Name of the flag that contains the path.
        is_file: Whether `path` is the path of a file.

    Raises:
        UsageError: If the folder cannot be created or written, or if `path` is a folder instead of
            a file.
    """
    folder = os.path.dirname(os.path.abspath(path)) if is_file else path
    reason = "the folder is not writable"
    try:
        os.makedirs(folder, exist_ok=True)
        if is_file and os.path.isdir(path):
            reason = "the path is a folder"
        elif os.access(folder, os.W_OK):
            return
    except OSError as error:
        reason = error.strerror or str(error)
    raise UsageError(
        f"Invalid flag --{flag}={path}: {reason}. Expected a {'file in a ' if is_file else ''}"
        "folder that can be created and written."
    )


def import_tensorflow() -> None:
    """Imports TensorFlow and shows its log only if the import fails.

    TensorFlow writes some lines to stderr before it reads TF_CPP_MIN_LOG_LEVEL, and twice, so this
    function redirects stderr during the import, unless the user has set the variable to "0" or "1".
    If it is not set, it is removed after the import, so that this function has the same effect in
    child processes.
    """
    given = os.environ.get(_LOG_LEVEL)
    if "tensorflow" in sys.modules or given in ("0", "1"):
        return
    os.environ.setdefault(_LOG_LEVEL, "2")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            log.seek(0)
            os.write(kept, log.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if given is None:
                del os.environ[_LOG_LEVEL]


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in ("--help", "-h", "-help", flag_sets.FULL_HELP) for word in arguments)


def _describe(error: Exception) -> tuple[str, bool]:
    """Returns an error's message and whether the error is expected."""
    if _GONE in str(error):
        return "The run failed because another rank ended. See the message of that rank.", True
    if isinstance(error, (UsageError, RunError, ImportError)):
        return str(error), True
    return "an unexpected error occurred. Please report it with this traceback:", False
