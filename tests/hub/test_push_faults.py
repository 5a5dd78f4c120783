"""What goes wrong on the way, one fault at a time, by real HTTP: how it ends, and what is on the Hub then."""

import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import HubServer, Repository
from huggingface_hub import HfApi

from tercet.hub.options import PushOptions
from tercet.hub.preparation import prepared_push
from tercet.hub.retries import Patience
from tercet.hub.upload import Pushed, upload
from tercet.training.errors import UserError

COMMIT = r"POST /api/.*/commit/"
UPLOAD = r"PUT /upload/"


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own process is offline; these talk to a Hub of their own, as the command would be set to."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)


def send(hub: HubServer, checkpoint: Path, said: list[str] | None = None, **options) -> Pushed:
    """A push, with waits so short that a test can sit them out."""
    say = (said if said is not None else []).append
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    chosen = PushOptions("user/verse", **options)
    with prepared_push(checkpoint, chosen) as prepared:
        return upload(prepared, chosen, api, say, Patience(say, first_wait_s=0.01))


def refusal(hub: HubServer, checkpoint: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        send(hub, checkpoint, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 503, "times": 3},
        {"status": 429, "retry_after": 1},
        {"status": 409},
        {"cut": 100},
        {"lose_reply": True},
        {"slow": 0.5},
    ],
    ids=str,
)
def test_a_commit_that_fails_for_now_is_made_once(hub: HubServer, small_checkpoint: Path, fault: dict) -> None:
    hub.faults.add(COMMIT, **fault)
    said: list[str] = []
    pushed = send(hub, small_checkpoint, said)
    assert hub.faults.are_over
    repository = hub.repository("user/verse")
    assert [commit.oid for commit in repository.history()][:-1] == [pushed.commit]
    assert len(hub.requests_to(UPLOAD)) == len({item.sha256 for item in repository.files().values() if item.is_lfs})
    waits = [line for line in said if "commit: " in line]
    if "retry_after" in fault:
        assert "again in 1 s" in waits[0]
    if "status" in fault:
        assert len(waits) == fault.get("times", 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"status": 401}, ["does not know this token", "hf auth login"]),
        ({"status": 403}, ["may not write to user/verse", "role 'write'"]),
        ({"status": 412}, ["does not take this now", "run the same command again"]),
        ({"status": 409, "times": 6}, ["does not take this now"]),
        ({"status": 429, "retry_after": 900}, ["asks for fewer requests", "again in 900 s"]),
        ({"status": 500, "times": 6}, ["out of order (status 500)", "again later"]),
        ({"cut": 10, "times": 6}, ["cannot be reached"]),
    ],
)
def test_a_commit_that_keeps_failing_leaves_the_repository_as_it_was(hub, small_checkpoint, fault, words) -> None:
    repository = hub.create("user/verse")
    before = (dict(repository.branches), dict(repository.tags))
    hub.faults.add(COMMIT, **fault)
    message = refusal(hub, small_checkpoint, branch="new", tag="v1")
    assert hub.faults.are_over
    for word in [*words, "nothing was changed"]:
        assert word in message
    assert (repository.branches, repository.tags) == before
    assert len(repository.commits) == 1


def test_after_a_cut_commit_the_same_command_sends_no_large_file_again(hub: HubServer, small_checkpoint: Path) -> None:
    hub.faults.add(COMMIT, cut=10, times=6)
    refusal(hub, small_checkpoint)
    sent = len(hub.requests_to(UPLOAD))
    assert sent == 2
    assert hub.repository("user/verse").files() == {}
    send(hub, small_checkpoint)
    assert len(hub.requests_to(UPLOAD)) == sent
    assert len(hub.repository("user/verse").history()) == 2


@pytest.mark.slow
def test_of_a_broken_upload_only_what_is_missing_is_sent_again(hub: HubServer, small_checkpoint: Path) -> None:
    """Of two large files one arrives and one does not, as often as huggingface_hub tries."""
    hub.faults.add(UPLOAD, cut=1, times=6, after=1)
    assert "user/verse was made, and is empty: run the same command again" in refusal(hub, small_checkpoint)
    repository = hub.repository("user/verse")
    assert (len(repository.lfs_objects), repository.files()) == (1, {})
    hub.requests.clear()
    send(hub, small_checkpoint)
    assert len(hub.requests_to(UPLOAD)) == 1
    assert len(repository.history()) == 2


def test_a_cut_upload_is_made_again_and_comes_whole(hub: HubServer, small_checkpoint: Path) -> None:
    hub.faults.add(UPLOAD, cut=1000)
    said: list[str] = []
    send(hub, small_checkpoint, said)
    assert any("fails: retrying in" in line for line in said)
    repository = hub.repository("user/verse")
    assert repository.read("model.safetensors") == (small_checkpoint / "model.safetensors").read_bytes()
    assert len(repository.history()) == 2


def test_somebody_elses_commit_in_between_is_not_lost(hub: HubServer, small_checkpoint: Path) -> None:
    """It comes after the push has looked at the branch; the cut lets the push look again."""
    repository = hub.create("user/verse")
    Meanwhile(repository, "commit", lambda: repository.add({"theirs.md": b"a word"}))
    message = refusal(hub, small_checkpoint)
    assert "changed by someone else" in message
    assert set(repository.files()) == {"theirs.md"}
    send(hub, small_checkpoint)
    assert {"theirs.md", "model.safetensors"} <= set(repository.files())


