"""The shape of the flag table and how to look things up in it; its entries: flag_table.py and foreign_flags.py."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvs_cli.readers import Reader

RUN = "run"
VALIDATE = "validate"
PERPLEXITY = "perplexity"
KL_DIVERGENCE = "kl-divergence"
DOCTOR = "doctor"
ALL_COMMANDS = (RUN, VALIDATE, PERPLEXITY, KL_DIVERGENCE)
"""Commands about a model, which share most flags."""
EVERY_COMMAND = (*ALL_COMMANDS, DOCTOR)


class Section(Enum):
    """Headings of ``--help``, in their order."""

    GENERAL = "General"
    INPUT = "Prompt and output"
    EVALUATION = "Text and evaluation"
    CONTEXT = "Context and KV cache"
    STREAMING = "KV streaming"
    DEVICE = "Device"
    SAMPLING = "Sampling"
    CHAT = "Chat"
    ROPE = "Positions beyond training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag this toolkit has.

    dest      the value it sets; for configuration values the dotted field of RunConfig or SamplingConfig
    read      text to value; None makes it a switch that takes no value
    negative  spellings of the switch that set False
    bare      the text meant when the value is left out; None when a value is needed
    repeats   every occurrence counts; otherwise the last one wins, as in llama.cpp
    """

    dest: str
    spellings: tuple[str, ...]
    help: str
    section: Section
    read: Reader | None = None
    metavar: str = ""
    negative: tuple[str, ...] = ()
    bare: str | None = None
    repeats: bool = False
    commands: tuple[str, ...] = ALL_COMMANDS

    @property
    def takes_value(self) -> bool:
        return self.read is not None

    @property
    def all_spellings(self) -> tuple[str, ...]:
        return self.spellings + self.negative


class ForeignStatus(Enum):
    """What happens to a flag of llama.cpp that this toolkit does not have."""

    REFUSED = "refused"  # it would change the result or ask for something missing
    ALREADY_SO = "already so"  # it asks for what happens anyway: accepted with one line


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag of llama.cpp that is known here but has no effect of its own."""

    spellings: tuple[str, ...]
    takes_value: bool
    status: ForeignStatus
    reason: str
    hint: str | None = None

    @property
    def all_spellings(self) -> tuple[str, ...]:
        return self.spellings


AnyFlag = Flag | ForeignFlag
_NUMBER_BEGINS = re.compile(r"[+-]?[0-9.]")


def _reads(flag: AnyFlag, text: str) -> bool:
    if isinstance(flag, ForeignFlag) or flag.read is None:
        return isinstance(flag, ForeignFlag)
    try:
        flag.read(text)
    except ValueError:
        return False
    return True


def _commands_of(flag: AnyFlag) -> tuple[str, ...]:
    return flag.commands if isinstance(flag, Flag) else ALL_COMMANDS


class FlagTable:
    """All flags with their index. A spelling may stand twice when no command has both of its flags."""

    def __init__(self, own: tuple[Flag, ...], foreign: tuple[ForeignFlag, ...] = ()) -> None:
        self.own = own
        self._by_dest = {flag.dest: flag for flag in reversed(own)}
        self._by_spelling: dict[str, list[AnyFlag]] = {}
        every: list[AnyFlag] = [*own, *foreign]
        for flag in every:
            for spelling in flag.all_spellings:
                self._by_spelling.setdefault(spelling, []).append(flag)
        for spelling, flags in self._by_spelling.items():
            commands = [command for flag in flags for command in _commands_of(flag)]
            if len(commands) != len(set(commands)):
                raise ValueError(f"{spelling} stands twice in the flag table")

    def find(self, spelling: str, command: str) -> AnyFlag | None:
        """The flag of ``command`` with this spelling, or else that of another command or of llama.cpp."""
        flags = self._by_spelling.get(spelling, [])
        own = [flag for flag in flags if isinstance(flag, Flag) and command in flag.commands]
        return next(iter(own + flags), None)

    def spelling_of(self, dest: str) -> str:
        """The first spelling that sets ``dest``, for messages; ``dest`` itself when no flag does."""
        flag = self._by_dest.get(dest)
        return flag.spellings[0] if flag is not None else dest

    def negative_of(self, dest: str) -> str | None:
        """The first spelling that switches ``dest`` off, if there is one."""
        flag = self._by_dest.get(dest)
        return next(iter(flag.negative), None) if flag is not None else None

    def of_command(self, command: str) -> list[Flag]:
        return [flag for flag in self.own if command in flag.commands]

    def nearest(self, spelling: str, command: str) -> str | None:
        """A flag of ``command`` (then any known one) that looks like a misspelt one."""
        own: Iterable[str] = (name for flag in self.of_command(command) for name in flag.all_spellings)
        for names in (own, self._by_spelling):
            close = difflib.get_close_matches(spelling, list(names), n=1, cutoff=0.7)
            if close:
                return close[0]
        return None

    def attached_value(self, word: str, command: str) -> tuple[str, str] | None:
        """Split ``-c512`` or ``-c=512`` into a known single-dash flag and its value; None when it is neither.

        ``-cc`` is neither: what follows has to be a value of the flag, or at least look like a number.
        """
        if word.startswith("--"):
            return None
        for length in range(len(word) - 1, 1, -1):
            flag = self.find(word[:length], command)
            value = word[length:].removeprefix("=")
            if flag is not None and flag.takes_value and (_NUMBER_BEGINS.match(value) or _reads(flag, value)):
                return word[:length], value
        return None
