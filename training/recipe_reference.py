"""All keys of a recipe, for a terminal and as the page docs/recipe.md: one source for both.

`python -m tercet.training.recipe_reference` prints the page; a test holds it against the code.
"""

import inspect
import textwrap
from collections.abc import Iterator, Sequence

from tercet.training.built_in_recipes import recipe_names, recipe_summary
from tercet.training.errors import UserError
from tercet.training.recipe import Recipe
from tercet.training.recipe_keys import MODEL, RecipeKey, keys_of, section_in

_OWN = "the recipe itself"


def sections() -> dict[str, tuple[str, list[RecipeKey]]]:
    """What each section is for, and its keys; those of no section first."""
    found: dict[str, tuple[str, list[RecipeKey]]] = {_OWN: ("Keys of no section.", [])}
    for name, field in Recipe.model_fields.items():
        if (section := section_in(field.annotation)) is not None:
            found[name] = (inspect.cleandoc(section.__doc__ or "").partition("\n")[0], [])
        elif name == MODEL:
            found[name] = ("The decoder: fields of `TercetConfig`, and where its weights begin.", [])
    for key in keys_of(Recipe):
        section = key.name.partition(".")[0] if "." in key.name else _OWN
        found[section][1].append(key)
    return found


def as_lines(names: Sequence[str] = (), *, width: int = 100) -> Iterator[str]:
    """The keys for a terminal.

    Args:
        names: Sections to show; none is all.
        width: Of the lines.

    Raises:
        UserError: No such section.
    """
    known = sections()
    for name in names:
        if name not in known:
            choices = ", ".join(section for section in known if section != _OWN)
            raise UserError(f"a recipe has no section {name}: choose one of {choices}")
    for section, (purpose, keys) in known.items():
        if names and section not in names:
            continue
        yield f"{section}: {purpose}"
        for key in keys:
            default = key.default if key.default == "required" else f"default {key.default}"
            yield f"  {key.name:<36}  {key.kind}; {default}"
            yield from textwrap.wrap(key.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        yield ""


def as_page() -> str:
    """The page docs/recipe.md."""
    lines = [
        "# Recipes: every key",
        "",
        "A recipe is one YAML file that says everything a run depends on. `tercet recipe` lists those that come with",
        "Tercet, `tercet recipe demo > my.yaml` makes a copy to change, `tercet train my.yaml` runs it, and",
        "`--set section.key=value` overrides a value without a file. `tercet recipe --keys` prints the tables below,",
        "`tercet recipe --keys training` those of one section. A list is changed in the file, or given as a whole:",
        "`--set data.sources='[{path: a.txt, weight: 2}, {path: b.txt, weight: 1}]'`; N below is a place in it.",
        "",
        "| recipe | |",
        "|---|---|",
        *(f"| [{name}](../recipes/{name}.yaml) | {_cell(recipe_summary(name))} |" for name in recipe_names()),
        "",
        "This page is what `python -m tercet.training.recipe_reference` prints from the code.",
    ]
    for section, (purpose, keys) in sections().items():
        lines += ["", f"## {section}", "", purpose, "", "| key | value | default | |", "|---|---|---|---|"]
        for key in keys:
            default = f"`{key.default}`" if key.default != "required" else "**required**"
            lines.append(f"| `{key.name}` | {_cell(key.kind)} | {default} | {_cell(key.description)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(as_page(), end="")
