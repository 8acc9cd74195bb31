"""benchmarks/versions.py without pip and network: words, environments, reports,
results, pages."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import versions
from smp_core.torch_facts.compat import TESTED_TORCH
from tests.harness import ROOT, going_on

PACKAGES = {
    "torch": "2.13.0+cpu",
    "lightning": "2.6.6",
    "accelerate": "1.15.0",
    "transformers": "5.23.0",
}


def outcome(
    passed: int = 3, failed: int = 0, skipped: int = 1, broke: str = ""
) -> dict[str, Any]:
    counts = {"passed": passed, "failed": failed, "skipped": skipped, "broke": broke}
    return {
        **counts,
        "failed_tests": [f"t{n}" for n in range(failed)],
        "seconds": 7,
        "date": "2026-11-25",
    }


def record(torch: str = "2.13.0+cpu", **ran: dict[str, Any]) -> dict[str, Any]:
    return {"python": "3.11.7", "packages": {**PACKAGES, "torch": torch}, "ran": ran}


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_SMP_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


def installed(envs: Path, name: str, marker: str | None = None) -> Path:
    """An environment as pip leaves it, with this marker."""
    (envs / name / "bin").mkdir(parents=True)
    (envs / name / "bin" / "python").symlink_to(sys.executable)
    if marker is not None:
        (envs / name / versions.MARKER).write_text(marker)
    return envs / name


class Pip:
    """A stand-in for subprocess.run that makes virtual environments of one link, and
    fails when told to."""

    def __init__(self, output: str = "", found: str = "") -> None:
        self.output, self.found, self.calls = output, found, list[list[str]]()

    def __call__(self, command: list[Any], **_: Any) -> SimpleNamespace:
        arguments = [str(each) for each in command[1:]]
        if arguments[:2] == ["-m", "venv"]:
            installed(Path(arguments[2]).parent, Path(arguments[2]).name)
            return SimpleNamespace(returncode=0)
        if arguments[2] == "config":
            return SimpleNamespace(
                stdout="global.cert='x'\nglobal.constraint='caps.txt'\n"
            )
        assert arguments[:3] == ["-m", "pip", "install"]
        self.calls.append(arguments[3:])
        if self.found:
            report = Path(arguments[arguments.index("--report") + 1])
            report.write_text(
                json.dumps({"install": [{"metadata": {"version": self.found}}]})
            )
        return SimpleNamespace(returncode=int(bool(self.output)), stdout=self.output)


def with_pip(monkeypatch: pytest.MonkeyPatch, output: str = "", found: str = "") -> Pip:
    pip = Pip(output, found)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


# Words


@pytest.mark.parametrize(
    ("word", "version"),
    [("2.13.0", "2.13.0"), ("2.16.0rc1", "2.16.0rc1"), ("2.13.0+cpu", "2.13.0")],
)
def test_a_release_is_itself(
    word: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = with_pip(monkeypatch)
    assert (
        versions.resolve(word) == version
        and versions.resolve("+newest") == "newest"
        and pip.calls == []
    )


def test_a_short_word_is_the_newest_patch_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pip = with_pip(monkeypatch, found="2.14.1+cpu")
    assert versions.resolve("2.14") == "2.14.1"
    assert pip.calls[0][-1] == "torch==2.14.*" and "--dry-run" in pip.calls[0]


@pytest.mark.parametrize("word", ["newest", "2", "2.14rc1", "torch", "2.14.1.1"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"write a release of torch \(2\.13\.0\)"):
        versions.resolve(word)


# Environments


def test_environments_are_in_the_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_SMP_ENVS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        versions.folder_of("2.13.0") == tmp_path / ".cache/torch-smp/envs/torch-2.13.0"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert versions.folder_of("newest") == tmp_path / "other/torch-smp/envs/newest"
    monkeypatch.setenv("TORCH_SMP_ENVS", str(tmp_path / "here"))
    assert versions.folder_of("2.13.0") == tmp_path / "here/torch-2.13.0"


def test_an_environment_gets_the_pinned_dependencies_and_a_marker(
    envs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = with_pip(monkeypatch)
    folder = versions.make("2.13.0")
    assert folder == envs / "torch-2.13.0" and versions.is_whole(folder)
    [call] = pip.calls
    assert (
        call[call.index("-c") + 1] == str(folder / "constraints.txt")
        and "torch==2.13.0" in call
    )
    assert {"torch>=2.11", "lightning>=2.6", "pytest"} <= set(call) and not any(
        "torch-smp" in each for each in call[5:]
    )
    pinned = (folder / "constraints.txt").read_text()
    assert "\ntorchao==" in pinned and "\ntorch==" not in pinned
    assert versions.make("2.13.0") == folder and len(pip.calls) == 1, (
        "a whole one is used again"
    )


def test_the_newest_of_all_is_not_pinned_and_upgraded_each_time(
    envs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = with_pip(monkeypatch)
    for _ in range(2):
        assert versions.is_whole(versions.make("newest"))
    assert len(pip.calls) == 2 and all(
        "--upgrade" in call and "-c" not in call for call in pip.calls
    )
    assert (
        capsys.readouterr().out.count(
            "global.constraint='caps.txt', so this may not be the newest"
        )
        == 2
    )


def test_pip_runs_again_where_it_failed_or_dependencies_changed(
    envs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(envs, "torch-2.13.0", "what other dependencies gave")
    with_pip(monkeypatch, output="ERROR: no space left")
    with pytest.raises(
        versions.NotMade, match=r"no space left\npip failed; its output is above$"
    ):
        versions.make("2.13.0")
    assert not versions.is_whole(folder) and not (folder / versions.MARKER).exists()
    pip = with_pip(monkeypatch)
    assert versions.is_whole(versions.make("2.13.0")) and len(pip.calls) == 1
    monkeypatch.setattr(versions, "requirements", lambda: ["torch>=2.12"])
    assert not versions.is_whole(folder)


def test_the_hash_is_of_dependencies_and_constraints_other_than_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    hashes = [versions.fingerprint()]
    for name, old, new in (
        ("pyproject.toml", "line-length = 120", "line-length = 100"),
        ("constraints.txt", "\ntorch==", "\ntorch==9"),
        ("constraints.txt", "\nnumpy==", "\nnumpy==9"),
        ("pyproject.toml", '"xxhash"', '"xxhash>=3"'),
        ("pyproject.toml", '"hypothesis"', '"hypothesis>=3"'),
    ):
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new))
        hashes.append(versions.fingerprint())
    assert hashes[0] == hashes[1] == hashes[2] and len(set(hashes)) == 4


def test_a_cap_of_pips_configuration_is_named(
    envs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "The conflict is caused by:\n    The user requested {}\n    The user requested (constraint) {}\n"
    with_pip(monkeypatch, output=output.format("torch==2.15.0", "torch<=2.14.1"))
    with pytest.raises(
        versions.NotMade,
        match=r"the constraint torch<=2\.14\.1 .* PIP_CONFIG_FILE=/dev/null make ver",
    ):
        versions.make("2.15.0")
    assert "above" in versions.why_pip_failed(
        output.format("torchao", "torchao==0.18.0")
    )
    assert "above" in versions.why_pip_failed(
        output.format("x", "torch-optimi==0.18.0")
    )


# Tests


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure/></testcase>
<testcase classname="tests.a" name="fails"/>
<testcase classname="tests.a" name="skips"><skipped/></testcase>
<testcase classname="tests.a" name="breaks_down_afterwards"><error/></testcase>
<testcase classname="" name="tests.b"><error/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_once(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    failed = ["tests.a::fails", "tests.a::breaks_down_afterwards", "tests.b"]
    assert versions.counted(report) == {
        "passed": 1,
        "failed": 3,
        "skipped": 1,
        "failed_tests": failed,
    }
    assert versions.counted(tmp_path / "none.xml") == {
        "passed": 0,
        "failed": 0,
        "skipped": 0,
        "failed_tests": [],
    }


PROGRAM = """
import os

