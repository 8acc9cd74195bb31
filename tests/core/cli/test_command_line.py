"""`smp` with what nobody meant to type: a short error, a status that is not 0, and no
traceback."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from smp_core.checkpoint import save_checkpoint
from smp_core.cli import app, outline
from tests.harness import ROOT

NONSENSE = [
    (["nonsense"], "No such command"),
    (["topology", "--shard-degree", "foo"], "'node', 'world'"),
    (["topology", "--nodes", "-3"], "--nodes"),
    (["topology", "--nodes", "2", "--ranks", "0"], "--ranks"),
    (["topology", "--nodes", "x"], "integer"),
    (["topology", "--nodes", "2", "--svg", "{here}/nowhere/x.svg"], "nowhere"),
    (["fp8-report", "{here}/nothing"], "cannot read"),
    (["fp8-report", "{here}"], "directory"),
    (["fp8-report", "{here}/noise"], "holds no step"),
    (["memory-report", "{here}/nothing"], "cannot read"),
    (["memory-report", "{here}/noise"], "holds no step"),
    (["checkpoint", "inspect", "{here}/nothing"], "nothing exists"),
    (
        ["checkpoint", "inspect", "{here}/saved", "--plot", "{here}/nowhere/x.png"],
        "nowhere",
    ),
    (
        ["checkpoint", "inspect", "{here}/saved", "--plot", "{here}/x.nonsense"],
        "nonsense",
    ),
    (
        ["checkpoint", "inspect", "{here}/run"],
        "a folder of checkpoints; give one of them: checkpoints/step=2",
    ),
    (["checkpoint", "verify", "{here}/noise"], "not a torch-smp checkpoint"),
    (["checkpoint", "list", "foo://x"], "Protocol not known: foo"),
    (
        ["checkpoint", "consolidate", "{here}/saved", "{here}/out", "--verify", "foo"],
        "verify='foo'",
    ),
    (
        ["checkpoint", "consolidate", "{here}/saved", "{here}/out", "--format", "foo"],
        "format='foo'",
    ),
    (
        ["checkpoint", "consolidate", "{here}/saved", "{here}/out", "--dtype", "foo"],
        "dtype='foo'",
    ),
    (
        [
            "checkpoint",
            "consolidate",
            "{here}/saved",
            "{here}/out",
            "--max-shard-size",
            "foo",
        ],
        "max_shard_size='foo'",
    ),
    (["checkpoint", "import", "{here}/noise", "{here}/out"], "noise"),
    (["checkpoint", "export", "{here}/saved", "{here}/out", "--format", "foo"], "foo"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    (folder / "noise").write_bytes(bytes(range(128, 256)))
    for path in (folder / "saved", folder / "run" / "checkpoints" / "step=2"):
        save_checkpoint(path, {"state_dict": {"weight": torch.ones(2)}})
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    NONSENSE,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_a_short_error(
    here: Path, arguments: list[str], words: str
) -> None:
    typed = [argument.format(here=here) for argument in arguments]
    done = CliRunner().invoke(app, typed, env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), (
        done.exception
    )
    assert words in done.stderr and len(done.stderr.splitlines()) <= 7, done.stderr
    assert not (here / "out").exists()


def test_the_version_is_said() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (
        done.exit_code == 0
        and done.output == f"torch-smp {metadata.version('torch-smp')}\n"
    )


@pytest.mark.parametrize("typed", ["", "--help", "--version", "nonsense"])
def test_the_list_of_commands_and_the_version_do_not_import_torch(typed: str) -> None:
    program = "import sys, atexit; from smp_core.cli import main; atexit.register(lambda: print(*sys.modules)); main()"
    command = [sys.executable, "-c", program, *typed.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    said, loaded = done.stdout.rpartition("\n")[0], done.stdout.split()
    assert "smp_core.cli.cli" in loaded and "torch" not in loaded, done.stderr
    expected = {"--version": "torch-smp 0", "nonsense": ""}.get(typed, "verify")
    assert expected in said


def words_of(page: str) -> list[str]:
    """Its words without the frame; a docstring's line may end earlier than the
    page's."""
    return page.replace("│", "").split()


def test_the_list_of_commands_is_the_same_without_them() -> None:
    with_commands, without = (
        CliRunner().invoke(made, ["--help"], env={"COLUMNS": "400"})
        for made in (app, outline())
    )
    assert with_commands.exit_code == 0 and words_of(without.output) == words_of(
        with_commands.output
    )
