"""What an import of ours brings along, seen in interpreters of their own."""

from __future__ import annotations

import subprocess
import sys

from tests.harness import ROOT

FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers"}
FACES = {"lightning_smp", "accelerate_smp"}

# The core, then each face in a child of its own, which goes on from what the core has
# loaded.
SCRIPT = """
import gc, os, sys
gc.disable()  # imports leave next to no garbage, and looking for it costs a tenth

def after(statement):
    exec(statement)
    print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}), flush=True)

after("import smp_core.engine.conversions, smp_core.cli, smp_core.observe.monitoring, smp_core.plan.memory")
for framework, face in (("lightning.pytorch", "lightning_smp"), ("accelerate", "accelerate_smp")):
    child = os.fork()
    if child == 0:
        after(f"import {framework}")
        after(f"import {face}")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, face
os._exit(0)  # taking torch apart costs time and shows nothing here
"""


def test_importing_the_core_or_a_face_loads_nothing_of_the_other() -> None:
    """Lightning loads what it likes by itself; we add neither Accelerate nor
    Transformers to that."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    core, lightning, lightning_face, accelerate, accelerate_face = (
        set(line.split()[1:]) for line in lines
    )
    assert "smp_core" in core and not core & (FRAMEWORKS | FACES)
    assert "lightning_smp" in lightning_face
    assert not (lightning_face - lightning) & {
        "accelerate_smp",
        "accelerate",
        "transformers",
    }
    assert "accelerate_smp" in accelerate_face
    assert not (accelerate_face - accelerate) & {
        "lightning_smp",
        "lightning",
        "pytorch_lightning",
        "transformers",
    }


def test_importing_rooms_loads_none_of_their_files() -> None:
    """Names are imported when they are asked for, so `smp report`, say, does not wait
    for torch. The `smp` command is the exception, whose room has it."""
    rooms = [
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "smp_core").rglob("__init__.py")
    ]
    rooms.remove("smp_core.cli")
    script = f"import sys, {', '.join(rooms)}; print(*sys.modules); import smp_core.cli; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    loaded, command = done.stdout.splitlines()
    assert {name for name in loaded.split() if name.startswith("smp_core")} == set(
        rooms
    )
    assert command == "False"
