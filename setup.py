"""Build the C library of the `shm` backend. Everything else about the package stands in pyproject.toml."""

import sys

from setuptools import Extension, setup

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

setup(ext_modules=[native] if sys.platform == "linux" else [])
