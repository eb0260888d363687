"""From parsed options to what they ask for: the files, the model on its device, settings of contexts and of sampling."""
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ..base.collection import settle
from ..base.defaults import MODEL, N_BATCH, N_UBATCH
from ..base.errors import UserError
from ..base.placement import Override, PlacementOptions
from .options import CACHE_TYPES
from .parser import refuse

OF_A_HUB = "-hff", "--revision", "--sha256", "--token", "--offline"
NVIDIA = Path("/dev/nvidiactl")  # is there where an NVIDIA driver of Linux is
FITTED_CONTEXT = 4096  # positions that --fit leaves room for where -c does not say


def existing(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a file")
    return path


def model_path(name: str) -> Path:
    """The file of -m, fetched if it is a name."""
    from ..files.pull import resolve
    return existing(resolve(name, sys.stderr))


def hub_path(options, name: str, thorough: bool = False) -> Path:
    """The file of -hf. thorough: of `pull_from_hub`."""
    from ..files.hub import HubModel, pull_from_hub
    asked = HubModel.of(name, file=options.hf_file or "", revision=options.revision, sha256=tuple(options.sha256 or ()),
                        token=options.token)
    return pull_from_hub(asked, sys.stderr, offline=options.offline, thorough=thorough)


def model_paths(options) -> list[Path]:
    """The files of -m or -hf, one each; the default model without either."""
    given = lambda names: [names] if isinstance(names, str) else list(names or ())
    refuse(options, ("-m",) * bool(options.hf), "-hf names the model")
    refuse(options, OF_A_HUB * (not options.hf), "is of -hf, which is not given")
    refuse(options, ("-hff", "--sha256") * (len(given(options.hf)) > 1), "is of one model, and -hf names several")
    if options.hf:
        return [hub_path(options, name) for name in given(options.hf)]
    return [model_path(name) for name in given(options.model) or [MODEL]]


def load_on(path: Path, device: str, load_model, placement=None, **more):
    """placement: in the place of the device; None: all is on it."""
    if load_model is None:
        from ..engine.model import Model
        load_model = Model.load
    model = load_model(path, device=device, **({"placement": placement} if placement else {}), **more)
    settle()
    return model


def devices_of(options) -> tuple[str, ...]:
    """Those of --device that share a model."""
    return tuple(options.device or ["auto"])


def placement_of(options, devices: tuple[str, ...]):
    """What the options of `options.placement` ask for, or None: all on one device."""
    from ..backends import device_of
    asked = PlacementOptions(devices, options.n_gpu_layers, tuple(options.overrides or ()), options.split_mode,
                             tuple(options.tensor_split), options.main_gpu, options.kv_offload, tuple(options.offload or ()),
                             options.hot_experts)
    if asked == PlacementOptions(devices[:1]):
        return None
    return asked.renamed(device_of)


def typed(placement) -> str:
    """What was asked for as options, but for the devices; "" for None."""
    if placement is None:
        return ""
    words = [f"-ngl {placement.n_gpu_layers}"] * (placement.n_gpu_layers is not None)
    if placement.split_mode != "layer":
        words.append(f"-sm {placement.split_mode}" + f" -mg {placement.main_gpu}" * (placement.split_mode == "none"))
    words += [f"-ts {','.join(f'{part:g}' for part in placement.tensor_split)}"] * bool(placement.tensor_split)
    words += ["-nkvo"] * (not placement.kv_offload)
    for asked in placement.overrides:
        if isinstance(asked, Override):
            words.append(f"-ot {asked.pattern}={asked.device}")
        else:
            words.append("-cmoe" if asked.n is None else f"{'--ncmoe-last' if asked.last else '-ncmoe'} {asked.n}")
    words += [f"--hot-experts {placement.hot_experts >> 20}"] * bool(placement.hot_experts)
    words += [f"--offload {name}={'never' if least is None else least}" for name, least in placement.offload]
    return " ".join(words)


@contextmanager
def load(options, load_model, **more):
    """The model of -m or -hf where -dev and the other options of its placement say, with the threads of -t; --verbose tells at
    the end what its devices copied. more: for `Model.load`."""
    path, placement = model_paths(options)[0], placement_of(options, devices_of(options))
    set_threads(options.n_threads)
    with reader(options, load_model, options.n_ctx)(path, devices_of(options)[0], placement, **more) as model:
        yield model
        if options.verbose and (report := model.report()):
            print(report, file=sys.stderr)


def reader(options, load_model, n_ctx: int | None, n_seq_max: int = 1):
    """(path, device, placement, ...) -> the model, by the options of `options.reading`. n_ctx, n_seq_max: of the context that
    --fit leaves room for."""
    from ..models.fit import Fit
    if options.numa:
        from ..kernels import numa
        try:
            numa.use(options.numa)
        except RuntimeError as error:
            raise UserError(f"--{error}") from None
    n_ubatch, n_batch, type_k, type_v = (most_of(options, *each) for each in (
        ("n_ubatch", N_UBATCH), ("n_batch", N_BATCH), ("type_k", "f16"), ("type_v", "f16")))
    fit = Fit(FITTED_CONTEXT if n_ctx is None else n_ctx, n_seq_max, type_k, type_v, min(n_ubatch, n_batch),
              options.fit_target << 20)
    settings = {"mapped": options.load_mode not in ("none", "mlock"), "fit": fit if options.fit == "on" else None}

    if load_model is None and (reason := missed_gpu(options)):
        print(f"--device: the CPU is taken: {reason}", file=sys.stderr)

    def read(path: Path, device: str, placement=None, **more):
        if load_model is not None:
            return load_on(path, device, load_model, placement, **more)
        model = load_on(path, device, None, placement, **settings, **more)
        if model.fitted:
            print(f"--fit: not all fits into {', '.join(model.fitted.devices)}; {typed(model.fitted)}", file=sys.stderr)
        if options.locked or "mlock" in options.load_mode:
            from ..base.memory import lock
            if trouble := lock():
                print(f"--mlock: {trouble}", file=sys.stderr)
        return model
    return read


def missed_gpu(options) -> str | None:
    """Why the CPU is taken where a GPU seems to be meant: -ngl is given, or this machine has an NVIDIA driver."""
    if options.device and options.device != ["auto"]:
        return None
    if NVIDIA.exists() or ("-ngl" in options.given.values() and options.n_gpu_layers != 0):
        from ..backends.cuda import unavailable
        return unavailable(0)
    return None


def most_of(options, name: str, default):
    """The option's value; of a list the one that takes the most memory; the default where the command has no such option."""
    found = getattr(options, name, None) or default
    if not isinstance(found, list):
        return found
    return min(found, key=CACHE_TYPES.index) if isinstance(default, str) else max(found)


def trained_context(options) -> int:
    """Positions that the command's model was trained for, by its file."""
    from ..files.gguf import GGUFFile
    name = getattr(options, "path", None) or getattr(options, "source", None)
    with GGUFFile.open(model_path(name) if name else model_paths(options)[0]) as file:
        return file.get(f"{file.get('general.architecture', 'str')}.context_length", "u32")


def checked_threads(n: int) -> int:
    from ..kernels.threads import MOST
    if n > MOST:
        raise UserError(f"-t: this machine has {MOST} CPU threads, got {n}")
    return n


def set_threads(n: int | None) -> None:
    """None leaves all."""
    if n is not None:
        from ..kernels.threads import set_num_threads
        set_num_threads(checked_threads(n))


def settings_of(options, **more):
    """What the options of `options.one_model` say about contexts."""
    from ..engine.settings import Settings
    names = "n_batch", "n_ubatch", "type_k", "type_v", "no_fuse", "graphs", "kv_write", "verbose", "n_threads_batch"
    return Settings(**{name: getattr(options, name) for name in names}, **more)


def sampling_of(options):
    from ..engine.sampling import Sampling
    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)


