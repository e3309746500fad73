"""Imports point down the layers, and only comm speaks torch.distributed."""

import pytest

from tests.contract.layers import RANK, circle, imports_of, module_of, part_of, violations
from tests.contract.tree import PACKAGE, REPO, sources


def test_every_part_has_a_layer():
    parts = {part_of(path, PACKAGE) for path in sources()} - {"__init__"}
    assert parts - set(RANK) == set(), "give the new part a place in LAYERS (tests/contract/layers.py)"


def test_the_package_follows_the_layers():
    found = [
        f"{path.relative_to(PACKAGE.parent)} {violation}"
        for path in sources()
        if part_of(path, PACKAGE) != "__init__"
        for violation in violations(path.read_text(), part_of(path, PACKAGE))
    ]
    assert found == []


def test_no_modules_import_each_other():
    """Not even in functions or for type checkers: whoever reads a module need not have read those above it."""
    modules = {module_of(path, PACKAGE): path for path in sources()}
    assert circle({name: imports_of(path.read_text(), name, modules) for name, path in modules.items()}) is None


def test_a_unit_test_has_the_place_and_the_name_of_its_module():
    """``a/test_b.py``, or ``a/test_b_subject.py``, tests ``a/b`` of the package, or of ``bench`` or ``tools``."""
    unit, strays = REPO / "tests" / "unit", []
    for path in sorted(unit.rglob("test_*.py")):
        place = path.parent.relative_to(unit)
        folders = [PACKAGE / place, *([REPO / place] if place.parts else [])]
        modules = {file.stem.lstrip("_") for folder in folders for file in (*folder.glob("*.py"), *folder.glob("*.c"))}
        modules |= {place.name} - {""}  # the package itself
        name = path.stem.removeprefix("test_")
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            strays.append(str(path.relative_to(unit)))
    assert strays == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize(
    ("part", "source", "expected"),
    [
        ("train", "from lockstep.parallel.ddp.wrapper import DistributedDataParallel", []),
        ("comm", "import torch.distributed as dist", []),
        ("launcher", "from torch.distributed.launcher.api import LaunchConfig", []),
        (
            "comm",
            "from lockstep.train import fit",
            ["line 1: comm imports lockstep.train.fit: train is not below comm"],
        ),
        (
            "parallel",
            "def f():\n    from lockstep.data.sampler import DistributedSampler",
            ["line 2: parallel imports lockstep.data.sampler.DistributedSampler: data is not below parallel"],
        ),
        (
            "train",
            "from lockstep import World",
            ["line 1: train imports lockstep.World: only cli uses the public names"],
        ),
        (
            "study",
            "from torch import distributed",
            [
                "line 1: study uses torch.distributed: it may use nothing of torch.distributed; "
                "take it from lockstep.comm"
            ],
        ),
        (
            "data",
            "import torch\nrank = torch.distributed.get_rank()",
            [
                "line 2: data uses torch.distributed: it may use nothing of torch.distributed; "
                "take it from lockstep.comm"
            ],
        ),
        (
            "launcher",
            "import torch.distributed as dist",
            [
                "line 1: launcher uses torch.distributed: it may use ['torch.distributed.run', "
                "'torch.distributed.launcher', 'torch.distributed.elastic'] of torch.distributed; "
                "take it from lockstep.comm"
            ],
        ),
    ],
)
def test_what_counts_as_a_violation(part, source, expected):
    assert violations(source, part) == expected
