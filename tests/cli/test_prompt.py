"""Where a prompt comes from: flag, file, standard input; escapes; what is refused (U10, U14, U15, U26)."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import pytest

from kvs_cli.arguments import read_arguments
from kvs_cli.console import Console
from kvs_cli.evaluation import read_text
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import PERPLEXITY
from kvs_cli.options import PromptOptions, build_options
from kvs_cli.prompt import (
    check_prompt_length,
    choose_chat_template,
    encode_chat,
    encode_prompt,
    encode_raw,
    first_messages,
    read_prompt,
    resolve_escapes,
)
from kvs_core.errors import ConfigError, FileAccessError
from kvs_core.tokenizer import Tokenizer
from tests.fixtures.tiny_vocab import bpe_vocab, spm_vocab


def give_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_the_flag_wins_and_standard_input_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"from stdin")
    assert read_prompt(PromptOptions(prompt="from -p")) == "from -p"
    assert sys.stdin.buffer.read() == b"from stdin"


def test_a_file_and_standard_input_lose_one_final_newline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("zwei\r\nlines 🦙\n\n".encode())
    assert read_prompt(PromptOptions(prompt_file=path)) == "zwei\r\nlines 🦙\n"
    give_input(monkeypatch, "é from a pipe\n".encode())
    assert read_prompt(PromptOptions()) == "é from a pipe"


def test_an_empty_prompt_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_prompt(PromptOptions(prompt="")) == ""
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"-f .*empty.txt: holds no prompt: it is empty"):
        read_prompt(PromptOptions(prompt_file=empty))
    for data in (b"", b"\n"):
        give_input(monkeypatch, data)
        with pytest.raises(ConfigError, match="standard input: holds no prompt: it is empty"):
            read_prompt(PromptOptions())


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"typed")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match="standard input: is a terminal, and no prompt was given") as refused:
        read_prompt(PromptOptions())
    assert refused.value.problems[0].hint == "give one with -p TEXT or -f FILE, or pipe it in"


def test_files_that_cannot_be_read_or_decoded_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match=r"prompt file .*missing.txt: No such file"):
        read_prompt(PromptOptions(prompt_file=tmp_path / "missing.txt"))
    with pytest.raises(FileAccessError, match="Is a directory"):
        read_prompt(PromptOptions(prompt_file=tmp_path))
    bad = tmp_path / "latin1.txt"
    bad.write_bytes(b"lim\xf3n")
    with pytest.raises(ConfigError, match=r"-f .*latin1.txt: .*byte offset 3"):
        read_prompt(PromptOptions(prompt_file=bad))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("-", "means standard input"), ("missing.txt", "check the spelling"), (".", "name a file, not a folder")],
)
def test_a_prompt_file_that_cannot_be_opened_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileAccessError) as caught:
        read_prompt(PromptOptions(prompt_file=Path(name)))
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_a_byte_order_mark_counts_as_text_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Editors put one in front of a text that is looked at without it."""
    tokenizer = make_tokenizer(add_bos=True)
    for text, n_warnings in (("hi", 0), ("\ufeffhi", 1)):
        encode_prompt(PromptOptions(prompt=text), Console(), tokenizer, {}, text)
        assert capsys.readouterr().err.count("warning: the prompt begins with a byte-order mark") == n_warnings


def test_standard_input_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

    for read in (read_prompt, lambda _: read_text(build_options(read_arguments(PERPLEXITY, ["-m", "x"], FLAGS, {})))):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Broken())))
        with pytest.raises(FileAccessError, match=r"^standard input: Input/output error$"):
            read(PromptOptions())


