"""The `accelerate-smp` command: launch, config, env."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

from smp_core.cli import findings, table_of
from smp_core.config import YAML_SECTION, SmpConfig, values as read
from smp_core.outside import OneLineErrors, console, without_commands
from smp_core.topology import divisors, listed


class _Commands(OneLineErrors):
    # The status of a wrong flag: what is wrong was typed, here or in the file.
    error_status = 2


app = without_commands(
    "accelerate-smp", "torch-smp for Hugging Face Accelerate.", _Commands
)

# Accelerate's spelling, and that of other commands.
_CONFIG_FILE = ("--config_file", "--config-file")

_PACKAGES = (
    "torch-smp",
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "trl",
    "safetensors",
)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def launch(context: typer.Context) -> None:
    """Start a training script: the flags of `accelerate launch`, and --config_file with
    a smp_config: section."""
    from accelerate_smp.launch import launch as start

    start(context.args)


@app.command()
def config(
    config_file: Annotated[
        Path, typer.Option(*_CONFIG_FILE, help="Where to write it.")
    ] = Path("smp.yaml"),
    overwrite: Annotated[
        bool, typer.Option(help="Replace a file that is there.")
    ] = False,
) -> None:
    """Ask the questions and write the YAML for `accelerate-smp launch`. A question is
    repeated until its answer is valid.
    """
    if config_file.exists() and not overwrite:
        raise ValueError(
            f"{config_file} exists; type --overwrite, or another --config_file"
        )
    # Machines and processes.
    gpus = torch.cuda.device_count()
    machines = _ask("How many machines", 1, read.integer(minimum=1))
    use_cpu = gpus == 0 and typer.confirm("No GPU found here; run on CPU", default=True)
    each = _ask(
        "How many processes on each machine", gpus or 4, read.integer(minimum=1)
    )
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU" if use_cpu else "MULTI_GPU",
        "num_machines": machines,
        "num_processes": machines * each,
        "use_cpu": use_cpu,
    }
    # Several machines have to find each other.
    if machines > 1:
        document["machine_rank"] = _ask("The rank of this machine", 0, _below(machines))
        document["main_process_ip"] = typer.prompt("The address of machine 0", type=str)
        document["main_process_port"] = _ask(
            "The port on machine 0", 29500, _below(65536, at_least=1)
        )
    # Precision, then sharding.
    precisions = ("no", "bf16") if use_cpu else ("no", "bf16", "fp16")
    asked = f"Precision ({', '.join(precisions)})"
    document["mixed_precision"] = _ask(
        asked, "no" if use_cpu else "bf16", read.word(*precisions)
    )
    degree = _ask(
        "Shard degree: ranks that hold one copy of the model (auto, node, world, a number)",
        "auto",
        _degree_of(machines * each),
    )
    document[YAML_SECTION] = {"shard_degree": degree}
    config_file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    typer.echo(
        f"{config_file} written; type: accelerate-smp launch --config_file {config_file} train.py"
    )


def _ask(question: str, default: Any, reader: read.Reader) -> Any:
    """Return the answer as ``reader`` reads it; a refused answer is asked again, with
    the allowed ones."""

    def value_of(answer: Any) -> Any:
        try:
            return reader("answer", answer)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.prompt(question, default=default, value_proc=value_of)


def _below(end: int, at_least: int = 0) -> read.Reader:
    def reader(name: str, answer: Any) -> int:
        number = read.integer(minimum=at_least)(name, answer)
        if number >= end:
            raise read.refusal(name, answer, f"{at_least} to {end - 1}")
        return number

    return reader


def _degree_of(processes: int) -> read.Reader:
    def reader(name: str, answer: Any) -> int | str:
        degree: int | str = SmpConfig.readers()["shard_degree"](name, answer)
        if isinstance(degree, int) and processes % degree:
            allowed = f"{listed(divisors(processes))}, 'node', 'world', 'auto'"
            raise read.refusal(
                name, answer, allowed, f"it has to divide the {processes} processes"
            )
        return degree

    return reader


@app.command()
def env(
    config_file: Annotated[
        Path | None, typer.Option(*_CONFIG_FILE, help="Show the knobs of this file.")
    ] = None,
) -> None:
    """Print versions, what `smp doctor` finds on this machine, and the knobs in
    effect."""
    for name in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        typer.echo(f"{name}: {version}")
    console().print(table_of(findings(Path())))
    knobs = (
        SmpConfig.from_env()
        if config_file is None
        else SmpConfig.from_yaml(config_file)
    )
    console().print(knobs.effective_table())


def main() -> None:
    """Run the `accelerate-smp` command."""
    sys.exit(app())


if __name__ == "__main__":
    main()
