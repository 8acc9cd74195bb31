"""The matrix over torch versions: the contract and a selection of tests with each of
them (docs/versions.md).

    python benchmarks/versions.py 2.13.0 2.14 +newest     # `make versions`; 2.14: its newest patch release
    python benchmarks/versions.py 2.16 --only contract    # a new release, in minutes
    python benchmarks/versions.py --made                  # the contract where an environment is there; keeps no results
    python benchmarks/versions.py --page                  # write the pages from the results

Every version has a virtual environment in a cache folder that several checkouts share,
so torch-smp itself is not installed there: ``PYTHONPATH`` leads to this checkout, and
to its name and version by the ``torch_smp.egg-info`` that ``pip install -e`` wrote
beside the packages. Dependencies are those of ``.[all]`` as constraints.txt pins them,
except torch; with ``+newest`` nothing is pinned. An environment is whole once it has
its marker, which holds a hash of the dependencies: pip runs again when they change, or
when it failed. pip takes the user's configuration.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import psutil
from filelock import FileLock
from packaging.version import VERSION_PATTERN, InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE, README = ROOT / "docs" / "versions.md", ROOT / "README.md"
BEGIN, END = (
    "<!-- from benchmarks/results/versions.json -->\n",
    "<!-- end of versions -->",
)

CONTRACT = ("tests/contract",)
SELECTION = (
    "tests/accelerate/test_bare_loop.py",
    "tests/accelerate/test_checkpoints.py",
    "tests/accelerate/test_compiled.py",
    "tests/accelerate/test_context.py",
    "tests/accelerate/test_fp8.py",
    "tests/accelerate/test_generate.py",
    "tests/accelerate/test_given_sharding.py",
    "tests/accelerate/test_parallelism.py",
    "tests/accelerate/test_pipeline.py",
    "tests/accelerate/test_sync.py",
    "tests/accelerate/test_tensor_parallel.py",
    "tests/accelerate/test_trainer.py",
    "tests/accelerate/test_trainer_variants.py",
    "tests/accelerate/test_uneven.py",
    "tests/accelerate/test_whole_weights.py",
    "tests/core/activations/test_checkpointing.py",
    "tests/core/activations/test_offloading.py",
    "tests/core/checkpoint/test_async_save.py",
    "tests/core/checkpoint/test_full_state.py",
    "tests/core/checkpoint/test_loading.py",
    "tests/core/checkpoint/test_round_trip.py",
    "tests/core/context_parallel/test_models.py",
    "tests/core/context_parallel/test_op.py",
    "tests/core/context_parallel/test_recomputation.py",
    "tests/core/context_parallel/test_sdpa.py",
    "tests/core/context_parallel/test_transformers_models.py",
    "tests/core/fuzz/test_random_runs.py",
    "tests/core/expert_parallel/test_balance.py",
    "tests/core/expert_parallel/test_checkpoints.py",
    "tests/core/expert_parallel/test_equivalence.py",
    "tests/core/expert_parallel/test_stages.py",
    "tests/core/optim/test_adafactor.py",
    "tests/core/optim/test_adamw8bit.py",
    "tests/core/optim/test_muon.py",
    "tests/core/pipeline/test_architectures.py",
    "tests/core/pipeline/test_checkpoints.py",
    "tests/core/pipeline/test_equivalence.py",
    "tests/core/tensor_parallel/test_checkpoints.py",
    "tests/core/tensor_parallel/test_compositions.py",
    "tests/core/tensor_parallel/test_equivalence.py",
    "tests/core/tensor_parallel/test_fused.py",
    "tests/core/tensor_parallel/test_loss.py",
    "tests/core/sharding/test_attached.py",
    "tests/core/sharding/test_batch_norm.py",
    "tests/core/sharding/test_between_calls.py",
    "tests/core/comm/test_collective_order.py",
    "tests/core/comm/test_comm.py",
    "tests/core/sharding/test_delayed_init.py",
    "tests/core/sharding/test_divergence.py",
    "tests/core/test_equivalence.py",
    "tests/core/fp8/test_fp8_layers.py",
    "tests/core/fp8/test_fp8_training.py",
    "tests/core/sharding/test_frozen_storage.py",
    "tests/core/sharding/test_fsdp_options.py",
    "tests/core/sharding/test_grad_norm.py",
    "tests/core/sharding/test_grad_scaler.py",
    "tests/core/sharding/test_half_precision_masters.py",
    "tests/core/sharding/test_optimizer_shard.py",
    "tests/core/sharding/test_prepared_optimizer.py",
    "tests/core/comm/test_quantized.py",
    "tests/core/comm/test_replica_hop.py",
    "tests/core/sharding/test_state_offload.py",
    "tests/core/test_streams.py",
    "tests/core/planner/test_trace_meter.py",
    "tests/core/test_unusual_models.py",
    "tests/core/sharding/test_window.py",
    "tests/core/sharding/test_window_sums.py",
    "tests/core/sharding/test_window_upsets.py",
    "tests/lightning/test_context.py",
    "tests/lightning/test_evaluation.py",
    "tests/lightning/test_every_checkpoint.py",
    "tests/lightning/test_fit.py",
    "tests/lightning/test_fp8.py",
    "tests/lightning/test_full_checkpoints.py",
    "tests/lightning/test_joined.py",
    "tests/lightning/test_manual_optimization.py",
    "tests/lightning/test_memory_savers.py",
    "tests/lightning/test_outside_forward.py",
    "tests/lightning/test_pipeline.py",
    "tests/lightning/test_precision.py",
    "tests/lightning/test_resume.py",
    "tests/lightning/test_tensor_parallel.py",
)
# Seconds, the end of a hang: the work takes a tenth of it.
LIMITS = {"contract": 1200, "selection": 6000}

NEWEST = "newest"
PACKAGES = ("torch", "lightning", "accelerate", "transformers")
MARKER = "torch-smp-whole"
NO_CONFIGURATION = "PIP_CONFIG_FILE=/dev/null"

Results = Mapping[str, Mapping[str, Any]]


class NotMade(Exception):
    """An environment could not be made; the message says why, and what to type."""


# Environments


def cache_folder() -> Path:
    """Return the folder of all environments: ``TORCH_SMP_ENVS``, or one in the user's
    cache."""
    if asked := os.environ.get("TORCH_SMP_ENVS"):
        return Path(asked)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch-smp" / "envs"


def folder_of(version: str) -> Path:
    return cache_folder() / (NEWEST if version == NEWEST else f"torch-{version}")


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def requirements() -> list[str]:
    """Return what ``.[all]`` depends on, which is every group of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return sorted(
        {
            line
            for group in groups
            for line in group
            if not line.startswith(project["name"])
        }
    )


