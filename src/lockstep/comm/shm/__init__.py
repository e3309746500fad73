"""The backend ``shm``. Here torch.distributed is made to know it, without importing torch before anybody needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_C10D = "torch.distributed.distributed_c10d"


def register_when_needed() -> None:
    """Register now if torch.distributed is there, else as soon as it has been imported."""
    if _C10D in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Register ``shm`` as a c10d backend for CPU tensors; again has no effect."""
    from torch.distributed import Backend  # only now: torch is there

    if "SHM" not in Backend._plugins:
        Backend.register_backend("shm", _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, backend_options: Any) -> Any:
    from lockstep.comm.shm.process_group import create_group  # the rest of the backend, when a group is made

    return create_group(options, backend_options)


class _Finder(MetaPathFinder):
    """Finds one module as everybody would, and has its loader register the backend afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Another loader, and `register` when it has done its work."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        backend: Any = module.Backend  # torch.distributed itself is not complete yet
        backend.register_backend("shm", _create_group, extended_api=True, devices=["cpu"])
