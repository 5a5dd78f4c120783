"""Carries `hub_card.md`, which lives at the repository's root, into the wheel beside the code that fills it."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCardTemplate(build_py):
    """setuptools' package data cannot reach above a package's own folder; one file is copied by hand."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file("hub_card.md", str(Path(self.build_lib, "tercet", "hub", "hub_card.md")))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Name the copied file too, so that `pip uninstall` and incremental builds know of it."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, "tercet", "hub", "hub_card.md"))]


setup(cmdclass={"build_py": BuildWithCardTemplate})