def test_it_passes():
    assert os.environ["PYTHONPATH"] == {root!r} and os.environ["PATH"].startswith({programs!r})

def test_it_fails():
    assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "limit", "counts", "broke"),
    [
        (PROGRAM, 600.0, (1, 1), ""),
        ("", 600.0, (0, 0), "pytest ended with status 5"),
        ("__import__('time').sleep(3600)", 1.0, (0, 0), "killed after 1 s"),
    ],
)
def test_runs_give_counts_and_how_they_ended(
    tmp_path: Path, program: str, limit: float, counts: tuple[int, int], broke: str
) -> None:
    folder = Path(sys.prefix)
    path = tmp_path / "test_this.py"
    path.write_text(program.format(root=str(ROOT), programs=str(folder / "bin")))
    with (tmp_path / "log").open("wb") as log:
        found = versions.run_tests(folder, [str(path)], limit, 1, log)
    assert ((found["passed"], found["failed"]), found["broke"]) == (counts, broke), (
        tmp_path / "log"
    ).read_text()


STARTS_ANOTHER = """
import subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "of_another_session"],
                         start_new_session=True)
print(other.pid, flush=True)
other.wait()
"""


def test_what_is_killed_leaves_no_processes() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        other = int(child.stdout.readline())
    versions.kill_tree(child)
    assert child.returncode == -9 and going_on([other], "of_another_session") == []


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (outcome(), True),
        (outcome(failed=1), False),
        (outcome(broke="killed after 1 s"), False),
        (outcome(passed=0), False),
    ],
)
def test_a_run_is_good_where_tests_passed_and_none_failed(
    found: dict[str, Any], good: bool
) -> None:
    assert versions.is_good(found) is good


