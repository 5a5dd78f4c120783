"""Hub datasets as training data, by name: what is read, and the one line for each thing that goes wrong."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hub_server import HubServer
from hub_server.clients import answer_of, run_client, run_python

from small_runs import small_settings

# Reads sources, each given as the fields of a recipe, and tells of each its texts or the line of its error.
READ = """
import json, sys
from tercet.training.sources import DataError, Source, read_documents

def told(fields):
    try:
        return [[document.text, document.source] for document in read_documents(Source.model_validate(fields))]
    except DataError as error:
        return str(error)

print(json.dumps([told(fields) for fields in json.loads(sys.argv[1])]))
"""


def json_lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text, "id": index}) + "\n" for index, text in enumerate(texts))


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def read(hub: HubServer, *sources: dict[str, Any], **options: Any) -> list[Any]:
    """Of each source its (text, label) pairs, or the line of its error."""
    answers = answer_of(run_python(hub, READ, json.dumps(sources), **options))
    return [answer if isinstance(answer, str) else [tuple(pair) for pair in answer] for answer in answers]


def publish(hub: HubServer) -> None:
    """user/texts with two splits and a tag, user/tongues with two configurations, and what cannot be read."""
    texts = hub.create("user/texts", "dataset")
    texts.tags["v1"] = texts.add({"train.jsonl": json_lines("old a", "old b"), "test.jsonl": json_lines("held")}).oid
    texts.add({"train.jsonl": json_lines("a", "b", "c")})
    files = [("en", "en/*.parquet"), ("de", "de/*.parquet")]
    card = "".join(f"- config_name: {name}\n  data_files: {pattern}\n" for name, pattern in files)
    hub.create("user/tongues", "dataset").add(
        {
            "README.md": f"---\nconfigs:\n{card}---\n",
            "en/0.parquet": parquet(text=["one", "two"], id=[1, 2]),
            "en/1.parquet": parquet(text=["three"], id=[3]),
            "de/0.parquet": parquet(text=["eins"], id=[1]),
        }
    )
    hub.create("user/hidden", "dataset", is_private=True).add({"train.txt": "secret"})
    hub.create("user/gated", "dataset", gated="auto").add({"train.jsonl": json_lines("g")})
    hub.create("user/empty", "dataset")
    hub.create("user/broken", "dataset").add({"train.jsonl": '{"text": "a"}\n{"text": \n'})
    hub.create("user/script", "dataset").add({"script.py": "print()"})


def test_name_configuration_split_and_revision_choose_the_rows(hub: HubServer):
    publish(hub)
    sources = [
        {"path": "user/texts"},
        {"path": "user/texts", "split": "test"},
        {"path": "user/texts", "revision": "v1"},
        {"path": "user/texts", "revision": hub.repository("user/texts", "dataset").tags["v1"]},
        {"path": "user/tongues", "name": "en"},
        {"path": "user/tongues", "name": "de", "text_template": "{id}: {text}"},
        {"path": "user/hidden"},
        {"path": "user/texts", "text_column": "content"},
    ]
    found = read(hub, *sources, *({**source, "streaming": True} for source in sources))
    for answers in (found[:8], found[8:]):
        assert answers[:7] == [
            [(text, "user/texts") for text in ("a", "b", "c")],
            [("held", "user/texts[test]")],
            *[[(text, "user/texts") for text in ("old a", "old b")]] * 2,
            [(text, "user/tongues:en") for text in ("one", "two", "three")],
            [("1: eins", "user/tongues:de")],
            [("secret", "user/hidden")],
        ]
        start = "Hub dataset 'user/texts', row 1 has no column 'content'; it has 'text', 'id'. Set text_column"
        assert answers[7].startswith(start)


def test_what_is_not_there_is_one_line_with_what_there_is(hub: HubServer):
    publish(hub)
    wanted = [
        ({"path": "user/nowhere"}, r"'user/nowhere' is no file or folder here and no dataset .* may see\. Check the"),
        ({"path": "nowhere"}, r"'nowhere' is no file or folder here and no dataset"),
        ({"path": "user/texts", "revision": "v9"}, r"'user/texts' has no revision 'v9'; it has 'main', 'v1'\. Give a"),
        ({"path": "user/texts", "split": "dev"}, r"'user/texts\[dev\]': .*\['train', 'test'\]\. Set the source's name"),
        ({"path": "user/tongues"}, r"'user/tongues': Config name is missing.*\['en', 'de'\]\. Set the source's name"),
        ({"path": "user/tongues", "name": "fr"}, r"'user/tongues:fr': .*'fr' not found.*'en', 'de'.*Set the source's"),
        ({"path": "user/empty"}, r"'user/empty' holds no file of data that `datasets` can read\. Check the name"),
        ({"path": "user/broken"}, r"'user/broken' cannot be read: JSON parse error: .*row 1\. Check the dataset"),
        ({"path": "user/script"}, r"'user/script' is made by a script, .* Try revision: refs/convert/parquet"),
    ]
    found = read(hub, *({**source, "streaming": streamed} for streamed in (False, True) for source, _ in wanted))
    for line, (source, pattern) in zip(found, wanted * 2, strict=True):
        assert isinstance(line, str), source
        assert re.search(pattern, line), line
        assert "\n" not in line


def test_what_may_not_be_read_says_whose_token_is_missing(hub: HubServer):
    publish(hub)
    sources = [{"path": path} for path in ("user/hidden", "user/nowhere", "user/gated", "user/texts")]
    hidden, nowhere, gated, texts = read(hub, *sources, token=None, home="stranger")
    for line, path in ((hidden, "user/hidden"), (nowhere, "user/nowhere")):
        assert line == (
            f"'{path}' is no file or folder here and no public dataset on the Hub. Check the name; for a private "
            "dataset set HF_TOKEN or run `hf auth login`."
        )
    assert re.fullmatch(rf".*'user/gated' is gated\. Ask for access at {hub.endpoint}/datasets/user/gated, .*", gated)
    assert [text for text, _ in texts] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_token_of_another_or_of_nobody_is_told_apart(hub: HubServer):
    publish(hub)
    sources = [{"path": path} for path in ("user/hidden", "user/gated")]
    other, refused = read(hub, *sources, token=hub.add_user("other"), home="other")
    assert "no dataset on the Hub that this token may see" in other
    assert "is gated. Ask for access" in refused
    (wrong,) = read(hub, {"path": "user/texts"}, token="hf_nobody", home="wrong")
    assert "the Hub does not take the token that is set" in wrong


@pytest.mark.slow
def test_offline_reads_what_is_in_the_cache_and_no_more(hub: HubServer):
    publish(hub)
    source = {"path": "user/texts"}
    offline = {"HF_HUB_OFFLINE": "1"}
    (line,) = read(hub, source, environment=offline)
    assert line.startswith("user/texts is no file or folder here, and Hub dataset 'user/texts' is not in the cache")
    assert "HF_HUB_OFFLINE forbids to download it" in line
    assert read(hub, source) == read(hub, source, environment=offline)
    assert [text for text, _ in read(hub, source, environment=offline)[0]] == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_limit_a_fault_and_a_cut_connection_lose_no_row(hub: HubServer, streaming: bool):
    texts = [f"document {index} {'x' * 300}" for index in range(1000)]
    hub.create("user/texts", "dataset").add({"train.jsonl": json_lines(*texts)})
    hub.faults.add(r"GET /api/datasets/user/texts", status=500)
    hub.faults.add(r"GET .*/train.jsonl", status=429, retry_after=0)
    hub.faults.add(r"GET .*/train.jsonl", status=500)
    hub.faults.add(r"GET .*/train.jsonl", cut=100_000)
    (found,) = read(hub, {"path": "user/texts", "streaming": streaming})
    assert [text for text, _ in found] == texts
    assert hub.faults.are_over


@pytest.mark.slow
def test_a_hub_that_stays_away_is_one_line(hub: HubServer):
    """After the tries of huggingface_hub, which take half a minute."""
    (line,) = read(hub, {"path": "user/texts"}, environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert re.fullmatch(r"Hub dataset 'user/texts' could not be downloaded: .*\. Check the network, and run .*", line)


@pytest.mark.slow
def test_a_stream_is_shared_by_ranks_and_goes_on_from_its_state(hub: HubServer):
    """`StreamOrder` over a streamed Hub dataset of four shards: each row once, whatever breaks or stops."""
    shards = {f"data/train-{shard}.parquet": [f"{shard}:{row}" for row in range(50)] for shard in range(4)}
    dataset = hub.create("user/shards", "dataset")
    dataset.add({path: parquet(text=rows, junk=[os.urandom(400) for _ in rows]) for path, rows in shards.items()})
    hub.faults.add(r"GET /content/", cut=2000, after=5)
    hub.faults.add(r"GET /content/", status=503, after=2)
    code = """
