"""Command line flags in groups, with a readable `--help` and one-line errors. Over absl's flags.

A program has a `FlagSet` of its own instead of absl's global one: its help lists its flags however
it was started, and it can run several times in one process.
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
from slipstream_tf.config import parse_bytes

USAGE_ERROR = 2  # Exit code: something that the user gave is wrong.
RUN_ERROR = 1  # Exit code: the run itself went wrong.
STOPPED = 143  # Exit code: SIGTERM came, and the run can go on.

_HELP_WIDTH = 99
_HELP_INDENT = 20
FULL_HELP = "--helpfull"
SETTINGS = "settings"
FROM_FILE = "names from the settings file"
"""Key in the parsed values: flags that the settings file sets and the command line does not."""


class ProgramError(Exception):
    """What ends a program in a way that is understood; `code` is its exit code."""

    code = RUN_ERROR


class UsageError(ProgramError):
    """What the user gave is wrong; the message names the value, the flag and what is allowed."""

    code = USAGE_ERROR


class StoppedError(ProgramError):
    """SIGTERM ended the run, which has saved where it was; the message says where."""

    code = STOPPED


class RunError(ProgramError):
    """The run went wrong in a way that is understood; the message says how."""


@contextlib.contextmanager
def raised_as(kind: type[ProgramError], text: str, *caught: type[Exception]) -> Iterator[None]:
    """Raises an error that is understood as one of the program.

    Args:
        kind: UsageError or RunError.
        text: in front of what the error says.
        *caught: the errors; default: OSError and ValueError.
    """
    kinds = caught or (OSError, ValueError)
    try:
        yield
    except kinds as error:
        raise kind(f"{text}{error}") from error


def does_nothing(name: str, needs: str) -> UsageError:
    """Returns the error for a flag that needs something else to matter."""
    return UsageError(f"Flag --{name} does nothing here. Allowed: with {needs}.")


class _Parser(flags.ArgumentParser):
    """Base of the parsers: `allowed` describes their values in words, `brief` in a few signs."""

    allowed = ""
    brief = ""
    json_types: tuple[type, ...] = (str,)  # Of a value in a settings file.

    def parse(self, argument: Any) -> Any:
        """Returns the value; a ValueError names the allowed values (absl adds flag and value)."""
        try:
            return self.convert(argument)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"Allowed: {self.allowed}.") from None

    def convert(self, argument: Any) -> Any:
        """Returns the value or raises."""
        raise NotImplementedError


class Number(_Parser):
    """A number in [minimum, maximum]; an open end is excluded."""

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
        # "nan" compares false; no setting is infinite.
        if not is_inside or value == float("inf"):
            raise ValueError
        return value

    def _read(self, argument: Any) -> float:
        return float(argument)


class Integer(Number):
    """An integer in [minimum, maximum]."""

    _noun, _form = "an integer", "{}"
    json_types = (int,)

    def _read(self, argument: Any) -> int:
        return int(str(argument).replace("_", ""))


class Choice(_Parser):
    """One of some words."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)
        self.allowed = "one of " + ", ".join(self.choices)
        self.brief = "|".join(self.choices)

    def convert(self, argument: Any) -> str:
        if argument not in self.choices:
            raise ValueError
        return argument


class Widths(_Parser):
    """Layer widths joined by commas or dashes, e.g. 256-128; may be empty."""

    allowed = brief = "integers >= 1 joined by '-', e.g. 256-128, or empty for no layer"
    json_types = (str, list)

    def convert(self, argument: Any) -> tuple[int, ...]:
        widths = tuple(map(int, argument.replace(",", "-").split("-"))) if argument else ()
        if any(width < 1 for width in widths):
            raise ValueError
        return widths


class Names(_Parser):
    """Some of a few names, each at most once, joined by commas."""

    json_types = (str, list)

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)
        self.allowed = f"some of {', '.join(choices)}, joined by ','"
        self.brief = f"some of {'|'.join(choices)}, joined by ','"

    def convert(self, argument: Any) -> tuple[str, ...]:
        names = tuple(argument.split(","))
        if len(set(names) & set(self.choices)) < len(names):
            raise ValueError
        return names


class Size(_Parser):
    """Bytes, or a text such as 256MB."""

    allowed = "bytes above 0, or a text such as 256MB or 1.5GiB"
    brief = "bytes, e.g. 256MB"
    json_types = (int, str)

    def convert(self, argument: Any) -> int | str:
        text = int(argument) if str(argument).isdigit() else argument
        parse_bytes("size", text)
        return text


class Text(_Parser):
    """Any text but the empty one."""

    allowed = "a text that is not empty"

    def convert(self, argument: Any) -> str:
        if not argument:
            raise ValueError
        return str(argument)


