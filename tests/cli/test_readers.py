"""Strict reading of single values: ranges, named values, and nothing that merely looks like a number (U24, U31)."""

from __future__ import annotations

import math

import pytest

from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import EVERY_COMMAND, Flag
from kvs_cli.readers import read_arena, read_device, read_kv_type, read_path, read_samplers, read_seed, read_text
from kvs_core.config import ArenaMode, ArenaRequest, SamplingConfig
from kvs_core.kv_types import KvType
from kvs_core.units import MIB

ODD_NUMBERS = (
    "",
    " 8 ",
    "8 ",
    "1e3",
    "4k",
    "0x10",
    "nan",
    "inf",
    "-inf",
    "1_000",
    "64M",
    "1.5",
    "٣",
    "+-1",
    str(2**63),
)
ODD_REALS = ("", " 1 ", "0x10", "nan", "inf", "-inf", "1_000", "1,5", "½", "1e", "1e999", "-1e999")


@pytest.mark.parametrize("dest", ["n_ctx", "seed", "temperature"])
@pytest.mark.parametrize("text", ["9" * 5000, "-" + "9" * 5000])
def test_a_number_of_thousands_of_digits_is_out_of_range_like_any_other(dest: str, text: str) -> None:
    with pytest.raises(ValueError, match="is out of range; allowed: ") as caught:
        read(dest, text)
    assert len(str(caught.value)) < 150


def test_zeros_in_front_are_no_size() -> None:
    assert read("n_ctx", "0" * 5000 + "8") == 8


def test_an_allowed_value_outside_the_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"allowed: 1 to 512, or -1$"):
        read("n_threads", "0")


def flag_of(dest: str) -> Flag:
    return next(flag for flag in FLAGS.own if flag.dest == dest)


def read(dest: str, text: str) -> object:
    flag = flag_of(dest)
    assert flag.read is not None
    return flag.read(text)


INTEGERS = {
    "n_ctx": (0, 2**31 - 1),
    "n_predict": (-2, 2**31 - 1),
    "n_batch": (1, 2**31 - 1),
    "n_ubatch": (1, 2**31 - 1),
    "n_parallel": (1, 2**31 - 1),
    "page_tokens": (1, 2**31 - 1),
    "n_threads": (-1, 512),
    "n_gpu_layers": (-2, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "repeat_last_n": (-1, 2**31 - 1),
    "seed": (-1, 2**32 - 1),
    "arena": (0, 2**31 - 1),
    "device_memory_bytes": (1, 2**31 - 1),
    "rope.yarn_orig_ctx": (0, 2**31 - 1),
    "n_chunks": (-1, 2**31 - 1),
    "ppl_stride": (0, 2**31 - 1),
    "base_arena": (0, 2**31 - 1),
}
REALS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (1e-6, 1e6),
    "rope.scale": (1e-6, 1e6),
    "rope.freq_scale": (1e-6, 1e6),
    "rope.yarn_ext_factor": (0.0, 1.0),
    "rope.yarn_attn_factor": (0.0, 1e6),
    "rope.yarn_beta_slow": (1e-9, math.inf),
    "rope.yarn_beta_fast": (1e-9, math.inf),
    "max_kld": (0.0, math.inf),
    "max_mean_kld": (0.0, math.inf),
}


def test_every_numeric_flag_has_its_range_here() -> None:
    numeric = {flag.dest for flag in FLAGS.own if flag.metavar.split("|")[0] in ("N", "X", "P", "T")}
    assert numeric == set(INTEGERS) | set(REALS) | {"rope.freq_base"}


@pytest.mark.parametrize("dest", INTEGERS)
def test_whole_numbers_are_read_to_the_ends_of_their_range(dest: str) -> None:
    low, high = INTEGERS[dest]
    read(dest, str(low))
    read(dest, str(high))
    for text in (str(low - 1), str(high + 1)):
        with pytest.raises(ValueError, match=rf"{text} is out of range; allowed: "):
            read(dest, text)


