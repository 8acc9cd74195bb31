"""`smp checkpoint ...`: what is printed, and the exit status that scripts rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from smp_core.checkpoint import save_checkpoint, save_step
from smp_core.cli import app
from tests.core.checkpoint.states import values


def smp(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "200"}
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_step(
            tmp_path,
            step,
            {"state_dict": values(step)},
            metadata={"module_prefix": "model."},
        )
    return tmp_path


def test_inspect_shows_what_is_in_it_and_plots(root: Path) -> None:
    pytest.importorskip("matplotlib")
    done = smp("inspect", root / "step-00000001", "--plot", root / "plot.png")
    assert done.exit_code == 0, done.output
    for text in (
        "state_dict.wide.weight",
        "[7, 5]",
        "bfloat16",
        "module_prefix",
        f"torch {torch.__version__}",
    ):
        assert text in done.output
    assert (root / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_says_when_a_file_is_missing(root: Path) -> None:
    assert "whole" in smp("inspect", root / "step-00000001").output
    (root / "step-00000001" / "tensors-00000-of-00001.safetensors").unlink()
    assert "broken: " in smp("inspect", root / "step-00000001").output


def test_verify_tells_whole_from_broken_by_its_exit_status(root: Path) -> None:
    path = root / "step-00000001"
    assert smp("verify", path, "--deep").exit_code == 0
    file = path / "tensors-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert smp("verify", path).exit_code == 0, (
        "sizes and headers fit; only --deep reads the rest"
    )
    done = smp("verify", path, "--deep")
    assert done.exit_code == 1 and file.name in done.stderr
    done = smp("verify", root / "nothing")
    assert done.exit_code == 1 and "nothing exists under this path" in done.stderr


def test_list_shows_whole_and_broken_and_latest(root: Path) -> None:
    (root / "step-00000001" / "manifest.json").unlink()
    done = smp("list", root)
    assert done.exit_code == 0, done.output
    first, second = (
        next(line for line in done.output.splitlines() if name in line)
        for name in ("0001", "0002")
    )
    assert "broken" in first and "LATEST" in second


def test_consolidate_import_and_export_go_round(root: Path) -> None:
    assert smp("consolidate", root / "step-00000002", root / "hf").exit_code == 0
    assert smp("import", root / "hf", root / "again", "--tie", "x=half").exit_code == 0
    assert smp("export", root / "again", root / "dcp", "--format", "dcp").exit_code == 0
    assert smp("import", root / "dcp", root / "third").exit_code == 0
    assert smp("consolidate", root / "third", root / "last.pt").exit_code == 0
    found = torch.load(root / "last.pt")
    for name, tensor in {**values(2), "x": values(2)["half"]}.items():
        assert torch.equal(found[name], tensor), name


def test_an_error_is_one_line(root: Path) -> None:
    save_checkpoint(root / "a", {"state_dict": values(1)})
    for arguments, message in [
        (["consolidate", root / "a", root], "exists already"),
        (["consolidate", root, root / "x"], "a folder of checkpoints"),
        (["import", root / "a", root / "b", "--tie", "x"], "NAME=NAME"),
        (["list", root / "nothing"], "there is no folder of checkpoints"),
    ]:
        done = smp(*arguments)
        assert done.exit_code == 1
        assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1, (
            done.stderr
        )
