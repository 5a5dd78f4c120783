"""What somebody meets who has just installed Tercet: recipes to copy, own text, mistakes, what to type next."""

import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from small_runs import small_settings
from tercet.training.recipe import load_recipe


def refusal(shown) -> str:
    assert shown.code == 2, (shown.out, shown.err)
    (line,) = [line for line in shown.err.splitlines() if line.strip()]
    return line


class TestRecipes:
    def test_all_are_listed_with_a_line_each(self, tercet, root):
        names = sorted(path.stem for path in (root / "recipes").glob("*.yaml"))
        listed = tercet("recipe").out.split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in listed] == names
        assert all(len(line.split()) > 5 for line in listed)

    def test_a_copy_is_the_recipe(self, tercet, tmp_path):
        copy = tmp_path / "my.yaml"
        copy.write_text(tercet("recipe", "demo").out, encoding="utf-8")
        assert load_recipe(str(copy)) == load_recipe("demo")

    def test_every_key_is_told(self, tercet):
        """Those of a whole recipe, as a run writes it down, with the defaults that it has."""
        shown = tercet("recipe", "--keys").out
        recipe = load_recipe("demo").model_dump(mode="json")
        for section, values in recipe.items():
            for key in values if isinstance(values, dict) else ():
                assert re.search(rf"^  {section}\.{key} ", shown, re.MULTILINE), f"{section}.{key}"
        told = dict(re.findall(r"^  (\S+) .*; default (.+)$", shown, re.MULTILINE))
        assert yaml.safe_load(told["optimizer.betas"]) == [0.9, 0.95]
        assert yaml.safe_load(told["model.norm_eps"]) == 1e-6
        assert "training.num_steps" not in told

    def test_every_key_has_words(self):
        from tercet.training.recipe import Recipe
        from tercet.training.recipe_keys import keys_of

        assert [key.name for key in keys_of(Recipe) if not key.description] == []

    def test_one_section(self, tercet):
        shown = tercet("recipe", "--keys", "samples").out
        assert "samples.top_p" in shown
        assert "training." not in shown.replace("training.sample_every", "")
        assert "choose one of data, tokenizer" in refusal(tercet("recipe", "--keys", "sample"))

    def test_an_unknown_one(self, tercet):
        assert "choose one of base, demo" in refusal(tercet("recipe", "nowhere"))

    def test_the_page_is_current(self, root):
        from tercet.training.recipe_reference import as_page

        page = (root / "docs" / "recipe.md").read_text(encoding="utf-8")
        assert page == as_page(), "python -m tercet.training.recipe_reference > docs/recipe.md"

    def test_help_names_them(self, tercet):
        shown = " ".join(re.sub("[│╭╮╰╯─]", " ", tercet("train", "--help").out).split())
        assert "base, demo, large, sft, shakespeare, small, text" in shown
        assert "tercet recipe" in shown


