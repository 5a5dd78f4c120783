"""A run that begins with a checkpoint, on conversations: what it takes over, what it learns, what it refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from resumed_runs import assert_same_run, silently, train_until_killed, weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tercet.interop import import_checkpoint
from tercet.training.errors import UserError
from tercet.training.from_checkpoint import complete_fields
from tercet.training.packing import PackedDataset, pack
from tercet.training.pipeline import make_model, train
from tercet.training.recipe import load_recipe, recipe_from_fields
from tercet.training.run_folder import differences
from tercet.training.token_set import PreparedData

WORDS = ["snow", "coal", "grass", "sea", "sun", "blood", "night", "milk", "rose", "leaf", "sky", "ash"]
COLOURS = ["white", "black", "green", "blue", "yellow", "red", "black", "white", "red", "green", "blue", "grey"]


def conversation(index: int) -> list[dict[str, str]]:
    """One of 24: a question and its answer, and every other time a second turn, or a system message first."""
    word, colour = WORDS[index % 12], COLOURS[index % 12]
    messages = [
        {"role": "user", "content": f"What is {word} like?"},
        {"role": "assistant", "content": f"It is {colour}."},
    ]
    if index % 2:
        messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": f"Yes, {colour} ~ é."}]
    return [{"role": "system", "content": "Be brief."}, *messages] if index >= 12 else messages


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(i)}) + "\n" for i in range(24)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(make_fields, text_folder, tmp_path_factory) -> Path:
    """A model of text whose context holds a whole conversation. Shared: a test that changes it works on a copy."""
    fields = make_fields(text_folder)
    fields["training"] |= {"num_steps": 4, "sequence_length": 128}
    folder = tmp_path_factory.mktemp("runs") / "base"
    train(recipe_from_fields(fields), output_dir=folder, say=silently)
    return folder


@pytest.fixture
def make_sft(base, chats):
    """A recipe that begins with a small model of text: make_sft(training={...}, model={...})."""

    def make(base: Path = base, **sections):
        fields = {
            "output_dir": "unused",
            "seed": 5,
            "data": {"sources": [{"path": str(chats), "messages_column": "messages"}], "validation_fraction": 0.2},
            "model": {"from_checkpoint": str(base)},
            "optimizer": {"warmup_steps": 2},
            "training": {"num_steps": 8, "sequence_length": 128, "global_batch_size": 4, "per_device_batch_size": 2,
                         "device": "cpu", "log_every": 1, "evaluate_every": 4, "save_every": 3},
            "samples": {"prompts": ["What is snow like?"], "max_new_tokens": 5},
        }  # fmt: skip
        for name, values in sections.items():
            fields[name] = {**fields.get(name, {}), **values}
        return recipe_from_fields(fields)

    return make


class TestWhatIsTakenOver:
    def test_weights_config_and_tokenizer(self, make_sft, base):
        recipe = make_sft(model={"hidden_dropout": 0.2})
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = make_model(recipe, tokenizer)
        theirs = AutoModelForCausalLM.from_pretrained(base)
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())
        ours, expected = model.config.to_dict(), theirs.config.to_dict()
        changed = {name for name in expected if ours.get(name) != expected[name]} - {
            "_name_or_path",
            "architectures",
            "auto_map",
        }
        assert changed == {"hidden_dropout"}
        assert model.config.hidden_dropout == 0.2
        assert recipe.tokenizer.path == str(base)

    def test_a_hub_model_is_named_as_one(self, make_sft):
        """Offline: what is asked of the Hub is its name and revision, and the reason comes in one line."""
        with pytest.raises(UserError, match=r"hf://user/model@v1 cannot be had from the Hub: ") as caught:
            make_sft(Path("unused"), model={"from_checkpoint": "hf://user/model@v1"})
        assert "\n" not in str(caught.value)

    def test_a_training_checkpoint_will_do(self, make_sft, base):
        newest = sorted((base / "checkpoints").glob("step-*"))[-1]
        model = make_model(make_sft(newest), AutoTokenizer.from_pretrained(newest))
        assert torch.equal(model.state_dict()["model.norm.weight"], weights(newest)["model.norm.weight"])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"hidden_size": 32}}, r"model\.hidden_size is 32, and .* has 16: remove the field"),
        ({"model": {"preset": "modern"}}, r"model\.preset has no effect beside model\.from_checkpoint"),
        ({"model": {"eos_token_id": 3}}, r"model\.eos_token_id is the tokenizer's to say"),
        ({"model": {"from_checkpoint": None, "weights_sha256": "a"}}, r"weights_sha256 says nothing without"),
        ({"model": {"from_checkpoint": 3}}, r"from_checkpoint is 3: give a folder, or hf://user/name"),
        ({"model": {"from_checkpoint": "no/where"}}, r"no/where is no folder here \(.*hf://no/where\)"),
        ({"tokenizer": {"vocab_size": 300}}, r"tokenizer\.vocab_size has no effect, for .* brings its own tokenizer"),
        ({"tokenizer": {"path": "other"}}, r"tokenizer\.path has no effect"),
        ({"training": {"sequence_length": 256}}, r"\(256\) is beyond model\.max_position_embeddings \(128"),
    ],
)  # fmt: skip
def test_what_contradicts_the_checkpoint_is_refused(make_sft, sections, message):
    with pytest.raises(UserError, match=message) as caught:
        make_sft(**sections)
    assert "\n" not in str(caught.value)


def test_what_is_no_tercet_checkpoint_is_refused_with_the_remedy(make_sft, tmp_path, killed_run):
    native = tmp_path / "llama"
    LlamaConfig(hidden_size=16, num_attention_heads=2).save_pretrained(native)
    with pytest.raises(UserError, match=r"holds a llama model: `tercet import .*llama NEW`"):
        make_sft(native)
    with pytest.raises(UserError, match=r"no config.json\): let that run end, or give .*step-\d+"):
        make_sft(killed_run)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match="is no model config"):
        make_sft(tmp_path / "torn")


class TestWhatIsLearned:
    def test_labels_are_the_assistants_tokens(self, make_sft, tmp_path):
        """Against transformers' own mask: of the documents as stored, and of the rows that a step gets."""
        train(make_sft(training={"num_steps": 1}), output_dir=tmp_path / "run", say=silently)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
        data = PreparedData.open(tmp_path / "run" / "data").train
        expected = {}
        for index in range(24):
            shown = tokenizer.apply_chat_template(
                conversation(index), return_dict=True, return_assistant_tokens_mask=True
            )
            expected[tuple(shown["input_ids"])] = shown["assistant_masks"]
        dataset = PackedDataset(data, pack(data.document_lengths, 1280), eos_token_id=0, pad_token_id=1)
        seen = 0
        for row in (dataset.row(number) for number in range(len(dataset))):
            inputs, labels, positions = (row[name].tolist() for name in ("input_ids", "shift_labels", "position_ids"))
            starts = [at for at, position in enumerate(positions) if position == 0]
            for start, stop in zip(starts, [*starts[1:], len(inputs)], strict=True):
                if inputs[start] == 1:  # padding
                    assert set(labels[start:stop]) == {-100}
                    continue
                ids = inputs[start + 1 : stop]
                mask = expected[tuple(ids)]
                assert labels[start:stop] == [*(i if m else -100 for i, m in zip(ids, mask, strict=True)), -100]
                said = tokenizer.decode([label for label in labels[start:stop] if label != -100])
                assert said.startswith("It is ") and said.endswith("<|im_end|>") and "What" not in said
                seen += 1
        assert seen == data.num_documents > 10

    def test_the_loss_of_answers_falls_and_is_what_is_reported(self, make_sft, base, tmp_path):
        """Against transformers alone: every held-out and every learned conversation by itself, in plain forwards."""
        recipe = make_sft(training={"num_steps": 60, "evaluate_every": 60, "save_every": 60})
        outcome = train(recipe, output_dir=tmp_path / "run", say=silently)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
        data = PreparedData.open(tmp_path / "run" / "data")
        learned = {tuple(data.train.tokens(d, 0, n)[:-1].tolist()) for d, n in enumerate(data.train.document_lengths)}

        def measure(folder: Path, *, of_train: bool) -> tuple[float, float]:
            model = AutoModelForCausalLM.from_pretrained(folder)
            nats = text_nats = num_tokens = num_bytes = 0.0
            for index in range(24):
                shown = tokenizer.apply_chat_template(
                    conversation(index), return_dict=True, return_assistant_tokens_mask=True
                )
                ids, mask = shown["input_ids"], torch.tensor(shown["assistant_masks"]).bool()
                if (tuple(ids) in learned) != of_train:
                    continue
                with torch.no_grad():
                    logits = model(torch.tensor([[0, *ids[:-1]]])).logits[0]
                each = F.cross_entropy(logits, torch.tensor(ids), reduction="none")
                nats += float(each[mask].sum())
                text_nats += float(each[mask & (torch.tensor(ids) > 3)].sum())
                num_tokens += int(mask.sum())
                num_bytes += sum(len(m["content"].encode()) for m in conversation(index) if m["role"] == "assistant")
            return nats / num_tokens, text_nats / math.log(2) / num_bytes

        before, _ = measure(base, of_train=True)
        after, _ = measure(tmp_path / "run", of_train=True)
        assert after < 0.7 * before
        held_out, bits_per_byte = measure(tmp_path / "run", of_train=False)
        assert outcome.results is not None and outcome.results.evaluation is not None
        assert outcome.results.evaluation.loss_nats == pytest.approx(held_out, rel=1e-4)
        assert outcome.results.evaluation.bits_per_byte == pytest.approx(bits_per_byte, rel=1e-4)
        assert "<|im_start|>assistant" in outcome.results.samples[0].prompt

    def test_generation_stops_at_the_end_of_a_turn(self, make_sft, tmp_path):
        train(make_sft(training={"num_steps": 1}), output_dir=tmp_path / "run", say=silently)
        settings = json.loads((tmp_path / "run" / "generation_config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
        assert settings["eos_token_id"] == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]


class TestExactness:
    def test_a_killed_run_goes_on_to_the_same_bits(self, make_sft, tmp_path):
        recipe = make_sft(model={"hidden_dropout": 0.1})
        train(recipe, output_dir=tmp_path / "whole", say=silently)
        train_until_killed(recipe, tmp_path / "killed", 6)
        train(recipe, output_dir=tmp_path / "killed", say=silently)
        assert_same_run(tmp_path / "killed", tmp_path / "whole")

    def test_other_weights_are_another_run(self, make_sft, base, tmp_path):
        copy = shutil.copytree(base, tmp_path / "base")
        train(make_sft(copy), output_dir=tmp_path / "run", say=silently)
        recorded = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
        assert recorded.model["weights_sha256"] == _sha256sum(copy / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(copy)
        torch.nn.init.ones_(model.get_input_embeddings().weight)
        model.save_pretrained(copy)
        with pytest.raises(UserError, match=r"run of another recipe \(different: model.weights_sha256\)"):
            train(make_sft(copy), output_dir=tmp_path / "run", say=silently)
        with pytest.raises(UserError, match=r"has other weights .* than model.weights_sha256 says"):
            train(recorded, output_dir=tmp_path / "again", say=silently)
        assert not (tmp_path / "again").exists()

    def test_the_record_of_a_run_is_whole_without_its_checkpoint(self, make_sft, base, tmp_path):
        copy = shutil.copytree(base, tmp_path / "base")
        recipe = make_sft(copy, training={"num_steps": 1})
        train(recipe, output_dir=tmp_path / "run", say=silently)
        with_base = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
        shutil.rmtree(copy)
        without = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
        assert without == with_base
        assert differences(without.model_dump(mode="json"), with_base) == []
        assert without.model_config_for(300, {}).hidden_size == 16
        with pytest.raises(UserError, match="base is no folder here"):
            train(without, output_dir=tmp_path / "again", say=silently)

    def test_a_recipe_without_a_checkpoint_is_left_alone(self):
        fields = {"model": {"hidden_size": 16}, "tokenizer": {"vocab_size": 300}}
        assert complete_fields(fields, frozenset(["hidden_size"]), "recipe") is fields


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """A Llama of 260 rows with random weights, imported: its tokenizer has bytes and an end of text, and no more."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("native")
    config = LlamaConfig(vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, eos_token_id=256,
                         bos_token_id=256, pad_token_id=None, tie_word_embeddings=False)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    backend = Tokenizer(
        models.BPE({character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|end|>")
    tokenizer.save_pretrained(folder / "llama")
    import_checkpoint(folder / "llama", folder / "tercet")
    return folder / "tercet"


class TestAnImportedModelWithoutAChatTemplate:
    def test_the_tokens_of_chatml_get_rows_of_their_own(self, make_sft, imported, tmp_path):
        said = []
        recipe = make_sft(imported, training={"num_steps": 2, "sequence_length": 64})
        train(recipe, output_dir=tmp_path / "run", say=said.append)
        assert any("<|pad|>, <|im_start|>, <|im_end|> added to it" in line for line in said), said
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
        assert tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]) == [
            256, 257, 258, 259,
        ]  # fmt: skip
        assert len(tokenizer) == 260

    def test_embeddings_and_head_grow_by_what_does_not_fit(self, make_sft, imported):
        recipe = make_sft(imported, training={"sequence_length": 64})
        tokenizer = AutoTokenizer.from_pretrained(imported)
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        tokenizer.add_tokens([f"<extra {i}>" for i in range(6)])
        model, again = make_model(recipe, tokenizer), make_model(recipe, tokenizer)
        theirs = AutoModelForCausalLM.from_pretrained(imported)
        for ours, old in (
            (model.get_input_embeddings(), theirs.get_input_embeddings()),
            (model.lm_head, theirs.lm_head),
        ):
            assert ours.weight.shape == (264, 32)
            assert torch.equal(ours.weight[:260], old.weight)
            assert ours.weight[260:].std() > 0 and ours.weight[260:].abs().max() < 2 * old.weight.abs().max()
        assert model.config.vocab_size == 264
        assert torch.equal(model.lm_head.weight, again.lm_head.weight)


def _sha256sum(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()
