"""What to publish, and where: the choices that a push leaves to its user."""

from collections.abc import Sequence
from dataclasses import dataclass

from tercet.training.errors import UserError
from tercet.training.repository_names import check_reference, check_repository

MAIN = "main"
NATIVE_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3")


@dataclass(frozen=True)
class PushOptions:
    """What to publish, and where.

    Attributes:
        repo_id: `user/name`.
        branch: Made from main if it is not there.
        private: Of a repository that is made; of one that is there, what it must be; None leaves it to the Hub.
        tag: Put on the commit.
        tag_step: Put `step-N` on it, N being the steps that the weights were trained for.
        move_tag: A tag that is elsewhere is moved; else that is refused.
        message: Of the commit; None makes one of step and bits per byte.
        license: Of the weights, instead of the recipe's.
        export: Publish the weights as a native model of this family.
        beside: Publish the export in a folder of the family's name, beside the checkpoint and not instead.
        include: Further files of the folder, as names or patterns.
        allow: Texts that look like secrets or absolute paths and may be published.
        shorten_paths: Publish the last part of absolute paths in the record of the run.
        replace: Remove what else the repository holds.
        from_recipe: The options are a recipe's section and not a command's flags, which remedies then name.
    """

    repo_id: str
    branch: str = MAIN
    private: bool | None = None
    tag: str | None = None
    tag_step: bool = False
    move_tag: bool = False
    message: str | None = None
    license: str | None = None
    export: str | None = None
    beside: bool = False
    include: Sequence[str] = ()
    allow: Sequence[str] = ()
    shorten_paths: bool = False
    replace: bool = False
    from_recipe: bool = False

    @property
    def again(self) -> str:
        """What to do after a failure that passes."""
        return "the next push tries again" if self.from_recipe else "run the same command again"

    def spelled(self, flag: str, setting: str) -> str:
        """How the user would say it."""
        return f"hub.{setting}" if self.from_recipe else flag


def check_names(options: PushOptions) -> None:
    """Refuse options that can mean nothing, before anything is read.

    Raises:
        UserError: Names the option.
    """
    check_repository(options.repo_id)
    check_reference(options.branch, "branch")
    if options.tag is not None:
        check_reference(options.tag, "tag")
    if options.export is not None and options.export not in NATIVE_FAMILIES:
        raise UserError(f"--export {options.export} is not known: choose one of {', '.join(NATIVE_FAMILIES)}")
    if options.beside and options.export is None:
        raise UserError("--beside puts an export beside the checkpoint: say which with --export")
    if options.message is not None and not options.message.strip():
        raise UserError("--message is empty: say what is new, or leave it out")
