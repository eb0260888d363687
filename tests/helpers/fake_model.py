"""A model without weights for tests of the commands: bytes as tokens, logits from a hash of the tokens up to the position,
so any slip shows."""
import hashlib
import re
from collections import Counter
from types import MappingProxyType

import numpy as np

from ggml_py.engine.kept import Kept
from ggml_py.engine.model import Model
from ggml_py.engine.sampling import chosen

BOS, EOS = 256, 257
N_VOCAB = 259  # odd: records of KL files are padded


class FakeTokenizer:
    suppressed: frozenset[int] = frozenset()
    model, n_vocab, bos_id, eos_id, add_eos, chat_template, chat_templates = "bytes", N_VOCAB, BOS, EOS, False, None, {}

    def __init__(self, add_bos: bool):
        self.add_bos = add_bos

    def encode(self, text, add_special=True, parse_special=False):
        text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)  # as real ones do
        return [BOS] * (add_special and self.add_bos) + list(text.encode("utf-8", "surrogateescape"))

    def token_bytes(self, id, skip_special=True):
        return bytes([id]) if id < 256 else b""

    def is_end_of_generation(self, id):
        return id == EOS


def prefix_logits(tokens) -> np.ndarray:
    """float32 [len(tokens), N_VOCAB]: row i depends on tokens[:i + 1] alone."""
    state, rows = hashlib.blake2b(digest_size=8), []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(state.digest(), "little")))
        rows.append(rng.standard_normal(N_VOCAB, np.float32))
    return 4 * np.array(rows)


class FakeContext:
    def __init__(self, model, n_ctx, n_batch, n_ubatch, type_k, type_v, n_seq_max):
        self.n_ubatch = n_ubatch
        self.model, self.n_batch, self.n_ctx = model, n_batch, n_ctx // n_seq_max
        self.memory, self.n_rollback, self.settings = self, self.n_ctx, ((), type_k, type_v)
        self.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        self.model.open_contexts -= 1

    def clear(self):
        self.sequences = {}

    def describe(self):
        return f"an arena for {self.n_ubatch} tokens"

    def launches(self):
        return "CUDA graphs: none"

    def decode(self, tokens, seq_id=0, logits="last"):
        return self.decode_batch([(seq_id, tokens)], logits)[0]

    def greedy(self, token, n, seq_id=0, see=None):
        for _ in range(n):
            if see is not None:
                see(row := self.decode([token], seq_id, "last")[-1])
                token = int(row.argmax())
            else:
                token = int(self.decode([token], seq_id, "argmax")[-1])
            yield token

    def greedy_batch(self, batch, n, more=None, draws=None):
        ids = dict(batch)
        for step in range(n):
            rows = [each[-1] for each in self.decode_batch([(seq_id, [token]) for seq_id, token in ids.items()])]
            found = [row.argmax() if draw is None else chosen(row, draw.sampling, draw.sampling.u(draw.position + step))
                     for row, draw in zip(rows, draws or [None] * len(rows))]
            ids = dict(zip(ids, [-1 if np.isnan(row).any() else int(token) for row, token in zip(rows, found)]))
            yield np.array([*ids.values()], np.int32)
            if more is not None and not more():
                return

    def decode_batch(self, entries, logits="last"):
        assert sum(len(tokens) for _, tokens in entries) <= self.n_batch
        self.model.calls.append((logits, {seq_id: len(tokens) for seq_id, tokens in entries}))
        results = []
        for seq_id, tokens in entries:
            past = self.sequences.setdefault(seq_id, [])
            past.extend(int(t) for t in tokens)
            assert len(past) <= self.n_ctx
            n_rows = {"all": len(tokens), "argmaxes": len(tokens), "none": 0}.get(logits, 1)
            rows = self.model.logits(past)[len(past) - n_rows:]
            results.append(np.where(np.isnan(rows).any(1), -1, rows.argmax(1)) if logits.startswith("argmax") else rows)
        return results

    def length(self, seq_id):
        return len(self.sequences.get(seq_id, []))

    def checkpoint(self, seq_id=0):
        pass

    def drop_checkpoints(self, seq_id=0):
        pass

    def reachable(self, seq_id, n):
        return min(n, self.length(seq_id))

    def keep(self, seq_id, n):
        assert n <= self.length(seq_id)
        del self.sequences.get(seq_id, [])[n:]


class FakeArchitecture:
    def angles_agree(self, n_ctx, other):
        return True

    def context_bytes(self, *settings):
        return Counter()


class FakeModel:
    """calls: (logits, {seq_id: n_tokens}) of each decode; open_contexts: contexts not yet left."""
    architecture, n_vocab, fitted, backends = FakeArchitecture(), N_VOCAB, None, MappingProxyType({})

    def __init__(self, add_bos=False, n_ctx_train=4096, logits=prefix_logits):
        self.tokenizer, self.n_ctx_train, self.logits = FakeTokenizer(add_bos), n_ctx_train, logits
        self.calls, self.open_contexts, self.kept = [], 0, Kept(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def describe(self):
        return "a fake model"

    def report(self):
        return "no copies"

    generate, _check_open = Model.generate, Model._check_open

    def new_context(self, *, n_ctx, n_batch=2048, n_ubatch=512, type_k="f16", type_v="f16", n_seq_max=1, no_fuse=(), graphs=True,
                    kv_write="set_rows", n_rollback=2, n_threads_batch=None):
        self.open_contexts += 1
        return FakeContext(self, n_ctx, n_batch, min(n_ubatch, n_batch), type_k, type_v, n_seq_max)