class TestOwnText:
    def test_100_kb_are_enough_for_its_vocabulary(self, small_corpus):
        from tercet.tokenizer import train_tokenizer

        text = "\n\n".join(small_corpus)[:100_000]
        recipe = load_recipe("text")
        trained = text[: int(len(text) * (1 - recipe.data.validation_fraction))]
        assert len(train_tokenizer([trained], recipe.tokenizer.vocab_size)) == 1024

    def test_a_run_and_what_to_type_next(self, tercet, text_file, tmp_path):
        """Nothing of another's text; every line that it proposes is a command that there is."""
        folder = tmp_path / "run"
        shown = tercet("train", "text", *small_settings(f"data.path={text_file}"), "--output", folder)
        assert shown.code == 0, shown.err
        assert "ROMEO" not in shown.out
        lines = [shlex.split(line, comments=True) for line in shown.out.partition("Next:\n")[2].splitlines()]
        assert [words[1] for words in lines] == ["generate", "explore", "info", "eval", "push"]
        assert lines[0] == ["tercet", "generate", str(folder)]
        # What would be published says under which licence, as the push asks for it.
        assert lines[4][2:] == [str(folder), "USER/NAME", "--license", "NAME", "--dry-run"]
        push = ["mit" if word == "NAME" else word for word in lines[4][1:]]
        assert tercet(*push, "--shorten-paths").code == 0
        assert tercet(*lines[0][1:], "--max-new-tokens", "3").code == 0

    def test_a_text_learned_by_heart_is_told(self, tercet, tmp_path):
        """Random letters: nothing but their frequencies can be known of those held out."""
        text = tmp_path / "letters.txt"
        text.write_text("".join(random.Random(0).choices("abcdefgh", k=2000)))
        settings = small_settings(
            f"data.path={text}", "model.hidden_size=64", "training.num_steps=120", "training.evaluate_every=20",
            "training.global_batch_size=16", "training.per_device_batch_size=16",
        )  # fmt: skip
        shown = tercet("train", "text", *settings, "--output", tmp_path / "run")
        told = re.search(r"It was better at step (\d+), (\S+) bits.*--set training.num_steps=(\d+)$", shown.out, re.M)
        assert told is not None, shown.out
        measured = re.findall(r"^step +(\d+)   validation loss .* (\S+) bits per byte", shown.out, re.M)
        step, best = min(measured, key=lambda pair: float(pair[1]))
        assert told[1] == told[3] == step
        assert abs(float(told[2]) - float(best)) <= 1e-3

    def test_a_text_not_learned_by_heart_is_not(self, tercet, text_file, tmp_path):
        shown = tercet("train", "text", *small_settings(f"data.path={text_file}"), "--output", tmp_path / "run")
        assert "bits per byte on held-out text" in shown.out
        assert "better at step" not in shown.out

    def test_the_lines_name_the_command_as_it_was_called(self, text_file, tmp_path):
        """Where no `tercet` is on the PATH."""
        arguments = ["train", "text", *small_settings(f"data.path={text_file}"), "-o", str(tmp_path / "run")]
        done = subprocess.run(
            [sys.executable, "-m", "tercet", *arguments],
            capture_output=True, text=True, check=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        command = shlex.split(done.stdout.partition("Next:\n")[2].splitlines()[2], comments=True)
        shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
        assert command[:3] == [sys.executable, "-m", "tercet"]
        assert "hidden_size" in shown.stdout

    def test_a_missing_file_says_how_to_name_one(self, tercet, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert "--set data.path=FILE" in refusal(tercet("train", "text"))

    def test_a_folder_that_is_not_there(self, tercet, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        line = refusal(tercet("train", "text", "--set", "data.path=out/prep"))
        assert line.startswith("tercet: out/prep is no file or folder here")

    @pytest.mark.parametrize("inside", ["", "data"])
    def test_prepared_data_is_no_text(self, tercet, checkpoint, tmp_path, inside):
        line = refusal(tercet("train", "text", "--set", f"data.path={checkpoint / inside}", "-o", tmp_path / "run"))
        assert f"--output {checkpoint}" in line

    def test_too_large_a_vocabulary(self, tercet, text_file, tmp_path):
        """What the message says to type does it."""
        book = tmp_path / "short.txt"
        book.write_text(text_file.read_text("utf-8")[:20_000], encoding="utf-8")
        arguments = ["train", "text", *small_settings(f"data.path={book}"), "-o", tmp_path / "run"]
        line = refusal(tercet(*arguments, "--set", "tokenizer.vocab_size=9999"))
        setting = line.partition("--set ")[2]
        assert re.fullmatch(r"tokenizer\.vocab_size=\d+", setting)
        assert tercet(*arguments, "--set", setting).code == 0
        line = refusal(tercet("tokenizer", "train", book, "-o", tmp_path / "t", "--vocab-size", "9999"))
        option = line[line.rindex("--vocab-size ") :].split()
        assert tercet("tokenizer", "train", book, "-o", tmp_path / "t", *option).code == 0


class TestMistakes:
    def test_no_yaml(self, tercet, tmp_path):
        (tmp_path / "notes.md").write_text("# Notes\n\n**Bold** words: of all *kinds*\n", encoding="utf-8")
        line = refusal(tercet("train", tmp_path / "notes.md"))
        assert "notes.md is not YAML (line 3, column 2: " in line
        assert "<" not in line

    def test_longer_than_a_finished_run(self, tercet, text_file, tmp_path):
        """The line that it tells goes on from the run that is there."""
        arguments = ["train", "text", *small_settings(f"data.path={text_file}"), "--output", tmp_path / "run"]
        assert tercet(*arguments).code == 0
        line = refusal(tercet(*arguments, "--set", "training.num_steps=6"))
        assert "different: training.num_steps" in line
        command = shlex.split(line.partition("in a new folder: ")[2])
        assert f"training.branch_from={tmp_path / 'run' / 'checkpoints' / 'step-00000004'}" in command
        shown = tercet(*command[1:])
        assert shown.code == 0, shown.err
        assert "step 4; different in its recipe: training.num_steps" in shown.out
        assert (tmp_path / "run-to-6" / "README.md").is_file()

    @pytest.mark.parametrize("setting", ["training.num_steps=2", "model.hidden_size=32"])
    def test_no_branch_where_none_can_be(self, tercet, text_file, tmp_path, setting):
        arguments = ["train", "text", *small_settings(f"data.path={text_file}"), "--output", tmp_path / "run"]
        assert tercet(*arguments).code == 0
        assert "branch_from" not in refusal(tercet(*arguments, "--set", setting))


class TestOnTheWay:
    def test_prepare_says_how_to_train_on_it(self, tercet, text_file, tmp_path):
        """The line that it ends with trains on what it made."""
        settings = small_settings(f"data.path={text_file}")
        shown = tercet("data", "prepare", "text", *settings, "--output", tmp_path / "run")
        assert shown.code == 0, shown.err
        made = (tmp_path / "run" / "data" / "manifest.json").stat()
        command = shlex.split(shown.out.partition("Next:\n")[2])
        shown = tercet(*command[1:])
        assert shown.code == 0, shown.err
        assert (tmp_path / "run" / "model.safetensors").is_file()
        assert (tmp_path / "run" / "data" / "manifest.json").stat().st_mtime_ns == made.st_mtime_ns

    def test_training_says_what_was_left_out(self, tercet, tmp_path):
        folder = tmp_path / "texts"
        folder.mkdir()
        for number in range(4):
            (folder / f"{number}.txt").write_text(f"This is text {min(number, 2)}. " * 300, encoding="utf-8")
        shown = tercet(
            "train", "text", *small_settings(f"data.path={folder}", "tokenizer.vocab_size=265"), "-o", tmp_path / "run"
        )
        assert shown.code == 0, shown.err
        assert "1 document left out, equal to one before" in shown.out

    def test_eval_says_what_it_does(self, tercet, checkpoint, text_file, tmp_path):
        shown = tercet("eval", shutil.copytree(checkpoint, tmp_path / "copy"), "--data", text_file)
        num_bytes = f"{text_file.stat().st_size:,}"
        assert f"{num_bytes} bytes, in windows of 32" in shown.err
        assert f"on {num_bytes} bytes" in shown.out

    def test_chat_with_a_model_that_never_chatted(self, tercet, checkpoint, monkeypatch):
        monkeypatch.setattr("builtins.input", lambda prompt: "/quit")
        assert "never on conversations" in tercet("chat", checkpoint).err


class TestPrompts:
    """`generate` and `explore` take it alike."""

    def test_generate(self, tercet, checkpoint):
        settings = ["--temperature", 0, "--max-new-tokens", 4]
        shown = tercet("generate", checkpoint, "The string", *settings).out
        assert shown.startswith("The string")
        assert tercet("generate", checkpoint, "--prompt", "The string", *settings).out == shown
        assert "given twice" in refusal(tercet("generate", checkpoint, "The", "--prompt", "The"))

    def test_explore(self, tercet, checkpoint, tmp_path):
        """As many tokens of a prompt either way, and others of another."""
        counts = []
        for prompt in (["The string"], ["--prompt", "The string"], ["The string and more"]):
            shown = tercet("explore", checkpoint, *prompt, "--new-tokens", 2, "-o", tmp_path / "page.html")
            assert shown.code == 0, shown.err
            counts.append(int(re.search(r"(\d+) \+ \d+ tokens through", shown.out)[1]))
        assert counts[0] == counts[1] < counts[2]

    def test_top_k(self, tercet, checkpoint):
        """Drawing among one is taking the likeliest."""
        drawn = tercet("generate", checkpoint, "The", "--top-k", 1, "--temperature", 5, "--max-new-tokens", 6).out
        assert drawn == tercet("generate", checkpoint, "The", "--temperature", 0, "--max-new-tokens", 6).out
        assert "--temperature" in refusal(tercet("generate", checkpoint, "--top-k", 3, "--temperature", 0))
