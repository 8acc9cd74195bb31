"""`smp doctor` says what is missing on a machine, and what to change."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import smp_core.cli.doctor as doctor
from smp_core.cli import app
from tests.harness import ROOT


def states(found: list[doctor.Finding]) -> dict[str, str]:
    return {each.topic: each.state for each in found}


def test_every_check_comes_to_an_end_here(tmp_path: Path) -> None:
    found = doctor.findings(tmp_path)
    assert {
        "torch",
        "devices",
        "Triton",
        "host name",
        "open files",
        "storage",
        "links",
    } <= states(found).keys()
    assert states(found)["torch"] == states(found)["storage"] == "ok"
    assert not [each for each in found if "could not be looked at" in each.found]
    assert list(tmp_path.iterdir()) == []


def test_tested_versions_are_those_of_the_constraints() -> None:
    pinned = dict(
        re.findall(
            r"^([\w-]+)==([^\s;]+)",
            (ROOT / "constraints.txt").read_text(),
            flags=re.MULTILINE,
        )
    )
    assert {
        name for name, tested in doctor.TESTED.items() if pinned[name] not in tested
    } == set()
    project = (ROOT / "pyproject.toml").read_text()
    assert all(
        f'"{name}>={oldest}"' in project for name, oldest in doctor.OLDEST.items()
    )


def test_what_has_to_change_is_a_problem_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("SMP_LINKS", str(tmp_path / "none.json"))
    real = metadata.version
    older = {"torch": "2.9.1", "transformers": "5.99"}
    with mock.patch.object(
        metadata, "version", lambda name: older.get(name) or real(name)
    ):
        found = doctor.findings(tmp_path / "no such folder")
    fixes = {each.topic: each.fix for each in found if each.state == "problem"}
    assert {"torch", "GLOO_SOCKET_IFNAME", "storage", "links"} <= fixes.keys() and all(
        fixes.values()
    )
    assert fixes["torch"] == "pip install 'torch>=2.11'" and fixes[
        "GLOO_SOCKET_IFNAME"
    ].endswith("lo")
    assert states(found)["transformers"] == "note"


@pytest.mark.parametrize(("has_driver", "state"), [(True, "problem"), (False, "note")])
def test_a_machine_without_a_device_is_no_problem(
    has_driver: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's torch for Linux is built for CUDA, also where nobody has a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        doctor, "NVIDIA_DRIVER", tmp_path if has_driver else tmp_path / "none"
    )
    (found,) = doctor.devices()
    assert found.state == state and bool(found.fix) == has_driver


def test_a_check_that_fails_is_a_finding() -> None:
    with mock.patch.object(doctor, "clock", side_effect=OSError("no")):
        assert Path() and states(doctor.findings(Path()))["clock"] == "note"


def test_the_command_has_a_status(tmp_path: Path) -> None:
    bad = CliRunner().invoke(
        app, ["doctor", "--folder", str(tmp_path / "none")], env={"COLUMNS": "200"}
    )
    assert bad.exit_code == 1 and "problem" in bad.output and "storage" in bad.output
    quiet = [doctor.Finding("torch", "ok", "2.13.0")]
    with mock.patch.object(doctor, "findings", lambda _: quiet):
        assert (
            CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path)]).exit_code
            == 0
        )


def test_what_nccl_is_told_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    told = next(
        finding for finding in doctor.network() if finding.topic == "NCCL is told"
    )
    assert "NCCL_DEBUG=INFO, TORCH_NCCL_TRACE_BUFFER_SIZE=2000" in told.found
