"""The oldest versions of other packages that torch-smp works with, all of them run by
the tests.

``pyproject.toml`` states the same ones for pip, which is not asked where packages were
installed in another order.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

from packaging.version import Version

OLDEST = {
    "torch": "2.11",
    "lightning": "2.6",
    "accelerate": "1.10.1",
    "transformers": "4.57",
}

# The extra of torch-smp that a package belongs to; and a module that a folder of the
# package's name does not have.
_EXTRAS = {
    "lightning": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "matplotlib": "plot",
}
_PART_OF = {"lightning": "lightning.pytorch"}


def is_older(name: str, installed: str) -> bool:
    """Return whether an installed version is older than the oldest that works."""
    # A build from source (2.13.0a0+git) has what its release has.
    return Version(Version(installed).base_version) < Version(OLDEST[name])


def how_to_install(package: str) -> str:
    """Return what to type for a package that is not there: by itself, and as an extra
    of torch-smp."""
    # A package can be optional and have no oldest version.
    needed = f"'{package}>={OLDEST[package]}'" if package in OLDEST else package
    extra = _EXTRAS[package]
    return (
        f"type: pip install -U {needed} (it is the extra {extra!r} of torch-smp; in its checkout: pip install -e "
        f"'.[{extra}]')"
    )


def matplotlibs_figure() -> Any:
    """Return the class of matplotlib's figures.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"matplotlib draws the picture and is not installed; {how_to_install('matplotlib')}"
        ) from None
    return Figure


def require(name: str, wanted_by: str) -> None:
    """Refuse a package that is older than the oldest that works, or not there at all.

    Args:
        name: the package, as pip knows it.
        wanted_by: what of torch-smp needs it.

    Raises:
        ImportError: with the version found, the oldest that works, and the command to
            type.
    """
    needed = f"{name}>={OLDEST[name]}"
    # pip's own list first: it knows the version without importing the package.
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        # Also of a folder on the path, which has no version that could be asked for.
        pass
    else:
        if is_older(name, installed):
            raise ImportError(
                f"{wanted_by} needs {needed}, found {installed}; type: pip install -U '{needed}'"
            )
    if not is_there(name):
        raise ImportError(
            f"{wanted_by} needs {needed}, it is not installed; {how_to_install(name)}"
        )


def is_there(name: str) -> bool:
    """Return whether a package can be imported."""
    # The package's name may be that of a folder on the path, so a part of it is looked
    # for.
    try:
        return importlib.util.find_spec(_PART_OF.get(name, name)) is not None
    except ModuleNotFoundError as error:
        if (error.name or name).partition(".")[0] != name:
            raise  # something else is missing, inside of it
        return False
