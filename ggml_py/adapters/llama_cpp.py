"""llama-cpp-python's `Llama` on this runtime: `from ggml_py.adapters.llama_cpp import Llama, LlamaGrammar`.

Arguments, defaults and the dictionaries of results are those of llama-cpp-python 0.3; what would change a result and is not there
is refused by its name. What concerns speed alone is taken and has no effect. Texts are those of `Model.generate` with the same
settings: equal calls give equal texts, on every device.
"""
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from gguf import GGMLQuantizationType

from ..base.defaults import DRAFT_MAX
from ..base.errors import ParameterError
from ..engine.completion import Piece, TokenLogprob
from ..engine.grammar import Grammar
from ..engine.likelihood import text_ids
from ..engine.model import Model
from ..engine.sampling import Sampling
from ..engine.settings import check_context
from ..kernels.threads import MOST, set_num_threads
from ..tokenizer.chat import encode_chat
from .placing import placement_of

LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW, LLAMA_SPLIT_MODE_TENSOR = range(4)
LLAMA_DEFAULT_SEED = 0xFFFFFFFF
SPLIT_MODES = "none", "layer", "row", "column"


class Refused(NamedTuple):
    """What an argument may be, and why it may be nothing else."""
    allowed: tuple
    reason: str


FILE = "the file says it"
ARGUMENTS = {  # of `Llama`
    "vocab_only": Refused((False,), "weights are always loaded; Tokenizer.from_gguf reads a tokenizer alone"),
    "kv_overrides": Refused((None, {}), FILE), "rope_scaling_type": Refused((None, -1), FILE),
    "rope_freq_base": Refused((0,), FILE), "rope_freq_scale": Refused((0,), FILE),
    "yarn_ext_factor": Refused((-1,), FILE), "yarn_attn_factor": Refused((-1, 1), FILE),
    "yarn_beta_fast": Refused((-1, 32), FILE), "yarn_beta_slow": Refused((-1, 1), FILE), "yarn_orig_ctx": Refused((0,), FILE),
    "pooling_type": Refused((-1,), "there are no embeddings of texts"), "attention_type": Refused((-1,), FILE),
    "embedding": Refused((False,), "there are no embeddings of texts"),
    "lora_base": Refused((None,), "there are no LoRA adapters"), "lora_path": Refused((None,), "there are no LoRA adapters"),
    "chat_format": Refused((None, "chat_template.default"), "the file's own template is taken"),
    "chat_handler": Refused((None,), "the file's own template is taken"),
    "tokenizer": Refused((None,), "the file's own is taken"),
    "spm_infill": Refused((False,), "there is no infill")}
SPEED_ALONE = {"n_batch", "n_ubatch", "n_threads_batch", "use_mlock", "logits_all", "flash_attn", "op_offload", "swa_full",
               "no_perf", "lora_scale", "numa", "verbose"}
COMPLETION = {  # of completions
    "suffix": Refused((None,), "there is no infill"), "typical_p": Refused((1,), "it is no step of sampling here"),
    "tfs_z": Refused((1,), "it is no step of sampling here"), "mirostat_mode": Refused((0,), "it is no step of sampling here"),
    "stopping_criteria": Refused((None,), "texts and control tokens stop a completion"),
    "logits_processor": Refused((None,), "logits stay on the device; logit_bias, penalties and grammars change them")}
COMPLETION_IGNORED = {"mirostat_tau", "mirostat_eta"}
ABSENT = {"embed": "there are no embeddings of texts", "create_embedding": "there are no embeddings of texts",
          "eval": "use model.new_context", "sample": "use model.generate", "generate": "use model.generate",
          "scores": "use model.new_context", "eval_logits": "use model.new_context", "eval_tokens": "use model.new_context",
          "save_state": "contexts are not saved", "load_state": "contexts are not saved",
          "create_chat_completion_openai_v1": "use create_chat_completion"}


def refuse(given: Mapping[str, Any], refused: Mapping[str, Refused], ignored: Iterable[str], where: str) -> None:
    """ParameterError for the first of the arguments that is not what it may be, or unknown."""
    for name, value in given.items():
        if name in refused:
            allowed, reason = refused[name]
            if not any(value is each or (value == each and value is not None) for each in allowed):
                raise ParameterError(name, f"is not supported, got {value!r:.60}: {reason}; allowed: "
                                           f"{' or '.join(map(repr, allowed))}")
        elif name not in ignored:
            raise ParameterError(name, f"is no argument of {where}")


class LlamaGrammar:
    """Makes `ggml_py.Grammar`."""

    @staticmethod
    def from_string(grammar: str, verbose: bool = True) -> Grammar:
        return Grammar.of(grammar)

    @staticmethod
    def from_file(file: str | Path, verbose: bool = True) -> Grammar:
        return Grammar.of(Path(file).read_text())

    @staticmethod
    def from_json_schema(json_schema: str, verbose: bool = True) -> Grammar:
        return Grammar.json_schema(json_schema)


