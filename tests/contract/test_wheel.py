"""The wheel: what is in it, and that everything runs in an environment that has nothing of this checkout."""

import ast
import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lockstep
from tests.contract import tree
from tests.contract.blocks import blocks_of
from tests.contract.environment import environment_with
from tests.contract.tree import REPO

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
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
IMPORT_ALL = """
import importlib, pkgutil, lockstep

for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    if module.name not in ("lockstep.__main__", "lockstep.ray", "lockstep.comm.shm._native"):
        importlib.import_module(module.name)
"""
# What follows the commands of the README here, so that they end within seconds; and what may be their exit code.
SHORT = {
    "train": "--epochs 2",
    "verify": "--steps 2",
    "compare": "--rounds 1 --steps 2 --warmup 1 --strategies ddp --no-memory --html compare.html",
    "predict": "",
    "rehearse": "--devices 3 --epochs 8 --quiet",
    "doctor": "--devices 1",
    "report": "",
}
BASE = "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"


def run(*command, codes=(0,), cwd=None, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in BASE}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode in codes, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def committed(*places):
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=REPO, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]


def packed():
    """Return what is committed of the package and the examples, by its names in the wheel."""
    inside = {name.removeprefix("src/") for name in committed("src") if Path(name).suffix not in (".c", ".h")}
    return inside | {f"lockstep/{name}" for name in committed("examples")}


def source_archive(folder):
    """Return the source archive of what is committed, without what earlier builds have left."""
    checkout = folder / "checkout"
    for name in committed():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, checkout / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", build, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def build(folder, **variables):
    """Return the wheel that pip builds from the source archive."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder))
    run(sys.executable, "-m", "pip", "wheel", *options, str(source_archive(folder)), **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def metadata(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(opened.read(name).decode())


def install(wheel, folder):
    """Return the programs of an environment with the wheel, and else only what its extra `examples` requires."""
    required = metadata(wheel).get_all("Requires-Dist")
    programs = environment_with(folder, *(text.removesuffix('; extra == "examples"') for text in required))
    options = ("--quiet", "--no-index", "--no-cache-dir", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", *options, f"{wheel}[examples]")
    return programs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("installed"))


def test_what_is_in_the_wheel(wheel):
    assert wheel.name == f"lockstep_torch-{lockstep.__version__}-py3-none-linux_{platform.machine()}.whl"
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == packed() | {"lockstep/comm/shm/_native.so"}
    pages = {"lockstep/study/page.css", "lockstep/study/page.html", "lockstep/study/report.html"}
    assert {
        "lockstep/py.typed",
        "lockstep/examples/digits.py",
        "lockstep/examples/cluster/Dockerfile",
        *pages,
    } <= inside
    about = metadata(wheel)
    assert (about["Name"], about["License-File"], about["License-Expression"]) == (
        "lockstep-torch",
        "LICENSE",
        "BSD-3-Clause",
    )
    assert about["Description-Content-Type"] == "text/markdown"


def targets(markdown):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE))


def test_links_of_the_description(wheel, tmp_path):
    # The address of the repository is not known: text without links.
    text = metadata(wheel).get_payload()
    assert targets(text) == [] and "![" not in text
    assert "\n[Scripts](docs/script.md) explains each step." in (REPO / "README.md").read_text()
    assert "\nScripts explains each step." in text
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    with (source / "pyproject.toml").open("a") as file:
        file.write('[project.urls]\nRepository = "https://example.com/lockstep/"\n')
    run(
        sys.executable,
        "-c",
        "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')",
        cwd=source,
    )
    [found] = source.glob("*.dist-info/METADATA")
    about = message_from_string(found.read_text())
    assert about["Project-URL"] == "Repository, https://example.com/lockstep/"
    text, at = about.get_payload(), f"v{lockstep.__version__}"
    picture = "docs/pictures/report.svg"
    assert (
        f"](https://example.com/lockstep/raw/{at}/{picture})](https://example.com/lockstep/blob/{at}/docs/watching.md)"
        in text
    )
    assert f"[Scripts](https://example.com/lockstep/blob/{at}/docs/script.md)" in text
    assert [target for target in targets(text) if not target.startswith("https://example.com/lockstep/")] == []
    assert len(targets(text)) == len(targets((REPO / "README.md").read_text()))


def test_what_is_imported_is_required():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(text).name) for text in itertools.chain(*lists)}
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for path in tree.sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"lockstep"}:
                if not {canonicalize_name(name) for name in providers.get(top, [top])} & declared:
                    missing.add(f"{path.relative_to(REPO)}: {top}")
    assert missing == set()


def test_every_module_can_be_imported(programs, tmp_path):
    run(programs / "python", "-c", IMPORT_ALL, cwd=tmp_path)
    assert "No module named 'pytest'" in run(programs / "python", "-c", "import pytest", codes=(1,), cwd=tmp_path)


def test_the_commands_of_the_readme(programs, tmp_path):
    (block,) = [
        b for b in blocks_of((REPO / "docs" / "index.md").read_text(), "index.md") if "lockstep.Task(" in b.code
    ]
    (tmp_path / "task.py").write_text(block.code)
    (tmp_path / "script.py").write_text(SCRIPT)
    told = re.findall(r"^\| `lockstep (\w+)(.*?)` \|", (REPO / "README.md").read_text(), re.MULTILINE)
    assert {command for command, _ in told} == {*SHORT}
    others = ["run --devices 2 script.py", "doctor --explain threads-too-many", "examples", "--version"]
    first = [f"{command}{rest} {SHORT[command]}" for command, rest in told if command != "report"] + others

    def lockstep_command(line):
        words = line.replace("TASK.py", "task.py").replace("RUN", "run").split()
        # The doctor finds something on machines that are busy, and a job that was rehearsed to fail is no error.
        return run(programs / "lockstep", *words, codes=(0, 1) if words[0] == "doctor" else (0,), cwd=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        printed = dict(zip(first, pool.map(lockstep_command, first), strict=True))
    assert f"shm 3.0 {programs.parent}/lib/" in printed["run --devices 2 script.py"]
    assert "examples/digits.py  " in printed["examples"]
    assert printed["--version"] == f"lockstep, version {lockstep.__version__}\n"
    lockstep_command("train examples/digits.py --devices 2 --run-dir run --epochs 1")
    assert "page written to run/report.html" in lockstep_command("report RUN")
    assert {"compare.html", "run/report.html"} <= {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")
    }


@pytest.mark.soak
def test_without_a_compiler_gloo_serves(tmp_path):
    wheel = build(tmp_path, CC="no-such-compiler")
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == packed()
    programs = install(wheel, tmp_path / "venv")
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = run(programs / "lockstep", "run", "--devices", "2", "script.py", cwd=tmp_path)
    assert f"gloo 3.0 {tmp_path}/venv/lib/" in printed
    assert printed.count(NO_LIBRARY) == 1, printed
    # One rank exchanges nothing.
    assert "lockstep: " not in run(programs / "lockstep", "run", "--devices", "1", "script.py", cwd=tmp_path)
