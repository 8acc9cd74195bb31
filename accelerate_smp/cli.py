"""The `accelerate-smp` command: launch, config, env."""

from __future__ import annotations

import logging
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.console import Console

from smp_core.config import SmpConfig
from smp_core.config_sources import YAML_SECTION

app = typer.Typer(
    name="accelerate-smp", help="torch-smp for Hugging Face Accelerate.", no_args_is_help=True, add_completion=False
)

_PACKAGES = ("torch-smp", "torch", "accelerate", "transformers", "peft", "trl", "safetensors")


@app.callback()
def _logging() -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def launch(context: typer.Context) -> None:
    """Start a training script: the flags of `accelerate launch`, and --config_file with a smp_config: section."""
    from accelerate_smp.launch import launch as start

    try:
        start(context.args)
    except ValueError as error:
        raise typer.Exit(_complain(error)) from None


@app.command()
def config(
    config_file: Annotated[Path, typer.Option(help="Where to write it.")] = Path("smp.yaml"),
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Ask the questions and write the YAML for `accelerate-smp launch`."""
    if config_file.exists() and not overwrite:
        raise typer.Exit(_complain(ValueError(f"{config_file} exists; type --overwrite, or another --config-file")))
    gpus = torch.cuda.device_count()
    machines = typer.prompt("How many machines", default=1, type=int)
    use_cpu = gpus == 0 and typer.confirm("No GPU found here; run on CPU", default=True)
    each = typer.prompt("How many processes on each machine", default=gpus or 4, type=int)
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU" if use_cpu else "MULTI_GPU",
        "num_machines": machines,
        "num_processes": machines * each,
        "use_cpu": use_cpu,
    }
    if machines > 1:
        document["machine_rank"] = typer.prompt("The rank of this machine", default=0, type=int)
        document["main_process_ip"] = typer.prompt("The address of machine 0", type=str)
        document["main_process_port"] = typer.prompt("The port on machine 0", default=29500, type=int)
    document["mixed_precision"] = typer.prompt("Precision (no, bf16, fp16)", default="no" if use_cpu else "bf16")
    knobs: dict[str, Any] = {}
    degree = typer.prompt(
        "Shard degree: ranks that hold one copy of the model (auto, node, world, a number)", default="auto"
    )
    knobs["shard_degree"] = int(degree) if degree.isdecimal() else degree
    try:
        SmpConfig.from_dict(knobs)
        if isinstance(knobs["shard_degree"], int) and machines * each % knobs["shard_degree"]:
            raise ValueError(f"shard_degree={degree} does not divide the {machines * each} processes")
    except ValueError as error:
        raise typer.Exit(_complain(error)) from None
    document[YAML_SECTION] = knobs
    config_file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    typer.echo(f"{config_file} written; type: accelerate-smp launch --config_file {config_file} train.py")


@app.command()
def env(
    config_file: Annotated[Path | None, typer.Option(help="Show the knobs of this file.")] = None,
) -> None:
    """Print versions, devices and the knobs in effect."""
    for name in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        typer.echo(f"{name}: {version}")
    typer.echo(f"python: {platform.python_version()} on {platform.platform()}")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    typer.echo(f"devices: {', '.join(names) or 'CPU only'}")
    try:
        knobs = SmpConfig.from_env() if config_file is None else SmpConfig.from_yaml(config_file)
    except ValueError as error:
        raise typer.Exit(_complain(error)) from None
    Console().print(knobs.effective_table())


def _complain(error: Exception) -> int:
    typer.echo(f"accelerate-smp: {error}", err=True)
    return 2


def main() -> None:
    """Run the `accelerate-smp` command."""
    sys.exit(app())


if __name__ == "__main__":
    main()
