"""The command `accelerate-smp launch`: one YAML for Accelerate's launcher and for
torch-smp.

The file is one of `accelerate config` with a section ``smp_config:`` beside
Accelerate's own keys. Accelerate refuses keys it does not know, so its part is handed
to its own launcher in a temporary file, and every worker reads the section from the
file itself (``SMP_CONFIG_FILE``). Four things of Accelerate's launcher are put right on
the way:

- a script with a plain ``Accelerator`` or ``Trainer`` gets ours
  (:mod:`accelerate_smp.run`);
- on CPU it starts one process whatever ``num_processes`` says: here as many as asked
  for, under torchrun, with ``ACCELERATE_USE_CPU`` so that they know each other;
- a ``parallelism_config:`` section has no effect unless its keys carry a prefix and
  FSDP is on: here they are exported as they are;
- ``smp_config:`` is checked before a worker is started.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_smp.fp8 import recipe_of
from accelerate_smp.launch_keys import read_keys, refuse_flags
from smp_core.config import CONFIG_FILE_VARIABLE, YAML_SECTION, SmpConfig, nearest_name
from smp_core.outside import read_yaml
from smp_core.topology import divisors, listed

logger = logging.getLogger("smp")

_PARALLELISM = ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "sp_size")
_PREFIX = "parallelism_config_"


@dataclass(frozen=True)
class LaunchFile:
    """A launch YAML, read and checked.

    Attributes:
        path: the file.
        smp: its ``smp_config:`` section.
        accelerate: everything else, without ``parallelism_config`` and ``fp8_config``.
        parallelism: its ``parallelism_config:`` section, keys without prefix.
    """

    path: Path
    smp: SmpConfig
    accelerate: dict[str, Any]
    parallelism: dict[str, int]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LaunchFile:
        """Read ``path``.

        Raises:
            ValueError: no such file, no ``smp_config:`` section, an unknown key in it
                or in ``parallelism_config:``, or a value that is not allowed; what is
                not built yet is not asked here.
        """
        file = Path(path)
        document = read_yaml(file)
        if not isinstance(document, dict) or YAML_SECTION not in document:
            raise ValueError(
                f"{path} has no `{YAML_SECTION}:` section; add one, as in `{YAML_SECTION}: {{shard_degree: node}}`, or "
                "use plain `accelerate launch`"
            )
        smp = SmpConfig.from_yaml(file)
        try:
            accelerate = read_keys(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        del accelerate[YAML_SECTION]
        # Sections of Accelerate that its launcher would drop, or export under names
        # that nothing reads, are taken out and handled here.
        parallelism = _parallelism(
            path, accelerate.pop("parallelism_config", None) or {}
        )
        asked = accelerate.pop("fp8_config", None)
        if asked is not None:
            recipe = recipe_of(asked, f"{path}: fp8_config")
            if smp.fp8 not in (None, recipe):
                raise ValueError(
                    f"{path}: fp8_config says {recipe} and smp_config fp8={smp.fp8}; remove one of the two"
                )
            smp = dataclasses.replace(smp, fp8=recipe)
        if (
            str(accelerate.get("mixed_precision", "no")) == "fp8"
            and smp.fp8 is not None
        ):
            # What everything but the linear layers computes in.
            accelerate["mixed_precision"] = "bf16"
        return cls(file, smp, accelerate, parallelism)

    def check(self, processes: int) -> None:
        """Refuse what would fail in every worker.

        Raises:
            ValueError: degrees that do not multiply to ``processes``, fp8 precision.
        """
        # Checked before a worker is started: each of them would print the same error.
        degree = self.smp.shard_degree
        if isinstance(degree, int) and processes % degree:
            raise ValueError(
                f"{self.path}: shard_degree={degree} does not divide num_processes={processes}; allowed: "
                f"{listed(divisors(processes))}"
            )
        product = 1
        for size in self.parallelism.values():
            product *= size
        if self.parallelism and product != processes:
            shown = " x ".join(
                f"{name}={size}" for name, size in self.parallelism.items()
            )
            raise ValueError(
                f"{self.path}: {shown} makes {product}, but num_processes={processes}; write num_processes: {product}, "
                "or leave parallelism_config out: replicas follow from shard_degree"
            )
        if str(self.accelerate.get("mixed_precision", "no")) == "fp8":
            raise ValueError(
                f"{self.path}: mixed_precision: fp8 needs the FP8 plugin of torch-smp to say how; write "
                "`fp8: hybrid` into smp_config and mixed_precision: bf16"
            )


def launch(arguments: Sequence[str]) -> None:
    """Start the workers that `accelerate launch` would, with the flags of `accelerate
    launch`.

    Args:
        arguments: what follows `accelerate-smp launch`.

    Raises:
        ValueError: see :class:`LaunchFile`; no such script.
        SystemExit: a worker failed; with its exit status, after one line that names it.
    """
    # All flags are those of Accelerate's own parser.
    parser = launch_command_parser()
    parser.prog = "accelerate-smp launch"
    parser.usage = "accelerate-smp launch --config_file FILE.yaml [flags of accelerate launch] SCRIPT [ARGS ...]"
    args = parser.parse_args(list(arguments))
    if args.config_file is None:
        raise ValueError(
            "write --config_file FILE.yaml, with a `smp_config:` section in it; `accelerate-smp config` makes one, "
            "examples/accelerate/ has more"
        )
    file = LaunchFile.read(args.config_file)
    refuse_flags(args)
    if not (args.module or args.no_python or os.path.isfile(args.training_script)):
        raise ValueError(
            f"{args.training_script}: no such file; write the script, and its arguments behind it"
        )
    # The flag, the file, or one process for each GPU.
    processes = (
        args.num_processes
        or file.accelerate.get("num_processes")
        or max(torch.cuda.device_count(), 1)
    )
    file.check(processes)
    # Workers read their knobs from the file by themselves.
    os.environ[CONFIG_FILE_VARIABLE] = str(file.path.resolve())
    # Of `fp8_config`, which workers do not read; a variable wins over a file.
    if file.smp.fp8 is not None:
        os.environ.setdefault("SMP_FP8", json.dumps(file.smp.fp8.to_dict()))
    if file.parallelism:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        os.environ.update(
            {
                f"PARALLELISM_CONFIG_{name.upper()}": str(n)
                for name, n in file.parallelism.items()
            }
        )
    kind = file.accelerate.get("distributed_type")
    on_cpu = bool(args.cpu or file.accelerate.get("use_cpu") or kind == "MULTI_CPU")
    on_cpu = on_cpu or not torch.accelerator.is_available()
    document = for_accelerate(file.accelerate, processes, on_cpu)
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        args.cpu = False  # with it Accelerate would start a single process
    if args.no_python:
        logger.warning(
            "--no_python: a plain Accelerator or Trainer in the program stays what it is, without torch-smp"
        )
    else:
        # SmpAccelerator in the place of Accelerator, SmpTrainer in the place of
        # Trainer.
        as_module = ["-m"] if args.module else []
        args.training_script_args = [
            *as_module,
            args.training_script,
            *args.training_script_args,
        ]
        args.training_script, args.module = "accelerate_smp.run", True
    # Accelerate's part goes to its launcher as a file of its own, and a worker's
    # failure comes back as its exit status.
    with tempfile.TemporaryDirectory(prefix="accelerate-smp-") as folder:
        args.config_file = os.path.join(folder, "accelerate.yaml")
        Path(args.config_file).write_text(yaml.safe_dump(document), encoding="utf-8")
        try:
            launch_command(args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise SystemExit(_ended(f"rank {rank}", failure.exitcode)) from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(_ended("the script", error.returncode)) from None


def _ended(who: str, status: int) -> int:
    """Print how a worker ended, whose own traceback has been printed. Returns the exit
    status a shell would show."""
    # Popen has the signal's number below 0.
    by_signal = status < 0
    how = (
        f"was ended by {signal.Signals(-status).name}"
        if by_signal
        else f"ended with exit status {status}"
    )
    print(f"accelerate-smp: {who} {how}; its output is above", file=sys.stderr)
    return 128 - status if by_signal else status


def for_accelerate(
    document: Mapping[str, Any], processes: int, on_cpu: bool
) -> dict[str, Any]:
    """Return Accelerate's part of the file, such that its launcher starts ``processes``
    workers."""
    known = {
        "compute_environment": "LOCAL_MACHINE",
        **document,
        "num_processes": processes,
    }
    kind = str(known.get("distributed_type") or "NO")
    if on_cpu or kind == "NO":
        # To the launcher "several workers under torchrun"; on CPU the workers detect
        # their device.
        kind = kind if kind == "FSDP" and processes > 1 else "MULTI_GPU"
    if processes == 1 and kind in ("MULTI_GPU", "MULTI_CPU"):
        kind = "NO"
    known["distributed_type"] = kind
    if on_cpu:
        known["use_cpu"] = True
        known.pop("gpu_ids", None)
    # A port that is free now, instead of 29500, which may be in use; several machines
    # have to agree on one.
    if (
        known.get("main_process_port") is None
        and int(known.get("num_machines", 1)) == 1
    ):
        known["main_process_port"] = 0
    return known


def _parallelism(path: Any, section: Mapping[str, Any]) -> dict[str, int]:
    sizes = {}
    for key, value in section.items():
        # With or without the prefix that Accelerate's own files have.
        name = str(key).removeprefix(_PREFIX)
        if name not in _PARALLELISM:
            if name in ("cp_backend", "cp_comm_strategy", "sp_backend"):
                raise ValueError(
                    f"{path}: parallelism_config: {key} has no effect in torch-smp; leave it out"
                )
            near = nearest_name(name, _PARALLELISM)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"{path}: parallelism_config: unknown key {key!r}{hint}; known: {', '.join(_PARALLELISM)}"
            )
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{path}: parallelism_config: {key}={value!r}; allowed: integers from 1 up"
            )
        sizes[name] = value
    return sizes
