"""The section `hub` of a recipe: where to push to while training."""

from typing import Self

from pydantic import Field, model_validator

from tercet.training.repository_names import check_reference, check_repository
from tercet.training.section import Section


class HubSection(Section):
    """Where to push to while training."""

    repo_id: str = Field(description="repository on the Hub, user/name")
    every_steps: int | None = Field(
        None, ge=1, description="push a checkpoint of every so many steps; without it, the finished model alone"
    )
    private: bool = Field(True, description="who may see it: you and your organization, or everybody")
    branch: str = Field("main", description="branch to push to")
    tag: bool = Field(True, description="tag every push with its step, such as step-1000")
    wait_s: float = Field(600, ge=0, description="seconds to wait for the last push, at most")
    shorten_paths: bool = Field(False, description="publish absolute paths as their last part; else they are refused")
    allow: tuple[str, ...] = Field((), description="texts that look like secrets or paths and may be published")

    @model_validator(mode="after")
    def _names_are_names(self) -> Self:
        check_repository(self.repo_id)
        check_reference(self.branch, "branch")
        return self

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of a step is to be pushed."""
        return self.every_steps is not None and step % self.every_steps == 0
