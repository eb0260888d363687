"""A hub on this machine that speaks Hugging Face's protocol as far as models are read: names of files at a revision, where a file
is, and its bytes, whole or from an offset, by way of a second host as large files are. It can be told to fail."""
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep
from urllib.parse import unquote, urlsplit

ERRORS = {"private": (401, "", ""), "forbidden": (403, "", "this token may not"), "gated": (403, "GatedRepo", "ask its owner"),
          "broken": (500, "", "")}  # what a repository of that name answers: status, X-Error-Code, X-Error-Message


@dataclass
class Hub:
    """repos: {"OWNER/NAME": {revision: (commit, {file: bytes})}}, of which the commits are revisions as well.

    cut_after: bytes, after which the connection that sends a file is closed, as often as `n_cuts` says. pace: seconds between two
    pieces of 64 KiB. wrong: bytes are sent in the place of a file's content. marks: whether an ETag is the sha256.
    asked: each request, "METHOD path" and the Range; secrets: what was sent as authorization to the second host."""
    repos: dict[str, dict[str, tuple[str, dict[str, bytes]]]]
    cut_after: int | None = None
    n_cuts: int = 0
    pace: float = 0.0
    wrong: bool = False
    marks: bool = True
    asked: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    url: str = ""
    token: str = ""  # that must be given for a repository that is called secret

    def put(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Adds a commit, which `revision` is from now on. Returns its hash."""
        commit = sha256(repr((repo, sorted(files), [*map(sha256_of, files.values())])).encode()).hexdigest()[:40]
        self.repos.setdefault(repo, {}).update({revision: (commit, files), commit: (commit, files)})
        return commit

    def fetched(self) -> list[str]:
        """The requests for bytes."""
        return [each for each in self.asked if each.startswith("GET /bytes")]


def sha256_of(data: bytes) -> str:
    return sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, hub = unquote(urlsplit(self.path).path), self.hub
        hub.asked.append(f"{self.command} {path}{' ' + self.headers['Range'] if 'Range' in self.headers else ''}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            if at := self.commit(*found.groups()):
                commit, files = at
                body = {"id": found[1], "modelId": found[1], "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if at := self.commit(found[1], found[2]):
                commit, files = at
                if (name := found[3]) not in files:
                    return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                mark = sha256_of(files[name]) if hub.marks else sha256_of(files[name])[:40]
                other = f"http://localhost:{self.server.server_port}/bytes/{found[1]}/{commit}/{name}"
                self.answer(302, b"", {"X-Repo-Commit": commit, "X-Linked-Etag": f'"{mark}"', "Location": other,
                                       "X-Linked-Size": str(len(files[name]))})
        elif found := re.fullmatch(r"/bytes/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            hub.secrets.append(self.headers.get("Authorization", ""))
            self.send_file(hub.repos[found[1]][found[2]][1][found[3]])
        else:
            self.answer(404, b"<html>no hub</html>")
        return None

    def commit(self, repo: str, revision: str):
        """What a revision is; else an answer is given, and None returned."""
        name = repo.partition("/")[2]
        if name in ERRORS:
            status, code, message = ERRORS[name]
            self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message})
        elif name == "secret" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo not in self.hub.repos:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in self.hub.repos[repo]:
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return self.hub.repos[repo][revision]
        return None

    def send_file(self, content: bytes):
        if self.hub.wrong:
            content = bytes(len(content))
        first = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        cut = self.hub.cut_after if self.hub.n_cuts else None
        for start in range(first, len(content), 1 << 16):
            piece = content[start:start + (1 << 16)]
            if cut is not None and start - first + len(piece) > cut:
                self.wfile.write(piece[:cut - (start - first)])
                self.hub.n_cuts -= 1
                self.close_connection = True
                return
            self.wfile.write(piece)
            sleep(self.hub.pace)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(hub: Hub):
    """In the block, the hub answers at `hub.url`."""
    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass  # the other side has gone, as tests have it
    with Quiet(("127.0.0.1", 0), type("Answering", (Handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
