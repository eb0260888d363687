"""Models: a file's weights on a device, or on several, and what is done with whole texts. A model's `Context` is the memory of
sequences; what threads and processes may share is told there (`context`).
"""
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import permutations
from math import inf
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self, Unpack, overload

from ..backends import device_of, open_backend
from ..backends.base import Backend
from ..base.defaults import MOST_DEFAULT_CONTEXT, N_BATCH, N_UBATCH
from ..base.errors import ParameterError
from ..base.placement import HOST, PlacementOptions
from ..files.gguf import GGUFFile
from ..files.hub import HubModel, pull_from_hub
from ..files.pull import resolve
from ..graph.place import DeviceOf
from ..kernels.threads import MOST
from ..models import model_class
from ..models.fit import Fit, fitted
from ..state.recurrent import LEAST_ROLLBACK
from ..tokenizer import Tokenizer
from . import completion
from .completion import Arguments, Generation, Piece, Prompt, TextArguments
from .context import Context, lock_holders
from .generate_many import generate_many
from .kept import Kept
from .likelihood import Likelihood, Text, score_many
from .settings import Settings


class Model:
    """Weights on one device, or on several. Use as a context manager, or call close() to free device memory.

    Threads may share it and its tokenizer (see `context`)."""

    def __init__(self, file: GGUFFile, *backends: Backend, nextn: bool = False, placement: PlacementOptions | None = None):
        """backends: those that the placement needs. Without one, all is on the first; `new_context(device_of=)` may use others.
        """
        self.file, self.own_backends = file, backends  # which are closed with it
        self.backends = {backend.device: backend for backend in backends}
        for backend in backends:
            backend.reader = next((other for other in backends if other.asynchronous), None)
            backend.expect()
        for a, b in permutations(backends, 2):
            a.reaches(b)  # opens memory of b to a, which is quick as long as nothing lies there
        self.architecture = model_class(file)(file, placement or PlacementOptions((backends[0].device,)), self.backends)
        self.backend = self.backends[self.architecture.placement.output]
        self._tokenizer: Tokenizer | None = None
        self.lock = RLock()  # for queueing a micro-batch: on a GPU a model's contexts share a stream and what its kernels leave
        self.pid = os.getpid()
        self.kept = Kept(self)  # of `generate` and `score`
        self.fitted: PlacementOptions | None = None  # chosen by `load`, where not all fits
        lock_holders.add(self)
        self.has_nextn = nextn  # a block that predicts tokens further on
        self.architecture.load(nextn)

    @classmethod
    def load(cls, path: str | Path | None = None, device: str = "auto", nextn: bool = False,
             placement: PlacementOptions | None = None, fit: Fit | None = None, mapped: bool = True, *,
             hf: str | HubModel | None = None) -> Self:
        """path: a GGUF file (the first part of a split one), or "smollm2", which is fetched when it is missing (`ggml-py pull`).
        hf: in its place a model of the hub, "OWNER/NAME" or "OWNER/NAME:QUANT", or a `HubModel`, which also says which revision
        or file.
        device: "auto" (the first GPU if there is one), "cpu" or "cuda:N". nextn: whether the blocks that predict tokens further
        on (NextN, MTP) are loaded, that is checked and on the device: they draft (`engine.mtp`). placement: of weights, caches
        and nodes on several devices, in the place of `device`. fit: what the devices must have room for beside the weights; where
        they have not, and the placement says no more than the devices, another is chosen, `Model.fitted`.
        mapped: weights are taken from a memory map of the file; else each is read.

        UserError (a ValueError) in one line for a file or device that cannot be used.
        """
        if path is not None and hf is not None:
            raise ParameterError("path", f"got {path} and hf {hf}, one is enough")
        if hf is not None:
            place = pull_from_hub(HubModel.of(hf) if isinstance(hf, str) else hf)
        elif path is not None:
            place = resolve(path)
        else:
            raise ParameterError("path", "must be given, or hf")
        with ExitStack() as to_close:  # unless the model has them
            placement = placement and placement.renamed(device_of)
            needed = {each: placement.asked_by(each) for each in placement.needed} if placement else {device: "device"}
            backends = [to_close.enter_context(closing(open_backend(each, parameter, expect=True)))
                        for each, parameter in needed.items()]
            file = to_close.enter_context(GGUFFile.open(place, mapped))
            asked = placement or PlacementOptions((backends[0].device,))
            if fit is not None and asked.is_of_devices_alone and HOST not in asked.devices:
                placement = fitted(file, asked, {backend.device: backend.free_bytes() for backend in backends}, fit, nextn)
                backends += [to_close.enter_context(closing(open_backend(each)))
                             for each in placement.needed if each not in asked.devices]
            model = cls(file, *backends, nextn=nextn, placement=placement)
            chosen = replace(placement or asked, tensor_split=asked.tensor_split)  # shares alone: all fits
            model.fitted = placement if fit is not None and chosen != asked else None
            to_close.pop_all()
        return model

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.file.metadata)
        return self._tokenizer

    @property
    def n_vocab(self) -> int:
        return self.architecture.n_vocab

    @property
    def n_ctx_train(self) -> int:
        return self.architecture.hp.n_ctx_train

    @property
    def device(self) -> str:
        return self.backend.device

    def describe(self) -> str:
        hp = self.architecture.hp
        return (f"{self.file.path}: {self.architecture.name}, {hp.n_layer} layers of {hp.n_embd}, {hp.n_head[0]} heads, "
                f"{hp.n_head_kv[0]} KV heads of {hp.n_embd_head_k[0]}, vocabulary {self.n_vocab}, trained for {self.n_ctx_train} "
                f"positions; {', '.join(f'{n:,} bytes of weights on {device}' for device, n in self.weight_bytes().items())}")

    def weight_bytes(self) -> dict[str, int]:
        """Of each device, the model's own first."""
        found = self.architecture.weight_bytes()
        return {device: found[device] for device in self.architecture.placement.devices if found[device]}

    def report(self) -> str:
        """What its devices have copied so far, for --verbose; nothing of the CPU."""
        hot, offload = self.architecture.hot, self.architecture.placement.offload
        lines = [backend.report() for backend in self.backends.values()] + ([hot.report()] if hot is not None else [])
        if offload is not None and offload.n_rows not in (None, inf):
            lines.append(f"{offload.device}: takes products with weights of the host from {offload.n_rows:g} rows a matrix on")
        return "\n".join(filter(None, lines))

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **arguments: Unpack[Arguments]) -> Generation: ...

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **arguments: Unpack[Arguments]) -> Iterator[Piece]: ...

    def generate(self, prompt: Prompt, *, stream: bool = False,
                 **arguments: Unpack[Arguments]) -> Generation | Iterator[Piece]:
        """Continue a prompt: a text, token ids, or messages ({"role": ..., "content": ...}), which go through the chat
        template. Returns a `Generation`; with stream=True an iterator of `Piece`, which make up the same.

        max_tokens=128: at most, None: until the model ends its text or the context is full. temperature=0 (the likeliest
        token), top_k=40, top_p=0.95, min_p=0.05, seed=0, repeat_penalty=1, presence_penalty=0, frequency_penalty=0,
        repeat_last_n=64, logit_bias={id: bias}: of `Sampling`. Draws depend on (seed, sample, position) alone. stop: texts that
        end it. logprobs: of each token that was chosen, and so many of the likeliest there. echo: the prompt first. n:
        completions, of which each draws for itself. draft: None, "ngram", "mtp" or a smaller `Model`, to guess tokens ahead,
        draft_max=8 at a time; no bit depends on it. digest: of the logits. grammar: what a completion may be, a `Grammar`.
        n_ctx: positions; by default as many as are needed, at most those that the model was trained on. type_k, type_v: as of
        `new_context`.
        The context stays for the next call, which does not compute again what both texts begin with, until the model is closed.
        ParameterError for what cannot be; UserError for logits that hold NaN."""
        self._check_open()
        found = completion.stream(self, prompt, **arguments)
        return found if stream else completion.joined(completion.prompt_ids(self.tokenizer, prompt), found)

    def generate_many(self, prompts: Iterable[Prompt], *, n_seq_max: int | None = None,
                      progress: Callable[[int, int], None] | None = None,
                      **arguments: Unpack[TextArguments]) -> list[Generation]:
        """Continue many prompts side by side: of each what `generate` gives with these arguments, bit for bit, in the order of
        the prompts; of many, several times as fast.

        A prompt is what `generate` takes, and so are the arguments but for stream, echo, draft and draft_max. A text that ends
        makes room for the next prompt; what prompts begin with alike is computed once.   n_seq_max: texts side by side; None: up
        to 64, as fit into half of the GPU's free memory, on a CPU into 1 GiB of KV cache.   progress: is told how many different
        texts are done, and how many there are.
        ParameterError as of `generate`, which names the prompt; UserError for logits that hold NaN."""
        self._check_open()
        return generate_many(self, prompts, n_seq_max, progress, **arguments)

    @overload
    def chat(self, messages: Sequence[Mapping], *, stream: Literal[False] = False, **arguments: Any) -> Generation: ...

    @overload
    def chat(self, messages: Sequence[Mapping], *, stream: Literal[True], **arguments: Any) -> Iterator[Piece]: ...

    def chat(self, messages: Sequence[Mapping], *, stream: bool = False, **arguments: Any) -> Generation | Iterator[Piece]:
        """Answer a conversation, as `generate` does with its arguments. What these do not name goes into the chat template, such
        as tools, date or enable_thinking (`tokenizer.chat.encode_chat`)."""
        self._check_open()
        own: Any = {name: arguments.pop(name) for name in [*arguments] if name in Arguments.__annotations__}
        from ..tokenizer.chat import encode_chat  # jinja2 takes a while to import, and only chats need it
        ids = encode_chat(self.tokenizer, messages, **arguments)
        return self.generate(ids, stream=True, **own) if stream else self.generate(ids, **own)

    def score(self, context: Text, continuation: Text, **settings: Any) -> Likelihood:
        """How likely the model holds `continuation` behind `context`: `score_many` of one pair, of which it has the settings."""
        found, = self.score_many([(context, continuation)], **settings)
        return found

    def score_many(self, pairs: Iterable[tuple[Text, Text]], *, n_seq_max: int | None = None, type_k: str = "f16",
                   type_v: str = "f16", n_ubatch: int = N_UBATCH,
                   progress: Callable[[int, int], None] | None = None) -> list[Likelihood]:
        """Of each (context, continuation) the log-likelihood of the continuation's tokens: the same bits for a pair alone or
        among others, in any order.

        Both are texts, or token ids. Texts of one pair are split into tokens together; special tokens in them are parsed, BOS
        comes first where the model wants it; an empty context is BOS, else EOS (`engine.likelihood.encode_pair`).
        Contexts that begin alike are decoded once.   n_seq_max: pairs that are scored side by side; None: up to 64, as fit into 1
        GiB of KV cache. type_k, type_v, n_ubatch: as of `new_context`.   progress: is told how many different pairs are done, and
        how many there are.
        ParameterError for what is no pair, for a longer text than the model was trained on, and where nothing can stand for an
        empty context; UserError for ids that there are not."""
        self._check_open()
        return score_many(self, pairs, Settings(n_ubatch=n_ubatch, type_k=type_k, type_v=type_v), n_seq_max, progress)

    def new_context(self, n_ctx: int | None = None, n_batch: int = N_BATCH,  # noqa: PLR0913 (settings, given by their names)
                    n_ubatch: int = N_UBATCH, type_k: str = "f16", type_v: str = "f16", n_seq_max: int = 1,
                    no_fuse: Iterable[str] | str = (), graphs: bool = True,
                    kv_write: str = "set_rows", device_of: DeviceOf | None = None,
                    n_rollback: int = LEAST_ROLLBACK, n_threads_batch: int | None = None, letters: bool = True) -> Context:
        """Memory for n_seq_max sequences, which share n_ctx: each has n_ctx // n_seq_max positions, so
        new_context(64, n_seq_max=2) has two sequences of 32.

        n_ctx: positions of all sequences together (default: what the model was trained for, for each, where that takes 1 GiB at
        most; else n_ctx must be given).
        type_k, type_v: "f32", "f16" or "q8_0", of the KV cache. No bits depend on the others.
        n_batch is accepted as other engines have it; it bounds n_ubatch, the tokens computed at a time.
        no_fuse: names of graph passes to leave out (`graph.fuse.PASSES`), or "all".
        graphs: replay steps from CUDA graphs on a GPU.
        kv_write: how cells of the KV cache are named, "set_rows" or "cpy" (`state.kv_cache.KVCache`).
        device_of: node -> the name of one of `backends`, in the place of the model's placement.
        n_rollback: positions that sequences of a recurrent model can be taken back, which takes memory for each. Others go back
        to any.
        n_threads_batch: CPU threads for micro-batches of more than one token; None: as many as for one.
        letters: where all devices reach each other's memory, they hand over without the host (`graph.letters`).
        UserError in one line for what cannot be.
        """
        self._check_open()
        if not n_ctx:
            n_ctx = self.n_ctx_train * n_seq_max
            n_bytes = self.architecture.context_bytes(self.n_ctx_train, n_seq_max, type_k, type_v, n_rollback,
                                                      min(n_ubatch, n_batch)).total()
            if n_bytes > MOST_DEFAULT_CONTEXT:
                raise ParameterError("n_ctx", f"must be given: {self.n_ctx_train} positions, which {self.file.path} says it was "
                                              f"trained for, take {n_bytes:,} bytes for {n_seq_max} sequences; a context of that "
                                              f"length may take {MOST_DEFAULT_CONTEXT:,} without being asked for")
        for name, value in ("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_seq_max", n_seq_max):
            if value < 1:
                raise ParameterError(name, f"must be at least 1, got {value}")
        if n_threads_batch is not None and not 1 <= n_threads_batch <= MOST:
            raise ParameterError("n_threads_batch", f"must be 1 to {MOST}, the CPU threads of this machine, got "
                                                    f"{n_threads_batch}")
        settings = (n_ctx, min(n_ubatch, n_batch), type_k, type_v, n_seq_max, no_fuse, graphs, kv_write, device_of, n_rollback,
                    n_threads_batch, letters)
        try:
            return Context(self, *settings)
        except ParameterError:
            if not self.kept.clear():  # its memory may be what is missing
                raise
        return Context(self, *settings)

    @property
    def is_of_another_process(self) -> bool:
        """Whether this process was forked from the one that loaded the model on a GPU: it cannot use that memory."""
        return any(backend.asynchronous for backend in self.backends.values()) and os.getpid() != self.pid

    def _check_open(self) -> None:
        if self.kept.is_closed:
            raise RuntimeError("model: it is closed, its memory is gone; allowed: Model.load()")

    def close(self) -> None:
        if self.is_of_another_process:
            return
        self.kept.close()
        self.architecture.close()
        self.file.close()
        for backend in self.own_backends:
            backend.close()

    def __repr__(self) -> str:
        return (f"<Model {str(self.file.path)!r}: {self.architecture.name}, {self.architecture.hp.n_layer} layers, "
                f"{self.n_vocab} tokens, on {self.device}>")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
