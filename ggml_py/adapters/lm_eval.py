"""lm-evaluation-harness 0.4.13 (the extra `lm-eval`): GGUF files as its model `ggml-py`.

    python -m ggml_py.adapters.lm_eval run --model ggml-py --model_args pretrained=model.gguf --tasks ...

is the harness's command line with this model registered, since that version has no plug-ins; from Python, importing this module
registers it. What a score is made of is the harness's: it splits pairs of texts, cuts documents into windows, reads the settings
of a task and cuts texts at their stops. Batch size, device and placement change no bit of a score.
"""
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from itertools import chain, cycle, islice
from math import fsum, prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"ggml_py.adapters.lm_eval: needs lm-evaluation-harness, the extra lm-eval: {error}",
                              name=error.name) from None

from .. import NUMERICS_VERSION, __version__
from ..base.defaults import CHAT_DATE, DRAFT_MAX, MODEL
from ..base.errors import ParameterError, UserError, printable
from ..check.attestation import files_sha256, tokenizer_sha256
from ..engine.completion import Generation
from ..engine.likelihood import Likelihood, text_ids
from ..engine.model import Model
from ..engine.settings import check_context
from ..models.fit import Fit
from ..tokenizer.chat import ChatTemplate, ChatTemplateError
from .placing import PLACING, placement_of

log = logging.getLogger(__name__)
NAME = "ggml-py"
HARNESS_DEVICE = "cuda:0"  # what its command line passes where nobody names a device
FITTED_CONTEXT = 4096  # positions that a model must leave room for where n_ctx is not given
KEPT = 1000  # pairs that are scored in one call; the harness's cache has those of the calls before
SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "repetition_penalty": "repeat_penalty"}  # the harness's names, and ours


@dataclass(frozen=True)
class HarnessTokenizer:
    """What the harness asks a tokenizer for. chat_template: a source, or several by their names."""
    chat_template: str | dict[str, str] | None
    bos_token_id: int | None
    bos_token: str | None
    eos_token_id: int | None
    eos_token: str | None
    pad_token_id: int | None = None
    pad_token: str | None = None


class Asked(NamedTuple):
    """A text to generate.   requests: the numbers of those that ask for it.   arguments: of `Model.generate_many`."""
    ids: list[int]
    requests: list[int]
    arguments: dict[str, Any]


