"""Command line flags with grouped help and one-line errors, on `absl.flags`.

Each program creates a `FlagSet` and does not use the global `absl.flags.FLAGS`. Therefore `--help`
lists only the flags of the program, and a program can run more than once in a process.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import operator
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from slipstream_tf._utils import disk
from slipstream_tf._utils.errors import shown
from slipstream_tf.config import parse_bytes

USAGE_ERROR = 2  # Exit code: a flag, an argument or a file from the user is invalid.
RUN_ERROR = 1  # Exit code: the run failed.
STOPPED = 143  # Exit code: SIGTERM stopped the run after a checkpoint, so it can be resumed.

_HELP_WIDTH = 99
_HELP_INDENT = 20
FULL_HELP = "--helpfull"
SETTINGS = "settings"
FROM_FILE = "names from the settings file"
"""Key in the parsed values: names of the flags that only the settings file sets."""


class ProgramError(Exception):
    """An expected error, which ends the program without a traceback.

    Attributes:
        code: Exit code of the program.
    """

    code = RUN_ERROR


class UsageError(ProgramError):
    """Invalid user input; the message contains the allowed values."""

    code = USAGE_ERROR


class StoppedError(ProgramError):
    """SIGTERM ended the run after a checkpoint. The message contains the path."""

    code = STOPPED


class RunError(ProgramError):
    """The run failed for a known reason, which the message contains."""


@contextlib.contextmanager
def raised_as(kind: type[ProgramError], text: str, *caught: type[Exception]) -> Iterator[None]:
    """Converts exceptions raised in its block to a `ProgramError`.

    Args:
        kind: Type of the raised error: `UsageError` or `RunError`.
        text: Prefix of the message. The message of the caught exception follows.
        *caught: Exception types to convert. Defaults to `OSError` and `ValueError`.
    """
    kinds = caught or (OSError, ValueError)
    try:
        yield
    except kinds as error:
        raise kind(f"{text}{error}") from error


def does_nothing(name: str, needs: str) -> UsageError:
    """Returns the error for a flag that has no effect without `needs`, a noun phrase."""
    return UsageError(
        f"Invalid flag --{name} in this run. It requires {needs}; otherwise, remove the flag."
    )


class _Parser(flags.ArgumentParser):
    """Base class of the flag parsers.

    Attributes:
        allowed: Description of the valid values for error messages.
        brief: Short form of `allowed` for `--help`, for example ">= 0"; may be empty.
        json_types: Types that a value may have in a settings file.
    """

    allowed = ""
    brief = ""
    json_types: tuple[type, ...] = (str,)

    def parse(self, argument: Any) -> Any:
        """Parses a value.

        Raises:
            ValueError: If the value is invalid. The message contains the allowed values, and absl
                adds the flag and the value.
        """
        try:
            return self.convert(argument)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"Expected {self.allowed}.") from None

    def convert(self, argument: Any) -> Any:
        """Converts the text; raises ValueError, TypeError or OverflowError if it is invalid."""
        raise NotImplementedError


class Number(_Parser):
    """Parses a float in [minimum, maximum]; open bounds are excluded."""

    _noun, _form = "a number", "{:g}"
    json_types: tuple[type, ...] = (int, float)

    def __init__(
        self,
        minimum: float,
        maximum: float = float("inf"),
        open_minimum: bool = False,
        open_maximum: bool = False,
    ) -> None:
        low, high = map(self._form.format, (minimum, maximum))
        self.brief = f"{'>' if open_minimum else '>='} {low}"
        if maximum != float("inf"):
            self.brief += f" and {'<' if open_maximum else '<='} {high}"
        self.allowed = f"{self._noun} {self.brief}"
        if maximum != float("inf") and not (open_minimum or open_maximum):
            self.brief = f"{low} to {high}"
        self._minimum, self._is_above = minimum, operator.gt if open_minimum else operator.ge
        self._maximum, self._is_below = maximum, operator.lt if open_maximum else operator.le

    def convert(self, argument: Any) -> float:
        value = self._read(argument)
        is_inside = self._is_above(value, self._minimum) and self._is_below(value, self._maximum)
        # Comparisons with NaN are false, so the bounds reject it. Infinity needs a separate check,
        # because the maximum may be infinite.
        if not is_inside or value == float("inf"):
            raise ValueError
        return value

    def _read(self, argument: Any) -> float:
        return float(argument)


class Integer(Number):
    """Parses an integer in [minimum, maximum]; underscores are allowed as in Python."""

    _noun, _form = "an integer", "{}"
    json_types = (int,)

    def _read(self, argument: Any) -> int:
        return int(str(argument).replace("_", ""))


class Choice(_Parser):
    """Parses one of a fixed list of words."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)
        self.allowed = "one of " + ", ".join(self.choices)
        self.brief = "|".join(self.choices)

    def convert(self, argument: Any) -> str:
        if argument not in self.choices:
            raise ValueError
        return argument


