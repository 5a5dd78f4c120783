"""Upload and download through the Hub on loopback, each with huggingface_hub in a process of its own."""

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hub_server import HubServer
from hub_server.clients import answer_of, run_client, run_python

PRELUDE = """
import json, sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
api = HfApi()

def error_of(call, *arguments, **settings):
    try:
        call(*arguments, **settings)
    except Exception as error:
        return type(error).__name__
    return None
"""
UPLOAD = f"""{PRELUDE}
api.create_repo("user/name", exist_ok=True)
api.upload_folder(repo_id="user/name", folder_path=sys.argv[1])
"""


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small text, an empty file, a file in a folder, a large file of one part and one of three."""
    made = tmp_path / "checkpoint"
    (made / "deep" / "er").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "README.md").write_text("---\nlicense: mit\n---\n# Hello")
    (made / "empty.txt").touch()
    (made / "deep" / "er" / "with a space & ü.txt").write_text("deep")
    (made / "model.safetensors").write_bytes(os.urandom(300_000))
    (made / "big.gguf").write_bytes(os.urandom(5_000_001))
    return made


def test_a_folder_goes_up_in_one_commit_and_comes_down_the_same(hub: HubServer, folder: Path, tmp_path: Path):
    code = UPLOAD + "print(json.dumps(snapshot_download('user/name', local_dir=sys.argv[2])))"
    down = Path(answer_of(run_python(hub, code, folder, tmp_path / "down")))
    repository = hub.repository("user/name")
    titles = [commit.title for commit in repository.history()]
    assert titles == ["Upload folder using huggingface_hub", "initial commit"]
    assert {path: repository.read(path) for path in repository.files()} == contents_of(folder)
    assert {path for path, file in repository.files().items() if file.is_lfs} == {"model.safetensors", "big.gguf"}
    assert len(hub.requests_to(r"PUT /upload/[^/]+/\d+$")) == 3
    assert len(hub.requests_to(r"PUT /upload/[^/]+$")) == 1
    for path, content in contents_of(folder).items():
        assert (down / path).read_bytes() == content
    file = repository.files()["model.safetensors"]
    assert file.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_git_itself_names_regular_files_and_pointers_alike(hub: HubServer, folder: Path, tmp_path: Path):
    """The ids by which clients know unchanged files are git's own."""
    hub.create("user/name").add_folder(folder)
    file = hub.repository("user/name").files()["model.safetensors"]
    with urllib.request.urlopen(f"{hub.endpoint}/user/name/raw/main/model.safetensors") as answer:
        (tmp_path / "pointer").write_bytes(answer.read())
    done = run_client(hub, ["git", "hash-object", folder / "config.json", tmp_path / "pointer"])
    assert done.stdout.split() == [hub.repository("user/name").files()["config.json"].blob_id, file.blob_id]


def test_a_push_that_broke_before_its_commit_sends_no_large_file_again(hub: HubServer, folder: Path):
    hub.faults.add(r"POST /api/.*/commit/", status=500)
    broken = run_python(hub, UPLOAD, folder)
    assert broken.returncode != 0
    assert "500" in broken.stderr
    repository = hub.repository("user/name")
    assert len(repository.history()) == 1
    sent = len(hub.requests_to("PUT /upload/"))
    answer_of(run_python(hub, UPLOAD + "print(1)", folder))
    assert len(hub.requests_to("PUT /upload/")) == sent == 4
    assert {path: repository.read(path) for path in repository.files()} == contents_of(folder)
    assert len(repository.history()) == 2


def test_a_push_that_broke_in_a_large_file_sends_only_that_one_again(hub: HubServer, folder: Path):
    """403 is not tried again: the push ends with the first large file there and the other one not."""
    hub.faults.add(r"PUT /upload/[^/]+/2", status=403)
    assert run_python(hub, UPLOAD, folder).returncode != 0
    repository = hub.repository("user/name")
    assert len(repository.history()) == 1
    there = len(hub.requests)
    answer_of(run_python(hub, UPLOAD + "print(1)", folder))
    again = [record for record in hub.requests[there:] if record.method == "PUT"]
    assert sum(record.received_bytes for record in again) == (folder / "big.gguf").stat().st_size
    assert {path: repository.read(path) for path in repository.files()} == contents_of(folder)


