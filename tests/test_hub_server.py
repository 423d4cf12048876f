# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The stand-in Hub against the real clients: they read back what they write, as they would from the Hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hub_server import Store, client_in_process, fetched_files, read_requests, serve
from huggingface_hub import (
    CommitOperationDelete,
    HfApi,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError
from safetensors.numpy import save_file
from transformers import AutoModel

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


class StandIn(NamedTuple):
    url: str
    root: Path


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[StandIn]:
    folder = tmp_path_factory.mktemp("loopback")
    with serve(folder / "hub") as url:
        yield StandIn(url, folder / "hub")


@pytest.fixture
def api(hub: StandIn, tmp_path: Path) -> Iterator[HfApi]:
    with client_in_process(hub.url, tmp_path / "home"):
        yield HfApi()


def write_tiny_repo(folder: Path, sibling: str) -> Path:
    folder.mkdir()
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    config = {"model_type": "tiny_scale", "architectures": ["TinyModel"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(MODELING_TINY)
    (folder / "scale_tiny.py").write_text(sibling)
    save_file({"scale": np.array([1, 2, 3], np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_tiny(source: object) -> list[float]:
    model = AutoModel.from_pretrained(source, trust_remote_code=True)
    return model(torch.tensor([10.0, 10.0, 10.0])).tolist()


@pytest.mark.oldest
def test_remote_code_is_loaded_with_every_sibling_and_no_hard_import(hub: StandIn, api: HfApi, tmp_path: Path) -> None:
    repo = api.create_repo("tester/tiny").repo_id
    api.upload_folder(repo_id=repo, folder_path=write_tiny_repo(tmp_path / "tiny", SCALE_TINY))
    assert fetched_files(hub.root, repo) == set(), "an upload should fetch nothing"
    assert load_tiny(repo) == [10.0, 20.0, 30.0], "the served code or weights are not the uploaded ones"
    expected = {"config.json", "modeling_tiny.py", "scale_tiny.py", "model.safetensors"}
    assert fetched_files(hub.root, repo) == expected
    unknown = [r["url"] for r in read_requests(hub.root) if r["endpoint"] is None and repo in r["url"]]
    assert not unknown, "transformers needs an endpoint that the stand-in lacks"
    hard = write_tiny_repo(tmp_path / "hard", SCALE_TINY_WITH_HARD_IMPORT)
    api.upload_folder(repo_id=repo, folder_path=hard)
    assert load_tiny(hard) == [10.0, 20.0, 30.0], "a folder's siblings are not scanned: this load should pass"
    with pytest.raises(ImportError, match=MISSING_PACKAGE):
        load_tiny(repo)


def test_what_is_missing_raises_the_clients_own_errors(api: HfApi) -> None:
    api.create_repo("missing")
    repo = "tester/missing"
    delete = [CommitOperationDelete(".gitattributes")]
    not_found, rejected = "RemoteEntryNotFoundError", "HfHubHTTPError"
    calls = [
        (lambda: hf_hub_download(repo, "absent.json"), not_found, 404),
        (lambda: list(api.list_repo_tree(repo, "absent")), not_found, 404),
        (lambda: api.delete_file("absent.json", repo), not_found, 404),
        (lambda: hf_hub_download(repo, ".gitattributes", revision="absent"), "RevisionNotFoundError", 404),
        (lambda: snapshot_download(repo, revision="0" * 40), "RevisionNotFoundError", 404),
        (
            lambda: api.upload_file(repo_id=repo, path_or_fileobj=b"", path_in_repo="x", revision="absent"),
            *("RevisionNotFoundError", 404),
        ),
        (lambda: hf_hub_download("tester/absent", "config.json"), "RepositoryNotFoundError", 404),
        (lambda: api.model_info("absent"), "RepositoryNotFoundError", 404),
        (
            lambda: api.upload_file(repo_id="tester/absent", path_or_fileobj=b"x", path_in_repo="x"),
            *("RepositoryNotFoundError", 404),
        ),
        (lambda: api.create_repo(repo), rejected, 409),
        (lambda: HfApi(token=False).create_repo("tester/another"), rejected, 401),
        (lambda: api.create_commit(repo, delete, commit_message="stale", parent_commit="0" * 40), rejected, 412),
    ]
    for i, (call, name, status) in enumerate(calls):
        with pytest.raises(HfHubHTTPError) as raised:
            call()
        assert (type(raised.value).__name__, raised.value.response.status_code) == (name, status), f"call {i}"
    # Neither None, "unknown", nor a path: a sentinel for a file that is known to be absent.
    absence = try_to_load_from_cache(repo, "absent.json")
    assert absence is not None and not isinstance(absence, str), "the client should cache that a file is absent"


def test_older_revisions_stay_readable(hub: StandIn, api: HfApi, tmp_path: Path) -> None:
    repo, folder = "tester/history", tmp_path / "folder"
    api.create_repo(repo, private=True)
    (folder / "sub").mkdir(parents=True)
    (folder / "note.txt").write_text("first")
    (folder / "sub" / "é & 1.bin").write_bytes(bytes(range(256)))
    first = api.upload_folder(repo_id=repo, folder_path=folder).oid
    (folder / "note.txt").write_text("second")
    second = api.upload_folder(repo_id=repo, folder_path=folder).oid
    unchanged = api.upload_folder(repo_id=repo, folder_path=folder).oid
    api.delete_folder("sub", repo)
    head = Store(hub.root).read_commit(repo)
    assert len({first, second, head["sha"]}) == 3, "every commit needs its own sha"
    assert unchanged == second, "an upload without changes should make no commit"
    snapshot = Path(snapshot_download(repo, revision=second))
    assert snapshot.name == second and (snapshot / "sub" / "é & 1.bin").read_bytes() == bytes(range(256))
    notes = [Path(hf_hub_download(repo, "note.txt", revision=r)).read_text() for r in (first, "main")]
    assert notes == ["first", "second"]
    assert api.list_repo_files(repo, revision=second) == [".gitattributes", "note.txt", "sub/é & 1.bin"]
    assert [entry.path for entry in api.list_repo_tree(repo, revision=second)] == [".gitattributes", "note.txt", "sub"]
    info = api.model_info(repo)
    assert (info.sha, info.private) == (head["sha"], True)
    assert [s.rfilename for s in info.siblings] == [".gitattributes", "note.txt"] == api.list_repo_files(repo)
    assert api.whoami()["name"] == "tester"


def test_files_and_unknown_endpoints_follow_http(hub: StandIn, api: HfApi) -> None:
    repo = api.create_repo("http").repo_id
    api.upload_file(repo_id=repo, path_or_fileobj=b"0123456789", path_in_repo="digits")
    commit, headers = Store(hub.root).read_commit(repo), get_session().head(hf_hub_url(repo, "digits")).headers
    found = [headers[name] for name in ("Content-Length", "ETag", "X-Repo-Commit")]
    assert found == ["10", f'"{commit["files"]["digits"]}"', commit["sha"]]
    with pytest.raises(HfHubHTTPError) as unknown:
        api.list_repo_refs(repo)
    assert unknown.value.response.status_code == 404
    assert f"no endpoint GET /api/models/{repo}/refs" in unknown.value.response.json()["error"]
    logged = [r["url"] for r in read_requests(hub.root) if r["endpoint"] is None and repo in r["url"]]
    assert logged == [f"/api/models/{repo}/refs"], "the log should show what is missing"
