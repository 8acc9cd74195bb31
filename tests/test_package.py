"""What a release is made of: the wheel, the sdist, and the versions that the forge's
workflow tries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import smp_core
from tests.harness import ROOT

PACKAGES = ("smp_core", "lightning_smp", "accelerate_smp")
# setuptools itself, as pip calls it, in an environment that has it: nothing is fetched.
BUILD = "from setuptools import build_meta as b; print(b.build_sdist('dist')); print(b.build_wheel('dist'))"


def test_versions_in_both_places_are_equal() -> None:
    stated = re.search(
        r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )
    assert stated is not None and stated[1] == smp_core.__version__


def test_the_workflow_tries_the_releases_of_torch_that_the_table_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "versions.json").read_text()
    )
    assert workflow["jobs"]["torch"]["strategy"]["matrix"]["torch"] == sorted(results)


def test_classifiers_are_versions_of_python_that_the_workflow_tries() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    stated = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"',
        (ROOT / "pyproject.toml").read_text(),
    )
    assert stated and {*stated} <= {
        *workflow["jobs"]["python"]["strategy"]["matrix"]["python"]
    }


def test_a_release_links_to_the_repository_that_it_is_built_in(tmp_path: Path) -> None:
    """An index shows the README alone: each link is an address, and a picture's that of
    the file itself."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    home = "https://forge.example/o/n"
    script = [
        sys.executable,
        str(ROOT / ".github" / "package_links.py"),
        home,
        "v1.2.0",
    ]
    subprocess.run(script, cwd=tmp_path, check=True, timeout=60)
    readme = (tmp_path / "README.md").read_text()
    targets = re.findall(r"(!?)\[[^\[\]]*\]\(([^()\s]+)\)", readme)
    assert not [target for _, target in targets if not target.startswith("https://")]
    ours = [(picture, target) for picture, target in targets if target.startswith(home)]
    assert len(ours) > 5
    for picture, target in ours:
        kind, tag, path = target.removeprefix(f"{home}/").split("/", 2)
        assert (kind, tag) == ("raw" if picture else "blob", "v1.2.0") and (
            ROOT / path
        ).exists(), target
    urls = (
        (tmp_path / "pyproject.toml")
        .read_text()
        .partition("[project.urls]")[2]
        .partition("\n[")[0]
    )
    assert (
        f'Repository = "{home}"' in urls
        and f'Issues = "{home}/issues"' in urls
        and "Paper" in urls
    )


def test_issues_about_faults_ask_for_what_doctor_prints() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (asked,) = (field for field in form["body"] if field["id"] == "doctor")
    assert (
        "smp doctor" in asked["attributes"]["label"]
        and asked["validations"]["required"]
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, made from a copy of what is committed or
    would be."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("package")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(
        listing, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for name in files.splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    (copy / "dist").mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=copy,
        check=True,
        capture_output=True,
        timeout=600,
    )
    return copy / "dist"


@pytest.mark.slow
def test_the_wheel_has_the_packages_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    ours = [
        path.relative_to(ROOT).as_posix()
        for top in PACKAGES
        for path in (ROOT / top).rglob("*.py")
    ]
    data = [
        "smp_core/AGENTS.md",
        "smp_core/planner/devices.json",
        "smp_core/planner/known_models.json",
        "smp_core/report/page.html",
        *(f"{top}/py.typed" for top in PACKAGES),
    ]
    assert {*ours, *data} <= set(names)
    assert not [name for name in names if "test" in Path(name).stem.split("_")]


@pytest.mark.slow
def test_the_sdist_has_documentation_examples_tests_and_the_changelog(
    dist: Path,
) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert {*files.splitlines()} - names == {".ci/run", ".gitignore"}
