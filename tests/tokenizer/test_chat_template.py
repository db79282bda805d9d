"""Choosing and rendering chat templates; broken and hostile ones end in one clear line."""

from __future__ import annotations

import contextlib
import resource
from datetime import datetime

import pytest

from kvs_core.chat_template import TEMPLATE_KEY, choose_template, render_chat
from kvs_core.errors import ConfigError
from tests.fixtures.refusals import check_form

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi é "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
]
# What llama.cpp's built-in templates of the same names give.
NAMED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi é <|im_end|>\n"
        "<|im_start|>assistant\nHello\n<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi é<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        "<start_of_turn>user\nBe brief.\n\nHi é<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
}


def render(template: str, *, prompt: bool = False, **options: object) -> str:
    return render_chat(template, TALK, add_generation_prompt=prompt, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMED)
def test_named_templates_give_llama_cpps_text(name: str) -> None:
    template = choose_template({}, option=name)
    talk, prompt = NAMED[name]
    assert render(template) == talk
    assert render(template, prompt=True) == talk + prompt


def test_the_models_own_template_is_the_default_and_an_option_replaces_it() -> None:
    metadata = {TEMPLATE_KEY: "{{ 'own' }}"}
    assert choose_template(metadata) == "{{ 'own' }}"
    assert choose_template(metadata, option="{% if true %}x{% endif %}") == "{% if true %}x{% endif %}"


@pytest.mark.parametrize("metadata", [{}, {TEMPLATE_KEY: ""}, {TEMPLATE_KEY: ["x"]}])
def test_a_model_without_a_template_says_what_to_give(metadata: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_template(metadata)
    check_form(caught.value)
    assert "--chat-template" in (caught.value.hint or "")
    assert "chatml" in (caught.value.hint or "")


def test_an_option_that_is_neither_name_nor_template_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_template({}, option="chatlm")
    check_form(caught.value)
    assert "'chatlm'" in str(caught.value)
    assert "chatml" in str(caught.value)


def test_block_lines_leave_no_white_space() -> None:
    template = "  {% for message in messages %}\n{{ message.role }}\n    {% endfor %}\nend\n"
    assert render(template) == "system\nuser\nassistant\nuser\nend"


def test_templates_see_what_they_are_written_for() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}", bos_text="<s>", eos_text="</s>") == "<s>|</s>"
    assert render("{{ messages[1].content | tojson }}") == '" Hi é "'
    assert render("{{ {'b': '<', 'a': 1} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": 1,\n  "b": "<"\n}'
    assert render("{{ strftime_now('%d %b %Y') }}", now=datetime(2024, 7, 26)) == "26 Jul 2024"
    assert render("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}x{% endfor %}") == "xx"
    assert render("{% generation %}a{{ messages[3].content }}{% endgeneration %}b") == "aByeb"
    assert render("{% if tools is none and not documents and undefined_name is not defined %}y{% endif %}") == "y"


@pytest.mark.parametrize(
    ("template", "fragment"),
    [
        ("a\n{% if %}", "line 2 does not parse"),
        ("{{ raise_exception('System role\nnot supported') }}", "refuses these messages: System role not supported"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 10**9 }}", "too long"),
        ("{{ 10**9 * [0] }}", "too long"),
        ("{{ 2 ** 99999999 }}", "power is too large"),
        ("{{ '%1000000000d' | format(1) }}", "bytes of memory"),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "bytes of memory",
        ),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.2 seconds"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "longer than 0.2 seconds",
        ),
        ("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_ends_in_one_line(template: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(template, time_limit_s=0.2 if "seconds" in fragment else 60.0)
    check_form(caught.value)
    assert fragment in str(caught.value)
    assert "--chat-template" in (caught.value.hint or "")


def test_the_bound_on_memory_ends_with_the_rendering() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    for template in ("x", "{{ nothing.at_all }}"):
        with contextlib.suppress(ConfigError):
            render(template)
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
