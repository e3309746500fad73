"""What pyproject.toml cannot say: build the C library of `shm`, pack the examples, make the README's links absolute."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SHM = "src/lockstep/comm/shm"

native = Extension(
    "lockstep.comm.shm._native",
    sources=[f"{SHM}/_sync.c", f"{SHM}/_collectives.c", f"{SHM}/_reduce.c", f"{SHM}/_quantize.c"],
    depends=[f"{SHM}/_shm.h", f"{SHM}/_sync.h"],
    # Sums must not depend on the processor: no fused multiply-add. Integers wrap around.
    extra_compile_args=["-std=gnu11", "-O3", "-fwrapv", "-ffp-contract=off"],
    # Without a C compiler the package installs all the same, and Gloo serves.
    optional=True,
)


class BuildLibrary(build_ext):
    """Build a library that is opened with ctypes and knows nothing of Python: its name names no version either."""

    def get_ext_filename(self, ext_name: str) -> str:
        """Return ``lockstep/comm/shm/_native.so``."""
        return ext_name.replace(".", "/") + ".so"


class PlatformWheel(bdist_wheel):
    """Tag the wheel with the platform only: one serves all versions of Python, free-threaded ones too."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return ``py3-none-PLATFORM``."""
        return "py3", "none", super().get_tag()[2]


class WithExamples(build_py):
    """Put the examples into the package, where `lockstep examples` finds them."""

    def run(self) -> None:
        """Copy them from the top of the source tree, unless the package is used in place."""
        super().run()
        if not self.editable_mode:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(
                HERE / "examples", Path(self.build_lib) / "lockstep/examples", ignore=ignored, dirs_exist_ok=True
            )


def long_description() -> str:
    """Return the README for a page elsewhere.

    Its links lead into the repository that ``[project.urls]`` names, at the tag of this version. Without an address,
    links become text and pictures are left out.
    """
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "").rstrip("/")
    (version,) = re.findall(r'^__version__ = "(.+)"$', (HERE / "src/lockstep/__init__.py").read_text(), re.MULTILINE)
    text = (HERE / "README.md").read_text(encoding="utf-8")
    picture, target = r"!\[([^]]*)\]", r"\((?!\w+:|#)([^)]+)\)"
    text = re.sub(picture + target, rf"![\1]({address}/raw/v{version}/\2)" if address else "", text)
    link = rf"(?<!!)\[((?:{picture}\([^)]*\)|[^][])*)\]{target}"
    return re.sub(link, rf"[\1]({address}/blob/v{version}/\3)" if address else r"\1", text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[native] if sys.platform == "linux" else [],
    cmdclass={"build_ext": BuildLibrary, "build_py": WithExamples, "bdist_wheel": PlatformWheel},
)