def test_a_nul_character_does_not_end_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "nul.txt"
    path.write_bytes(b"a\0b")
    assert read_prompt(PromptOptions(prompt_file=path)) == "a\0b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb"a\nb\tc\r", b"a\nb\tc\r"),
        (rb"\\n", rb"\n"),
        (rb"\'\"", b"'\""),
        (rb"\xF0\x9f\xA6\x99", "🦙".encode()),
        (rb"\x4", rb"\x4"),
        (rb"\xZZ", rb"\xZZ"),
        (rb"\d \\", b"\\d \\"),
        (b"end\\", b"end\\"),
    ],
)
def test_escapes_are_those_of_llama_cpp(text: bytes, expected: bytes) -> None:
    assert resolve_escapes(text) == expected


def test_escapes_can_be_switched_off_and_must_make_characters() -> None:
    assert read_prompt(PromptOptions(prompt=r"a\nb")) == "a\nb"
    assert read_prompt(PromptOptions(prompt=r"a\nb", escape=False)) == r"a\nb"
    with pytest.raises(ConfigError, match=r"-p, its escapes resolved: .*byte offset 1, bytes ff") as refused:
        read_prompt(PromptOptions(prompt=r"\n\xff"))
    assert "--no-escape" in (refused.value.problems[0].hint or "")


def test_the_place_of_a_stray_byte_is_that_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"a\\nb\\n lim\xf3n")
    with pytest.raises(ConfigError, match=r"-f .*latin1.txt: the text is not valid UTF-8: byte offset 10, ") as refused:
        read_prompt(PromptOptions(prompt_file=path))
    assert "iconv" in (refused.value.problems[0].hint or "")


def make_tokenizer(*, add_bos: bool, spm: bool = True) -> Tokenizer:
    vocab = spm_vocab(add_bos=add_bos) if spm else bpe_vocab(add_bos=add_bos)
    return Tokenizer.from_metadata(vocab.metadata(), path="tiny.gguf")


def test_a_second_bos_is_kept_and_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    assert encode_raw(tokenizer, "hi", Console())[0] == tokenizer.bos_id
    assert capsys.readouterr().err == ""
    tokens = encode_raw(tokenizer, "<s>hi", Console())
    assert tokens[:2] == [tokenizer.bos_id] * 2
    assert capsys.readouterr().err == (
        "warning: the prompt begins with BOS, and the model's file asks to add one: there are two now\n"
    )


def test_an_empty_prompt_starts_from_bos_or_is_refused() -> None:
    with_bos = make_tokenizer(add_bos=True)
    assert encode_raw(with_bos, "", Console()) == [with_bos.bos_id]
    with pytest.raises(ConfigError, match="this model has no BOS token to start from"):
        encode_raw(make_tokenizer(add_bos=False, spm=False), "", Console())


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    check_prompt_length(64, 64)
    with pytest.raises(ConfigError, match=r"^the prompt: 65 tokens are more than the context of 64 tokens holds$"):
        check_prompt_length(65, 64)


def test_messages_and_template(tmp_path: Path) -> None:
    options = PromptOptions(system_prompt="Be brief")
    assert first_messages(options, "hi") == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hi"},
    ]
    path = tmp_path / "t.jinja"
    path.write_text("{{ bos_token }}{{ messages[0].content }}!")
    template = choose_chat_template(PromptOptions(chat_template_file=path), {})
    tokenizer = make_tokenizer(add_bos=True)
    assert encode_chat(tokenizer, template, first_messages(PromptOptions(), "hi")) == tokenizer.encode(
        "hi!", add_special=True, parse_special=True
    )
    with pytest.raises(FileAccessError, match=r"chat template .*none.jinja: No such file"):
        choose_chat_template(PromptOptions(chat_template_file=tmp_path / "none.jinja"), {})
    with pytest.raises(ConfigError, match="empty prompt"):
        encode_chat(make_tokenizer(add_bos=False, spm=False), "{# nothing #}{{ '' }}", [])
    for template in ("", "{# nothing #}\n"):
        with pytest.raises(ConfigError, match="empty prompt"):
            encode_chat(tokenizer, template, first_messages(PromptOptions(), "hi"))
    assert encode_chat(tokenizer, "{{ messages[0].content }}", first_messages(PromptOptions(), "")) == [
        tokenizer.bos_id
    ]