class Llama:
    """model_path: a GGUF file, or "smollm2".   n_gpu_layers: 0: all on the CPU; -1: all on the first GPU, if there is one.
    split_mode, main_gpu, tensor_split: as llama.cpp has them (docs/placement.md).   n_ctx: positions, 0: as many as the model was
    trained on.   seed: of completions without one.   draft_model: None, "ngram", "mtp", another `Llama`, or what has
    `num_pred_tokens` (a prompt lookup).   type_k, type_v: numbers of ggml's types, or "f32", "f16", "q8_0".   others: what is
    allowed of ARGUMENTS, and SPEED_ALONE.   `model` is the `ggml_py.Model`.

    ParameterError (a ValueError) for what is refused."""

    def __init__(self, model_path: str | Path, *, n_gpu_layers: int = 0, split_mode: int = LLAMA_SPLIT_MODE_LAYER,  # noqa: PLR0913
                 main_gpu: int = 0, tensor_split: Sequence[float] | None = None, use_mmap: bool = True,
                 seed: int = LLAMA_DEFAULT_SEED, n_ctx: int = 512, n_threads: int | None = None, offload_kqv: bool = True,
                 last_n_tokens_size: int = 64, draft_model: Any = None, type_k: int | str | None = None,
                 type_v: int | str | None = None, **others: Any):
        refuse(others, ARGUMENTS, SPEED_ALONE, "Llama")
        if split_mode not in range(len(SPLIT_MODES)):
            raise ParameterError("split_mode", f"must be 0 to {len(SPLIT_MODES) - 1}, got {split_mode!r}")
        self.types: dict[str, Any] = {"type_k": _cache_type("type_k", type_k), "type_v": _cache_type("type_v", type_v)}
        self.draft, self.draft_max = _draft(draft_model)
        Sampling(seed=seed)
        self.seed, self.last_n_tokens_size, self.model_path = seed, last_n_tokens_size, str(model_path)
        if n_threads:
            set_num_threads(min(n_threads, MOST))
        device = "cpu" if n_gpu_layers == 0 else "auto"
        if tensor_split and n_gpu_layers:
            device = "/".join(f"cuda:{i}" for i in range(len(tensor_split)))
        placement = placement_of(device, n_gpu_layers=n_gpu_layers if n_gpu_layers > 0 else None,
                                 split_mode=SPLIT_MODES[split_mode], tensor_split=tensor_split or (), main_gpu=main_gpu,
                                 kv_offload=offload_kqv) if n_gpu_layers else None
        self.model = Model.load(model_path, device, placement=placement, mapped=use_mmap, nextn=self.draft == "mtp")
        self._n_ctx = n_ctx or self.model.n_ctx_train
        check_context(self.model, self._n_ctx)

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None, **arguments: Any) -> Self:
        """A model of the hub (docs/hub.md). filename: its name in the repository, or a pattern that ends in a quantization, such
        as "*q8_0.gguf"."""
        from ..files.hub import HubModel, pull_from_hub
        for name in "local_dir", "local_dir_use_symlinks", "cache_dir":
            arguments.pop(name, None)
        pattern = re.fullmatch(r"\*[-.]?(\w+)(?:\*|\.gguf)", filename or "")
        if "*" in (filename or "") and not pattern:
            raise ParameterError("filename", f"got {filename!r}, allowed: a name, or *QUANT.gguf")
        asked = HubModel(repo_id, quant=pattern[1]) if pattern else HubModel(repo_id, file=filename or "")
        return cls(pull_from_hub(asked), **arguments)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Llama.{name}: {'is not here: ' + ABSENT[name] if name in ABSENT else 'there is no such name'}")

    def __repr__(self) -> str:
        return f"<Llama of {self.model!r}>"

    # Texts

    def create_completion(self, prompt: str | Sequence[int], max_tokens: int | None = 16, temperature: float = 0.8,  # noqa: PLR0913
                          top_p: float = 0.95, min_p: float = 0.05, logprobs: int | None = None, echo: bool = False,
                          stop: str | Sequence[str] | None = (), frequency_penalty: float = 0.0, presence_penalty: float = 0.0,
                          repeat_penalty: float = 1.0, top_k: int = 40, stream: bool = False, seed: int | None = None,
                          model: str | None = None, grammar: Grammar | str | None = None,
                          logit_bias: Mapping[Any, float] | None = None,
                          **others: Any) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """A dictionary of the completion, or an iterator of chunks. max_tokens: None, 0 or less: until the context is full.
        logprobs: of so many of the likeliest tokens and of the chosen one.   others: COMPLETION, which are refused.

        A prompt that is a text has BOS where the file says so, once; special tokens in it are parsed."""
        refuse(others, COMPLETION, COMPLETION_IGNORED, "a completion")
        ids = text_ids(self.model.tokenizer, prompt) if isinstance(prompt, str) else [int(id) for id in prompt]
        if not ids and self.token_bos() >= 0:
            ids = [self.token_bos()]
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        found = self.model.generate(
            ids, stream=True, max_tokens=max_tokens if max_tokens and max_tokens > 0 else None,
            stop=[text for text in stops if text], logprobs=0 if logprobs is None else max(logprobs, 1), echo=echo,
            draft=self.draft, draft_max=self.draft_max,
            grammar=Grammar.of(grammar) if isinstance(grammar, str) else grammar, n_ctx=self._n_ctx, **self.types,
            temperature=temperature, top_p=top_p, min_p=min_p, top_k=max(top_k, 0), seed=self.seed if seed is None else seed,
            repeat_penalty=repeat_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
            repeat_last_n=self.last_n_tokens_size, logit_bias={int(id): float(b) for id, b in (logit_bias or {}).items()})
        text = prompt if isinstance(prompt, str) else self.detokenize(ids).decode("utf-8", "ignore")
        about = {"id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time()),
                 "model": self.model_path if model is None else model}
        parts = self._parts(found, text, echo, logprobs)
        if stream:
            return ({**about, "choices": [part.choice]} for part in parts)
        whole = [*parts]
        n_new = sum(part.n_ids for part in whole) - len(ids) * echo
        choice = {**whole[-1].choice, "text": "".join(part.choice["text"] for part in whole)}
        if logprobs is not None:
            known = [part.choice["logprobs"] for part in whole if part.choice["logprobs"]]
            choice["logprobs"] = {name: [each for part in known for each in part[name]] for name in LOGPROBS}
        return {**about, "choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": n_new,
                                                        "total_tokens": len(ids) + n_new}}

    __call__ = create_completion

    def create_chat_completion(self, messages: Sequence[Mapping], functions: Sequence[Mapping] | None = None,
                               function_call: Any = None, tools: Sequence[Mapping] | None = None, tool_choice: Any = None,
                               temperature: float = 0.2, response_format: Mapping[str, Any] | None = None,
                               max_tokens: int | None = None, logprobs: bool | None = None, top_logprobs: int | None = None,
                               **others: Any) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """An answer by the model's own chat template, which sees the tools; a call that the model writes is in its text. The
        template is told 2026-01-01 for the date.   response_format: {"type": "json_object", "schema": ...} holds the answer to
        JSON.   others: of `create_completion`."""
        for name, value in ("tool_choice", tool_choice), ("function_call", function_call):
            if value not in (None, "none", "auto"):
                raise ParameterError(name, f"is not supported, got {value!r:.60}: the model chooses; allowed: None, 'none' or "
                                           "'auto'")
        if functions is not None:
            tools = [{"type": "function", "function": each} for each in functions]
        if schema := _schema(response_format):
            others["grammar"] = Grammar.json_schema(schema)
        for name in "echo", "suffix":
            if name in others:
                raise ParameterError(name, "is no argument of an answer")
        found = self.create_completion(encode_chat(self.model.tokenizer, messages, tools=tools), max_tokens, temperature,
                                       logprobs=(top_logprobs or 0) if logprobs else None, **others)
        return _answer(found) if isinstance(found, dict) else _answers(found)

    def _parts(self, pieces: Iterator[Piece], prompt: str, echo: bool, n_top: int | None) -> Iterator["Part"]:
        """A text each, with the likelihoods of the tokens that it took, and a last one, which has the reason."""
        at, reason, n_ids = 0 if echo else len(prompt), None, 0
        held: list[TokenLogprob] = []
        for i, piece in enumerate(pieces):
            is_echo, reason = echo and i == 0, piece.finish_reason
            held += piece.logprobs[is_echo and piece.ids[0] == self.token_bos():]
            n_ids += len(piece.ids)
            text = prompt if is_echo else piece.text
            if text or (reason and held):
                yield Part({"text": text, "index": 0, "logprobs": self._listed(held, at, n_top), "finish_reason": None}, n_ids)
                at, held, n_ids = at + len(text), [], 0
        yield Part({"text": "", "index": 0, "logprobs": None, "finish_reason": "length" if reason == "length" else "stop"}, n_ids)

    def _listed(self, known: Sequence[TokenLogprob], at: int, n_top: int | None) -> dict[str, list] | None:
        """The lists of LOGPROBS. at: characters before the first token. Of tokens of equal texts the likeliest is shown."""
        rows, written = [], b""
        for each in known if n_top is not None else ():
            text = self._text(each.id)
            top: dict[str, float | None] = {}
            for id, logprob in each.top[:n_top]:
                top.setdefault(self._text(id), logprob)
            top[text] = each.logprob
            rows.append((text, each.logprob, None if each.logprob is None else top, at + len(written.decode("utf-8", "ignore"))))
            written += self.model.tokenizer.token_bytes(each.id)
        return dict(zip(LOGPROBS, map(list, zip(*rows)))) if rows else None

    def _text(self, id: int) -> str:
        return self.model.tokenizer.token_bytes(id).decode("utf-8", "ignore")

    # Tokens

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """add_bos: BOS, and EOS, where the file says so.   special: special tokens are parsed."""
        return self.model.tokenizer.encode(text.decode("utf-8", "surrogateescape"), add_special=add_bos, parse_special=special)

    def detokenize(self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False) -> bytes:
        """special: control tokens give their texts, not nothing."""
        text = b"".join(self.model.tokenizer.token_bytes(id, not special) for id in tokens)
        return text.removeprefix(b" ") if len(tokens) and tokens[0] == self.token_bos() else text

    def token_bos(self) -> int:
        return -1 if self.model.tokenizer.bos_id is None else self.model.tokenizer.bos_id

    def token_eos(self) -> int:
        return -1 if self.model.tokenizer.eos_id is None else self.model.tokenizer.eos_id

    def token_nl(self) -> int:
        return self.tokenize(b"\n", add_bos=False)[-1]

    def n_ctx(self) -> int:
        return self._n_ctx

    def n_embd(self) -> int:
        return self.model.architecture.hp.n_embd

    def n_vocab(self) -> int:
        return self.model.n_vocab

    @property
    def metadata(self) -> dict[str, str]:
        """Of the file, without lists."""
        return {key: str(value).lower() if isinstance(value, bool) else str(value)
                for key, value in self.model.file.metadata.items() if isinstance(value, str | int | float)}

    # State: a completion depends on its arguments alone

    def set_seed(self, seed: int) -> None:
        Sampling(seed=seed)
        self.seed = seed

    def reset(self) -> None:
        """Nothing is left to forget."""

    def set_cache(self, cache: Any) -> None:
        """What a prompt begins with as the one before is not computed again, with or without it."""

    def close(self) -> None:
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Part(NamedTuple):
    """A chunk's choice, and how many tokens it took."""
    choice: dict[str, Any]
    n_ids: int