def test_what_is_selected_is_there() -> None:
    assert len(set(versions.SELECTION)) == len(versions.SELECTION) > 20
    assert [path for path in versions.SELECTION if not (ROOT / path).is_file()] == []


def test_the_contract_runs_in_whole_environments_only(
    envs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_tests(
        folder: Path, tests: Any, limit: float, workers: int, log: Any
    ) -> dict[str, Any]:
        assert tests == ("tests/contract",) and limit == 1200
        log.write(b"what pytest printed")
        return outcome(failed=int(folder.name == "torch-2.10.0"))

    monkeypatch.setattr(versions, "run_tests", run_tests)
    monkeypatch.setattr(versions, "suites", lambda only: {only: versions.CONTRACT})
    assert versions.contract_where_made() and capsys.readouterr().out == ""
    for name in ("newest", "torch-2.10.0", "torch-2.9.0"):
        installed(envs, name, versions.fingerprint())
    installed(envs, "torch-2.11.0")
    installed(envs, "torch-of-mine", versions.fingerprint())
    (envs / "torch-2.13.0.lock").touch()
    assert not versions.contract_where_made()
    assert capsys.readouterr().out.splitlines() == [
        "contract, torch-2.9.0: 3 passed, 0 failed, 1 skipped in 7 s",
        "what pytest printed",
        "contract, torch-2.10.0: 3 passed, 1 failed, 1 skipped in 7 s",
        "contract, torch-2.11.0: left out, dependencies are not installed; `make versions` does that",
        "contract, newest: 3 passed, 0 failed, 1 skipped in 7 s",
    ]
    monkeypatch.setattr(versions, "suites", lambda only: {})
    assert versions.contract_where_made() and capsys.readouterr().out == ""


def test_a_checkout_without_the_contract_runs_the_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert [*versions.suites(None)] == ["selection"] and versions.suites(
        "contract"
    ) == {}
    (tmp_path / "tests" / "contract" / "deeper").mkdir(parents=True)
    assert versions.suites("contract") == {}
    (tmp_path / "tests" / "contract" / "deeper" / "test_it.py").touch()
    assert [*versions.suites(None)] == ["contract", "selection"] and [
        *versions.suites("contract")
    ] == ["contract"]


# Results and pages


def test_results_of_other_versions_stay() -> None:
    before = {
        "2.9.0": record(contract=outcome()),
        "newest": record("2.15.0", contract=outcome()),
    }
    kept = copy.deepcopy(before)
    found = versions.merged(before, "2.10.0", record(selection=outcome(failed=2)))
    assert [*found] == ["2.9.0", "2.10.0", "newest"] and before == kept
    assert found["2.9.0"] == kept["2.9.0"] and found["newest"] == kept["newest"]


def test_what_ran_with_other_packages_goes() -> None:
    before = {"2.13.0": record(contract=outcome(5), selection=outcome(6))}
    again = versions.merged(before, "2.13.0", record(contract=outcome(7)))["2.13.0"][
        "ran"
    ]
    assert again == {"contract": outcome(7), "selection": outcome(6)}
    for name, value in (
        ("packages", {**PACKAGES, "accelerate": "1.16.0"}),
        ("python", "3.12.0"),
    ):
        changed = {**record(contract=outcome(7)), name: value}
        assert versions.merged(before, "2.13.0", changed) == {"2.13.0": changed}


def test_a_run_of_the_matrix_goes_on_behind_a_version_that_cannot_be_made(
    envs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make(version: str) -> Path:
        if version == "2.15.0":
            raise versions.NotMade("pip failed")
        return versions.folder_of(version)

    monkeypatch.setattr(versions, "make", make)
    monkeypatch.setattr(
        versions, "installed", lambda folder: {"python": "3.11.7", "packages": PACKAGES}
    )
    monkeypatch.setattr(versions, "suites", lambda only: {"selection": ["a"]})
    monkeypatch.setattr(
        versions,
        "run_tests",
        lambda folder, *_: outcome(failed=int("2.14" in folder.name)),
    )
    for name in ("RESULTS", "PAGE", "README"):
        monkeypatch.setattr(versions, name, tmp_path / name)
    for page in (versions.PAGE, versions.README):
        page.write_text(f"before\n{versions.BEGIN}{versions.END}\nbehind\n")
    assert (
        not versions.run_matrix(["2.15.0", "2.13.0"], None, 2)
        and "2.15.0: pip failed" in capsys.readouterr().err
    )
    assert versions.run_matrix(["2.13.0"], None, 2) and not versions.run_matrix(
        ["2.14.1"], None, 2
    )
    assert [*versions.saved()] == ["2.13.0", "2.14.1"]
    assert versions.table(versions.saved()) in versions.PAGE.read_text()
    readme = versions.README.read_text()
    assert (
        readme.startswith("before\n")
        and readme.endswith("\nbehind\n")
        and "2.14.1" not in readme
    )


def test_the_table_has_a_row_for_each_version_and_what_ran() -> None:
    results = {
        "2.13.0": record(contract=outcome(), selection=outcome(200, 0, 9)),
        "newest": record(
            "2.15.0", contract=outcome(0, 0, 0, broke="killed after 600 s")
        ),
    }
    rows = versions.table(results).splitlines()
    assert rows[2:] == [
        "| 2.13.0 | 2.6.6 | 1.15.0 | 5.23.0 | 3.11.7 | contract | 3 | 0 | 1 | 7 | 2026-11-25 |",
        "| 2.13.0 | 2.6.6 | 1.15.0 | 5.23.0 | 3.11.7 | selection | 200 | 0 | 9 | 7 | 2026-11-25 |",
        "| 2.15.0, newest of all | 2.6.6 | 1.15.0 | 5.23.0 | 3.11.7 | contract (killed after 600 s) | 0 | 0 | 0 | 7 "
        "| 2026-11-25 |",
    ]
    assert {row.count("|") for row in rows} == {12}


MAKE = "the tests of [`make versions`](docs/versions.md)"


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            {
                "2.13.0": record(contract=outcome()),
                "2.14.1": record("2.14.1", contract=outcome()),
            },
            f"With torch 2.13.0, 2.14.1 {MAKE} pass.\n",
        ),
        (
            {
                "2.13.0": record(contract=outcome()),
                "newest": record("2.15.0", a=outcome(), b=outcome(failed=2)),
            },
            f"With torch 2.13.0 {MAKE} pass.\nOf them, with 2.15.0, newest of all, 2 fail.\n",
        ),
        (
            {"2.13.0": record(a=outcome(broke="x"))},
            f"Of {MAKE}, with 2.13.0, 0 fail, and the run did not end.\n",
        ),
    ],
)
def test_the_readme_says_what_passes_and_what_fails(
    results: dict[str, Any], said: str
) -> None:
    assert versions.sentence(results) == said


def test_the_pages_are_those_of_the_result() -> None:
    results = versions.saved()
    for page, made in (
        (versions.PAGE, versions.table(results)),
        (versions.README, versions.sentence(results)),
    ):
        text = page.read_text(encoding="utf-8")
        assert text == versions.with_generated(text, made), (
            f"{page.name}: run benchmarks/versions.py --page"
        )


def test_the_releases_that_a_refusal_names_have_passed() -> None:
    results = versions.saved()
    for release in TESTED_TORCH:
        ran = results[release]["ran"]
        assert ran.keys() == {"contract", "selection"} and all(
            map(versions.is_good, ran.values())
        ), release