def test_a_tag_that_fails_is_made_by_the_next_push(hub: HubServer, small_checkpoint: Path) -> None:
    hub.faults.add(r"POST /api/.*/tag/", status=403)
    message = refusal(hub, small_checkpoint, tag_step=True)
    repository = hub.repository("user/verse")
    commit = repository.history()[0].oid
    assert f"commit {commit[:8]} is there, its tag is not" in message
    assert repository.tags == {}
    pushed = send(hub, small_checkpoint, tag_step=True)
    assert repository.tags == {"step-640": commit}
    assert not pushed.is_new


def test_a_lost_answer_to_a_tag_is_no_second_tag(hub: HubServer, small_checkpoint: Path) -> None:
    hub.faults.add(r"POST /api/.*/tag/", lose_reply=True)
    pushed = send(hub, small_checkpoint, tag="v1")
    assert hub.repository("user/verse").tags == {"v1": pushed.commit}


def test_a_moved_tag_only_where_that_is_asked_for(hub: HubServer, small_checkpoint: Path, tmp_path: Path) -> None:
    send(hub, small_checkpoint, tag="v1")
    changed = shutil.copytree(small_checkpoint, tmp_path / "changed")
    (changed / "generation_config.json").write_text("{}")
    assert "has a tag v1 already" in refusal(hub, changed, tag="v1")
    pushed = send(hub, changed, tag="v1", move_tag=True)
    assert hub.repository("user/verse").tags == {"v1": pushed.commit}


@pytest.mark.parametrize(("status", "word"), [(401, "token"), (403, "may not write"), (500, "out of order")])
def test_a_repository_that_cannot_be_made(hub: HubServer, small_checkpoint: Path, status: int, word: str) -> None:
    hub.faults.add("POST /api/repos/create", status=status, times=6 if status == 500 else 1)
    assert word in refusal(hub, small_checkpoint)
    assert hub.repositories == {}


def test_a_token_that_reads_only_and_one_of_nobody(hub: HubServer, small_checkpoint: Path) -> None:
    hub.create("user/verse")
    own = hub.token
    hub.token = hub.add_user("user", can_write=False)
    assert "may not write" in refusal(hub, small_checkpoint)
    hub.token = "hf_" + "x" * 34
    assert "does not know this token" in refusal(hub, small_checkpoint)
    hub.token = own
    assert len(hub.repository("user/verse").commits) == 1


def test_a_card_that_the_hub_refuses_is_known_before_anything_is_sent(hub: HubServer, small_checkpoint: Path) -> None:
    message = refusal(hub, small_checkpoint, license="no-such-licence")
    assert "the Hub would refuse the card" in message
    assert "'no-such-licence'; nothing was sent" in message.replace(")", "")
    assert hub.repositories == {}
    assert hub.requests_to(r"POST /api/repos|PUT ") == []
    hub.faults.add("POST /api/validate-yaml", status=503)
    said: list[str] = []
    send(hub, small_checkpoint, said)
    assert "look at the card: the Hub answers 503" in said[0]


class Meanwhile:
    """Somebody else does something on the Hub, once, right before a call of the server's own repository."""

    def __init__(self, repository: Repository, method: str, does: Callable[[], object]) -> None:
        original = getattr(repository, method)

        def call(*arguments, **keywords):
            setattr(repository, method, original)
            does()
            return original(*arguments, **keywords)

        setattr(repository, method, call)


def test_a_branch_that_somebody_else_makes_meanwhile_is_theirs(hub: HubServer, small_checkpoint: Path) -> None:
    """Between our look at the branches and our own branch; the push fails and must not remove theirs."""
    repository = hub.create("user/verse")

    def make_theirs() -> None:
        repository.branches["new"] = repository.branches["main"]
        repository.add({"theirs.md": b"a word"}, branch="new")

    Meanwhile(repository, "goes_to_lfs", make_theirs)
    message = refusal(hub, small_checkpoint, branch="new")
    assert "There is a branch new" in message
    assert set(repository.files("new")) == {"theirs.md"}


def test_our_new_branch_stays_where_somebody_has_gone_on_with_it(hub: HubServer, small_checkpoint: Path) -> None:
    repository = hub.create("user/verse")
    Meanwhile(repository, "commit", lambda: repository.add({"theirs.md": b"a word"}, branch="new"))
    assert "changed by someone else" in refusal(hub, small_checkpoint, branch="new")
    assert set(repository.files("new")) == {"theirs.md"}


def test_a_branch_that_is_deleted_meanwhile(hub: HubServer, small_checkpoint: Path) -> None:
    repository = hub.create("user/verse")
    repository.branches["old"] = repository.branches["main"]
    Meanwhile(repository, "commit", lambda: repository.branches.pop("old"))
    message = refusal(hub, small_checkpoint, branch="old")
    assert "has no such revision" in message
    assert "nothing was changed" in message
    assert set(repository.branches) == {"main"}


def test_a_tag_that_somebody_else_makes_meanwhile_is_not_moved(hub: HubServer, small_checkpoint: Path) -> None:
    repository = hub.create("user/verse")
    first = repository.branches["main"]
    Meanwhile(repository, "commit", lambda: repository.tags.update(v1=first))
    message = refusal(hub, small_checkpoint, tag="v1")
    assert "its tag is not" in message
    assert repository.tags == {"v1": first}
    assert "model.safetensors" in repository.files()


def test_no_network(small_checkpoint: Path, tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as hub:
        pass  # its port is closed now
    message = refusal(hub, small_checkpoint)
    assert "cannot be reached" in message
    assert "nothing was changed: run the same command again" in message
