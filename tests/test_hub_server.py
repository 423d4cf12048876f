# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The stand-in Hub against the real clients: what goes in through them comes out of them, as it would on the Hub."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hub_server import Store, client_environment, fetched_files, read_requests, serve
from safetensors.numpy import save_file

MISSING_PACKAGE = "package_that_nobody_installed"

# The entry file knows its sibling only by a relative import: nothing but transformers' scan can ask for scale_tiny.py.
MODELING_TINY = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .scale_tiny import scaled


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_scale"


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.post_init()

    def forward(self, values):
        return scaled(values, self.scale)
"""
SCALE_TINY = """
def scaled(values, scale):
    return values * scale
"""
# Never called: only a loader that scans this file can object to the import.
SCALE_TINY_WITH_HARD_IMPORT = f"""{SCALE_TINY}

def unused():
    import {MISSING_PACKAGE}

    return {MISSING_PACKAGE}
"""

UPLOAD_FOLDER = """
import json, sys
from huggingface_hub import HfApi
repo = HfApi().create_repo(sys.argv[1], exist_ok=True).repo_id
print(json.dumps([repo, HfApi().upload_folder(repo_id=repo, folder_path=sys.argv[2]).oid]))
"""
LOAD_TINY = """
import json, sys
import torch
from transformers import AutoModel
outcomes = []
for source in sys.argv[1:]:
    try:
        model = AutoModel.from_pretrained(source, trust_remote_code=True)
        outcomes.append(model(torch.tensor([10.0, 10.0, 10.0])).tolist())
    except ImportError as error:
        outcomes.append(f"{type(error).__name__}: {error}")