def test_an_upload_gets_over_a_cut_connection_and_short_faults(hub: HubServer, folder: Path):
    hub.faults.add(r"PUT /upload/[^/]+$", cut=100_000)
    hub.faults.add(r"PUT /upload/[^/]+/1", status=500)
    hub.faults.add(r"POST .*/preupload/", status=429, retry_after=0)
    answer_of(run_python(hub, UPLOAD + "print(1)", folder))
    assert hub.faults.are_over
    repository = hub.repository("user/name")
    assert {path: repository.read(path) for path in repository.files()} == contents_of(folder)
    assert len(repository.history()) == 2


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: HubServer, folder: Path):
    hub.faults.add(r"POST /api/.*/commit/", lose_reply=True)
    assert run_python(hub, UPLOAD, folder).returncode != 0
    repository = hub.repository("user/name")
    assert len(repository.history()) == 2
    answer_of(run_python(hub, UPLOAD + "print(1)", folder))
    assert len(repository.history()) == 2


def test_a_commit_is_whole_or_not_at_all(hub: HubServer):
    code = """
api.create_repo("user/name")
first = api.create_commit("user/name", [CommitOperationAdd("a.txt", b"a"), CommitOperationAdd("d/b.txt", b"b")],
                          commit_message="two")
bad = [CommitOperationAdd("c.txt", b"c"), CommitOperationDelete("nowhere.txt")]
errors = [error_of(api.create_commit, "user/name", bad, commit_message="half")]
good = [CommitOperationAdd("c.txt", b"c"), CommitOperationDelete("d/")]
errors.append(error_of(api.create_commit, "user/name", good, commit_message="old", parent_commit="0" * 40))
second = api.create_commit("user/name", good, commit_message="new", parent_commit=first.oid)
print(json.dumps([errors, first.oid, second.oid]))
"""
    errors, first, second = answer_of(run_python(hub, PRELUDE + code))
    repository = hub.repository("user/name")
    assert errors == ["RemoteEntryNotFoundError", "HfHubHTTPError"]
    assert set(repository.files(first)) == {"a.txt", "d/b.txt"}
    assert set(repository.files()) == {"a.txt", "c.txt"}
    assert [commit.oid for commit in repository.history()][:2] == [second, first]
    assert [record.status for record in hub.requests_to("/commit/")] == [200, 404, 412, 200]


def test_branches_tags_history_and_long_listings(hub: HubServer):
    hub.page_size = 3
    repository = hub.create("user/name")
    first = repository.add({f"{index}.txt": f"{index}" for index in range(10)}, "ten files")
    code = """
api.create_tag("user/name", tag="step-10", revision=sys.argv[1])
api.create_branch("user/name", branch="feature/x", revision="step-10")
api.upload_file(path_or_fileobj=b"new", path_in_repo="f/new.txt", repo_id="user/name", revision="feature/x")
refs = api.list_repo_refs("user/name")
errors = [error_of(api.create_tag, "user/name", tag="step-10"), error_of(api.create_branch, "user/name", branch="main"),
          error_of(api.delete_branch, "user/name", branch="nowhere"),
          error_of(api.upload_file, path_or_fileobj=b"", path_in_repo="x", repo_id="user/name", revision="nowhere")]
api.delete_tag("user/name", tag="step-10")
print(json.dumps({
    "tags": {tag.name: tag.target_commit for tag in refs.tags}, "branches": [branch.name for branch in refs.branches],
    "errors": errors, "files": api.list_repo_files("user/name", revision="feature/x"),
    "tree": [entry.path for entry in api.list_repo_tree("user/name", revision="feature/x", recursive=True)],
    "in_folder": [entry.path for entry in api.list_repo_tree("user/name", "f", revision="feature/x")],
    "titles": [commit.title for commit in api.list_repo_commits("user/name", revision="feature/x")],
    "infos": [info.path for info in api.get_paths_info("user/name", ["f", "0.txt", "none"], revision="feature/x")],
}))
"""
    told = answer_of(run_python(hub, PRELUDE + code, first.oid))
    names = sorted([".gitattributes", "f/new.txt", *(f"{index}.txt" for index in range(10))])
    assert told["tags"] == {"step-10": first.oid}
    assert told["branches"] == ["main", "feature/x"]
    assert told["errors"] == ["HfHubHTTPError", "HfHubHTTPError", "RevisionNotFoundError", "RevisionNotFoundError"]
    assert told["files"] == names
    assert told["tree"] == sorted([*names, "f"])
    assert told["in_folder"] == ["f/new.txt"]
    assert told["titles"][1:] == ["ten files", "initial commit"]
    assert told["infos"] == ["f", "0.txt"]
    assert (repository.tags, sorted(repository.files())) == ({}, [f"{index}.txt" for index in range(10)])


