"""Build the C library of the `shm` backend. Everything else about the package stands in pyproject.toml."""

import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

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


setup(
    ext_modules=[native] if sys.platform == "linux" else [],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
