"""The wheel: what is in it, and that it runs in an environment that has nothing of this checkout."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import lockstep
from tests.contract.tree import REPO

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

PROGRAM = """
import lockstep, torch

with lockstep.init(device="cpu") as world:
    total = torch.tensor(world.rank + 1.0)
    torch.distributed.all_reduce(total)
    world.print(world.backend, total.item(), lockstep.__file__)
"""
NO_LIBRARY = (
    "this group uses Gloo instead of shm: its C library was not built when lockstep was installed; install a C "
    "compiler and lockstep again."
)


def run(*command, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env={**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def sources():
    """Return what is committed of the package, as paths below src."""
    listed = subprocess.run(["git", "ls-files", "-z", "src"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name.removeprefix("src/") for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]


def build(folder, **variables):
    """Build the wheel from what is committed, without what earlier builds have left."""
    tree = folder / "tree"
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", *(f"src/{e}" for e in sources())):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, tree / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder))
    run(sys.executable, "-m", "pip", "wheel", *options, str(tree), **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel, folder):
    """Return an environment that has the wheel, and sees what this one has but nothing of this checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    run(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel))
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A folder that a .pth file names is searched after this one, and its own .pth files, an editable install's, are not
    # read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_runs_in_an_empty_environment(has_compiler, tmp_path):
    wheel = build(tmp_path, **({} if has_compiler else {"CC": "no-such-compiler"}))
    assert wheel.name == f"lockstep_torch-{lockstep.__version__}-py3-none-linux_{platform.machine()}.whl"
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = {"lockstep/comm/shm/_native.so"} if has_compiler else set()
    assert inside == {name for name in sources() if Path(name).suffix not in (".c", ".h")} | library
    pages = {"lockstep/study/page.css", "lockstep/study/page.html", "lockstep/study/report.html"}
    assert {"lockstep/py.typed", *pages} <= inside

    programs = install(wheel, tmp_path / "venv")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    printed = run(str(programs / "lockstep"), "run", "--devices", "2", str(script))
    backend = "shm" if has_compiler else "gloo"
    assert f"{backend} 3.0 {tmp_path}/venv/lib/" in printed
    assert printed.count(NO_LIBRARY) == (not has_compiler), printed
    # One rank exchanges nothing.
    assert "lockstep: " not in run(str(programs / "lockstep"), "run", "--devices", "1", str(script))