import json
from itertools import islice
from datasets import load_dataset
from tercet.training import StreamOrder

def order(rank):
    stream = load_dataset("user/shards", split="train", streaming=True)
    return StreamOrder({"shards": stream}, seed=1, rank=rank, world_size=2)

read = []
for rank in range(2):
    first = order(rank)
    read += [row.row["text"] for row in islice(first, 37)]
    second = order(rank)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    read += [row.row["text"] for row in islice(second, 63)]
print(json.dumps(read))
"""
    found = answer_of(run_python(hub, code))
    assert sorted(found) == sorted(text for rows in shards.values() for text in rows)
    assert hub.faults.are_over


def recipe(folder: Path, root: Path, **source: Any) -> Path:
    """The recipe of the demo, with one source of documents instead of Python's own."""
    fields = yaml.safe_load((root / "recipes" / "demo.yaml").read_text())
    del fields["data"]["path"]
    fields["data"]["sources"] = [source]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_on_a_hub_dataset_is_that_on_its_file(
    hub: HubServer, small_corpus, root: Path, tmp_path: Path, streaming: bool
):
    """`tercet data prepare` gives the tokens of the same text here; `tercet train` trains on, and says whence."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in small_corpus[:20])
    hub.create("user/texts", "dataset").add({"train.jsonl": content})
    (tmp_path / "here.jsonl").write_text(content)

    def run(command: str, output: str, path: str) -> None:
        settings = recipe(tmp_path, root, path=path, streaming=streaming)
        words = [sys.executable, "-m", "tercet", *command.split(), settings, "--output", tmp_path / output]
        done = run_client(hub, [*words, *small_settings()], folder=tmp_path)
        assert done.returncode == 0, done.stderr

    run("data prepare", "ours", "user/texts")
    run("data prepare", "here", "here.jsonl")
    shards = [sorted((tmp_path / name / "data").glob("**/*.bin")) for name in ("ours", "here")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]] != []
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == (tmp_path / "here" / "tokenizer.json").read_bytes()
    run("train", "ours", "user/texts")
    results = json.loads((tmp_path / "ours" / "results.json").read_text())
    assert results["training"]["num_steps"] == 4
    assert [source["hub_id"] for source in results["data"]["sources"]] == ["user/texts"]
    assert "datasets:\n- user/texts\n" in (tmp_path / "ours" / "README.md").read_text()


@pytest.mark.slow
def test_the_command_ends_with_two_and_one_line(hub: HubServer, root: Path, tmp_path: Path):
    publish(hub)
    for source, reason in (
        ({"path": "user/nowhere"}, "no public dataset on the Hub"),
        ({"path": "user/texts", "revision": "v9"}, "has no revision 'v9'; it has 'main', 'v1'"),
        ({"path": "user/texts", "split": "dev"}, r"\['train', 'test'\]"),
        ({"path": "user/hidden"}, "for a private dataset set HF_TOKEN"),
    ):
        words = ["data", "prepare", recipe(tmp_path, root, **source), "--output", tmp_path / "run", *small_settings()]
        done = run_client(hub, [sys.executable, "-m", "tercet", *words], token=None)
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(rf"tercet: .*{reason}.*\n", done.stderr), done.stderr
