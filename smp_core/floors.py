"""The oldest versions of other packages that torch-smp works with, all of them run by the tests.

``pyproject.toml`` states the same ones for pip, which is not asked where packages were installed in another order.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

from packaging.version import Version

OLDEST = {"torch": "2.11", "lightning": "2.6", "accelerate": "1.10.1", "transformers": "4.57"}


def is_older(name: str, installed: str) -> bool:
    """Return whether an installed version is older than the oldest that works."""
    # A build from source (2.13.0a0+git) has what its release has.
    return Version(Version(installed).base_version) < Version(OLDEST[name])


def require(name: str, wanted_by: str) -> None:
    """Refuse a package that is older than the oldest that works, or not there at all.

    Args:
        name: the package, as pip knows it.
        wanted_by: what of torch-smp needs it.

    Raises:
        ImportError: with the version found, the oldest that works, and the command to type.
    """
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(name) is not None:
            return  # a folder on the path, which has no version that could be asked for
        found = "it is not installed"
    else:
        if not is_older(name, installed):
            return
        found = f"found {installed}"
    needed = f"{name}>={OLDEST[name]}"
    raise ImportError(f"{wanted_by} needs {needed}, {found}; type: pip install -U '{needed}'")
