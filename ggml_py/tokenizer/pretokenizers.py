r"""How `tokenizer.ggml.pre` cuts text into pieces before BPE merges bytes; merges never cross from one piece into another.

A set is a list of regexes. The text is one piece; each regex in turn cuts every piece into its matches and the gaps between them,
and nothing is dropped. A regex sees only its piece, so that `(?!\S)` holds at a piece's end. The engine is Oniguruma, through
`tokenizers`: alternatives are tried from left to right, `\p{..}` are Unicode's general categories and scripts, `&&` intersects
classes, and `\s` is White_Space (U+0009-000D, 0020, 0085, 00A0, 1680, 2000-200A, 2028, 2029, 202F, 205F, 3000, and not
U+001C-001F).

Sets cut as the tokenizers that the models were published with, where those are known, else as llama.cpp does; `DEVIATIONS` says
where the two differ. No regex backtracks over a long run: the engine would give up. docs/tokenizers.md is written from this file.
"""
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


def _either(*alternatives: str) -> str:
    return "|".join(alternatives)


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"(?:[^\S\r\n]*+[\r\n]++)++"  # `\s*[\r\n]+`, white space up to its last line break
_SPACES = _LINES + r"|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# Before the first group of three digits, counted from the end of their run: at most two digits of it stand before. So a run is
# looked through at most three times.
_FIRST_OF_THREES = _either(*(rf"(?<=\A{digits}|[^0-9]{digits})(?=(?:[0-9]{{3}})++(?![0-9]))"
                             for digits in ("", "[0-9]", "[0-9][0-9]")))