print(json.dumps(outcomes))
"""


class StandIn(NamedTuple):
    url: str
    root: Path


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandIn]:
    with serve(tmp_path / "hub") as url:
        yield StandIn(url, tmp_path / "hub")


def run_client(hub: StandIn, home: Path, script: str, *arguments: object, **environment: str) -> Any:
    """Run `script` in a fresh process whose only Hub is `hub`; its last line of output is its result, as JSON."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**client_environment(hub.url, home), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"the client failed:\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def write_tiny_repo(folder: Path, sibling: str) -> Path:
    folder.mkdir()
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    config = {"model_type": "tiny_scale", "architectures": ["TinyModel"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(MODELING_TINY)
    (folder / "scale_tiny.py").write_text(sibling)
    save_file({"scale": np.array([1, 2, 3], np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unknown_requests(hub: StandIn) -> list[str]:
    return [f"{r['method']} {r['url']}" for r in read_requests(hub.root) if r["endpoint"] is None]


def test_a_pushed_model_gives_the_same_logits_in_another_process(hub: StandIn, tmp_path: Path) -> None:
    logits_of = "model(torch.arange(8)[None]).logits.detach().numpy().tobytes().hex()"
    pushed, oid = run_client(
        hub,
        tmp_path / "pusher",
        f"""
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
commit = model.push_to_hub("llama")
print(json.dumps([{logits_of}, commit.oid]))
""",
    )
    loaded, cached = run_client(
        hub,
        tmp_path / "loader",
        f"""
import json, torch
from huggingface_hub import try_to_load_from_cache
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained("tester/llama").eval()
print(json.dumps([{logits_of}, try_to_load_from_cache("tester/llama", "model.safetensors")]))
""",
    )
    assert loaded == pushed, "the loaded weights are not the pushed ones"
    assert Path(cached).parent.name == oid, "the loader cached the weights under another commit than the pushed one"
    assert {"config.json", "model.safetensors"} <= fetched_files(hub.root, "tester/llama")
    assert not unknown_requests(hub), "transformers needs an endpoint that the stand-in lacks"


def test_remote_code_is_loaded_with_every_sibling(hub: StandIn, tmp_path: Path) -> None:
    folder = write_tiny_repo(tmp_path / "tiny", SCALE_TINY)
    run_client(hub, tmp_path / "pusher", UPLOAD_FOLDER, "tester/tiny", folder)
    assert fetched_files(hub.root, "tester/tiny") == set(), "an upload should fetch nothing"
    outcomes = run_client(hub, tmp_path / "loader", LOAD_TINY, "tester/tiny")
    assert outcomes == [[10.0, 20.0, 30.0]], "the served code or weights are not the uploaded ones"
    wanted = {"config.json", "modeling_tiny.py", "scale_tiny.py", "model.safetensors"}
    assert fetched_files(hub.root, "tester/tiny") == wanted
    assert not unknown_requests(hub), "transformers needs an endpoint that the stand-in lacks"


def test_a_siblings_hard_import_is_refused_from_the_hub_and_not_from_a_folder(hub: StandIn, tmp_path: Path) -> None:
    folder = write_tiny_repo(tmp_path / "hard", SCALE_TINY_WITH_HARD_IMPORT)
    run_client(hub, tmp_path / "pusher", UPLOAD_FOLDER, "tester/hard", folder)
    local, served = run_client(hub, tmp_path / "loader", LOAD_TINY, folder, "tester/hard")
    assert local == [10.0, 20.0, 30.0], "a folder's siblings are not scanned: this load should pass"
    assert isinstance(served, str), "the Hub's siblings are scanned: this load should be refused"
    assert served.startswith("ImportError: ") and MISSING_PACKAGE in served


def test_what_is_missing_raises_the_clients_own_errors(hub: StandIn, tmp_path: Path) -> None:
    names = run_client(
        hub,
        tmp_path / "home",
        """
import json
from huggingface_hub import CommitOperationDelete, HfApi, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()
api.create_repo("missing")
calls = {
    "file": lambda: hf_hub_download("tester/missing", "absent.json"),
    "folder": lambda: list(api.list_repo_tree("tester/missing", "absent")),
    "deleted file": lambda: api.delete_file("absent.json", "tester/missing"),
    "revision": lambda: hf_hub_download("tester/missing", ".gitattributes", revision="absent"),
    "commit": lambda: snapshot_download("tester/missing", revision="0" * 40),
    "branch": lambda: api.upload_file(
        repo_id="tester/missing", path_or_fileobj=b"", path_in_repo="x", revision="absent"
    ),
    "repo": lambda: hf_hub_download("tester/absent", "config.json"),
    "repo without namespace": lambda: api.model_info("absent"),
    "repo to upload to": lambda: api.upload_file(
        repo_id="tester/absent", path_or_fileobj=b"x", path_in_repo="x"
    ),
    "repo twice": lambda: api.create_repo("tester/missing"),
    "token": lambda: HfApi(token=False).create_repo("tester/another"),
    "parent": lambda: api.create_commit(
        "tester/missing",
        [CommitOperationDelete(".gitattributes")],
        commit_message="from a stale copy",
        parent_commit="0" * 40,
    ),
}
names = {}
for name, call in calls.items():
    try:
        call()
    except HfHubHTTPError as error:
        names[name] = [type(error).__name__, error.response.status_code]
    else:
        names[name] = None
# Neither None, "unknown", nor a path: a sentinel for a file that is known to be absent.
absence = try_to_load_from_cache("tester/missing", "absent.json")
names["absence is cached"] = absence is not None and not isinstance(absence, str)
print(json.dumps(names))
""",
    )
    assert names == {
        "file": ["RemoteEntryNotFoundError", 404],
        "folder": ["RemoteEntryNotFoundError", 404],
        "deleted file": ["RemoteEntryNotFoundError", 404],
        "revision": ["RevisionNotFoundError", 404],
        "commit": ["RevisionNotFoundError", 404],
        "branch": ["RevisionNotFoundError", 404],
        "repo": ["RepositoryNotFoundError", 404],
        "repo without namespace": ["RepositoryNotFoundError", 404],
        "repo to upload to": ["RepositoryNotFoundError", 404],
        "repo twice": ["HfHubHTTPError", 409],
        "token": ["HfHubHTTPError", 401],
        "parent": ["HfHubHTTPError", 412],
        "absence is cached": True,
    }


def test_older_revisions_stay_readable(hub: StandIn, tmp_path: Path) -> None:
    result = run_client(
        hub,
        tmp_path / "home",
        """
import json, sys
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
api, repo, folder = HfApi(), "tester/history", Path(sys.argv[1])
api.create_repo(repo, private=True)
(folder / "sub").mkdir(parents=True)
(folder / "note.txt").write_text("first")
(folder / "sub" / "é & 1.bin").write_bytes(bytes(range(256)))
first = api.upload_folder(repo_id=repo, folder_path=folder).oid
(folder / "note.txt").write_text("second")
second = api.upload_folder(repo_id=repo, folder_path=folder).oid
unchanged = api.upload_folder(repo_id=repo, folder_path=folder).oid
api.delete_folder("sub", repo)
snapshot = Path(snapshot_download(repo, revision=second))
print(json.dumps({
    "commits": [first, second, unchanged],
    "snapshot": [snapshot.name, (snapshot / "sub" / "é & 1.bin").read_bytes().hex()],
    "notes": [Path(hf_hub_download(repo, "note.txt", revision=r)).read_text() for r in (first, "main")],
    "files": [api.list_repo_files(repo, revision=r) for r in (second, "main")],
    "tree": [entry.path for entry in api.list_repo_tree(repo, revision=second)],
    "info": [(info := api.model_info(repo)).sha, info.private, [s.rfilename for s in info.siblings]],
    "user": api.whoami()["name"],
}))
""",
        tmp_path / "folder",
    )
    first, second, unchanged = result["commits"]
    head = Store(hub.root).read_commit("tester/history")
    assert len({first, second, head["sha"]}) == 3, "every commit needs a sha of its own"
    assert unchanged == second, "an upload without changes should make no commit"
    assert result["snapshot"] == [second, bytes(range(256)).hex()]
    assert result["notes"] == ["first", "second"]
    assert result["files"] == [[".gitattributes", "note.txt", "sub/é & 1.bin"], [".gitattributes", "note.txt"]]
    assert result["tree"] == [".gitattributes", "note.txt", "sub"]
    assert result["info"] == [head["sha"], True, [".gitattributes", "note.txt"]]
    assert result["user"] == "tester"


def test_ranges_and_unknown_endpoints_answer_as_http_asks(hub: StandIn, tmp_path: Path) -> None:
    result = run_client(
        hub,
        tmp_path / "home",
        """
import json
from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()
api.create_repo("ranges")
api.upload_file(repo_id="tester/ranges", path_or_fileobj=b"0123456789", path_in_repo="digits")
url = hf_hub_url("tester/ranges", "digits")
answers = [get_session().get(url, headers={"Range": f"bytes={r}"}) for r in ("2-4", "7-", "-3", "8-99", "10-")]
head = get_session().head(url).headers
try:
    api.list_repo_refs("tester/ranges")
except HfHubHTTPError as error:
    refused = [error.response.status_code, error.response.json()["error"]]
print(json.dumps({
    "ranges": [[a.status_code, a.headers["Content-Range"], a.text] for a in answers[:4]],
    "beyond": [answers[4].status_code, answers[4].headers["Content-Range"]],
    "head": [head[name] for name in ("Content-Length", "ETag", "X-Repo-Commit")],
    "refused": refused,
}))
""",
    )
    assert result["ranges"] == [
        [206, "bytes 2-4/10", "234"],
        [206, "bytes 7-9/10", "789"],
        [206, "bytes 7-9/10", "789"],
        [206, "bytes 8-9/10", "89"],
    ]
    assert result["beyond"] == [416, "bytes */10"]
    head = Store(hub.root).read_commit("tester/ranges")
    assert result["head"] == ["10", f'"{head["files"]["digits"]}"', head["sha"]]
    status, message = result["refused"]
    assert status == 404 and "no endpoint GET /api/models/tester/ranges/refs" in message
    assert unknown_requests(hub) == ["GET /api/models/tester/ranges/refs"], "the log should show what is missing"
