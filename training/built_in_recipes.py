"""The recipes that come with Tercet, as text; nothing here imports torch."""

from importlib import resources


def recipe_names() -> list[str]:
    """Their names, sorted."""
    folder = resources.files("tercet.recipes")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The YAML of one, comments and all."""
    return (resources.files("tercet.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """What its first comment says of it."""
    return recipe_text(name).partition("\n")[0].removeprefix("#").strip()