class Widths(_Parser):
    """Parses layer widths, for example 256-128; may be empty."""

    allowed = brief = "integers >= 1 joined by '-', e.g. 256-128; empty for no hidden layer"
    json_types = (str, list)

    def convert(self, argument: Any) -> tuple[int, ...]:
        widths = tuple(map(int, argument.replace(",", "-").split("-"))) if argument else ()
        if any(width < 1 for width in widths):
            raise ValueError
        return widths


class NameList(_Parser):
    """Parses distinct names from a fixed list, joined by commas."""

    json_types = (str, list)

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)
        self.allowed = f"one or more of {', '.join(choices)}, separated by commas"
        self.brief = f"one or more of {'|'.join(choices)}, separated by commas"

    def convert(self, argument: Any) -> tuple[str, ...]:
        names = tuple(argument.split(","))
        if len(set(names) & set(self.choices)) < len(names):
            raise ValueError
        return names


class Size(_Parser):
    """Parses a number of bytes above 0, or a text such as 256MB.

    KB, MB, GB and TB are powers of 1,000; KiB, MiB, GiB and TiB are powers of 1,024.
    """

    allowed = "a number of bytes above 0, or a size such as 256MB or 1.5GiB"
    brief = "bytes, e.g. 256MB"
    json_types = (int, str)

    def convert(self, argument: Any) -> int | str:
        text = int(argument) if str(argument).isdigit() else argument
        parse_bytes("size", text)
        return text


class Text(_Parser):
    """Parses a text that is not empty."""

    allowed = "a nonempty text"

    def convert(self, argument: Any) -> str:
        if not argument:
            raise ValueError
        return str(argument)


class Flag(NamedTuple):
    """Definition of a flag.

    Attributes:
        name: Name without dashes.
        parser: Parser of the value. None defines a boolean switch that is off by default.
        text: Help text, including the unit of a number.
        default: Value if the flag is not given.
        default_text: Description of the default in `--help`. Defaults to the value, "none" or
            "off".
        needs: Conditions that must hold for the flag to have an effect, see `train_flags.Need`.
    """

    name: str
    parser: _Parser | None
    text: str
    default: Any = None
    default_text: str = ""
    needs: tuple[Any, ...] = ()


