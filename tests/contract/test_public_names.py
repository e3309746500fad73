"""The public names: no more and no fewer without a reason, each of them real, and all of them free to import."""

import inspect
import re
import subprocess
import sys
from importlib import import_module

import pytest

import lockstep
import lockstep.data
from tests.contract.tree import REPO

PUBLIC_NAMES = {
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "EarlyStopping",
    "LocalSGD",
    "Loss",
    "Recovery",
    "ShardedDataset",
    "SyncBatchNorm",
    "Task",
    "World",
    "ZeroRedundancyOptimizer",
    "adopt",
    "backward",
    "compare",
    "errors",
    "evaluate",
    "fit",
    "init",
    "launch",
    "load",
    "monitor",
    "predict",
    "prepare",
    "report",
    "save",
    "seed",
    "tune",
    "verify",
}


def test_public_names_are_frozen():
    assert set(lockstep.__all__) == PUBLIC_NAMES
    assert len(lockstep.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_name_exists_and_is_documented(name):
    assert getattr(lockstep, name).__doc__
    assert name in dir(lockstep)


DATA_NAMES = {"TokenFiles"}


def test_names_of_data_sets_are_frozen():
    assert set(lockstep.data.__all__) == DATA_NAMES
    for name in DATA_NAMES:
        assert getattr(lockstep.data, name).__doc__
        assert name in dir(lockstep.data)
    with pytest.raises(AttributeError) as caught:
        _ = lockstep.data.TokenFile
    assert str(caught.value) == "module 'lockstep.data' has no attribute 'TokenFile'"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError) as caught:
        _ = lockstep.DistributedDataParalel
    assert str(caught.value) == "module 'lockstep' has no attribute 'DistributedDataParalel'"


def modules_after(code):
    code += "\nimport sys\nprint(*sorted(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_import_is_light():
    heavy = {"torch", "numpy", "rich", "click", "plotly", "sklearn"}
    assert modules_after("import lockstep, lockstep.data") & heavy == set()


def test_engines_do_not_load_what_only_the_commands_use():
    code = "import lockstep\nlockstep.DataParallel, lockstep.DistributedDataParallel, lockstep.init"
    assert modules_after(code) & {"rich", "click", "plotly", "sklearn"} == set()


def test_the_reference_lists_the_members_of_each_class_on_purpose():
    page, strays = (REPO / "docs" / "reference" / "api.md").read_text(), []
    for module, name, members in re.findall(
        r"^::: ([\w.]+)\.(\w+)\n(?:    options: \{ members: (.*) \})?", page, re.MULTILINE
    ):
        if module == "lockstep.ray" or not isinstance(found := getattr(import_module(module), name), type):
            continue  # needs a package, or has no members
        if not members:
            strays.append(f"{name}: members")
        for member in members.strip("[]").split(", ") if members != "false" else ():
            if not inspect.getdoc(getattr(found, member, None)):
                strays.append(f"{name}.{member}")
    assert strays == []
