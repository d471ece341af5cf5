"""Ship the presets, the quickstart and the tested versions inside the package that `pip install` writes.

All else about the package is in pyproject.toml. An editable installation reads them in the repository.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
# The folder of the package that `megasharp.config.core.SHIPPED` finds, with the repository's paths below it.
INTO = Path("megasharp", "shipped")
PIECES = (
    *("configs", "examples/quickstart/base", "examples/quickstart/memory", "examples/quickstart/data"),
    *("examples/quickstart/run.yaml", "constraints.txt"),
)


def shipped() -> list[str]:
    """Every file that is shipped, relative to the repository."""
    found = (path for piece in PIECES for path in (HERE / piece, *(HERE / piece).rglob("*")) if path.is_file())
    return sorted(path.relative_to(HERE).as_posix() for path in found)


class WithPresets(build_py):
    """Builds the package, then copies what is shipped into it."""

    def run(self) -> None:
        """Build; in an editable installation nothing is copied."""
        super().run()
        if self.editable_mode:
            return
        for name in shipped():
            target = Path(self.build_lib, INTO, name)
            self.mkpath(str(target.parent))
            self.copy_file(str(HERE / name), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files that a build writes."""
        own = [] if self.editable_mode else [str(Path(self.build_lib, INTO, name)) for name in shipped()]
        return [*super().get_outputs(include_bytecode), *own]

    def get_source_files(self) -> list[str]:
        """The files that a source distribution holds, from which a wheel can be built."""
        return [*super().get_source_files(), *shipped()]


setup(cmdclass={"build_py": WithPresets})