class FlagSet:
    """Parses the flags of a program and formats its help.

    Args:
        program: Name of the program.
        purpose: Description of the program for `--help`.
        examples: Example command lines for `--help`.
        groups: Flags by group title. `--help` lists them in this order.
        arguments: Name of the positional arguments, for example "RUN". `parse` returns their list
            under this name. An empty string means that the program has no positional arguments.
        basic: Names of the flags that `--help` lists; `--helpfull` lists all. Empty means that
            `--help` lists all, too.

    Attributes:
        program: Name of the program.
        needs: Conditions of each flag by flag name, see `Flag.needs`.
    """

    def __init__(
        self,
        program: str,
        purpose: str,
        examples: Sequence[str],
        groups: Mapping[str, Sequence[Flag]],
        arguments: str = "",
        basic: Sequence[str] = (),
    ) -> None:
        self.program = program
        self._arguments = arguments
        self._basic = tuple(basic)
        self._purpose, self._examples = purpose, tuple(examples)
        self._values = flags.FlagValues()
        self._groups = {title: [flag.name for flag in group] for title, group in groups.items()}
        self._notes: dict[str, str] = {}
        self.needs = {flag.name: flag.needs for flag in itertools.chain(*groups.values())}
        for name, parser, text, default, default_text, _ in itertools.chain(*groups.values()):
            if parser is None:
                flags.DEFINE_boolean(name, False, text, flag_values=self._values)
                self._notes[name] = f"default: {default_text or 'off'}"
                continue
            flags.DEFINE(parser, name, default, text, flag_values=self._values)
            details = default_text or ("none" if default is None else str(default))
            allowed = f"{parser.brief}; " if parser.brief else ""
            self._notes[name] = f"{allowed}default: {details}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all flags, in the order of the help."""
        return tuple(itertools.chain(*self._groups.values()))

    def parser_of(self, name: str) -> Any:
        """Returns the parser of a flag; a switch has absl's boolean parser."""
        return self._values[name].parser

    def described(self, name: str) -> str:
        """Returns a flag's help text with its allowed values and default."""
        return f"{self._values[name].help} ({self._notes[name]})"

    def help_text(self, is_full: bool = False) -> str:
        """Returns the text for `--help`, or for `--helpfull` if `is_full`."""
        shown = self._basic if self._basic and not is_full else self.names
        lines = [*textwrap.wrap(self._purpose, _HELP_WIDTH), "", "Usage:"]
        lines += [f"  {example}" for example in self._examples]
        for title, names in self._groups.items():
            listed = [name for name in names if name in shown]
            if not listed:
                continue
            lines += ["", f"{title}:"]
            for name in listed:
                head, indent = f"  --{name}".ljust(_HELP_INDENT), " " * _HELP_INDENT
                if not head.endswith(" "):
                    lines.append(head)
                    head = indent
                # Do not break paths and options such as --batch_size=1 at hyphens.
                body = textwrap.TextWrapper(_HELP_WIDTH, head, indent, break_on_hyphens=False)
                lines += body.wrap(self.described(name))
        if len(shown) < len(self.names):
            lines += ["", f"{len(self.names) - len(shown)} more flags: {self.program} --helpfull"]
        return "\n".join(lines)

    def parse(self, arguments: Sequence[str]) -> tuple[dict[str, Any], frozenset[str]]:
        """Parses the command line.

        Args:
            arguments: Command line arguments without the program name.

        Returns:
            A tuple of the values by flag name and the names of the flags on the command line. If
            `--settings` is given, the values include the values from that file, and the entry
            `FROM_FILE` holds the names of the flags that only the file sets.

        Raises:
            UsageError: If a flag is unknown, a value is invalid, or there is a positional argument
                and the program takes none.
        """
        self._values.unparse_flags()
        for name in self._values:
            self._values[name].unparse()
        try:
            rest = self._values([self.program, *arguments])[1:]
        except flags.IllegalFlagValueError as error:
            message = str(error).replace(": Expected ", ". Expected ", 1)
            if "Non-boolean" in message:
                message = f"{message.split(':')[0]}. Expected true, false, or no value."
            raise UsageError(f"Invalid {message}") from None
        except flags.Error as error:
            message = str(error).replace(" ?", "?").rstrip(".")
            end = "" if message.endswith("?") else "."
            raise UsageError(f"{message}{end} See {self.program} {FULL_HELP}.") from None
        if rest and not self._arguments:
            raise UsageError(
                f"Unexpected argument {rest[0]!r}. Expected only flags, in the form "
                f"--flag=value; see {self.program} --help."
            )
        given = frozenset(name for name in self._values if self._values[name].present)
        values: dict[str, Any] = {name: self._values[name].value for name in self._values}
        if self._arguments:
            values[self._arguments] = rest
        if values.get(SETTINGS) is not None:
            found = self.parse_file(values[SETTINGS])
            values[FROM_FILE] = frozenset(found) - given
            values.update((name, found[name]) for name in values[FROM_FILE])
        return values, given

    def parse_file(self, path: str) -> dict[str, Any]:
        """Parses a settings file: a JSON object from flag names to values.

        Args:
            path: Path of the file.

        Returns:
            The values by flag name.

        Raises:
            UsageError: If the file cannot be read or is not a JSON object, a name is not a flag, or
                a value has the wrong type or is out of range.
        """
        problem = f"Invalid flag --{SETTINGS}={path}. Expected a JSON file. Reading it failed: "
        with raised_as(UsageError, problem):
            found = disk.read_json(path)
        if not isinstance(found, dict):
            raise UsageError(
                f"Invalid flag --{SETTINGS}={path}: the file contains {shown(found)}. Expected a "
                'JSON object from flag names to values, for example {"dim": 32}.'
            )
        return {name: self._from_json(path, name, value) for name, value in found.items()}

    def _from_json(self, path: str, name: str, value: Any) -> Any:
        if name not in self.names or name == SETTINGS:
            near = difflib.get_close_matches(name.replace("-", "_"), self.names, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"Invalid name {name!r} in {path}.{hint} Expected the name of a flag of "
                f"{self.program} other than --{SETTINGS}; see {self.program} {FULL_HELP}."
            )
        parser = self.parser_of(name)
        is_switch = not isinstance(parser, _Parser)
        try:
            # Compare types exactly, because `isinstance(True, int)` is true.
            if type(value) not in ((bool,) if is_switch else parser.json_types):
                raise ValueError
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            return parser.parse(text)
        except ValueError:
            allowed = "true or false" if is_switch else parser.allowed
            raise UsageError(
                f"Invalid value {value!r} of {name!r} in {path}. Expected {allowed}."
            ) from None