def choice_of(options, tokenizer):
    """How tokens are chosen; UserError for a bias of a token that there is not."""
    bias = {id: value for each in options.logit_bias for id, value in each.items()}
    if options.ignore_eos:
        bias |= {id: float("-inf") for id in range(tokenizer.n_vocab) if tokenizer.is_end_of_generation(id)}
    names = "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"
    return replace(sampling_of(options), logit_bias=bias, **{name: getattr(options, name) for name in names})


def matcher_of(options, tokenizer):
    """Of the grammar that is asked for; else what allows all."""
    from ..engine.grammar import FREE, Grammar
    if options.grammar is None:
        return FREE
    kind, source = options.grammar
    if not isinstance(source, str):
        from ..engine.windows import read_text
        source = read_text(existing(source))
    return getattr(Grammar, kind)(source).matcher(tokenizer)


def draft_source(options) -> str | None:
    """What --draft-source and -md ask for; UserError for options that do not go together."""
    kind = options.draft_source or ("model" if options.model_draft else None)
    refuse(options, ("--draft-max",) * (kind is None), "needs --draft-source")
    refuse(options, ("-md",) * (kind != "model"), "is of --draft-source model")
    refuse(options, ("--draft-p-min",) * (kind not in ("model", "mtp")), "is of --draft-source model and mtp")
    if kind == "model" and not options.model_draft:
        raise UserError("--draft-source model: needs -md")
    return kind


@contextmanager
def speculation_of(options, model, n_ctx: int, load_model):
    """How a text of n_ctx positions is guessed ahead, or None."""
    from ..engine.completion import drafting
    draft = draft_source(options)
    with ExitStack() as stack:
        if draft == "model":
            draft = stack.enter_context(load_on(model_path(options.model_draft), devices_of(options)[0], load_model))
        yield stack.enter_context(drafting(model, draft, n_ctx, options.draft_max, options.draft_p_min, options.type_k,
                                           options.type_v))