@pytest.mark.parametrize("dest", INTEGERS)
@pytest.mark.parametrize("text", ODD_NUMBERS)
def test_what_only_looks_like_a_whole_number_is_refused(dest: str, text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        read(dest, text)


@pytest.mark.parametrize("dest", REALS)
def test_decimal_numbers_are_read_to_the_ends_of_their_range(dest: str) -> None:
    low, high = REALS[dest]
    assert read(dest, str(low)) == low
    assert read(dest, str(1.0)) == 1.0
    assert read(dest, "2.5e-1") == 0.25
    for text in (str(-0.5), *([] if high == math.inf else [str(high * 1.0000001)])):
        with pytest.raises(ValueError, match="out of range; allowed: "):
            read(dest, text)


@pytest.mark.parametrize("dest", REALS)
@pytest.mark.parametrize("text", ODD_REALS)
def test_what_only_looks_like_a_decimal_number_is_refused(dest: str, text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        read(dest, text)


def test_a_percentage_is_read_as_a_share_and_a_share_is_refused() -> None:
    assert read("min_same_top", "99.5") == pytest.approx(0.995)
    assert read("min_same_top", "100") == 1.0
    for text in ("0.995", "1", "0"):
        with pytest.raises(ValueError, match=f"{text} is a percentage, as printed"):
            read("min_same_top", text)
    with pytest.raises(ValueError, match=r"100\.1 is out of range"):
        read("min_same_top", "100.1")


def test_a_rope_base_is_above_one_and_turns_are_above_zero() -> None:
    """Their logarithms are divided by, and taken."""
    assert read("rope.freq_base", "1.5") == 1.5
    for dest, text in (("rope.freq_base", "1"), ("rope.yarn_beta_fast", "0"), ("rope.yarn_beta_slow", "0")):
        with pytest.raises(ValueError, match=f"{text} is out of range; allowed: numbers above {text}"):
            read(dest, text)


def test_minus_zero_becomes_zero() -> None:
    assert math.copysign(1.0, float(str(read("temperature", "-0.0")))) == 1.0


def test_named_values_keep_their_meaning() -> None:
    assert read("n_threads", "-1") is None
    assert read("n_gpu_layers", "auto") is None
    assert read("n_gpu_layers", "-1") is None
    assert read("n_gpu_layers", "all") == read("n_gpu_layers", "-2") == 2**31 - 1
    assert read("rope.yarn_orig_ctx", "0") is None
    assert read("rope.yarn_ext_factor", "-1.0") is None
    with pytest.raises(ValueError, match="allowed: 0 to 2147483647, or auto, or all"):
        read("n_gpu_layers", "some")


def test_seeds_are_never_wrapped() -> None:
    assert read_seed("0") == 0
    assert read_seed(str(2**32 - 2)) == 2**32 - 2
    assert read_seed("-1") is None
    assert read_seed(str(2**32 - 1)) is None
    with pytest.raises(ValueError, match="out of range"):
        read_seed(str(2**32 + 7))


def test_the_arena_is_whole_mib_or_auto_and_zero_is_off() -> None:
    assert read_arena("64") == ArenaRequest(mode=ArenaMode.FIXED, n_bytes=64 * MIB)
    assert read_arena("auto") == ArenaRequest(mode=ArenaMode.AUTO)
    assert read_arena("0") == ArenaRequest()
    for text in ("-1", "nan", "1.5", "64M", "Auto"):
        with pytest.raises(ValueError, match=r"allowed: 0 to 2147483647 \(MiB\), or auto"):
            read_arena(text)


@pytest.mark.parametrize("dest", ["type_k", "type_v"])
def test_every_type_that_help_lists_is_read_and_no_other(dest: str) -> None:
    listed = flag_of(dest).help.split(":", 1)[1].split(", in lower case", 1)[0].replace(" ", "").split(",")
    assert [read(dest, text) for text in listed] == list(KvType)
    for text in ("q6_k", "tq3_0", "Q8_0", "q8_0 ", "", "turbo9"):
        with pytest.raises(ValueError, match=f"allowed: {', '.join(kv_type.value for kv_type in KvType)}$"):
            read_kv_type(text)


def test_sampler_names_are_read_in_order_and_unsupported_ones_named() -> None:
    assert read_samplers("top-k;temp") == ("top_k", "temperature")
    assert read_samplers(";".join(SamplingConfig().samplers)) == SamplingConfig().samplers
    assert read("samplers", "") == ()
    with pytest.raises(ValueError, match="the sampler dry is not supported yet"):
        read_samplers("penalties;dry;top_k")
    with pytest.raises(ValueError, match="'top_z' is not a sampler; allowed: penalties;top_k"):
        read_samplers("top_z")


def test_sampler_letters_equal_the_default_names() -> None:
    flag = next(flag for flag in FLAGS.own if "--sampling-seq" in flag.spellings)
    assert flag.read is not None
    assert flag.read("ekpmt") == SamplingConfig().samplers
    with pytest.raises(ValueError, match="the letter 'd' stands for no supported sampler"):
        flag.read("edkt")


def test_devices() -> None:
    known = ["auto", "cpu", "cuda", "cuda:3", "cuda:GPU-8932f937"]
    assert [read_device(text) for text in known] == known
    for text in ("gpu", "cuda:", "cuda:x", "cuda:-1", ""):
        with pytest.raises(ValueError, match="allowed: auto, cpu, cuda, cuda:N"):
            read_device(text)
    with pytest.raises(ValueError, match="write cuda in lower case"):
        read_device("CUDA")


def test_paths_are_expanded_and_impossible_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(read_path("~/x.gguf")) == "/home/someone/x.gguf"
    assert str(read_path("-x.gguf")) == "-x.gguf"
    assert str(read_path("Модели/é 模型/x y.gguf")) == "Модели/é 模型/x y.gguf"
    for text, reason in (("", "is empty"), ("a\0b", "NUL"), ("~nobody-of-that-name/x", "cannot be expanded")):
        with pytest.raises(ValueError, match=reason):
            read_path(text)


def test_text_keeps_every_character_and_refuses_bytes_that_are_not_utf8() -> None:
    assert read_text("naïve 🦙 \n") == "naïve 🦙 \n"
    with pytest.raises(ValueError, match="is not valid UTF-8: byte offset 3"):
        read_text("lim\udcf3n")


def test_every_command_of_the_table_exists() -> None:
    assert {command for flag in FLAGS.own for command in flag.commands} == set(EVERY_COMMAND)