def test_refusals_are_the_exceptions_that_the_hub_causes(hub: HubServer):
    hub.create("user/open").add({"a.txt": "a"})
    hub.create("user/hidden", is_private=True)
    hub.create("user/gated", gated="auto").add({"a.txt": "a"})
    reader = hub.add_user("user", can_write=False)
    code = """
stranger, reader = HfApi(token=False), HfApi(token=sys.argv[1])
card = b"---\\nlicense: my-own\\n---"
print(json.dumps({
    "missing": error_of(api.model_info, "user/nowhere"),
    "private, no token": error_of(stranger.model_info, "user/hidden"),
    "private": error_of(api.model_info, "user/hidden"),
    "gated": error_of(stranger.hf_hub_download, "user/gated", "a.txt"),
    "revision": error_of(stranger.model_info, "user/open", revision="nowhere"),
    "entry": error_of(stranger.hf_hub_download, "user/open", "nowhere.txt"),
    "exists": error_of(api.create_repo, "user/open"),
    "other's name": error_of(api.create_repo, "other/name"),
    "bad name": error_of(api.create_repo, "user/a..b", repo_type="dataset"),
    "write, no token": error_of(stranger.upload_file, path_or_fileobj=b"", path_in_repo="a", repo_id="user/open"),
    "write, read token": error_of(reader.upload_file, path_or_fileobj=b"", path_in_repo="a", repo_id="user/open"),
    "bad token": error_of(HfApi(token="hf_wrong").whoami),
    "bad card": error_of(api.upload_file, path_or_fileobj=card, path_in_repo="README.md", repo_id="user/open"),
    "role": reader.whoami()["auth"]["accessToken"]["role"],
}))
"""
    assert answer_of(run_python(hub, PRELUDE + code, reader)) == {
        "missing": "RepositoryNotFoundError",
        "private, no token": "RepositoryNotFoundError",
        "private": None,
        "gated": "GatedRepoError",
        "revision": "RevisionNotFoundError",
        "entry": "RemoteEntryNotFoundError",
        "exists": "HfHubHTTPError",
        "other's name": "HfHubHTTPError",
        "bad name": "HFValidationError",
        "write, no token": "HfHubHTTPError",
        "write, read token": "HfHubHTTPError",
        "bad token": "HfHubHTTPError",
        "bad card": "ValueError",
        "role": "read",
    }


def test_the_storage_takes_no_token(hub: HubServer):
    """So a client that sends one there, where on the real Hub a stranger would read it, fails every download test."""
    content = os.urandom(1000)
    hub.create("user/name").add({"a.bin": content})
    address = hub.storage.download_url(hashlib.sha256(content).hexdigest())
    assert urllib.request.urlopen(address).read() == content
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, headers={"Authorization": f"Bearer {hub.token}"}))
    assert refused.value.code == 400


