"""Models of a hub that speaks Hugging Face's protocol: chosen as llama.cpp's -hf chooses, verified, and plain files in the user's
cache folder, each with a record beside it that says what it is.

    models/hub/OWNER--NAME@REVISION/FILE.gguf                  whole, or not there
                                    FILE.gguf.pulled.json      the record: commit and sha256 (`Pulled`)
                                    .FILE.gguf.ETAG.partial    what has arrived; the next pull goes on from there

`huggingface_hub` asks and fetches. Of what it offers, `hf_hub_download` is not used: it throws away an interrupted file, and
keeps files as links into a store. Xet is not used either: it writes a file's pieces in any order, so that half a file cannot be
continued. Plain HTTP gives the same bytes.
"""
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..base.errors import ParameterError, UserError, quoted
from ..base.progress import Progress, teller
from .pull import file_sha256, models_folder
from .writing import write, writing

logger = logging.getLogger(__name__)

SHA256, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.IGNORECASE)
PREFERRED = "Q4_K_M", "Q8_0"  # where no quantization is asked for; else the first model
NO_MODELS = "mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"  # in names of files that go with a model


@dataclass(frozen=True)
class HubModel:
    """A model of a hub.

    repo: "OWNER/NAME". quant: such as "Q4_K_M", in any case; "": Q4_K_M if there is one, else Q8_0, else the first model.
    file: its name in the repository, in the place of `quant`. revision: a branch, a tag or a commit. sha256: of each file, by
    part, that it must have; (): as the hub says. token: as `huggingface_hub` takes it; None: of HF_TOKEN or of `hf auth login`.
    """
    repo: str
    quant: str = ""
    file: str = ""
    revision: str = "main"
    sha256: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, **more) -> "HubModel":
        """Of "OWNER/NAME" or "OWNER/NAME:QUANT"."""
        repo, colon, quant = name.partition(":")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII) or ".." in repo or bool(colon) != bool(quant):
            raise UserError(f"{quoted(name)} is not a model of a hub, expected OWNER/NAME or OWNER/NAME:QUANT")
        return cls(repo, quant, **more)

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision != "main" else ""
        return f"{self.repo}{at}{f':{self.quant}' if self.quant and not self.file else ''}"


@dataclass(frozen=True)
class Pulled:
    """What is known of a file: the commit of its repository, its name there, the hub's mark of its content, and what it holds."""
    repo: str
    revision: str
    file: str
    etag: str
    n_bytes: int
    sha256: str


class Unreachable(UserError):
    """The hub does not answer, or is not asked: what is here may do."""


def pull_from_hub(asked: HubModel, log=None, folder: Path | None = None, offline: bool = False, thorough: bool = False) -> Path:
    """The path of a model's file, or of its first part; fetched where it is missing, damaged, or another at this revision by now.

    log: a stream that is told what happens, with a bar if it is a terminal; None: by `logging`. offline: the hub is not asked. A
    hub that does not answer is told of, and what is here is taken. thorough: what is here is read and its sha256 compared, also
    where nothing wrote into it since it came.
    UserError in one line for what cannot be; no file is ever half there under its name."""
    say = teller(log, logger.info)
    folder = (models_folder() if folder is None else folder) / "hub"
    folder /= f"{asked.repo.replace('/', '--')}@{quote(asked.revision, safe='')}"
    commit = None
    try:
        if offline:
            raise Unreachable(f"pull: {asked}: is not here, and no hub is asked")
        commit, names = listing(asked)
    except Unreachable as error:
        names = sorted(record.file for _, record in recorded(folder))
        if not chosen_names(names, asked):
            raise
        if not offline:
            say(f"{error}; taking what is here")
    chosen = parts_of(asked, names)
    paths = [inside(folder, name, asked) for name in chosen]
    if asked.sha256 and len(asked.sha256) != len(chosen):
        raise ParameterError("sha256", f"{asked} has {len(chosen)} file{'s' * (len(chosen) > 1)}, got {len(asked.sha256)}")
    digests = asked.sha256 or ("",) * len(chosen)
    if commit is None:
        check_here(asked, paths, digests, thorough)
    else:
        for name, path, wanted in zip(chosen, paths, digests):
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with alone(folder / ".lock", asked, say):
                update(asked, commit, name, path, wanted, say, log, thorough)
    return paths[0]


