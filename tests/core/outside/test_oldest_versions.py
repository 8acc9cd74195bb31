"""The oldest versions that work are the same wherever they are stated, and older ones
are refused in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest

from smp_core.outside.oldest_versions import OLDEST, is_older, require
from tests.harness import ROOT


def test_pip_and_the_documents_state_the_same_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    stated = dict(
        re.findall(r'"(torch|lightning|accelerate|transformers)>=([\d.]+)"', project)
    )
    assert stated == OLDEST
    for page in ("README.md", "docs/accelerate.md", "docs/lightning.md"):
        found = re.findall(
            r"\b(torch|lightning|accelerate|transformers) ([\d.]+) or newer",
            (ROOT / page).read_text(),
            re.IGNORECASE,
        )
        assert found and all(
            version == OLDEST[name.lower()] for name, version in found
        ), page


@pytest.mark.parametrize(
    ("installed", "older"),
    [
        ("2.10.1", True),
        ("2.11.0", False),
        ("2.11.0a0+git1234", False),
        ("2.13.0+cu130", False),
    ],
)
def test_versions_are_compared_as_releases(installed: str, older: bool) -> None:
    assert is_older("torch", installed) is older


def test_a_missing_package_is_named_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError,
        match=r"SmpTrainer needs transformers>=[\d.]+, it is not installed; type: pip",
    ):
        require("transformers", "SmpTrainer")


# Packages that are hidden, as if they were not there; then what is run without them.
# Each in a child of its own.
WITHOUT = """
import importlib.abc, os, sys
from importlib import metadata

real = metadata.version

class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name):
    if name == hidden:
        raise metadata.PackageNotFoundError(name)
    return real(name)

metadata.version = version
sys.meta_path.insert(0, Hides())
for hidden, program in (case.split(": ") for case in sys.argv[1:]):
    child = os.fork()
    if child == 0:
        try:
            exec(program)
            print("nothing is missed", flush=True)
        except (ImportError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


LACKING = {
    "lightning: import lightning_smp": "ImportError: lightning_smp needs lightning>=",
    "accelerate: import accelerate_smp": "ImportError: accelerate_smp needs accelerate>=",
    "matplotlib: from smp_core.report.charts import Charts; Charts()": "ValueError: matplotlib draws",
}
MORE_LACKING = {
    "lightning: import lightning_smp.strategy": "ImportError: lightning_smp needs lightning>=",
    "accelerate: import accelerate_smp.run": "ImportError: accelerate_smp needs accelerate>=",
    "transformers: from accelerate_smp import SmpTrainer": "ImportError: SmpTrainer needs transformers>=",
}


@pytest.mark.parametrize(
    "cases",
    [LACKING, pytest.param(MORE_LACKING, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_a_face_without_its_framework_names_the_extra_and_the_checkout_s_command(
    cases: dict[str, str],
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, *cases]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    said = done.stdout.splitlines()
    assert len(said) == len(cases), done.stdout + done.stderr
    for (case, begins), line in zip(cases.items(), said, strict=True):
        package = case.partition(":")[0]
        extra = {"matplotlib": "plot"}.get(package, package)
        assert line.startswith(begins) and f"pip install -e '.[{extra}]'" in line, line
        assert "torch-smp[" not in line, "there is no release yet that pip could find"


def test_no_message_or_page_names_a_release_that_pip_could_find() -> None:
    files = [
        path
        for folder in ("smp_core", "lightning_smp", "accelerate_smp")
        for path in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert not [
        str(path) for path in files if "torch-smp[" in path.read_text(encoding="utf-8")
    ]


# Each case in a child of its own. What fails to import stands for the names that an
# older version lacks.
SCRIPT = """
import os, sys
from importlib import metadata

import smp_core.outside.oldest_versions

real = metadata.version
for name, face, module in (case.split(",") for case in sys.argv[1:]):
    child = os.fork()
    if child == 0:
        metadata.version = lambda asked: "0.1.2" if asked == name else real(asked)
        if name != "transformers":
            sys.modules[name] = None
        try:
            exec(f"from {face} import {module}")
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    "cases",
    [
        {
            "lightning,lightning_smp,SmpShardedStrategy": "lightning_smp",
            "accelerate,accelerate_smp,SmpAccelerator": "accelerate_smp",
            "transformers,accelerate_smp,SmpTrainer": "SmpTrainer",
        },
        pytest.param(
            {"transformers,accelerate_smp.trainer,SmpTrainer": "SmpTrainer"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=len,
)
def test_a_face_refuses_what_is_too_old(cases: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *cases]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    expected = []
    for case, wanted_by in cases.items():
        name = case.partition(",")[0]
        needed = f"{name}>={OLDEST[name]}"
        expected.append(
            f"{wanted_by} needs {needed}, found 0.1.2; type: pip install -U '{needed}'"
        )
    assert done.stdout.splitlines() == expected, done.stderr
