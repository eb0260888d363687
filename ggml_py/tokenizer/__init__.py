"""Text to token ids and back, from a model file's metadata alone.

In the order in which data flows:

    vocabulary.py     the texts, types, scores and special ids of the metadata, checked
    pretokenizers.py  the table of `tokenizer.ggml.pre`: how text is cut into pieces before byte-level BPE merges them
    bpe.py            BPE of bytes (`tokenizer.ggml.model` = gpt2) and of characters (gemma4), on the library `tokenizers`
    spm.py            SentencePiece merges by score with byte fallback (`tokenizer.ggml.model` = llama)
    tokenizer.py      `Tokenizer`: special tokens, BOS and EOS around either of them; decoding, whole or as a stream
"""
from .tokenizer import Detokenizer, Tokenizer
from .vocabulary import TokenizerError

__all__ = ["Detokenizer", "Tokenizer", "TokenizerError"]
