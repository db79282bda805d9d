"""Stop strings end a stream, and no part of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import ConfigError
from kvs_core.stop_text import StopMatcher
from tests.tokenizer.vocabularies import STEADY


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """All texts shown, the flushed one last, and the stop string found."""
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        result = matcher.push(piece)
        shown.append(result.text)
        if result.stop is not None:
            return shown, result.stop
    return [*shown, matcher.flush()], None


def test_a_possible_beginning_is_held_back_until_it_is_decided() -> None:
    assert run(["User:"], ["Hi U", "ser", "name"]) == (["Hi ", "", "Username", ""], None)
    assert run(["User:"], ["Hi U", "ser", ": x"]) == (["Hi ", "", ""], "User:")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    assert run(["###"], ["a##"]) == (["a", "##"], None)


def test_text_behind_the_stop_string_is_not_shown() -> None:
    assert run(["\n\n"], ["a\n\nb"]) == (["a"], "\n\n")
    matcher = StopMatcher(["x"])
    assert matcher.push("axb").text == "a"
    assert matcher.push("more").text == ""
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_the_stop_string_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "abc")


def test_an_overlapping_second_try_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.problems[0].field == "--reverse-prompt"


def shown_by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read character by character until the text read so far ends in a stop string."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


@STEADY
@given(st.lists(st.text("abé", min_size=1, max_size=4), max_size=4), st.lists(st.text("abé", max_size=5), max_size=12))
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    shown, stop = run(stops, pieces)
    assert ("".join(shown), stop) == shown_by_definition(stops, "".join(pieces))
