"""The pre-tokenizers of byte-level BPE vocabularies: which regexes cut a text before merging, by GGUF name.

Building the tokenizer from them is in ``kvs_core.tokenizer``.

Patterns of one entry apply in sequence: each cuts every existing piece into its matches and the gaps between them,
and the gaps stay pieces of their own. They are written for the Oniguruma engine of the ``tokenizers`` library.

Two choices where llama.cpp and the original tokenizers differ:

* contractions (``'s``, ``'LL`` …) match ASCII letters only, as in llama.cpp; a case-folding engine would also take
  the long s (U+017F) for an ``s``;
* the gpt-4o and tekken families use the original classes of upper- and lower-case letters. llama.cpp replaces them by
  "letter other than a-z" and "letter other than A-Z" without combining marks, so non-ASCII text may split differently
  there; ASCII text does not.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)

# Words that start with capitals or go on in small letters; the optional tail is the contraction of gpt-4o.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(*, tail: str, digits: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{tail}|{lead}{_UPPER}+{_LOWER}*{tail}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


_GPT4O = _cased(tail=f"{_CONTRACTION}?", digits=r"\p{N}{1,3}")
_TEKKEN = _cased(tail="", digits=r"\p{N}")

_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _LINES_AND_SPACES
)
_DEEPSEEK3_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_DEEPSEEK_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"

# Letters with case (general categories Lu, Ll, Lt) of Unicode 12 in Latin, Greek, Cyrillic, Armenian, Georgian,
# Cherokee, Glagolitic, Coptic and the cased astral scripts, plus the letterlike symbols, as deepseek-llm lists them:
# inclusive ranges of code points, "-" joined, in hexadecimal.
_DEEPSEEK_LLM_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""


def _class_of(ranges: str) -> str:
    """A character class out of hexadecimal ranges, written with escapes so that no editor can change it."""
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in item.split("-")) for item in ranges.split()) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How one family of BPE vocabularies cuts text, and the defaults llama.cpp ties to that name.

    ``ignore_merges``    a piece that is a token as a whole is taken without merging
    ``default_add_bos``  BOS is prepended unless the file says otherwise
    ``default_bos``      a file without a BOS id still has one (llama.cpp's default id); False: then there is none
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    default_add_bos: bool = False
    default_bos: bool = True


# llama.cpp's name for "no name given"; kept as a constant because a missing key also leads here.
DEFAULT_PRE_TOKENIZER = "default"

_FAMILIES = (
    PreTokenizer(
        names=(DEFAULT_PRE_TOKENIZER,),
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    PreTokenizer(
        names=(
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ),
        patterns=(_LLAMA3,),
        ignore_merges=True,
        default_add_bos=True,
    ),
    PreTokenizer(names=("glm4", "glm5"), patterns=(_LLAMA3,), ignore_merges=True, default_bos=False),
    PreTokenizer(names=("chatglm-bpe",), patterns=(_LLAMA3,), default_bos=False),
    PreTokenizer(names=("dbrx", "smaug-bpe"), patterns=(_LLAMA3,)),
    PreTokenizer(
        names=(
            "qwen2",
            "deepseek-r1-qwen",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "kormo",
            "grok-2",
        ),
        patterns=(_QWEN2,),
    ),
    PreTokenizer(names=("qwen35",), patterns=(_QWEN35,)),
    PreTokenizer(names=("laguna",), patterns=(r"[^\n]+|[\n]+", _QWEN2)),
    PreTokenizer(names=("gpt-4o", "llama4", "kanana2", "minimax-m2"), patterns=(_GPT4O,)),
    PreTokenizer(names=("tekken",), patterns=(_TEKKEN,), ignore_merges=True, default_add_bos=True),
    PreTokenizer(
        names=("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        patterns=(r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3_WORDS),
    ),
    PreTokenizer(
        names=("deepseek-llm",),
        patterns=(
            r"[\r\n]",
            rf"\s?{_class_of(_DEEPSEEK_LLM_CASED)}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        ),
    ),
    PreTokenizer(
        names=("deepseek-coder",),
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    ),
    PreTokenizer(
        names=(
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "exaone4",
            "modern-bert",
            "roberta-bpe",
            "a.x-4.0",
            "gigachat",
            "mellum",
            "trillion",
            "granite-docling",
        ),
        patterns=(_GPT2,),
    ),
    PreTokenizer(
        names=(
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ),
        patterns=(r"\p{N}", _GPT2),
    ),
    PreTokenizer(names=("falcon",), patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    PreTokenizer(
        names=("bailingmoe", "bailingmoe2", "llada-moe"),
        patterns=(rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    PreTokenizer(
        names=("minicpm5",),
        patterns=(r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_LINES_AND_SPACES}"),
        ignore_merges=True,
    ),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: family for family in _FAMILIES for name in family.names}

# gemma4 is no byte-level vocabulary and its file need not name a pre-tokenizer: runs of newlines stand alone.
GEMMA4_PATTERN = r"[^\n]+|[\n]+"
