"""An object store in a folder, so that several processes see the same objects: ``objects:///tmp/run``.

Objects are there in whole or not at all, as in S3, and one of two processes that create the same one gets an error.
"""

import io
import os
import secrets

import fsspec
from fsspec.implementations.local import LocalFileSystem

UPLOAD = ".upload"


class Upload(io.FileIO):
    """An object that is being written: it is there once this is closed."""

    def __init__(self, path):
        self._path = path
        super().__init__(f"{path}.{secrets.token_hex(4)}{UPLOAD}", "xb")

    def close(self):
        if not self.closed:
            super().close()
            os.replace(self.name, self._path)


def folder_store(path):
    """Return the URL of a store in the folder ``path``, which this process can use from now on."""

    # Made here, as the class cannot travel to other processes.
    class FolderStore(LocalFileSystem):
        protocol = "objects"

        def _open(self, path, mode="rb", **how):
            if mode == "rb":
                return super()._open(path, mode, **how)
            os.makedirs(self._parent(path), exist_ok=True)
            return Upload(self._strip_protocol(path))

        def pipe_file(self, path, value, mode="overwrite", **_how):
            path = self._strip_protocol(path)
            with self._open(f"{path}.{secrets.token_hex(4)}{UPLOAD}", "wb") as file:
                file.write(value)
            name = file._path
            if mode == "create":
                try:
                    os.link(name, path)
                finally:
                    os.unlink(name)
            else:
                os.replace(name, path)

        def ls(self, path, detail=False, **how):
            found = super().ls(path, detail=detail, **how)
            return [each for each in found if not (each["name"] if detail else each).endswith(UPLOAD)]

    fsspec.register_implementation("objects", FolderStore, clobber=True)
    return f"objects://{path}"
