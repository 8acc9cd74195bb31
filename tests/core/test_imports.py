"""What an import of ours brings along, seen in interpreters of their own."""

from __future__ import annotations

import subprocess
import sys

from tests.harness import ROOT

FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers"}
FACES = {"lightning_smp", "accelerate_smp"}


def loaded_after(*statements: str) -> list[set[str]]:
    """Top-level modules that are there after each of the statements, run in one fresh interpreter."""
    show = "print('LOADED', *sorted({name.partition('.')[0] for name in sys.modules}))"
    script = "\n".join(["import sys", *(line for statement in statements for line in (statement, show))])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("LOADED")]


def test_importing_the_core_or_the_lightning_face_loads_nothing_of_the_other() -> None:
    """Lightning loads what it likes by itself; we add neither Accelerate nor Transformers to that."""
    core, framework, face = loaded_after(
        "import smp_core.parallelize, smp_core.cli, smp_core.monitoring, smp_core.planning.memory",
        "import lightning.pytorch",
        "import lightning_smp",
    )
    assert "smp_core" in core and not core & (FRAMEWORKS | FACES)
    assert "lightning_smp" in face and not (face - framework) & {"accelerate_smp", "accelerate", "transformers"}


def test_importing_the_accelerate_face_loads_nothing_of_the_other() -> None:
    framework, face = loaded_after("import accelerate", "import accelerate_smp")
    assert "accelerate_smp" in face
    assert not (face - framework) & {"lightning_smp", "lightning", "pytorch_lightning", "transformers"}
