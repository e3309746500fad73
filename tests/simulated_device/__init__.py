"""A simulated accelerator: `load()` builds it, once per machine, and registers the device ``sim`` with torch.

`torch.sim` has the usual functions of a device and some of its own (device.py). What it simulates, and what of it is
checked, stands at the head of runtime.h.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("device.cpp", "autocast.cpp")]
NAME = "lockstep_simulated_device"


def load(devices: int = 4) -> ModuleType:
    """Return ``torch.sim``, with ``devices`` devices.

    Call it before the first backward of the process: autograd then starts its threads, one for each device.
    """
    import torch  # not at the top: the test session itself does not need it

    if not hasattr(torch, "sim"):
        import_file("simulated_device_native", NAME, build())
        import_file("simulated_device_module", "simulated_device_module", HERE / "device.py").register(devices)
    return torch.sim


def missing() -> str:
    """Return why the device cannot be built here, or nothing."""
    if sys.platform != "linux":
        return "the simulated device needs Linux"
    absent = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
    return f"the simulated device cannot be built: {' and '.join(absent)} not found" if absent else ""


def build() -> Path:
    """Compile the extension unless this has been done, and return its file. Processes wait for the one that builds."""
    files = [*sorted(HERE.glob("*.cpp")), HERE / "runtime.h"]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    versions = f"torch-{version('torch')}-{sys.implementation.cache_tag}"
    folder = HERE.parents[1] / "build" / "simulated_device" / versions
    folder.mkdir(parents=True, exist_ok=True)
    library, done = folder / f"{NAME}.so", folder / "done"
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != key:
            from torch.utils import cpp_extension

            done.unlink(missing_ok=True)
            # torch's own lock, for which it would wait forever if whoever had it was killed.
            (folder / "lock").unlink(missing_ok=True)
            cpp_extension.load(
                NAME,
                [str(file) for file in SOURCES],
                extra_cflags=["-O0", "-g0"],
                build_directory=str(folder),
                is_python_module=False,
            )
            done.write_text(key)
    return library


def import_file(alias: str, name: str, file: Path) -> ModuleType:
    """Import a module from its file, unless this has been done."""
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[alias]