class Flag(NamedTuple):
    """A flag.

    Attributes:
        name: without dashes.
        parser: of its value; None: a switch, off unless `--name` is given.
        text: what it does; of a number, in which unit.
        default: if it is not given.
        default_text: how `--help` tells the default; default: the value itself, or "none".
        needs: what must be so for it to matter; see `cli.train_flags`.
    """

    name: str
    parser: _Parser | None
    text: str
    default: Any = None
    default_text: str = ""
    needs: tuple[Any, ...] = ()


class FlagSet:
    """The flags of one program.

    Args:
        program: its name.
        purpose: what it does, in a few lines, for `--help`.
        examples: command lines for `--help`.
        groups: the flags, by the title under which `--help` lists them.
        arguments: what arguments that are no flags stand for, e.g. "RUN"; their list is the value
            of this name. Empty: the program takes none.
        basic: names of the flags that `--help` lists, where all of them do not fit a screen;
            `--helpfull` lists all. Empty: `--help` does.
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
            told = default_text or ("none" if default is None else str(default))
            allowed = f"{parser.brief}; " if parser.brief else ""
            self._notes[name] = f"{allowed}default: {told}"

    @property
    def names(self) -> tuple[str, ...]:
        """The flags, as they are listed."""
        return tuple(itertools.chain(*self._groups.values()))

    def parser_of(self, name: str) -> Any:
        """Returns the parser of a flag; that of a switch is absl's."""
        return self._values[name].parser

    def described(self, name: str) -> str:
        """Returns what the help says of a flag: text, what is allowed, default."""
        return f"{self._values[name].help} ({self._notes[name]})"

    def help_text(self, is_full: bool = False) -> str:
        """Returns what `--help` prints, or `--helpfull`."""
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
                # Paths and options stay whole.
                body = textwrap.TextWrapper(_HELP_WIDTH, head, indent, break_on_hyphens=False)
                lines += body.wrap(self.described(name))
        if len(shown) < len(self.names):
            lines += ["", f"{len(self.names) - len(shown)} more flags: {self.program} --helpfull"]
        return "\n".join(lines)

    def parse(self, arguments: Sequence[str]) -> tuple[dict[str, Any], frozenset[str]]:
        """Parses the command line.

        Args:
            arguments: without the program's name.

        Returns:
            (values by flag, names of the flags that were given). With a flag `--settings`, the
            values include the file's values; see `FROM_FILE`.

        Raises:
            UsageError: an unknown flag, a bad value, or an argument that is no flag.
        """
        self._values.unparse_flags()
        for name in self._values:
            self._values[name].unparse()
        try:
            rest = self._values([self.program, *arguments])[1:]
        except flags.IllegalFlagValueError as error:
            message = str(error)
            if "Non-boolean" in message:
                message = f"{message.split(':')[0]}: Allowed: true, false, or the flag alone."
            raise UsageError(f"Invalid {message}") from None
        except flags.Error as error:
            message = str(error).replace(" ?", "?").rstrip(".")
            raise UsageError(f"{message} (see {self.program} --help)") from None
        if rest and not self._arguments:
            raise UsageError(
                f"Unexpected argument {rest[0]!r}. Settings are given as --flag=value; see "
                f"{self.program} --help."
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
        """Parses a settings file: a JSON object of flags and their values.

        Args:
            path: of the file.

        Returns:
            The values by flag.

        Raises:
            UsageError: the file cannot be read or is no JSON object, a name is no flag, or a value
                is not of the flag's type or range.
        """
        with raised_as(UsageError, f"Invalid flag --{SETTINGS}={path}: "):
            found = disk.read_json(path)
        if not isinstance(found, dict):
            raise UsageError(
                f"Invalid flag --{SETTINGS}={path}: {found!r}. Allowed: a JSON object of flags and "
                "their values."
            )
        return {name: self._from_json(path, name, value) for name, value in found.items()}

    def _from_json(self, path: str, name: str, value: Any) -> Any:
        if name not in self.names or name == SETTINGS:
            near = difflib.get_close_matches(name.replace("-", "_"), self.names, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"Invalid name {name!r} in {path}.{hint} Allowed: flags of {self.program} other "
                f"than {SETTINGS}; see {self.program} {FULL_HELP}."
            )
        parser = self.parser_of(name)
        is_switch = not isinstance(parser, _Parser)
        try:
            # `bool` is an `int`, but no number in JSON.
            if type(value) not in ((bool,) if is_switch else parser.json_types):
                raise ValueError
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            return parser.parse(text)
        except ValueError:
            allowed = "true or false" if is_switch else parser.allowed
            raise UsageError(
                f"Invalid value {value!r} of {name!r} in {path}. Allowed: {allowed}."
            ) from None