def constraints() -> str:
    """Return constraints.txt without torch."""
    lines = (
        (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    )
    return "".join(line for line in lines if not line.startswith("torch=="))


def fingerprint() -> str:
    text = "\n".join([*requirements(), constraints()])
    return hashlib.sha256(text.encode()).hexdigest()


def is_whole(folder: Path) -> bool:
    """Return whether pip has installed there, to its end, what this checkout depends
    on."""
    marker = folder / MARKER
    return (
        python_of(folder).exists()
        and marker.exists()
        and marker.read_text(encoding="utf-8") == fingerprint()
    )


def made() -> list[Path]:
    """Return the folders of environments, whole or not, by version."""
    of_torch = (
        path.name.removeprefix("torch-") for path in cache_folder().glob("torch-*")
    )
    versions = [
        name
        for name in of_torch
        if re.fullmatch(VERSION_PATTERN, name, re.VERBOSE | re.IGNORECASE)
    ]
    folders = [folder_of(version) for version in in_order([*versions, NEWEST])]
    return [folder for folder in folders if python_of(folder).exists()]


def in_order(versions: Iterable[str]) -> list[str]:
    return sorted(
        versions,
        key=lambda name: (name == NEWEST, Version("0" if name == NEWEST else name)),
    )


def pip(python: Path | str, *arguments: str) -> None:
    """Run pip with the user's configuration.

    Raises:
        NotMade: pip failed; where a constraint of its configuration caps torch, the
            message names that.
    """
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *arguments,
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise NotMade(f"{done.stdout[-4000:].rstrip()}\n{why_pip_failed(done.stdout)}")


def why_pip_failed(output: str) -> str:
    """Return the error's last line. constraints() has no torch, so a constraint on
    torch is the configuration's."""
    cap = re.search(r"\(constraint\) (torch\b(?!-)\S+)", output)
    if cap is None:
        return "pip failed; its output is above"
    return (
        f"pip's own configuration caps torch: it has the constraint {cap[1]} (see `pip config list`); to leave its "
        f"configuration files out, type {NO_CONFIGURATION} make versions"
    )


def configured_constraints() -> list[str]:
    """Return the lines of pip's configuration that name files of constraints."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        stdout=subprocess.PIPE,
        text=True,
    )
    return [line for line in listed.stdout.splitlines() if ".constraint=" in line]


def resolve(word: str) -> str:
    """Return the version that a word means: itself, the newest patch release of
    ``2.13``, or ``newest``.

    Raises:
        ValueError: the word is none of these.
        NotMade: pip finds no such release.
    """
    if word == f"+{NEWEST}":
        return NEWEST
    try:
        version = Version(word)
    except InvalidVersion:
        version = Version("0")
    if len(version.release) == 3:
        return version.public
    if len(version.release) != 2 or version.is_prerelease:
        raise ValueError(
            f"VERSIONS={word}: write a release of torch (2.13.0), a short one (2.13) or +{NEWEST}"
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        asked = (
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--report",
            str(report),
        )
        pip(sys.executable, *asked, f"torch=={version.public}.*")
        found = json.loads(report.read_text(encoding="utf-8"))["install"][0][
            "metadata"
        ]["version"]
    return Version(found).public


def make(version: str) -> Path:
    """Return a version's environment, made or completed where it is not whole.
    ``newest`` is always upgraded."""
    folder = folder_of(version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if version != NEWEST and is_whole(folder):
            return folder
        print(f"{folder}: pip installs what .[all] depends on", flush=True)
        if not python_of(folder).exists():
            created = subprocess.run([sys.executable, "-m", "venv", folder])
            if created.returncode:
                raise NotMade(
                    f"could not create {folder}: install the venv module of your python3"
                )
        (folder / MARKER).unlink(missing_ok=True)
        if version == NEWEST:
            for cap in configured_constraints():
                print(
                    f"pip's configuration has {cap}, so this may not be the newest; see {NO_CONFIGURATION}"
                )
            pip(
                python_of(folder),
                "--upgrade",
                "--upgrade-strategy",
                "eager",
                *requirements(),
            )
        else:
            pinned = folder / "constraints.txt"
            pinned.write_text(constraints(), encoding="utf-8")
            pip(
                python_of(folder),
                "-c",
                str(pinned),
                f"torch=={version}",
                *requirements(),
            )
        (folder / MARKER).write_text(fingerprint(), encoding="utf-8")
    return folder


# Tests


def environment_of(folder: Path) -> dict[str, str]:
    """Return this process's environment variables as they are in an active virtual
    environment, with the checkout."""
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    ours = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": path,
    }
    return {**os.environ, **ours}


def run_tests(
    folder: Path,
    tests: Sequence[str],
    limit: float,
    workers: int,
    log: IO[bytes] | None = None,
) -> dict[str, Any]:
    """Run tests in an environment and return what came of them.

    Args:
        folder: the environment.
        tests: files and folders of tests, relative to the checkout.
        limit: seconds until everything is killed.
        workers: test files that run side by side; 0: in one process.
        log: takes the output; the terminal if None.
    """
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports, "report.xml")
        command = [
            python_of(folder),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        command += [
            "-n",
            str(workers),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            *tests,
        ]
        began = time.monotonic()
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment_of(folder),
            stdout=log,
            stderr=log and subprocess.STDOUT,
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_tree(child)
        seconds = time.monotonic() - began
        found = counted(report)
    broke = ""
    if status is None:
        broke = f"killed after {limit:g} s"
    elif status != int(bool(found["failed"])):
        broke = f"pytest ended with status {status}"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {**found, "broke": broke, "seconds": round(seconds), "date": today}


def kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, with its descendants: ranks have sessions of
    their own."""
    if child.poll() is not None:
        return
    parent = psutil.Process(child.pid)
    for process in [*parent.children(recursive=True), parent]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    child.wait()


def counted(report: Path) -> dict[str, Any]:
    """Return how many tests of a JUnit report passed, failed and were skipped, and the
    names of those that failed."""
    states: dict[str, str] = {}
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        # A file that cannot be imported.
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
        kinds = {part.tag for part in case}
        if kinds & {"failure", "error"}:
            states[name] = "failed"
        elif name not in states:
            # A test has two entries where its body and what comes after it end
            # differently.
            states[name] = "skipped" if "skipped" in kinds else "passed"
    of_state = list(states.values())
    counts = {state: of_state.count(state) for state in ("passed", "failed", "skipped")}
    return {
        **counts,
        "failed_tests": [name for name, state in states.items() if state == "failed"],
    }


def is_good(outcome: Mapping[str, Any]) -> bool:
    return outcome["passed"] > 0 and not outcome["failed"] and not outcome["broke"]


def in_words(outcome: Mapping[str, Any]) -> str:
    counts = ", ".join(
        f"{outcome[state]} {state}" for state in ("passed", "failed", "skipped")
    )
    broke = f", {outcome['broke']}" if outcome["broke"] else ""
    return f"{counts} in {outcome['seconds']} s{broke}"


def suites(only: str | None) -> dict[str, Sequence[str]]:
    """Return what there is to run. The contract is left out where a checkout has
    none."""
    contract = CONTRACT if any((ROOT / CONTRACT[0]).glob("**/test_*.py")) else ()
    every = {"contract": contract, "selection": SELECTION}
    return {
        name: tests for name, tests in every.items() if tests and only in (None, name)
    }


def contract_where_made() -> bool:
    """Run the contract in every whole environment, print a line for each, and return
    whether all was well."""
    good = True
    tests = suites("contract").get("contract", ())
    for folder in made() if tests else ():
        if not is_whole(folder):
            print(
                f"contract, {folder.name}: left out, dependencies are not installed; `make versions` does that"
            )
            continue
        with tempfile.TemporaryFile() as log:
            # Its few tests take less than the imports of a second process.
            outcome = run_tests(folder, tests, LIMITS["contract"], 0, log)
            if not is_good(outcome):
                good = False
                log.seek(0)
                print(log.read().decode(errors="replace"))
        print(f"contract, {folder.name}: {in_words(outcome)}", flush=True)
    return good


# Results and pages


def installed(folder: Path) -> dict[str, Any]:
    """Return the versions of Python and of the packages that matter in an
    environment."""
    program = (
        "import json, platform, sys; from importlib.metadata import version; print(json.dumps({'python': "
        "platform.python_version(), 'packages': {name: version(name) for name in sys.argv[1:]}}))"
    )
    done = subprocess.run(
        [python_of(folder), "-c", program, *PACKAGES],
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def merged(results: Results, version: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with a version's record. Other versions stay, and so does what ran
    with the same packages."""
    before = results.get(version, {})
    same = all(before.get(name) == record[name] for name in ("python", "packages"))
    ran = {**(before["ran"] if same else {}), **record["ran"]}
    every = {**results, version: {**record, "ran": ran}}
    return {name: every[name] for name in in_order(every)}


def saved() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def named(version: str, record: Mapping[str, Any]) -> str:
    torch = Version(record["packages"]["torch"]).public
    return f"{torch}, newest of all" if version == NEWEST else torch


def table(results: Results) -> str:
    """Return the table of docs/versions.md, a row for each version and what ran."""
    others = PACKAGES[1:]
    rows = [
        f"| torch | {' | '.join(others)} | Python | ran | passed | failed | skipped | seconds | date |",
        f"|---{'|---' * len(others)}|---|---|---|---|---|---|---|",
    ]
    for version, record in results.items():
        packages = " | ".join(record["packages"][name] for name in others)
        for what, outcome in record["ran"].items():
            counts = " | ".join(
                str(outcome[name])
                for name in ("passed", "failed", "skipped", "seconds", "date")
            )
            ran = f"{what} ({outcome['broke']})" if outcome["broke"] else what
            rows.append(
                f"| {named(version, record)} | {packages} | {record['python']} | {ran} | {counts} |"
            )
    return "\n".join(rows) + "\n"


def sentence(results: Results) -> str:
    """Return the README's lines."""
    good, bad = [], []
    for version, record in results.items():
        ran = record["ran"].values()
        if all(map(is_good, ran)):
            good.append(named(version, record))
            continue
        failed = sum(outcome["failed"] for outcome in ran)
        broke = any(outcome["broke"] for outcome in ran)
        bad.append(
            f"with {named(version, record)}, {failed} fail{', and the run did not end' if broke else ''}"
        )
    what = "the tests of [`make versions`](docs/versions.md)"
    lines = [f"With torch {', '.join(good)} {what} pass."] if good else []
    if bad:
        lines.append(f"Of {'them' if good else what}, {'; '.join(bad)}.")
    return "\n".join(lines) + "\n"


def with_generated(text: str, made: str) -> str:
    """Return a page's text with its generated part replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.split(END)[1]}"


def write_pages(results: Results) -> None:
    for page, text in ((PAGE, table(results)), (README, sentence(results))):
        page.write_text(
            with_generated(page.read_text(encoding="utf-8"), text), encoding="utf-8"
        )


def run_matrix(words: Sequence[str], only: str | None, workers: int) -> bool:
    """Run what was asked for with each version, keep each result as soon as it is
    there, return whether all is well."""
    good = True
    for word in words:
        try:
            version = resolve(word)
            folder = make(version)
        except (NotMade, ValueError) as error:
            print(f"{word}: {error}", file=sys.stderr, flush=True)
            good = False
            continue
        record = {**installed(folder), "ran": {}}
        for what, tests in suites(only).items():
            print(f"{what}, {folder.name}", flush=True)
            outcome = run_tests(folder, tests, LIMITS[what], workers)
            print(f"{what}, {folder.name}: {in_words(outcome)}", flush=True)
            record["ran"][what] = outcome
            good = good and is_good(outcome)
        results = merged(saved(), version, record)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        write_pages(results)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="VERSION", help=f"2.13.0, 2.13 or +{NEWEST}"
    )
    parser.add_argument("--only", choices=LIMITS)
    parser.add_argument(
        "--workers", type=int, default=2, help="test files that run side by side"
    )
    parser.add_argument(
        "--made",
        action="store_true",
        help="the contract in environments that are there",
    )
    parser.add_argument(
        "--page", action="store_true", help="write the pages from the results"
    )
    asked = parser.parse_args()
    if asked.made:
        return int(not contract_where_made())
    if asked.page:
        write_pages(saved())
        return 0
    if not asked.words:
        parser.error("name a version")
    if not suites(asked.only):
        parser.error(f"this checkout has no {CONTRACT[0]}")
    return int(not run_matrix(asked.words, asked.only, asked.workers))


if __name__ == "__main__":
    sys.exit(main())
