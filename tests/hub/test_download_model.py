"""A published checkpoint used by name, by transformers in a process of its own, with Tercet and without."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from hub_server.clients import answer_of, run_python
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The cat sat on the mat; whatever it was, it was über-comfortable there.\n\n    def f(x): return x\n"
PRELUDE = """
import json, sys
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

def told(model, ids):
    ids = torch.tensor([ids])
    with torch.no_grad():
        logits = model(ids).logits[0]
    greedy = model.generate(ids, do_sample=False, max_new_tokens=12, min_new_tokens=12)[0, ids.shape[1]:]
    return {"logits": logits.tolist(), "greedy": greedy.tolist(), "class": type(model).__module__}
"""


@pytest.fixture(scope="module")
def published(shared_hub: HubServer, trained: Path, tmp_path_factory) -> dict[str, Path]:
    """user/name: other weights under a tag, a branch and a commit, then the trained ones on main. Folders by commit."""
    other = tmp_path_factory.mktemp("other")
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(trained).config)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(trained).save_pretrained(other)
    repository = shared_hub.create("user/name")
    old = repository.add_folder(other, "other weights")
    repository.tags["step-2"] = repository.branches["wip/first"] = old.oid
    new = repository.add_files(trained, "trained weights")
    return {new.oid: trained, old.oid: other}


def expected(folder: Path) -> dict[str, Any]:
    """What the checkpoint gives here, where Tercet is."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    greedy = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, min_new_tokens=12)[0, len(ids) :]
    return {"ids": ids, "logits": logits, "greedy": greedy.tolist(), "text": tokenizer.decode(greedy)}


def assert_same(told: dict[str, Any], wanted: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(told["logits"]), wanted["logits"], rtol=0, atol=1e-5)
    assert told["greedy"] == wanted["greedy"]


def test_by_name_and_revision_without_tercet(shared_hub: HubServer, published: dict[str, Path]):
    """One process of a reader who has transformers alone: refused at first, then each revision, and a snapshot."""
    code = """
answer = {"tercet": True}
try:
    import tercet
except ImportError:
    answer["tercet"] = False
try:
    AutoModelForCausalLM.from_pretrained("user/name")
except ValueError as error:
    answer["refusal"] = str(error)
    print()  # behind the question that transformers asks first
tokenizer = AutoTokenizer.from_pretrained("user/name", trust_remote_code=True)
ids = answer["ids"] = tokenizer(sys.argv[1])["input_ids"]
for revision in (None, *sys.argv[2:]):
    settings = {} if revision is None else {"revision": revision}
    model = AutoModelForCausalLM.from_pretrained("user/name", trust_remote_code=True, **settings)
    answer[str(revision)] = told(model, ids)
answer["text"] = tokenizer.decode(answer["None"]["greedy"])
folder = snapshot_download("user/name")
answer["snapshot"] = told(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), ids)
print(json.dumps(answer))
"""
    (_, trained), (old, other) = published.items()
    revisions = ("step-2", "wip/first", old)
    told = answer_of(run_python(shared_hub, PRELUDE + code, TEXT, *revisions, without_tercet=True, home="reader"))
    assert told["tercet"] is False
    assert "trust_remote_code=True" in told["refusal"]
    wanted, older = expected(trained), expected(other)
    assert told["ids"] == wanted["ids"] == older["ids"]
    assert_same(told["None"], wanted)
    assert_same(told["snapshot"], wanted)
    assert told["text"] == wanted["text"]
    assert told["None"]["class"].startswith("transformers_modules.")
    for revision in revisions:
        assert_same(told[revision], older)
    assert (older["logits"] - wanted["logits"]).abs().max() > 0.1


@pytest.mark.slow
def test_where_tercet_is_imported_nothing_needs_to_be_trusted(shared_hub: HubServer, published: dict[str, Path]):
    code = """
import tercet.modeling
tokenizer = AutoTokenizer.from_pretrained("user/name")
ids = tokenizer(sys.argv[1])["input_ids"]
print(json.dumps({**told(AutoModelForCausalLM.from_pretrained("user/name"), ids), "ids": ids}))
"""
    asked = len(shared_hub.requests)
    told = answer_of(run_python(shared_hub, PRELUDE + code, TEXT, home="owner"))
    wanted = expected(next(iter(published.values())))
    assert told["class"] == "tercet.modeling.modeling_tercet"
    assert told["ids"] == wanted["ids"]
    assert_same(told, wanted)
    assert not [record for record in shared_hub.requests[asked:] if record.path.endswith("_tercet.py")]


@pytest.mark.slow
def test_the_llama_export_needs_no_trust(shared_hub: HubServer, trained: Path, tmp_path: Path):
    from tercet.interop import export_checkpoint

    export_checkpoint(trained, tmp_path / "llama", "llama")
    shared_hub.create("user/native").add_folder(tmp_path / "llama")
    code = """
tokenizer = AutoTokenizer.from_pretrained("user/native")
ids = tokenizer(sys.argv[1])["input_ids"]
print(json.dumps({**told(AutoModelForCausalLM.from_pretrained("user/native"), ids), "ids": ids}))
"""
    told = answer_of(run_python(shared_hub, PRELUDE + code, TEXT, without_tercet=True, home="native"))
    wanted = expected(trained)
    assert told["class"].startswith("transformers.models.llama.")
    assert told["ids"] == wanted["ids"]
    assert_same(told, wanted)


@pytest.mark.slow
def test_a_private_checkpoint_is_the_owners_and_a_missing_revision_is_named(hub: HubServer, trained: Path):
    hub.create("user/hidden", is_private=True).add_files(trained)
    code = """
answer = {}
for name, revision in (("tokens", "main"), ("revision", "v9")):
    try:
        tokenizer = AutoTokenizer.from_pretrained("user/hidden", revision=revision, trust_remote_code=True)
        answer[name] = tokenizer(sys.argv[1])["input_ids"]
    except OSError as error:
        answer[name] = str(error)
print(json.dumps(answer))
"""
    owner = answer_of(run_python(hub, PRELUDE + code, TEXT))
    stranger = answer_of(run_python(hub, PRELUDE + code, TEXT, token=None, home="stranger"))
    assert owner["tokens"] == expected(trained)["ids"]
    assert "v9" in owner["revision"]
    assert "private repository" in stranger["tokens"]
    assert "hf auth login" in stranger["tokens"]


@pytest.mark.slow
def test_loading_goes_on_after_a_limit_and_a_cut_connection(hub: HubServer, trained: Path):
    repository = hub.create("user/name")
    repository.add_files(trained)
    weights = repository.files()["model.safetensors"]
    hub.faults.add(r"GET .*/tokenizer.json", status=429, retry_after=0)
    hub.faults.add(f"GET /content/{weights.sha256}", cut=weights.size // 2)
    hub.faults.add(r"GET .*/modeling_tercet.py", cut=1000)
    code = """
tokenizer = AutoTokenizer.from_pretrained("user/name", trust_remote_code=True)
ids = tokenizer(sys.argv[1])["input_ids"]
print(json.dumps(told(AutoModelForCausalLM.from_pretrained("user/name", trust_remote_code=True), ids)))
"""
    done = run_python(hub, PRELUDE + code, TEXT, without_tercet=True)
    assert_same(answer_of(done), expected(trained))
    assert hub.faults.are_over
    assert re.search("resume", done.stderr)