def test_a_cut_download_goes_on_where_it_broke(hub: HubServer):
    """The client keeps what it has in pieces of 10 MiB."""
    content = os.urandom(11 << 20)
    hub.create("user/name").add({"a.bin": content})
    hub.faults.add(r"GET /content/", cut=(10 << 20) + 500_000)
    code = """
import hashlib
path = hf_hub_download("user/name", "a.bin")
print(json.dumps(hashlib.sha256(Path(path).read_bytes()).hexdigest()))
"""
    assert answer_of(run_python(hub, PRELUDE + code)) == hashlib.sha256(content).hexdigest()
    assert [record.range for record in hub.requests_to("GET /content/")] == [None, f"bytes={10 << 20}-"]
    assert hub.requests_to("GET /content/")[1].sent_bytes == 1 << 20


def test_a_download_waits_out_a_limit_and_a_hub_that_is_slow(hub: HubServer):
    content = os.urandom(1000)
    hub.create("user/name").add({"a.bin": content, "b.bin": content[::-1]})
    hub.faults.add(r"GET /content/", status=429, retry_after=0)
    hub.faults.add(r"GET /content/", slow=5)
    code = """
paths = [hf_hub_download("user/name", name) for name in ("a.bin", "b.bin")]
print(json.dumps([Path(path).read_bytes().hex() for path in paths]))
"""
    done = run_python(hub, PRELUDE + code, environment={"HF_HUB_DOWNLOAD_TIMEOUT": "1"})
    assert answer_of(done) == [content.hex(), content[::-1].hex()]
    assert hub.faults.are_over


def test_a_broken_snapshot_goes_on_with_what_is_missing(hub: HubServer):
    """huggingface_hub does not try again after a 500 in a download; what came before it is kept."""
    repository = hub.create("user/name")
    contents = {f"{index}.bin": os.urandom(50_000) for index in range(4)}
    repository.add(contents)
    hub.faults.add(f"GET /content/{repository.files()['2.bin'].sha256}", status=500)
    code = "print(json.dumps(snapshot_download('user/name', max_workers=1)))"
    assert run_python(hub, PRELUDE + code).returncode != 0
    down = contents_of(Path(answer_of(run_python(hub, PRELUDE + code))))
    assert {name: down[name] for name in contents} == contents
    asked = [record.path for record in hub.requests_to("GET /content/") if record.status == 200]
    assert len(asked) == len(set(asked)) == 4


def test_a_snapshot_of_a_revision_that_is_there_asks_for_no_content(hub: HubServer):
    repository = hub.create("user/name", is_private=True)
    old = repository.add({"a.txt": "old", "b.bin": b"\0old"})
    repository.tags["v1"] = old.oid
    repository.add({"a.txt": "new"})
    code = """
folders = [Path(snapshot_download("user/name", revision=revision)) for revision in sys.argv[1:]]
print(json.dumps([(folder / "a.txt").read_text() for folder in folders]))
"""
    wanted = ("v1", old.oid, "main", "v1")
    assert answer_of(run_python(hub, PRELUDE + code, *wanted)) == ["old", "old", "new", "old"]
    assert len(hub.requests_to("GET /content/")) == 1
    assert len(hub.requests_to(r"GET /user/name/resolve/.*a\.txt")) == 2
    stranger = run_python(hub, PRELUDE + code, "v1", token=None, home="stranger")
    assert "RepositoryNotFoundError" in stranger.stderr


def test_repositories_are_set_private_and_deleted(hub: HubServer):
    code = """
api.create_repo("user/texts", repo_type="dataset", private=True)
private = api.dataset_info("user/texts").private
api.update_repo_settings("user/texts", repo_type="dataset", private=False)
listed = [found.id for found in HfApi(token=False).list_datasets(author="user")]
api.delete_repo("user/texts", repo_type="dataset")
print(json.dumps([private, listed, error_of(api.delete_repo, "user/texts", repo_type="dataset")]))
"""
    assert answer_of(run_python(hub, PRELUDE + code)) == [True, ["user/texts"], "RepositoryNotFoundError"]
    assert hub.repositories == {}
