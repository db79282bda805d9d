"""argv and KVS_* variables matched against the flag table: values with their origins, and every problem found.

This happens before Typer looks at anything, because Typer's parser splits unknown single-dash words
(``-cnv`` would become ``-c nv``). What the values mean together is options.py's subject.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvs_cli.flags import Flag, FlagTable, ForeignFlag, ForeignStatus
from kvs_core.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value in effect: what was read, the text it came from and who gave it."""

    value: object
    text: str
    origin: str


@dataclass(slots=True, kw_only=True)
class Arguments:
    """What a command line says. ``settings`` lacks whatever was left out or could not be read."""

    command: str
    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def get(self, dest: str, default: object = None) -> object:
        setting = self.settings.get(dest)
        return default if setting is None else setting.value

    def is_given(self, dest: str) -> bool:
        return dest in self.settings


def read_arguments(
    command: str, argv: Sequence[str], table: FlagTable, variables: Mapping[str, tuple[str, str]]
) -> Arguments:
    """Match everything; nothing is raised, so that one run names every problem.

    variables  dest -> (variable name, its text), weaker than any flag
    """
    arguments = Arguments(command=command)
    own = {flag.dest: flag for flag in reversed(table.of_command(command))}
    _Matcher(table, arguments, argv).match()
    for dest, (name, text) in variables.items():
        if dest in own and dest not in arguments.settings:
            _store(arguments, own[dest], text, shown_flag=name, origin=f"variable {name}")
    return arguments


def _store(arguments: Arguments, flag: Flag, text: str, *, shown_flag: str, origin: str) -> None:
    assert flag.read is not None
    try:
        value = flag.read(text)
    except ValueError as error:
        arguments.problems.append(Problem(field=shown_flag, value="", reason=str(error)))
        return
    if flag.repeats:
        before = arguments.get(flag.dest, ())
        assert isinstance(before, tuple)
        value = (*before, value)
    arguments.settings[flag.dest] = Setting(value=value, text=text, origin=origin)


class _Matcher:
    """One walk over argv from left to right."""

    def __init__(self, table: FlagTable, arguments: Arguments, argv: Sequence[str]) -> None:
        self._table = table
        self._arguments = arguments
        self._words = list(argv)
        self._at = 0
        self._seen: dict[str, str] = {}

    def match(self) -> None:
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            if len(word) > 1 and word.startswith("-"):
                self._match_flag(word)
            else:
                self._refuse(word, "is not expected here", self._hint_for_stray())

    def _hint_for_stray(self) -> str:
        before = self._table.find(self._words[self._at - 2], self._arguments.command) if self._at > 1 else None
        if isinstance(before, Flag) and before.bare is not None:
            return f"{self._words[self._at - 2]} takes {before.metavar.replace('|', ', ')} or nothing"
        return "put a text with spaces in quotes, after its flag"

    def _match_flag(self, word: str) -> None:
        name, attached = _split(word)
        flag = self._table.find(name, self._arguments.command)
        if isinstance(flag, ForeignFlag):
            self._take_foreign(flag, name, attached)
        elif flag is None:
            self._refuse_unknown(word, name)
        elif self._arguments.command not in flag.commands:
            self._take_text(flag, attached)
            self._refuse(name, f"belongs to {_join(flag.commands)}", None)
        elif flag.takes_value:
            self._take_value(flag, name, attached)
        elif attached is not None:
            self._refuse(name, f"takes no value, but got {attached!r}", None)
        else:
            self._note_repeat(flag, name)
            value = name not in flag.negative
            self._arguments.settings[flag.dest] = Setting(value=value, text="on" if value else "off", origin=name)

    def _take_value(self, flag: Flag, name: str, attached: str | None) -> None:
        text = self._take_text(flag, attached)
        if text is None:
            follower = self._words[self._at : self._at + 1]
            stands = f"; {follower[0]} is another flag" if follower else ""
            hint = f"write {name}={follower[0]} if that is the value" if follower and name.startswith("--") else None
            self._refuse(name, f"needs a value{stands}", hint)
            return
        self._note_repeat(flag, name)
        _store(self._arguments, flag, text, shown_flag=name, origin=name)

    def _take_text(self, flag: Flag | ForeignFlag, attached: str | None) -> str | None:
        """The text of a flag's value, moving past it; None when there is none."""
        if attached is not None or not flag.takes_value:
            return attached
        follower = self._words[self._at] if self._at < len(self._words) else None
        if isinstance(flag, Flag) and flag.bare is not None and not _is_value_of(flag, follower):
            return flag.bare
        if follower is None or self._is_flag(follower):
            return None
        self._at += 1
        return follower

    def _flag_follows(self) -> bool:
        return self._at < len(self._words) and self._words[self._at].startswith("-")

    def _is_flag(self, word: str) -> bool:
        name, _ = _split(word)
        return word.startswith("-") and self._table.find(name, self._arguments.command) is not None

    def _take_foreign(self, flag: ForeignFlag, name: str, attached: str | None) -> None:
        self._take_text(flag, attached)
        if flag.status is ForeignStatus.ALREADY_SO:
            self._arguments.remarks.append(f"{name} changes nothing: {flag.reason}")
        else:
            self._refuse(name, flag.reason, flag.hint)

    def _refuse_unknown(self, word: str, name: str) -> None:
        two_dashes = "-" + name.partition("=")[0]  # "-temp" for "--temp"
        if self._table.find(two_dashes, self._arguments.command) is not None:
            name = two_dashes[1:]
            near: str | None = two_dashes
        else:
            parts = self._table.attached_value(word, self._arguments.command)
            if parts is not None and parts[1]:
                self._refuse(word, "a value stands apart from a flag with one dash", f"write {parts[0]} {parts[1]}")
                return
            near = self._table.nearest(name, self._arguments.command)
        hint = f"did you mean {near}?" if near else f"kvs {self._arguments.command} --help lists all flags"
        self._refuse(name, "is not a flag", hint)
        # The value of a flag that nobody knows should not be reported as a second mistake.
        near_flag = self._table.find(near, self._arguments.command) if near else None
        if "=" not in word and (near_flag is None or near_flag.takes_value) and not self._flag_follows():
            self._at += 1

    def _note_repeat(self, flag: Flag, name: str) -> None:
        if flag.dest in self._seen and not flag.repeats:
            self._arguments.remarks.append(f"{name} replaces the earlier {self._seen[flag.dest]}: the last one counts")
        self._seen[flag.dest] = name

    def _refuse(self, name: str, reason: str, hint: str | None) -> None:
        self._arguments.problems.append(Problem(field=name, value="", reason=reason, hint=hint))


def _join(commands: Collection[str]) -> str:
    """`kvs a`, `kvs a and kvs b`, `kvs a, kvs b and kvs c`."""
    *others, last = (f"kvs {command}" for command in commands)
    return f"{', '.join(others)} and {last}" if others else last


def _split(word: str) -> tuple[str, str | None]:
    """Name and attached value of a word: only ``--long=value`` attaches; underscores in long names equal dashes."""
    if not word.startswith("--"):
        return word, None
    name, separator, value = word.partition("=")
    return name.replace("_", "-"), value if separator else None


def _is_value_of(flag: Flag, word: str | None) -> bool:
    """Whether a flag whose value may be left out takes this word: its readers refuse everything that is not one."""
    assert flag.read is not None
    if word is None:
        return False
    try:
        flag.read(word)
    except ValueError:
        # A misspelt value ("-fa onn") is a wrong value; anything else is the next word of the command line.
        return not word.startswith("-") and bool(difflib.get_close_matches(word.lower(), flag.metavar.split("|")))
    return True