# Which files

def listing(asked: HubModel) -> tuple[str, list[str]]:
    """The commit that the revision is, and the names of its files, in the hub's order."""
    from huggingface_hub import HfApi, constants
    with asking(asked):
        try:
            found = HfApi().model_info(asked.repo, revision=asked.revision, token=asked.token,
                                       timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (TypeError, KeyError, json.JSONDecodeError):
            raise UserError(f"pull: {asked}: {hub()} does not answer as a hub does") from None
    if not COMMIT.fullmatch(found.sha or ""):
        raise UserError(f"pull: {asked}: {hub()} names no commit of it, but {found.sha!r:.60}")
    return str(found.sha), [each.rfilename for each in found.siblings or ()]


def chosen_names(names: Sequence[str], asked: HubModel) -> list[str]:
    """The file that is asked for, or the best one by its quantization; none where there is none."""
    if asked.file:
        return [asked.file] * (asked.file in names)
    models = [name for name in names if name.endswith(".gguf") and not any(no in name.rpartition("/")[2] for no in NO_MODELS)]
    models = [name for name in models if not (split := SPLIT.fullmatch(name)) or int(split[2]) == 1]
    for quant in [asked.quant] if asked.quant else PREFERRED:
        found = [name for name in models if re.search(re.escape(quant) + "[.-]", name, re.IGNORECASE)]
        if found:
            return found[:1]
    return [] if asked.quant else models[:1]


def parts_of(asked: HubModel, names: Sequence[str]) -> list[str]:
    """The files of the model that is asked for, by part."""
    found = chosen_names(names, asked)
    if not found:
        there = ", ".join(quoted(name) for name in names if name.endswith(".gguf")) or "none"
        what = f"no file {quoted(asked.file)}" if asked.file else f"no model {quoted(asked.quant)}" if asked.quant else "no model"
        raise UserError(f"pull: {asked}: has {what}; its GGUF files: {there}")
    split = SPLIT.fullmatch(found[0])
    if not found[0].endswith(".gguf"):
        raise UserError(f"pull: {asked}: {quoted(found[0])} is not a GGUF file")
    if not split:
        return found
    parts = [f"{split[1]}-{i + 1:05}-of-{split[3]}.gguf" for i in range(int(split[3]))]
    missing = [part for part in parts if part not in names]
    if missing or not parts:
        example = quoted((missing or found)[0])
        raise UserError(f"pull: {asked}: {len(missing)} of {len(parts)} parts are missing, such as {example}")
    return parts


def inside(folder: Path, name: str, asked: HubModel) -> Path:
    """The path of a file; UserError for a name that would leave the folder, on any system."""
    if any(part in ("", ".", "..") or not part.isprintable() or {*part} & {*'\\:'} for part in name.split("/")):
        raise UserError(f"pull: {asked}: the file name {quoted(name)} leaves the folder of its model")
    return folder.joinpath(*name.split("/"))


# One file

def update(asked: HubModel, commit: str, name: str, path: Path, wanted: str, say, log, thorough: bool) -> None:
    """`path` holds the file as of the commit. wanted: its sha256; "": whatever the hub says."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    there = pulled(path)
    if there and there.revision == commit and is_intact(path, there, thorough):
        check_sha256(path, there.sha256, wanted)
        return
    url = hf_hub_url(asked.repo, name, revision=commit)
    with asking(asked, name):
        found = get_hf_file_metadata(url, token=asked.token)
    etag, n_bytes = found.etag or "", found.size
    if not re.fullmatch(r"[\w.-]+", etag) or n_bytes is None:
        raise UserError(f"pull: {asked}: {hub()} gives {quoted(name)} no ETag or no size")
    known = etag if SHA256.fullmatch(etag) else ""  # of large files; others are marked by git's hash
    if known:
        check_sha256(f"{asked}: {name}", known, wanted)
    if n_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise UserError(f"pull: {asked}: {quoted(name)} has {n_bytes:,} bytes; of more than {constants.MAX_HTTP_DOWNLOAD_SIZE:,} "
                        f"the hub gives by Xet alone: `hf download {asked.repo}` fetches it")
    if there and there.etag == etag and is_intact(path, there, thorough):
        sha256 = there.sha256
    elif known and path.is_file() and path.stat().st_size == n_bytes and file_sha256(path) == known:
        sha256 = known  # its record is lost
    elif known and linked(path, known):
        sha256 = known
        say(f"{name} is that of another revision, which is here")
    else:
        if path.exists():
            say(f"{path} is {'another' if there and there.etag != etag else 'damaged'} and will be fetched again")
        sha256 = fetch(asked, url, name, path, Pulled(asked.repo, commit, name, etag, n_bytes, known), wanted, say, log)
    check_sha256(path, sha256, wanted)
    write(record_of(path), json.dumps(asdict(Pulled(asked.repo, commit, name, etag, n_bytes, sha256)), indent=1).encode() + b"\n")


def fetch(asked: HubModel, url: str, name: str, path: Path, expected: Pulled, wanted: str, say, log) -> str:
    """Fetches a file, from where the last attempt ended, and gives it its name when all of it is right. Returns its sha256."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers
    place = path.with_name(f".{path.name}.{expected.etag[:16]}.partial")
    with writing(path):
        for left in path.parent.iterdir():  # of contents that are no longer asked for
            if left.name.startswith(f".{path.name}.") and left.name.endswith(".partial") and left != place:
                left.unlink()
        if place.exists() and place.stat().st_size > expected.n_bytes:
            place.unlink()
        n_there = place.stat().st_size if place.exists() else 0
        n_free = shutil.disk_usage(path.parent).free
    if expected.n_bytes - n_there > n_free:
        raise UserError(f"pull: {asked}: {quoted(name)} takes {expected.n_bytes - n_there:,} bytes more, {n_free:,} are free in "
                        f"{path.parent}")
    begun = f", going on at {n_there / 1e6:.1f} MB" if n_there else ""
    say(f"pulling {name} ({expected.n_bytes / 1e6:.1f} MB{begun}) of {asked.repo}, revision {expected.revision}")
    with (Progress(log, name.rpartition("/")[2], expected.n_bytes, n_done=n_there, of_bytes=True) as bar, asking(asked, name),
          open(place, "ab") as file):
        http_get(url, file, resume_size=n_there, headers=build_hf_headers(token=asked.token), expected_size=expected.n_bytes,
                 displayed_filename=name, tqdm_class=lambda **settings: Told(bar))  # type: ignore[arg-type]
    with writing(path):
        sha256 = file_sha256(place)
        for right in filter(None, (expected.sha256, wanted)):
            if sha256 != right:
                place.unlink()
                raise UserError(f"pull: {asked}: what came as {quoted(name)} has sha256 {sha256}, must have {right}; it is "
                                "thrown away")
        os.replace(place, path)
    return sha256


class Told:
    """What `http_get` takes for a tqdm: it tells a `Progress`."""

    def __init__(self, bar: Progress):
        self.bar = bar

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def update(self, n: int) -> None:
        self.bar.advance(n=n)


def check_here(asked: HubModel, paths: Sequence[Path], digests: Sequence[str], thorough: bool) -> None:
    """UserError unless the files are here as their records say, all of one revision."""
    revisions = set()
    for path, wanted in zip(paths, digests):
        there = pulled(path)
        if there is None or not is_intact(path, there, thorough):
            raise UserError(f"{path}: is damaged, and no hub is asked")
        check_sha256(path, there.sha256, wanted)
        revisions.add(there.revision)
    if len(revisions) > 1:
        raise UserError(f"pull: {asked}: its parts are of {len(revisions)} revisions, and no hub is asked")


def check_sha256(what: object, found: str, wanted: str) -> None:
    if wanted and found != wanted:
        raise UserError(f"{what}: sha256 is {found}, must be {wanted}")


# Records

def record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.pulled.json")


def pulled(path: Path) -> Pulled | None:
    """What the record beside a file says; None where there is none that can be read."""
    with suppress(OSError, ValueError, TypeError):
        found = Pulled(**json.loads(record_of(path).read_bytes()))
        if all(type(value) is type_ for value, type_ in zip(asdict(found).values(), (str, str, str, str, int, str))):
            return found
    return None


def recorded(folder: Path) -> Iterator[tuple[Path, Pulled]]:
    """The files of a folder that have records."""
    for path in folder.rglob("*.gguf"):
        if record := pulled(path):
            yield path, record


def is_intact(path: Path, record: Pulled, thorough: bool) -> bool:
    """The file is as its record says. It is read if it was written since the record was, or thoroughly."""
    if not path.is_file() or path.stat().st_size != record.n_bytes:
        return False
    unwritten = path.stat().st_mtime_ns <= record_of(path).stat().st_mtime_ns
    return (unwritten and not thorough) or file_sha256(path) == record.sha256


def linked(path: Path, sha256: str) -> bool:
    """Whether the same file was here, as of another revision of its repository, and has this name as well now."""
    folder = next(each for each in path.parents if each.parent.name == "hub")
    for other in folder.parent.glob(f"{folder.name.partition('@')[0]}@*"):
        for found, record in recorded(other):
            if record.sha256 == sha256 and found != path and is_intact(found, record, thorough=True):
                with suppress(OSError):  # a file system without links: it is fetched
                    path.unlink(missing_ok=True)
                    os.link(found, path)
                    return True
    return False


@contextmanager
def alone(lock: Path, asked: HubModel, say) -> Iterator[None]:
    """No other process pulls into the folder meanwhile; says so where that must be waited for."""
    from huggingface_hub.utils import WeakFileLock
    with ExitStack() as stack:
        with writing(lock):
            try:
                stack.enter_context(WeakFileLock(lock, timeout=0.5))
            except TimeoutError:
                say(f"another process pulls {asked}; waiting for it")
                stack.enter_context(WeakFileLock(lock))
        yield


# Errors

def hub() -> str:
    from huggingface_hub import constants
    return constants.ENDPOINT


@contextmanager
def asking(asked: HubModel, name: str = "") -> Iterator[None]:
    """What goes wrong between here and the hub is a UserError in one line; Unreachable where that may be another day."""
    from huggingface_hub import errors
    http_error: Any = errors.HfHubHTTPError.__bases__[0]  # of the HTTP library that huggingface_hub was made for
    who = f"pull: {asked}{f': {quoted(name)}' * bool(name)}"
    token = "HF_TOKEN or `hf auth login` gives a token that may read it"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(f"{who}: its owner gives it to those who accept the terms at {hub()}/{asked.repo}; {token}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{who}: {hub()} has no such repository, or it is private; {token}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{who}: has no revision {quoted(asked.revision)}") from None
    except errors.EntryNotFoundError:
        raise UserError(f"{who}: is not there at revision {quoted(asked.revision)}") from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable(f"{who}: is not asked for, as HF_HUB_OFFLINE says") from None
    except errors.HFValidationError as error:
        raise UserError(f"{who}: {error}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        said = f"{hub()} answers {status}{f': {error.server_message:.200}' if error.server_message else ''}"
        if status in (401, 403):
            raise UserError(f"{who}: no permission: {said}; {token}") from None
        raise (Unreachable if status >= 500 or status == 429 else UserError)(f"{who}: {said}") from None
    except http_error as error:
        raise Unreachable(f"{who}: {hub()} cannot be reached: {error}") from None
    except OSError as error:
        raise UserError(f"{who}: {error.strerror or error}") from None
