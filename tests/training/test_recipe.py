"""A recipe is checked before anything is touched, and every mistake is named with its remedy."""

from importlib import resources

import pytest
import yaml

from tercet.training.recipe import Recipe, RecipeError, load_recipe, recipe_from_fields, recipe_to_yaml
from tercet.training.recipe_keys import keys_of
from tercet.training.recipe_mistakes import _ELSEWHERE

BUILT_IN = sorted(
    item.name.removesuffix(".yaml")
    for item in resources.files("tercet.recipes").iterdir()
    if item.name.endswith(".yaml")
)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_recipes_are_whole(name, untouched):
    # Its checkpoint is another recipe's, which a test does not wait for.
    start = [f"model.from_checkpoint={untouched}", "training.sequence_length=32"] if name == "sft" else []
    recipe = load_recipe(name, start)
    assert recipe.training.num_steps > 0
    assert recipe_from_fields(yaml.safe_load(recipe_to_yaml(recipe))) == recipe


@pytest.mark.parametrize("name", ["demo", "demo.yaml", "recipes/demo.yaml"])
def test_a_built_in_recipe_by_any_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(name) == load_recipe("demo")


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"num_step": 5}, "unknown key training.num_step; did you mean training.num_steps?"),
        ("model", {"hiden_size": 5}, "unknown key model.hiden_size; did you mean model.hidden_size?"),
        ("optimizer", {"lr": 1}, "unknown key optimizer.lr; did you mean optimizer.learning_rate?"),
        ("data", {"pth": "x"}, "unknown key data.pth; did you mean data.path?"),
        ("training", {"num_steps": 0}, "training.num_steps is 0: expected a whole number ≥ 1"),
        ("training", {"num_steps": "many"}, "training.num_steps is 'many': expected a whole number ≥ 1"),
        ("training", {"device": "tpu"}, "training.device is 'tpu': expected one of auto, cpu, cuda"),
        ("training", {"per_device_batch_size": 3}, "global_batch_size (4) is not a multiple"),
        ("data", {"sources": [{"path": "x"}]}, "either data.path or data.sources"),
        ("data", {"path": None}, "either data.path or data.sources"),
        ("model", {"num_attention_heads": 3}, "hidden_size (16) is not a multiple of num_attention_heads (3)"),
        ("model", {"max_position_embeddings": 16}, "training.sequence_length (32) is beyond"),
        ("model", {"mlp_type": "moe"}, "model.mlp_type is 'moe': expected one of gated, plain"),
        ("model", {"hidden_size": "abc"}, "model.hidden_size is 'abc': expected a whole number"),
        ("model", {"norm_eps": "1e-5"}, "model.norm_eps is '1e-5': expected a number (YAML reads 1e-5 as text: write"),
        ("model", {"rope_parameters": 5}, "model.rope_parameters is 5: expected a mapping"),
        ("training", {"gradient_checkpointing": "x"}, "is 'x': expected true, false or whole number ≥ 1"),
        ("optimizer", {"betas": [0.9, 1.5]}, "optimizer.betas.1 is 1.5: optimizer.betas is a list of 2 numbers ≥ 0"),
        ("model", {"preset": "ancient"}, "choose modern or classic"),
    ],
)
def test_each_mistake_is_one_line_that_names_it(make_recipe, section, values, message):
    with pytest.raises(RecipeError) as caught:
        make_recipe(**{section: values})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lr", "optimizer.learning_rate"),
        ("training.lr", "optimizer.learning_rate"),
        ("training.learning_rate", "optimizer.learning_rate"),
        ("model.learning_rat", "optimizer.learning_rate"),
        ("steps", "training.num_steps"),
        ("num_steps", "training.num_steps"),
        ("training.max_steps", "training.num_steps"),
        ("training.batch_size", "training.global_batch_size"),
        ("block_size", "training.sequence_length"),
        ("model.n_layer", "model.num_hidden_layers"),
        ("model.n_head", "model.num_attention_heads"),
        ("n_embd", "model.hidden_size"),
        ("model.dropout", "model.hidden_dropout"),
        ("vocab_size", "tokenizer.vocab_size"),
        ("optimiser.learning_rate", "optimizer"),
        ("hub.repo", "hub.repo_id"),
    ],
)
def test_the_nearest_key_is_looked_for_in_all_sections(written, meant):
    with pytest.raises(RecipeError) as caught:
        load_recipe("demo", [f"{written}=5"])
    assert f"unknown key {written if meant != 'optimizer' else 'optimiser'}; did you mean {meant}?" in str(caught.value)


def test_every_name_of_elsewhere_leads_to_a_key():
    names = {key.name for key in keys_of(Recipe)}
    assert {*_ELSEWHERE.values()} <= names
    assert not {*_ELSEWHERE} & names


def test_a_key_that_is_like_none_gets_those_of_its_section():
    with pytest.raises(RecipeError, match=r"unknown key samples\.qqqq; known: samples\.prompts, .*samples\.top_p$"):
        load_recipe("demo", ["samples.qqqq=1"])


