"""`Tokenizer`: token ids of a text and text of token ids, as a model file defines them."""
import codecs
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Self

from gguf import TokenType

from ..base.errors import quoted
from .bpe import BPE, ByteLevelBPE, SpaceEscapedBPE
from .pretokenizers import GEMMA4, PRE_TOKENIZERS, PreTokenizer
from .spm import SPM
from .vocabulary import TokenizerError, Vocabulary, scalar, special_id, texts

log = logging.getLogger(__name__)
ASCII_SPACES = " \t\n\r\v\f"
SPECIAL = TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN  # their bytes are those of their texts
NOT_READ = {"t5": "unigram", "bert": "WordPiece", "rwkv": "the longest match over bytes",
            "plamo2": "the cheapest path over suffixes", "whitespace": "BPE of words", "hybriddna": "BPE and 6-mers of DNA"}


class Tokenizer:
    """The tokenizer that a model file's metadata describes.

    metadata: GGUF keys to Python values; arrays are sequences or numpy arrays. A file without a tokenizer (`tokenizer.ggml.model`
    missing or "no_vocab") gives an object that knows `n_vocab` at most and whose `encode` and `decode` raise: such a model takes
    token ids.

    n_vocab: number of token ids.   bos_id, eos_id: ids, or None.   add_bos, add_eos: whether `encode` puts them around a text.
    chat_template: Jinja source, or None.   chat_templates: the sources of named templates.   suppressed: ids that are never to be
    chosen when text is generated.

    A tokenizer can be copied and pickled: it holds nothing of the file.
    """

    def __init__(self, metadata: Mapping):
        self.model = scalar(metadata, "tokenizer.ggml.model", str, "no_vocab")
        self.chat_template: str | None = scalar(metadata, "tokenizer.chat_template", str, None)
        names = texts(metadata, "tokenizer.chat_templates") if "tokenizer.chat_templates" in metadata else []
        self.chat_templates = {name: source for name in names
                               if (source := scalar(metadata, f"tokenizer.chat_template.{name}", str, None)) is not None}
        if self.model in ("no_vocab", "none"):
            self.model = "no_vocab"
            self.n_vocab = scalar(metadata, f"{metadata.get('general.architecture')}.vocab_size", int, 0)
            self.bos_id = self.eos_id = None
            self.add_bos = self.add_eos = False
            self.suppressed: frozenset[int] = frozenset()
            return
        if self.model not in ("gpt2", "gemma4", "llama"):
            kind = f" ({NOT_READ[self.model]}), which is not supported" if self.model in NOT_READ else ""
            raise TokenizerError(f"tokenizer.ggml.model: got {quoted(self.model)}{kind}, known are 'gpt2' (byte-level BPE), "
                                 "'gemma4' (BPE), 'llama' (SPM) and 'no_vocab'")
        self._vocabulary = Vocabulary.from_metadata(metadata)
        self.n_vocab, self.suppressed = len(self._vocabulary.tokens), self._vocabulary.suppressed
        if self.model != "llama":
            pre = _pre_tokenizer(metadata) if self.model == "gpt2" else replace(GEMMA4, bos_id=None, eos_id=None)
            self._add_space_prefix = scalar(metadata, "tokenizer.ggml.add_space_prefix", bool, False)
            bpe = SpaceEscapedBPE if pre.spaces_escaped else ByteLevelBPE
            self._fragments: BPE | SPM = bpe(self._vocabulary, pre, metadata)
            self._clean_spaces, add_bos, bos, eos = pre.clean_spaces, pre.add_bos, pre.bos_id, pre.eos_id
        else:
            self._add_space_prefix = scalar(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
            self._fragments = SPM(self._vocabulary, self._add_space_prefix)
            self._clean_spaces, add_bos, bos, eos = False, True, 1, 2
        self.bos_id = special_id(metadata, "bos", self.n_vocab, bos)
        self.eos_id = special_id(metadata, "eos", self.n_vocab, eos)
        self.add_bos = scalar(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos)
        if self.model == "gemma4" and not self.add_bos:
            log.warning("tokenizer.ggml.add_bos_token: false, as in early files of Gemma 4; BOS is added, the model needs it")
            self.add_bos = True
        self.add_eos = scalar(metadata, "tokenizer.ggml.add_eos_token", bool, False)
        for name, add, id in (("bos", self.add_bos, self.bos_id), ("eos", self.add_eos, self.eos_id)):
            if add and id is None:
                raise TokenizerError(f"tokenizer.ggml.add_{name}_token is true, "
                                     f"but tokenizer.ggml.{name}_token_id names none of {self.n_vocab} tokens")
        types = self._vocabulary.types
        self._user_defined = self._longest_first(id for id in range(self.n_vocab) if types[id] == TokenType.USER_DEFINED)
        self._special = self._longest_first(id for id in range(self.n_vocab) if types[id] in SPECIAL)
        self._strips_left, self._strips_right = _stripping(metadata, self._vocabulary, {id for _, id in self._special})
        self._known_bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, path: str | PathLike[str]) -> Self:
        """The tokenizer of a GGUF file; the file may hold a vocabulary and no tensors."""
        from ..files.gguf import GGUFFile
        with GGUFFile.open(path) as file:
            return cls(file.metadata)

    def __repr__(self) -> str:
        special = "".join(f", {name} {id}" for name, id in (("BOS", self.bos_id), ("EOS", self.eos_id)) if id is not None)
        return f"<Tokenizer {self.model}: {self.n_vocab} tokens{special}>"

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special: put BOS and EOS around it where the model wants them (`add_bos`, `add_eos`).
        parse_special: texts of control tokens, such as <|im_start|>, become those tokens; without it only user-defined tokens do.
        Those of a few models swallow the ASCII white space beside them (`_stripping`).
        A lone surrogate stands for a byte that is not UTF-8 (text decoded with errors="surrogateescape").
        """
        self._require_vocabulary()
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        for fragment in self._split_special(text, self._special if parse_special else self._user_defined):
            ids += [fragment] if isinstance(fragment, int) else self._fragments.encode(fragment)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, clean_spaces: bool | None = None) -> str:
        """Text of token ids; what is not UTF-8 becomes U+FFFD. skip_special: control and unknown tokens give no text.

        Where the model puts a space before every text, the first token loses its leading space (a token after BOS keeps it).
        clean_spaces: take away the space before ? ! . , and the contractions 's 'm 're 've, and those around a lone apostrophe;
        None: as the model has it (docs/tokenizers.md). Only without it is the text of a text's tokens that text.
        """
        self._require_vocabulary()
        pieces = [self.token_bytes(id, skip_special) for id in ids]
        if pieces and self._add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces).decode("utf-8", "replace")
        return _clean_spaces(text) if (self._clean_spaces if clean_spaces is None else clean_spaces) else text

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """What one token adds to a text, in UTF-8 (a character may be spread over several tokens)."""
        self._check_id(id)
        id, type = int(id), self._vocabulary.types[id]
        if skip_special and type in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b""
        if id not in self._known_bytes:
            self._known_bytes[id] = self._vocabulary.tokens[id].encode() if type in SPECIAL else self._fragments.token_bytes(id)
        return self._known_bytes[id]

    def token_text(self, id: int) -> str:
        """The text under which the vocabulary lists a token, e.g. `Ġthe`, `▁the`, `<0x0A>`, `<|im_end|>`."""
        self._check_id(id)
        return self._vocabulary.tokens[id]

    def is_end_of_generation(self, id: int) -> bool:
        """Whether a model that produces this token has finished its answer. Without a vocabulary no token is known to."""
        return self.model != "no_vocab" and id in self._vocabulary.end_of_generation

    def _longest_first(self, ids: Iterable[int]) -> list[tuple[str, int]]:
        """(text, id), longest text (in bytes) first; equally long ones by id."""
        tokens = self._vocabulary.tokens
        return [(tokens[id], id) for id in sorted(ids, key=lambda id: -len(tokens[id].encode()))]

    def _split_special(self, text: str, candidates: list[tuple[str, int]]) -> list[str | int]:
        """Text as a list of fragments and of ids of special tokens. Each candidate in turn, longest first, cuts the fragments
        that are left.

        So a longer token wins over one that starts further left: a single pass over the text would not do.
        """
        fragments: list[str | int] = [text] if text else []
        for token, id in candidates:
            if token in text:
                fragments = [part for fragment in fragments
                             for part in ([fragment] if isinstance(fragment, int) else self._cut(fragment, token, id))]
        return fragments

    def _cut(self, fragment: str, token: str, id: int) -> list[str | int]:
        """fragment.split(token) with the id between the parts; empty parts are left out."""
        between = fragment.split(token)
        if id in self._strips_left:
            between[:-1] = [text.rstrip(ASCII_SPACES) for text in between[:-1]]
        if id in self._strips_right:
            between[1:] = [text.lstrip(ASCII_SPACES) for text in between[1:]]
        parts: list[str | int] = [between[0]] if between[0] else []
        for text in between[1:]:
            parts += [id, text] if text else [id]
        return parts

    def _require_vocabulary(self) -> None:
        if self.model == "no_vocab":
            raise TokenizerError("tokenizer.ggml.model: the model file has no vocabulary; give token ids instead of text")

    def _check_id(self, id: int) -> None:
        self._require_vocabulary()
        if not 0 <= id < self.n_vocab:
            raise TokenizerError(f"token id: got {id}, the vocabulary has 0 to {self.n_vocab - 1}")


class Detokenizer:
    """Text of a growing list of token ids: bytes that do not yet make a character are held back.

    The text is that of the tokens as they stand in a longer text: no leading space is taken away, and no other.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def __repr__(self) -> str:
        return f"<Detokenizer of {self.tokenizer!r}>"

    def feed(self, id: int) -> str:
        """The text that has become certain with this token; nothing where the model file has no vocabulary."""
        if self.tokenizer.model == "no_vocab":
            return ""
        return self._utf8.decode(self.tokenizer.token_bytes(id, self.skip_special))

    def finish(self) -> str:
        """What is still held back: U+FFFD, or nothing. The next token starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _pre_tokenizer(metadata: Mapping) -> PreTokenizer:
    name = scalar(metadata, "tokenizer.ggml.pre", str, None)
    if name is None:
        log.warning("tokenizer.ggml.pre: missing; text is split as for 'default', which may not be what the model was trained "
                    "with")
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre: got {quoted(name)}, known are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _stripping(metadata: Mapping, vocabulary: Vocabulary, special: set[int]) -> tuple[set[int], set[int]]:
    """The tokens that swallow the white space to their left, and to their right. Files do not say which: models are known by
    their names, as in llama.cpp."""
    def ids(*texts: str) -> set[int]:
        return {vocabulary.ids[text] for text in texts if text in vocabulary.ids}

    name = scalar(metadata, "general.name", str, "").lower()
    if any(pre in scalar(metadata, "tokenizer.ggml.pre", str, "") for pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return ids("<mask>"), set()
    if "phi-3" in name or "phi3" in name:
        return set(), (special | ids("</s>")) - ids("<unk>", "<s>", "<|endoftext|>")
    return ids("[MASK]") if "modern-bert" in name else set(), set()


def _clean_spaces(text: str) -> str:
    text = re.sub(" (?=[?!.,])", "", text)
    text = re.sub(" ' ", "'", text)
    return re.sub(" (?='(?:[sm]|re|ve))", "", text)