@register_model(NAME)
class GGMLPy(TemplateLM):
    """pretrained: a GGUF file, or "smollm2".   hf: in its place a model of the hub, OWNER/NAME or OWNER/NAME:QUANT.
    device: "auto", "cpu", "cuda:N", several with / between.   n_ctx: positions at most; by default what the model was trained on.
    batch_size: pairs that are scored, and texts that are generated, side by side; "auto": as fit.   type_k, type_v: of the KV
    cache.   max_gen_toks: of tasks that do not say.   seed: of tasks that draw.   draft, draft_max: as of `Model.generate`; texts
    are then generated one after the other.   date, enable_thinking, chat_template_args: for the chat template.   think_end_token:
    the text behind which answers begin.   placement: of `placing.placement_of`."""

    def __init__(self, pretrained: str | None = None, hf: str | None = None, device: str | None = None,  # noqa: PLR0913
                 n_ctx: int | None = None, batch_size: int | str | None = None, type_k: str = "f16", type_v: str = "f16",
                 max_gen_toks: int = 256, seed: int = 0, draft: str | None = None, draft_max: int = DRAFT_MAX,
                 date: str = CHAT_DATE, enable_thinking: bool | None = None,
                 chat_template_args: Mapping[str, Any] | None = None, think_end_token: str | None = None,
                 max_batch_size: int | None = None, trust_remote_code: bool = False, **placement: Any):
        super().__init__()
        for name in placement.keys() - {*PLACING}:
            raise ParameterError(name, f"is no argument of {NAME}; allowed: {', '.join(ARGUMENTS)}")
        self.n_seq_max = _n_seq_max(batch_size)
        where = "auto" if device in (None, HARNESS_DEVICE) else str(device)
        self.model = Model.load(pretrained or (None if hf else MODEL), where, nextn=draft == "mtp", hf=hf,
                                placement=placement_of(where, **placement),
                                fit=Fit(n_ctx or FITTED_CONTEXT, type_k=type_k, type_v=type_v))
        log.info("%r", self.model)
        if n_ctx is not None:
            check_context(self.model, n_ctx)
        self.max_length = n_ctx or self.model.n_ctx_train
        self.max_gen_toks = max_gen_toks
        # what a task does not set is off
        self.drawing: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": -1,
                                        "seed": seed}
        self.drafting: dict[str, Any] = {} if draft is None else {"draft": draft, "draft_max": draft_max}
        self.types: dict[str, Any] = {"type_k": type_k, "type_v": type_v}
        self.date, self.think_end_token = date, think_end_token
        self.template_arguments = {**(chat_template_args or {}),
                                   **({} if enable_thinking is None else {"enable_thinking": enable_thinking})}
        self.template: str | None = None  # the name of one of several
        self._device, self._digest = self.model.device, sha256()
        own = self.model.tokenizer
        bos, eos = (None if id is None else own.token_text(id) for id in (own.bos_id, own.eos_id))
        named = {**({"default": own.chat_template} if own.chat_template else {}), **own.chat_templates}
        self.tokenizer = HarnessTokenizer(named if own.chat_templates else own.chat_template, own.bos_id, bos, own.eos_id, eos)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None):
        """What model_args name comes before the harness's own device and batch size."""
        return super().create_from_arg_obj(arg_dict, {name: value for name, value in (additional_config or {}).items()
                                                      if name not in arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None):
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    @property
    def batch_size(self) -> int | str:
        return self.n_seq_max or "auto"

    @property
    def eot_token_id(self) -> int | None:
        return self.model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What a first token stands behind: BOS, else EOS."""
        own = self.model.tokenizer
        start = own.eos_id if own.bos_id is None else own.bos_id
        if start is None:
            raise UserError(f"{self.model.file.path}: has neither BOS nor EOS, behind which a text could begin")
        return start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Special tokens are parsed; BOS comes first where the file says so, once. add_special_tokens=False: only what the text
        has."""
        if add_special_tokens is False:
            return self.model.tokenizer.encode(string, add_special=False, parse_special=True)
        return text_ids(self.model.tokenizer, string)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        answers = []
        found = self._likelihoods([(context, ids) for _, context, ids in requests], "loglikelihood", disable_tqdm)
        for (texts, *_), each in zip(requests, found):
            if not each.ids and texts[1]:
                raise UserError(f"loglikelihood: {texts[1]!r:.60} has no tokens of its own behind {texts[0]!r:.60}")
            answers.append((each.logprob, each.is_greedy))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Of each document the exact sum over its tokens, rounded once. The first stands behind `prefix_token_id`, once."""
        windows = [self._windows(*request.args) for request in requests]
        found = self._likelihoods([*chain(*windows)], "loglikelihood_rolling", disable_tqdm)
        answers = []
        for request, own in zip(requests, windows):
            answers.append(fsum(logprob for each in islice(found, len(own)) for logprob in each.logprobs))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        ids = self.tok_encode(text, add_special_tokens=False)
        start = self.prefix_token_id
        windows = utils.get_rolling_token_windows(ids[ids[:1] == [start]:], start, self.max_length, context_len=1)
        return [*map(utils.make_disjoint_window, windows)]

    def _likelihoods(self, pairs: list[tuple[list[int], list[int]]], what: str, disable_tqdm: bool) -> Iterator[Likelihood]:
        """Of ids, one after the other, as soon as they are known."""
        with tqdm(total=len(pairs), desc=f"Running {what} requests", disable=disable_tqdm) as bar:
            for first in range(0, len(pairs), KEPT):
                for each in self._scored([self._cut(*pair) for pair in pairs[first:first + KEPT]], bar):
                    self._digest.update(np.asarray(each.ids, "<i4").tobytes() + np.asarray(each.logprobs, "<f4").tobytes())
                    yield each

    def _scored(self, pairs: list[tuple[list[int], list[int]]], bar: tqdm) -> list[Likelihood]:
        return self.model.score_many(pairs, n_seq_max=self.n_seq_max, progress=_shower(bar, len(pairs)), **self.types)

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Of too many ids the last max_length + 1. An empty context is `prefix_token_id`."""
        context = context or [self.prefix_token_id]
        n = len(context) + len(continuation) - (self.max_length + 1)
        if n > 0:
            log.warning("loglikelihood: %d tokens of context and %d of continuation, allowed are %d; the first %d are cut",
                        len(context), len(continuation), self.max_length + 1, n)
        if n >= len(context):
            raise UserError(f"loglikelihood: a continuation has {len(continuation)} tokens, allowed: up to {self.max_length}")
        return context[max(n, 0):], continuation

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Requests that are equal ask for several samples, or, without a draw, for one text. Texts with the same settings are
        generated side by side; with drafts one after the other, those that begin alike behind each other."""
        same: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            same.setdefault(json.dumps(request.args, sort_keys=True, default=str), []).append(i)
        alike: dict[str, list[Asked]] = {}
        for places in same.values():
            asked = self._asked(requests[places[0]].args, places)
            alike.setdefault(json.dumps(asked.arguments, default=str), []).append(asked)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for every in alike.values():
                every.sort(key=itemgetter(0))
                for first in range(0, len(every), KEPT):
                    part = every[first:first + KEPT]
                    for asked, found in zip(part, self._generated(part, bar)):
                        for i, completion in zip(asked.requests, cycle(found.completions)):
                            answers[i] = postprocess_generated_text(completion.text, asked.arguments["stop"],
                                                                    self.think_end_token)
                            self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        for text in answers:
            self._digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
        return answers

    def _generated(self, texts: list[Asked], bar: tqdm) -> Iterator[Generation]:
        """Of texts with the same arguments."""
        arguments = {**texts[0].arguments, **self.types}
        if self.drafting:
            for asked in texts:
                yield self.model.generate(asked.ids, **arguments, **self.drafting)
                bar.update(len(asked.requests))
            return
        yield from self.model.generate_many([asked.ids for asked in texts], n_seq_max=self.n_seq_max,
                                            progress=_shower(bar, sum(len(asked.requests) for asked in texts)), **arguments)

    def _asked(self, args: tuple[str, dict], requests: list[int]) -> Asked:
        context, gen_kwargs = args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        n, draws = settings.pop("max_gen_toks"), settings.pop("do_sample")
        stops = [text for text in handle_stop_sequences(settings.pop("until"), self.tokenizer.eos_token) if text]
        if not 0 <= n < self.max_length:
            raise ParameterError("max_gen_toks", f"must be 0 to {self.max_length - 1}, which leaves room for a prompt in "
                                                 f"{self.max_length} positions, got {n}")
        ids, n = maybe_truncate(self.tok_encode(context) or [self.prefix_token_id], n, self.max_length)
        if settings.pop("num_beams", 1) != 1:
            raise ParameterError("num_beams", "tokens are chosen one by one; allowed: 1")
        for name in settings.keys() - SAMPLING.keys():
            raise ParameterError(name, f"is no setting of generation here; allowed: until, max_gen_toks, do_sample, "
                                       f"{', '.join(SAMPLING)}")
        arguments = {**self.drawing, **{SAMPLING[name]: value for name, value in settings.items()}, "max_tokens": n,
                     "stop": stops}
        if not draws:
            arguments["temperature"] = 0.0
        return Asked(ids, requests, {**arguments, "n": len(requests) if arguments["temperature"] > 0 else 1})

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source; of several the one of this name, which `apply_chat_template` then takes too."""
        found = super().chat_template(chat_template)
        self.template = chat_template if chat_template in self.model.tokenizer.chat_templates else None
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Without add_generation_prompt the last message is the beginning of an answer, which stays open."""
        template = ChatTemplate.of(self.model.tokenizer, self.template)
        render = lambda messages: template.render(messages, add_generation_prompt, self.date, **self.template_arguments)
        try:
            text = render(chat_history)
        except ChatTemplateError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            log.warning("%s; the system message is left out", error)
            text = render(rest)
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"]
        begun = begun if begun in text else begun.strip()
        if begun not in text:
            raise ChatTemplateError(f"{template.key}: the prompt does not hold the last message, {begun!r:.60}")
        return text[:text.rindex(begun) + len(begun)]

    @property
    def tokenizer_name(self) -> str:
        """For the names of cached requests: what they are made by."""
        made_by = [tokenizer_sha256(self.model.file.metadata), self.template, self.date, self.template_arguments]
        return f"gguf-{sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        """For the file of results. results_sha256: of all answers so far, in the order of the requests: likelihoods (ids as
        little-endian int32, then float32, pair by pair) and texts (UTF-8, then a zero byte)."""
        tensors = self.model.file.tensors.values()
        types = sorted({info.type.name for info in tensors})
        return {"model_num_parameters": sum(prod(info.shape) for info in tensors), "model_dtype": ", ".join(types),
                "model_sha": files_sha256(self.model.file), "model_name": self.model.file.path.name,
                "tokenizer_sha": tokenizer_sha256(self.model.file.metadata), "model_device": self.model.device,
                "max_length": self.max_length, **self.types, "ggml_py": __version__, "numerics": NUMERICS_VERSION,
                "results_sha256": self._digest.hexdigest()}


ARGUMENTS = *list(signature(GGMLPy).parameters)[:-1], *PLACING


def _shower(bar: tqdm, n_requests: int) -> Callable[[int, int], None]:
    """(how many are done, of how many) moves the bar over so many requests."""
    before = bar.n
    return lambda done, n: bar.update(before + n_requests * done // n - bar.n)


def _n_seq_max(batch_size: int | str | None) -> int | None:
    text = str(batch_size)
    if batch_size is None or text.split(":")[0] == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ParameterError("batch_size", f"must be at least 1, or auto, got {batch_size!r}")
    return int(text)


def main() -> int:
    from lm_eval.__main__ import cli_evaluate
    try:
        cli_evaluate()
    except UserError as error:
        print(f"{NAME}: error:", printable(" ".join(str(error).split())), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
