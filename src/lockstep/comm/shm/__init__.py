"""The backend ``shm``. This module registers it with torch.distributed, without importing torch before it is needed.

It also makes torch's process groups meet where `lockstep.env.meeting_place` says.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_C10D = "torch.distributed.distributed_c10d"


def register_when_needed() -> None:
    """Register now if torch.distributed is imported, else as soon as it has been imported."""
    if _C10D in sys.modules:
        _register(sys.modules[_C10D])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(c10d: Any) -> None:
    """Register ``shm`` as a c10d backend for CPU tensors; again has no effect."""
    if "shm" not in c10d.Backend.backend_list:
        c10d.Backend.register_backend("shm", _create_group, extended_api=True, devices=["cpu"])
        from lockstep.env import meeting_there

        c10d.rendezvous = meeting_there(c10d.rendezvous)


def _create_group(options: Any, backend_options: Any) -> Any:
    from lockstep.comm.hierarchy import create_group  # import the rest of the backend when a group is created

    return create_group(options, backend_options)


class _Finder(MetaPathFinder):
    """Finds one module as the import system would, and makes its loader register the backend afterwards."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)  # torch.distributed itself is not complete yet

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this one loader only
        return spec