LOGPROBS = "tokens", "token_logprobs", "top_logprobs", "text_offset"


def _cache_type(name: str, value: int | str | None) -> str:
    if value is None:
        return "f16"
    if isinstance(value, str):
        return value
    try:
        return GGMLQuantizationType(value).name.lower()
    except ValueError:
        raise ParameterError(name, f"must be a number of ggml's types, got {value!r}") from None


def _draft(asked: Any) -> tuple[Any, int]:
    """`draft` and `draft_max` of `Model.generate`."""
    if isinstance(asked, Llama):
        return asked.model, DRAFT_MAX
    n = getattr(asked, "num_pred_tokens", None)
    return ("ngram", n) if isinstance(n, int) else (asked, DRAFT_MAX)


def _schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_object", "schema": schema}:
            return schema
        case {"type": "json_object"}:
            return {"type": "object"}
    raise ParameterError("response_format", f"got {response_format!r:.60}, allowed: types text, json_object and json_schema")


def _chat_logprobs(known: Mapping[str, list] | None) -> dict[str, Any] | None:
    if known is None:
        return None
    listed = lambda token, logprob: {"token": token, "bytes": None, "logprob": logprob}
    return {"content": [{**listed(token, logprob), "top_logprobs": [listed(*each) for each in top.items()]}
                        for token, logprob, top in zip(known["tokens"], known["token_logprobs"], known["top_logprobs"])],
            "refusal": None}


def _answer(completion: Mapping[str, Any]) -> dict[str, Any]:
    choice, = completion["choices"]
    return {**completion, "id": f"chat{completion['id']}", "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": choice["text"]},
                         "logprobs": _chat_logprobs(choice["logprobs"]), "finish_reason": choice["finish_reason"]}]}


def _answers(chunks: Iterator[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chunks of which the first says the role."""
    for i, chunk in enumerate(chunks):
        choice, = chunk["choices"]
        about = {**chunk, "id": f"chat{chunk['id']}", "object": "chat.completion.chunk"}
        choices = [({"role": "assistant"}, None, None)] * (i == 0) + [
            ({"content": choice["text"]} if choice["finish_reason"] is None else {}, choice["logprobs"], choice["finish_reason"])]
        for delta, known, reason in choices:
            yield {**about, "choices": [{"index": 0, "delta": delta, "logprobs": _chat_logprobs(known), "finish_reason": reason}]}