def test_several_mistakes_are_all_named(make_recipe):
    with pytest.raises(RecipeError) as caught:
        make_recipe(training={"num_step": 1, "sequense_length": 2})
    assert "did you mean training.num_steps?" in str(caught.value)
    assert "did you mean training.sequence_length?" in str(caught.value)


def test_a_source_in_a_list_is_checked_too(make_recipe):
    with pytest.raises(
        RecipeError, match=r"unknown key data\.sources\.0\.text_colum; did you mean data\.sources\.0\.text_column\?"
    ):
        make_recipe(data={"path": None, "sources": [{"path": "x", "text_colum": "t"}]})


class TestSources:
    def sources(self, *sources, **data):
        return {"path": None, "sources": [{"path": f"s{i}", **fields} for i, fields in enumerate(sources)], **data}

    def test_weights_are_parts_of_one(self, make_recipe):
        data = make_recipe(data=self.sources({"weight": 3}, {"weight": 1, "name": "fr"})).data
        assert data.weights() == {"s0": 0.75, "s1:fr": 0.25}
        assert make_recipe(data=self.sources({}, {})).data.weights() is None
        assert make_recipe().data.weights() is None

    def test_a_source_takes_what_it_does_not_say_from_the_section(self, make_recipe):
        data = make_recipe(
            data=self.sources({"on_bad_row": "error"}, {"min_chars": 7}, on_bad_row="skip", min_chars=5, max_chars=9)
        ).data
        shown = [(source.on_bad_row, source.min_chars, source.max_chars) for source in data.all_sources()]
        assert shown == [("error", 5, 9), ("skip", 7, 9)]
        (only,) = make_recipe(data={"max_chars": 9}).data.all_sources()
        assert (only.on_bad_row, only.min_chars, only.max_chars) == ("error", None, 9)

    def test_every_setting_survives_being_written_out(self, make_recipe):
        recipe = make_recipe(
            data=self.sources(
                {"text_template": "# {t}\n\n{b}", "weight": 0.5}, {"messages_column": "m", "weight": 0.5},
                on_bad_row="skip",
            )
        )  # fmt: skip
        assert recipe_from_fields(yaml.safe_load(recipe_to_yaml(recipe))) == recipe

    @pytest.mark.parametrize(
        ("sources", "data", "message"),
        [
            ([{"weight": 1}, {}], {}, "data.sources has weights, but none for s1; give all of them one, or none"),
            ([{"weight": -1}], {}, "data.sources.0.weight is -1: expected a number > 0"),
            ([{"weight": 1}, {"weight": 1, "path": "s0"}], {}, "names s0 twice"),
            ([{"text_template": "{a"}], {}, "data.sources.0.text_template is '{a': expected '}'"),
            ([{"text_template": "{a:x}"}], {}, "{a} has a format after its name"),
            ([{"messages_column": "m"}], {"split_by": "tail"}, "split_by: tail cuts conversations"),
            ([{"min_chars": 8}], {"max_chars": 7}, "data.min_chars (8) is more than max_chars (7) for s0"),
            ([{"on_bad_row": "ignore"}], {}, "data.sources.0.on_bad_row is 'ignore'"),
            ([{}], {"on_bad_row": "ignore"}, "data.on_bad_row is 'ignore'"),
            ([{"weigth": 1}], {}, "unknown key data.sources.0.weigth; did you mean data.sources.0.weight?"),
        ],
    )
    def test_mistakes(self, make_recipe, sources, data, message):
        with pytest.raises(RecipeError) as caught:
            make_recipe(data=self.sources(*sources, **data))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


class TestOverrides:
    def test_values_are_read_as_yaml(self):
        recipe = load_recipe(
            "demo", ["training.num_steps=7", "samples.prompts=[a, b]", "data.drop_duplicates=false", "seed=9"]
        )
        assert recipe.training.num_steps == 7
        assert recipe.samples.prompts == ("a", "b")
        assert recipe.data.drop_duplicates is False
        assert recipe.seed == 9

    def test_a_section_may_be_new(self):
        assert load_recipe("shakespeare", ["card.license=mit"]).card.license == "mit"

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("training.num_steps", "expected section.key=value"),
            ("seed.x=1", "seed is a value, not a section"),
            ("training.num_stepz=1", "did you mean training.num_steps"),
            ("training.num_steps={", "not YAML"),
        ],
    )
    def test_mistakes(self, override, message):
        with pytest.raises(RecipeError, match=message):
            load_recipe("demo", [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"data: [", "is not YAML"),
        (b"- a\n- b\n", "holds no recipe"),
        (b"", "holds no recipe"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        load_recipe(str(path))


def test_a_missing_file_lists_what_there_is():
    with pytest.raises(RecipeError, match=r"no recipe at nowhere\.yaml.*demo.*shakespeare"):
        load_recipe("nowhere.yaml")
