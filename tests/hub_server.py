# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A stand-in for the Hugging Face Hub on loopback: what `huggingface_hub` needs to create, fill and read model repos.

The clients under test are the real ones; only the server is ours. A client is this process (`client_in_process`) or
another one (`client_environment`):

    with serve(tmp_path / "hub") as url, client_in_process(url, tmp_path / "home"):
        HfApi().create_repo("tester/model")
    assert fetched_files(tmp_path / "hub", "tester/model") == set()

The root contains `models/<repo id>.json` (every commit: sha, path -> blob; every branch, tag and pull request:
name -> sha), `blobs/<git object id>` and `requests.jsonl` (one line per request). It is simpler than the Hub: it
stores models only, has no large files (LFS, Xet), accepts any token, and every model card passes `validate-yaml`.

`plan_faults` makes the next requests to an endpoint fail: with a status, or because the connection is cut.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "tester"  # the owner of every token, and of repos created without a namespace
BRANCH = "main"
REPO = r"(?P<repo>\w[\w.-]*(?:/\w[\w.-]*)?)"
REVISION = r"(?P<revision>[^/]+)"  # arrives quoted: the slashes of refs/pr/1 are %2F

# methods, path, the `Handler` method that responds, whether a token is needed
ROUTES = [
    (["GET"], r"/api/whoami-v2", "whoami", True),
    (["POST"], r"/api/repos/create", "create_repo", True),
    (["POST"], r"/api/validate-yaml", "validate_yaml", False),
    (["GET"], rf"/api/models/{REPO}(?:/revision/{REVISION})?", "model_info", False),
    (["GET"], rf"/api/models/{REPO}/tree/{REVISION}(?:/(?P<path>.+))?", "tree", False),
    (["POST"], rf"/api/models/{REPO}/preupload/{REVISION}", "preupload", True),
    (["POST"], rf"/api/models/{REPO}/commit/{REVISION}", "commit", True),
    (["POST"], rf"/api/models/{REPO}/branch/{REVISION}", "create_branch", True),
    (["POST"], rf"/api/models/{REPO}/tag/{REVISION}", "create_tag", True),
    (["GET", "HEAD"], rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", "resolve", False),
]


@dataclass
class Reply:
    """One HTTP response; `data` is sent as it is if it is bytes, and as JSON otherwise."""

    data: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class HubError(Exception):
    """A response that is an error; the client chooses the type of its exception by the `X-Error-Code` header."""

    def __init__(self, status: int, message: str, code: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        named = {"X-Error-Code": code} if code else {}
        self.reply = Reply({"error": message}, status, {**named, **(headers or {})})


class Store:
    """The repositories below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        (root / "requests.jsonl").touch()

    def repo_path(self, repo: str) -> Path:
        return self.root / "models" / f"{repo}.json"

    def read_repo(self, repo: str) -> dict[str, Any]:
        if not self.repo_path(repo).exists():
            raise HubError(404, f"Repository {repo} not found", "RepoNotFound")
        return dict(json.loads(self.repo_path(repo).read_text()))

    def read_commit(self, repo: str, revision: str = BRANCH) -> dict[str, Any]:
        """The commit that `revision` names: its `sha` and its `files`, path -> blob."""
        content = self.read_repo(repo)
        for commit in content["commits"]:
            if commit["sha"] == content["refs"].get(revision, revision):
                return dict(commit)
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def add_commit(self, repo: str, content: dict[str, Any], files: dict[str, str], ref: str) -> str:
        """Append a commit to `content`, let `ref` point to it, and store it. Its sha depends on the one before it."""
        before = content["commits"][-1]["sha"] if content["commits"] else None
        sha = hashlib.sha1(json.dumps([repo, before, files]).encode()).hexdigest()
        content["commits"].append({"sha": sha, "files": dict(sorted(files.items()))})
        content["refs"][ref] = sha
        self.write_repo(repo, content)
        return sha

    def write_repo(self, repo: str, content: dict[str, Any]) -> None:
        self.repo_path(repo).parent.mkdir(parents=True, exist_ok=True)
        self.repo_path(repo).write_text(json.dumps(content, indent=1))

    def next_fault(self, endpoint: str | None) -> int | None:
        """The status planned for a request to `endpoint`: 0 for a cut connection, None for no fault."""
        path = self.root / "faults.json"
        faults = json.loads(path.read_text()) if path.exists() else []
        for i, (name, status) in enumerate(faults):
            if name == endpoint:
                path.write_text(json.dumps(faults[:i] + faults[i + 1 :]))
                return int(status)
        return None

    def add_blob(self, data: bytes) -> str:
        """Store a file's content under its git object id, by which the client recognizes unchanged files."""
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (self.root / "blobs" / oid).write_bytes(data)
        return oid

    def read_blob(self, oid: str) -> bytes:
        return (self.root / "blobs" / oid).read_bytes()


class Handler(BaseHTTPRequestHandler):
    """HTTP in and out, and one method per endpoint, which returns a `Reply` or raises a `HubError`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets: Nagle would hold back the second for 40 ms
    store: Store
    lock = threading.Lock()

    def answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.origin = f"http://{self.headers['Host']}"
        entry = {"method": self.command, "url": unquote(self.path), "endpoint": None}
        # One request at a time: commits cannot race, and the log is complete before the client continues.
        with self.lock:
            try:
                reply = self.route(entry)
            except HubError as error:
                reply = error.reply
            with (self.store.root / "requests.jsonl").open("a") as log:
                log.write(json.dumps({**entry, "status": reply.status}) + "\n")
        if reply.status == 0:
            self.close_connection = True
            self.connection.close()
            return
        is_file = isinstance(reply.data, bytes)
        data = reply.data if is_file else json.dumps(reply.data).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/octet-stream" if is_file else "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = answer

    def route(self, entry: dict[str, Any]) -> Reply:
        path = urlsplit(self.path).path
        for methods, pattern, name, needs_token in ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or self.command not in methods:
                continue
            arguments = {key: unquote(value) for key, value in match.groupdict().items() if value}
            entry.update(endpoint=name, **arguments)
            fault = self.store.next_fault(name)
            if fault is not None:
                raise HubError(fault, "as planned")
            if needs_token and not self.headers.get("Authorization", "").startswith("Bearer "):
                raise HubError(401, "Invalid username or password.")
            return getattr(self, name)(**arguments)
        raise HubError(404, f"the stand-in Hub has no endpoint {self.command} {path}: if a client needs it, add it")

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: requests.jsonl is the log, and stderr is for tracebacks."""

    def whoami(self) -> Reply:
        token = {"type": "access_token", "accessToken": {"displayName": "stand-in", "role": "write"}}
        return Reply({"type": "user", "id": USER, "name": USER, "fullname": USER, "orgs": [], "auth": token})

    def create_repo(self) -> Reply:
        options = json.loads(self.body)
        repo = f"{options.get('organization') or USER}/{options['name']}"
        answer = {"name": repo, "url": f"{self.origin}/{repo}"}
        if self.store.repo_path(repo).exists():
            # With `exist_ok=True` the client reads the URL from the error.
            return Reply({"error": "You already created this model repo", **answer}, 409)
        private = options.get("private") or options.get("visibility") == "private"
        # As on the Hub, a new repo is not empty: its revisions resolve and the first upload has a parent.
        attributes = self.store.add_blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        content = {"private": bool(private), "commits": [], "refs": {}}
        self.store.add_commit(repo, content, {".gitattributes": attributes}, BRANCH)
        return Reply(answer)

    def validate_yaml(self) -> Reply:
        return Reply({"errors": [], "warnings": []})

    def model_info(self, repo: str, revision: str = BRANCH) -> Reply:
        commit, private = self.store.read_commit(repo, revision), self.store.read_repo(repo)["private"]
        siblings = [{"rfilename": path} for path in commit["files"]]
        return Reply({"id": repo, "sha": commit["sha"], "private": private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, path: str = "") -> Reply:
        recursive = "recursive=true" in self.path.lower()
        prefix = f"{path}/" if path else ""
        entries: dict[str, dict[str, Any]] = {}
        for name, oid in self.store.read_commit(repo, revision)["files"].items():
            if not name.startswith(prefix):
                continue
            child, slash, _ = name.removeprefix(prefix).partition("/")
            if slash and not recursive:
                folder_oid = hashlib.sha1(child.encode()).hexdigest()  # no client compares it: any 40 digits work
                entries[child] = {"type": "directory", "path": prefix + child, "oid": folder_oid}
            else:
                entries[name] = {"type": "file", "path": name, "oid": oid, "size": len(self.store.read_blob(oid))}
        if path and not entries:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        return Reply(list(entries.values()))

    def preupload(self, repo: str, revision: str) -> Reply:
        present = self.store.read_commit(repo, revision)["files"]
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        # With the `oid` of an existing file, the client leaves unchanged files out of the commit.
        common = {"uploadMode": "regular", "shouldIgnore": False}
        return Reply({"files": [{"path": path, "oid": present.get(path), **common} for path in paths]})

    def create_branch(self, repo: str, revision: str) -> Reply:
        return self.create_ref(repo, revision, json.loads(self.body or b"{}").get("startingPoint", BRANCH))

    def create_tag(self, repo: str, revision: str) -> Reply:
        return self.create_ref(repo, json.loads(self.body)["tag"], revision)

    def create_ref(self, repo: str, ref: str, revision: str) -> Reply:
        sha, content = self.store.read_commit(repo, revision)["sha"], self.store.read_repo(repo)
        if ref in content["refs"]:
            raise HubError(409, f"Reference already exists: {ref}")
        content["refs"][ref] = sha
        self.store.write_repo(repo, content)
        return Reply({})

    def commit(self, repo: str, revision: str) -> Reply:
        content = self.store.read_repo(repo)
        if revision not in content["refs"]:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        head, ref = self.store.read_commit(repo, revision), revision
        if "create_pr" in self.path:
            ref = f"refs/pr/{sum(name.startswith('refs/pr/') for name in content['refs']) + 1}"
        files = dict(head["files"])
        for line in self.body.splitlines():
            match json.loads(line):
                case {"key": "header", "value": header}:
                    if header.get("parentCommit", head["sha"]) != head["sha"]:
                        raise HubError(
                            412, f"{header['parentCommit']} is not the head of {revision}, {head['sha']} is"
                        )
                case {"key": "file", "value": {"path": path, "content": encoded, "encoding": "base64"}}:
                    files[path] = self.store.add_blob(base64.b64decode(encoded, validate=True))
                case {"key": "deletedFile" | "deletedFolder" as key, "value": {"path": path}}:
                    folder = path.rstrip("/") + "/"
                    kept = {p: o for p, o in files.items() if p != path and not p.startswith(folder)}
                    if len(kept) == len(files):
                        raise HubError(404, f"A file with this name doesn't exist: {key} {path}", "EntryNotFound")
                    files = kept
                case operation:
                    raise HubError(400, f"the stand-in Hub cannot commit a {operation['key']!r}")
        sha = self.store.add_commit(repo, content, files, ref)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.origin}/{repo}/commit/{sha}"}
        if ref != revision:
            answer["pullRequestUrl"] = f"{self.origin}/{repo}/discussions/{ref.rpartition('/')[2]}"
        return Reply(answer)

    def resolve(self, repo: str, revision: str, path: str) -> Reply:
        commit = self.store.read_commit(repo, revision)
        headers = {"X-Repo-Commit": commit["sha"]}
        if path not in commit["files"]:
            # The client caches that this commit lacks the file: the error names the commit, too.
            raise HubError(404, f"{path} not found at {revision}", "EntryNotFound", headers)
        oid = commit["files"][path]
        data = self.store.read_blob(oid)
        return Reply(data, 200, headers | {"ETag": f'"{oid}"'})


def read_requests(root: Path) -> list[dict[str, Any]]:
    """The requests so far: method, url, endpoint (None when unknown), status, and the route's repo, revision, path."""
    return [json.loads(line) for line in (root / "requests.jsonl").read_text().splitlines()]


def plan_faults(root: Path, *faults: tuple[str, int]) -> None:
    """The next requests to these endpoints meet these faults: an HTTP status, or 0 for a connection that is cut.

    Faults that were planned earlier are cancelled.
    """
    (root / "faults.json").write_text(json.dumps(faults))


def fetched_files(root: Path, repo: str) -> set[str]:
    """Paths of the files of `repo` whose content has been sent to a client."""
    sent = [r for r in read_requests(root) if r["endpoint"] == "resolve" and r["status"] == 200]
    return {r["path"] for r in sent if r["method"] == "GET" and r["repo"] == repo}


def client_environment(url: str, home: Path) -> dict[str, str]:
    """The environment of a client whose only Hub is `url`, with its caches and its login below `home`."""
    own = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(own)}
    nowhere = "http://127.0.0.1:9"  # nothing listens there: a request that leaves loopback fails at once
    closed = {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "ALL_PROXY": nowhere, "NO_PROXY": "127.0.0.1"}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    return {**inherited, **closed, **quiet, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": "hf_stand_in"}


@contextmanager
def client_in_process(url: str, home: Path) -> Iterator[None]:
    """Makes this process a client whose only Hub is `url`; the processes that it starts inherit the environment.

    `huggingface_hub` and transformers read the environment when they are imported, so their constants change as well.
    """
    import huggingface_hub
    import pytest
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    environment, constants = client_environment(url, home), huggingface_hub.constants
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(environment):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
        patch.setattr(hub, "_hf_api", None, raising=False)  # the client that newer versions of transformers keep
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(home / "modules"))
        patch.setattr(sys, "path", list(sys.path))  # transformers appends the folder of remote code
        for name in _remote_modules():
            patch.delitem(sys.modules, name)
        huggingface_hub.close_session()  # the next session reads the proxies of this environment
        try:
            yield
        finally:
            huggingface_hub.close_session()
            for name in _remote_modules():
                del sys.modules[name]


def _remote_modules() -> list[str]:
    """Remote code that is imported in this process."""
    return [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Run a stand-in Hub over `root` in threads of this process and yield its URL; its repos remain in `root`."""
    handler = type("BoundHandler", (Handler,), {"store": Store(root)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