def _cased_words(upper: str, lower: str, end: str = f"(?:{_CONTRACTION})?") -> str:
    """Words that end before an upper-case letter that follows a lower-case one. upper, lower: insides of classes, which share the
    letters that have no case."""
    return _either(*(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{end}" for word in (f"[{upper}]*[{lower}]+", f"[{upper}]+[{lower}]*")))


def _threes(digit: str) -> str:
    """Runs of digits in groups of three, counted from their end."""
    return rf"(?<!{digit}){digit}{{1,2}}(?=(?:{digit}{{3}})++(?!{digit}))|{digit}{{3}}|{digit}{{1,2}}"


_CASED = (  # letters of scripts with upper and lower case
    "A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386"
    "\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA"
    "\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D"
    "\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102"
    "\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184"
    "\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06"
    "\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2"
    "\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943")
_CJK = "\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _either(_CONTRACTION, _WORD, r"\p{N}{1,3}", _OTHERS, _SPACES)
_QWEN2 = _either(_CONTRACTION, _WORD, r"\p{N}", _OTHERS, _SPACES)
_GPT4O = _either(_cased_words(_UPPER, _LOWER), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)
_DEEPSEEK3 = _either(_PUNCTUATED, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_NEWLINES = r"[^\n]+|\n+"
# The reference matches these sets with all non-ASCII white space replaced, so ranges of characters never hold it: the published
# U+3000-3002 starts at 3001 here, and U+0800-4E00 excludes it.
_DEEPSEEK_CJK = "[\u0800-\u9FA5\uAC00-\uD7FF&&\\S]+"

REGEXES: dict[str, tuple[str, ...]] = {
    "GPT2": (_GPT2,),
    "SMOLLM": (r"\p{N}", _GPT2),
    "DEFAULT": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "FALCON": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "CHAMELEON": (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
    "LLAMA3": (_LLAMA3,),
    "MINICPM5": (r"\p{N}{1,3}", _either(_CONTRACTION, _WORD, r"\p{N}+", _OTHERS, _SPACES)),
    "JAIS2": (_either(_CONTRACTION, _WORD, r"\p{N}{1,3}", _OTHERS, _LINES,
                      *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s"),),
    "QWEN2": (_QWEN2,),
    "QWEN35": (_either(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES),),
    "UFAKZEKA": (_either(_WORD, r"\p{N}", _OTHERS, _SPACES),),
    "LAGUNA": (_NEWLINES, _QWEN2),
    "SEED_CODER": (_either(_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}]+", _SPACES),),
    "EXAONE_MOE": (_either(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?\p{L}(?:\p{M}| ?\p{L})*+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                           _SPACES),),
    "GPT4O": (_GPT4O,),
    "GRANITE_EMB_MULTI": (_either(_cased_words(r"[\p{L}\p{M}]&&[^a-z]", r"[\p{L}\p{M}]&&[^A-Z]"), r"\p{N}{1,3}",
                                  r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES),),
    "TEKKEN": (_either(_cased_words(_UPPER, _LOWER, ""), r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES),),
    # A run of digits that ends where a word ends; the second regex cuts it.
    "TINY_AYA": (r"(?<!\d)\d++(?!\w)", r"\A\d{1,2}(?=(?:\d{3})++\z)|\G\d{3}", _GPT4O),
    "YOUTU": (_either("[\uAC00-\uD7A3\u3131-\u318E]+",
                      "[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+",
                      "[\u3105-\u312F]+", f"[{_CJK}]+"),
              _either(_cased_words(_UPPER, _LOWER), r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)),
    "KIMI_K2": (_either(r"\p{Han}+", _cased_words(rf"{_UPPER}&&\P{{Han}}", rf"{_LOWER}&&\P{{Han}}"), r"\p{N}{1,3}", _OTHERS,
                        _SPACES),),
    # The fourth regex is `\s+$`, written so that a long run of spaces is tried once and not from each space.
    "DEEPSEEK_LLM": (r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001-\u3002]+",
                     r"(?<!\s)\s++\z", _DEEPSEEK_CJK, r"\p{N}+"),
    "DEEPSEEK_CODER": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    "DEEPSEEK3": (r"\p{N}{1,3}", f"[{_CJK}]+", _DEEPSEEK3),
    "SPARK2_5": (r"\p{N}{1,3}", f"[{_CJK}]+", _either(_PUNCTUATED, r" ?[\p{P}\p{S}]+", r"[\r\n]", r"\s+(?!\S)", r"\s+"),
                 r"\p{N}"),
    "AFMOE": (_threes(r"\p{Nd}"), _either(*(f"[{block}]+" for block in (
        "\u4E00-\u9FFF\u3040-\u30FF\u3400-\u4DBF\uF900-\uFAFF\uFF65-\uFF9F\u2F00-\u2FDF",
        "\u0E00-\u0E7F", "\u0E80-\u0EFF", "\u1780-\u17FF",
        "\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF", "\uAC00-\uD7AF\u1100-\u11FF"))), _DEEPSEEK3),
    "SUPERBPE": (r"\p{N}+", _FIRST_OF_THREES, r"[0-9]{3}(?=[0-9]{3})"),
    "BLOOM": (_BLOOM,),
    "VIKING": (_BLOOM, r"\p{N}"),
    "GEMMA4": (_NEWLINES,),
}
DEVIATIONS = {  # set: how llama.cpp cuts otherwise, and by what the set was verified
    "GPT4O": "llama.cpp sees upper and lower case in ASCII alone and ends a word at a mark (`\\p{M}`). Published: o200k_base of "
             "tiktoken, and the regex that llama.cpp quotes of `tokenizer.json`.",
    "TEKKEN": "As GPT4O. Published: the regex that llama.cpp quotes of `tokenizer.json`.",
    "YOUTU": "llama.cpp writes this regex and reads `\\p{Lu}`, `\\p{Ll}` as any letter: its words do not end between lower and "
             "upper case.",
    "TINY_AYA": "As GPT4O, and llama.cpp cuts every run of numbers in threes from its end, together with the text before it. "
                "Published, as llama.cpp quotes it: only digits (`\\d`) whose run ends where a word ends; `12345abc` is 123, "
                "45, abc.",
    "KIMI_K2": "llama.cpp takes runs of letters without regard to case and marks, and blocks of code points for `\\p{Han}`. "
               "Published: `pat_str` of `tokenization_kimi.py`.",
    "AFMOE": "llama.cpp cuts runs of all numbers (`\\p{N}`), the first group together with the text before it, and has one class "
             "of scripts, which begins at U+8C48 in place of U+F900. Published: the regexes of `tokenizer.json`.",
}


@dataclass(frozen=True)
class PreTokenizer:
    """A row of the table.

    regex_set: of `REGEXES`.   ignore_merges: a piece that is a token is taken as it is, without merging.
    spaces_escaped: token texts are plain text with U+2581 for a space, not byte letters; bytes without a token are `<0xXX>`.
    newlines_whole: a run of newlines that is a token is taken as it is.
    merges_required: the metadata must have merges; the rest are defaults of the metadata, and what they say."""
    regex_set: str
    clean_spaces: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    bos_id: int | None = 11
    eos_id: int | None = 11
    spaces_escaped: bool = False
    newlines_whole: bool = False
    merges_required: bool = True

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Text -> pieces, of byte letters (the 256 characters that stand for bytes) unless `spaces_escaped`."""
        cuts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in REGEXES[self.regex_set]]
        letters = [] if self.spaces_escaped else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        return pre_tokenizers.Sequence([*cuts, *letters])


GEMMA4 = PreTokenizer("GEMMA4", clean_spaces=True, add_bos=True, spaces_escaped=True, newlines_whole=True)
PRE_TOKENIZERS = {name: row for names, row in {
    "default": PreTokenizer("DEFAULT", clean_spaces=True),
    "gpt-2 phi-2 exaone4 mellum a.x-4.0 gigachat modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code "
    "roberta-bpe mpt olmo jais": PreTokenizer("GPT2", clean_spaces=True),
    "trillion granite-docling": PreTokenizer("GPT2"),
    "smollm command-r": PreTokenizer("SMOLLM"),
    "starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer("SMOLLM", clean_spaces=True),
    "falcon": PreTokenizer("FALCON", clean_spaces=True),
    "chameleon": PreTokenizer("CHAMELEON", add_bos=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        "LLAMA3", clean_spaces=True, ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe": PreTokenizer("LLAMA3", clean_spaces=True),
    "chatglm-bpe": PreTokenizer("LLAMA3", clean_spaces=True, bos_id=None),
    "glm4 glm5": PreTokenizer("LLAMA3", clean_spaces=True, ignore_merges=True, bos_id=None),
    "minicpm5": PreTokenizer("MINICPM5", clean_spaces=True, ignore_merges=True),
    "jais-2": PreTokenizer("JAIS2", clean_spaces=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 bailingmoe bailingmoe2 llada-moe hunyuan grok-2 solar-open": PreTokenizer("QWEN2"),
    "megrez stablelm2": PreTokenizer("QWEN2", clean_spaces=True),
    "qwen35": PreTokenizer("QWEN35"),
    "ufakzeka": PreTokenizer("UFAKZEKA"),
    "laguna": PreTokenizer("LAGUNA"),
    "seed-coder": PreTokenizer("SEED_CODER"),
    "exaone-moe": PreTokenizer("EXAONE_MOE", clean_spaces=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer("GPT4O"),
    "granite-embed-multi-97m": PreTokenizer("GRANITE_EMB_MULTI", ignore_merges=True),
    "tekken": PreTokenizer("TEKKEN", ignore_merges=True, add_bos=True),
    "tiny_aya cohere2moe": PreTokenizer("TINY_AYA"),
    "youtu": PreTokenizer("YOUTU", ignore_merges=True),
    "kimi-k2": PreTokenizer("KIMI_K2", merges_required=False),
    "deepseek-llm": PreTokenizer("DEEPSEEK_LLM"),
    "deepseek-coder": PreTokenizer("DEEPSEEK_CODER"),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer("DEEPSEEK3"),
    "spark2_5": PreTokenizer("SPARK2_5"),
    "afmoe": PreTokenizer("AFMOE"),
    "superbpe": PreTokenizer("SUPERBPE"),
    "bloom gpt3-finnish": PreTokenizer("BLOOM", clean_spaces=True),
    "poro-chat": PreTokenizer("BLOOM"),
    "viking": PreTokenizer("VIKING"),
    "gemma4 granite-embed-multi-311m": GEMMA4,
    "sarvam-moe": PreTokenizer("GEMMA4", spaces_escaped=True),
}.items() for name in names.split()}
