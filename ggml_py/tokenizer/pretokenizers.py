r"""How `tokenizer.ggml.pre` cuts text into pieces before BPE merges bytes; merges never cross from one piece into another.

A set is a list of regexes. The text is one piece; each regex in turn cuts every piece into its matches and the gaps between them,
and nothing is dropped. A regex sees only its piece, so that `(?!\S)` holds at a piece's end. The engine is Oniguruma, through
`tokenizers`: alternatives are tried from left to right, `\p{..}` are Unicode's general categories, and `\s` is White_Space
(U+0009-000D, 0020, 0085, 00A0, 1680, 2000-200A, 2028, 2029, 202F, 205F, 3000, and not U+001C-001F).
"""
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
# `\s*[\r\n]+|\s+(?!\S)|\s+`, where the first part takes white space up to its last line break. It is written so that it does not
# backtrack: on a long run of spaces the engine would give up.
_SPACES = r"(?:[^\S\r\n]*+[\r\n]++)++|\s+(?!\S)|\s+"
_HAN = "\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF\U00020000-\U0002A6DF\U0002A700-\U0002EBEF\U0002F800-\U0002FA1F"
_CASED = (  # letters of scripts with upper and lower case
    "A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386"
    "\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA"
    "\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D"
    "\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102"
    "\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184"
    "\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06"
    "\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2"
    "\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943")

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
SMOLLM = (r"\p{N}", *GPT2)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
LLAMA3 = (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,)
QWEN2 = (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,)
QWEN35 = (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,)
KIMI_K2 = (f"[{_HAN}]+|[^\\r\\n\\p{{L}}\\p{{N}}]?[\\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?"
           + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = ("|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?:{_CONTRACTION})?" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
         + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,)
DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
             r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" +
             _SPACES)
# The reference matches this set with all non-ASCII white space replaced, so ranges of characters never hold it: the published
# U+3000-3002 starts at 3001 here, and U+0800-4E00 excludes it. The fourth regex is `\s+$`, written so that a long run of spaces
# is tried once and not from each space.
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001-\u3002]+",
                r"(?<!\s)\s++\z",
                "[\u0800-\u9FA5\uAC00-\uD7FF&&\\S]+", r"\p{N}+")


@dataclass(frozen=True)
class PreTokenizer:
    """A row of the table. ignore_merges: a piece that is a token is taken as it is, without merging;
    the rest are defaults of the metadata."""
    regexes: tuple[str, ...]
    clean_spaces: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    bos_id: int | None = 11

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Text -> pieces of byte letters (the 256 characters that stand for bytes)."""
        cuts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in self.regexes]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {name: row for names, row in {
    "smollm": PreTokenizer(SMOLLM),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        LLAMA3, clean_spaces=True, ignore_merges=True, add_bos=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2": PreTokenizer(QWEN2),
    "megrez": PreTokenizer(QWEN2, clean_spaces=True),
    "qwen35": PreTokenizer(QWEN35),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "deepseek-v3": PreTokenizer(DEEPSEEK3),
    "chatglm-bpe": PreTokenizer(LLAMA3, clean_spaces=True, bos_id=None),
    "glm4 glm5": PreTokenizer(LLAMA3, clean_spaces=True, ignore_merges=True, bos_id=None),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(QWEN2),
    "gpt-2 phi-2 exaone4 mellum a.x-4.0 gigachat modern-bert jina-es jina-de jina-v2-es jina-v2-de": PreTokenizer(
        GPT2, clean_spaces=True),
    "kimi-k2": PreTokenizer(KIMI_K2),
    "gpt-4o llama4 kanana2 talkie": PreTokenizer(GPT4O),
    "default": PreTokenizer(DEFAULT, clean_spaces=True),
}.items() for name in names.split()}
