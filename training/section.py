"""What all sections of a recipe have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: an unknown key is an error, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
