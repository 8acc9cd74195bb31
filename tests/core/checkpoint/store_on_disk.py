"""An object store that several processes share: ``disk-store:///folder``, fsspec's view
of a local folder with the atomic puts of a store. Importing this file registers it."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PREFIX = "disk-store://"


class StoreOnDisk(LocalFileSystem):  # type: ignore[misc]
    protocol = "disk-store"

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        path = self._strip_protocol(path)
        with open(f"{path}.put", "wb") as file:
            file.write(value)
        os.replace(f"{path}.put", path)


fsspec.register_implementation("disk-store", StoreOnDisk, clobber=True)
