"""The face of commands: options in groups with their defaults, short errors, lines that fit the terminal."""

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

ALL = "--help-all"
_NARROW = 60  # columns below which descriptions stand under their options
_BESIDE, _UNDER = 26, 6  # where descriptions begin
_ALIKE = 0.75  # how like an option a word is, of 1, to be taken for a slip


class CommandLine(argparse.ArgumentParser):
    """Reads the arguments of one command.

    Where `short` names options, `--help` shows these alone, by their first sentences, and `--help-all` all. `groups`:
    the names of options by the title that they stand under; what is in no group comes first.
    """

    def __init__(
        self,
        *,
        groups: Mapping[str, Sequence[str]] | None = None,
        short: Collection[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)
        self._groups = {title: set(names) for title, names in (groups or {}).items()}
        self._short = frozenset(short)
        if short:
            self.add_argument(ALL, action=_HelpAll, help="show all options and exit")

    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, how to get help in another, and exits with status 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = self._about(unknown.split()[0])
        self.exit(2, f"{self.prog}: error: {message}\n{help_line(self.prog)}\n")

    def format_usage(self) -> str:
        """The line of usage, without the options one by one."""
        positionals = (self._positional(a) for a in self._actions if not a.option_strings)
        return " ".join([f"usage: {self.prog}", "[options]", *positionals]) + "\n"

    def format_help(self) -> str:
        """What `--help` prints."""
        return self.help_text(is_short=bool(self._short))

    def help_text(self, *, is_short: bool) -> str:
        """The help, of the options in `short` alone or of all."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for title, actions in self._titled(is_short=is_short):
            formatter.start_section(title)
            formatter.add_arguments(map(_first_sentence, actions) if is_short else actions)
            formatter.end_section()
        if is_short:
            count = sum(1 for action in self._actions if action.option_strings)
            formatter.add_text(
                f"`{self.prog} {ALL}` shows all {count} options, and says more of these."
            )
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def _titled(self, *, is_short: bool) -> Iterable[tuple[str, list[argparse.Action]]]:
        grouped = {name for names in self._groups.values() for name in names}
        shown = [
            action
            for action in sorted(self._actions, key=lambda action: bool(action.option_strings))
            if not is_short or _name(action) in self._short | {"help", "help_all"}
        ]
        first = [a for a in shown if not a.option_strings or _name(a) not in grouped]
        yield "arguments" if any(not a.option_strings for a in first) else "options", first
        for title, names in self._groups.items():
            if actions := [a for a in shown if a.option_strings and _name(a) in names]:
                yield title, actions

    def _positional(self, action: argparse.Action) -> str:
        name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        return f"[{name}]" if action.nargs in ("?", "*") and not name.startswith("[") else name

    def _about(self, word: str) -> str:
        if not word.startswith("-"):
            return f"there is no place for {word!r}"
        flag = word.partition("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        alike = difflib.get_close_matches(flag, known, 1, _ALIKE)
        return f"there is no option {flag}" + (f"; did you mean {alike[0]}?" if alike else "")


def help_line(prog: str) -> str:
    """The one line that says how to get help."""
    return f"`{prog} --help` lists the options."


def wrapped(text: str, indent: str = "") -> str:
    """A text in lines of the terminal's width, those after the first behind the indent."""
    return textwrap.fill(
        text, _columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def is_narrow() -> bool:
    """Whether descriptions have no room beside names."""
    return _columns() < _NARROW


def _columns() -> int:
    return max(20, min(100, shutil.get_terminal_size().columns))


class _HelpAll(argparse.Action):
    """Prints all options and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandLine)
        print(parser.help_text(is_short=False), end="")
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Options with their defaults. Where the description tells the default ("... unless given"), or there is none
    and the description says all, the value that stands for "not given" is left out. Members of an enumeration are
    shown as they are written, in lower case.
    """

    def __init__(self, prog: str) -> None:
        width = _columns() - 2
        super().__init__(
            prog, width=width, max_help_position=_UNDER if width < _NARROW else _BESIDE
        )

    def add_argument(self, action: argparse.Action) -> None:
        if isinstance(action.metavar, str) and re.fullmatch(r"\{[A-Z,_]+\}", action.metavar):
            action.metavar = action.metavar.lower()
            action.help = re.sub(
                r"\(default: [A-Z_]+\)$", lambda default: default[0].lower(), action.help or ""
            )
        super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if text and ("unless given" in text or re.search(r"\(default: (None|\[\])?\)$", text)):
            text = re.sub(r" \(default: [^()]*\)$", "", text)
        return text

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Of a switch and its opposite the one that changes something."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return next(flag for flag in action.option_strings if not flag.startswith("--no-"))
        return super()._format_action_invocation(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(
            " ".join(text.split()), width, break_long_words=False, break_on_hyphens=False
        )


def _name(action: argparse.Action) -> str:
    """The field that an option sets."""
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    return flags[0].removeprefix("--").replace("-", "_") if flags else action.dest


def _first_sentence(action: argparse.Action) -> argparse.Action:
    """The option with the beginning of its description, and its default."""
    text = action.help or ""
    first = re.split(r"(?<=\.) |[;:] ", text, maxsplit=1)[0].rstrip(".")
    default = re.search(r" \(default: [^()]+\)$", text)
    first = re.sub(r" \(default$", "", first)
    if default and "unless given" not in text and default[0] not in first:
        first += default[0]
    action.help = first
    return action
