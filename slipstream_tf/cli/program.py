"""A program from its command line to its exit code, alone or as one rank of a job.

Of a job, rank 0 alone prints results. An error that ranks find together (a bad flag, missing data)
is printed once, by rank 0; one that comes later is printed by the rank that has it, with its
number, and ends the job: its launcher stops the other ranks.
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
_INTERRUPTED = 130  # Exit code, as shells have it.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# What the ranks that are left hear of one that has gone.
_GONE = "Horovod has been shut down"


class AgreedError(ProgramError):
    """What went wrong on some rank; raised on all, and told by rank 0."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def run_program(
    flag_set: FlagSet, main: Callable[[dict[str, Any], frozenset[str]], None], arguments: Any = None
) -> int:
    """Runs a program: parses its flags, prints help or one line for what went wrong.

    Args:
        flag_set: its flags.
        main: takes what `FlagSet.parse` returns.
        arguments: of the command line; default: those of this process.

    Returns:
        The exit code: 0, `USAGE_ERROR`, `RUN_ERROR` or `STOPPED`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if _asks_for_help(arguments):
        try:
            print(flag_set.help_text(flag_sets.FULL_HELP in arguments), flush=True)
        except BrokenPipeError:
            # The reader (`head`) has seen enough; the interpreter flushes once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    logging.set_verbosity(logging.WARNING)
    try:
        main(*flag_set.parse(arguments))
    except ProgramError as error:
        print(f"{flag_set.program}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"{flag_set.program}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


def run_rank(
    flag_set: FlagSet,
    prepare: Callable[[dict[str, Any], frozenset[str]], _Prepared],
    carry_out: Callable[..., None],
    arguments: Sequence[str] | None = None,
    is_elastic: Callable[[_Prepared], bool] = lambda _: False,
) -> int:
    """Runs a program as a rank of the job that its launcher started.

    Args:
        flag_set: its flags.
        prepare: takes what `FlagSet.parse` returns; TensorFlow must not yet run after it.
        carry_out: takes what `prepare` returned, and the ranks; where these come and go, the `job`
            besides.
        arguments: of the command line; default: those of this process.
        is_elastic: whether ranks come and go, by what `prepare` returned.

    Returns:
        The exit code, as of `run_program`.
    """
    own_rank = agent.rank() or 0
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if _asks_for_help(arguments):
        return 0 if own_rank else run_program(flag_set, lambda *_: None, arguments)
    # What all ranks warn of needs to be read once.
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

        def start(ranks: Communicator, **beside: Any) -> None:
            nonlocal comm
            comm = ranks
            with agreed(comm, "flags"):
                if problem is not None:
                    raise problem
            assert prepared is not None
            carry_out(prepared, comm, **beside)

        if prepared is not None and is_elastic(prepared):
            elastic.run(lambda job: start(job.comm, job=job))
        else:
            start(init())
    except StoppedError as error:  # of a job of one rank
        print(f"{flag_set.program}: {error}", file=sys.stderr, flush=True)
        return error.code
    except AgreedError as error:
        assert comm is not None
        if comm.rank == 0:
            print(f"{flag_set.program}: {error}", file=sys.stderr, flush=True)
        from slipstream_tf._utils.agreement import gather_json

        # A launcher stops all ranks when the first ends with an error: rank 0 speaks before that.
        gather_json(comm, None, "slipstream.told")
        return error.code
    except Exception as error:
        told, is_expected = _told(error)
        print(f"{flag_set.program}: rank {own_rank}: {told}", file=sys.stderr, flush=True)
        if not is_expected:
            raise
        return error.code if isinstance(error, ProgramError) else flag_sets.RUN_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


@contextlib.contextmanager
def agreed(comm: Communicator, name: str) -> Iterator[None]:
    """Runs a part of the program whose errors all ranks hear of; a collective at its end.

    There must be no collective in it that an error of one rank alone would leave out.

    Args:
        comm: the ranks; with one, errors pass through.
        name: of the part, the same on all ranks.

    Raises:
        AgreedError: a rank raised a UsageError or RunError in it.
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


def make_output(path: str) -> None:
    """Makes the output folder before the work, not after hours of it.

    Args:
        path: of the folder; it may be there already.

    Raises:
        UsageError: it cannot be made, or not be written.
    """
    reason = "it cannot be written"
    try:
        os.makedirs(path, exist_ok=True)
        if os.access(path, os.W_OK):
            return
    except OSError as error:
        reason = error.strerror or str(error)
    raise UsageError(
        f"Invalid flag --output={path}: {reason}. Allowed: a folder that can be made and written."
    )


def import_tensorflow() -> None:
    """Imports TensorFlow; what it logs meanwhile is shown only if the import fails.

    Some of those lines are written before any setting of the log level is looked at, and would
    bury the first real one. Whoever sets TF_CPP_MIN_LOG_LEVEL wants TensorFlow's log and gets all
    of it. The setting made here is gone afterwards, when TensorFlow has read it: processes that
    this one starts are to do the same.
    """
    if "tensorflow" in sys.modules or _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "2"
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
            del os.environ[_LOG_LEVEL]


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in ("--help", "-h", "-help", flag_sets.FULL_HELP) for word in arguments)


def _told(error: Exception) -> tuple[str, bool]:
    """What a rank says of an error of its own, and whether that is all there is to say."""
    if _GONE in str(error):
        return "The run broke off, because another rank ended. It says why.", True
    if isinstance(error, (UsageError, RunError, ImportError)):
        return str(error), True
    return "an unexpected error:", False
