"""`smp checkpoint inspect | verify | list | consolidate | import | export`: thin
commands over this package.

An error of a checkpoint is one line on stderr and exit status 1
(smp_core/outside/command_line.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

from smp_core.checkpoint.foreign.conversion import export_checkpoint, import_checkpoint
from smp_core.checkpoint.full_state import consolidate
from smp_core.checkpoint.inspection import checkpoint_tables, list_table, plot_bytes
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.verify import verify_checkpoint
from smp_core.outside import console, long_wait

app = typer.Typer(
    help="Look at, check and convert checkpoint folders.", no_args_is_help=True
)

_Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="A checkpoint folder or fsspec address (s3://...)."
    ),
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace a file, a checkpoint or an export at OUT."
    ),
]
_AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read values saved with allow_pickle. RUNS CODE from the file.",
    ),
]


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    ]
    # A bar on a terminal; in a file or a pipe the bar shows its end alone, and lines
    # tell the time.
    waiting = long_wait("writing", here=not sys.stderr.isatty())
    with waiting, Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("writing", total=total)
        yield lambda count: bar.advance(task, count)


@app.command()
def inspect(
    directory: _Directory,
    all_tensors: Annotated[
        bool,
        typer.Option("--all", help="List every tensor, not the largest ones only."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also write a plot of bytes per rank to this PNG."),
    ] = None,
) -> None:
    """Show what a checkpoint holds: step, mesh, versions, files, tensors."""
    for table in checkpoint_tables(directory, all_tensors):
        console().print(table)
    if plot is not None:
        plot_bytes(directory, plot)
        typer.echo(f"plot written to {plot}")


@app.command()
def verify(
    directory: _Directory,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compute every digest (reads all bytes).")
    ] = False,
) -> None:
    """Check that every file is there and as it was written; exit status 1 if not."""
    with long_wait(f"checking {directory}"):
        problems = verify_checkpoint(directory, deep)
    for problem in problems:
        typer.echo(f"broken: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    checked = (
        "sizes, headers and digests"
        if deep
        else "sizes and headers (--deep also checks digests)"
    )
    typer.echo(f"{directory} is whole: {checked}")


@app.command("list")
def list_root(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="A folder of checkpoints.")
    ],
) -> None:
    """List the checkpoints in a folder, and which of them are complete, which
    incomplete, and which is the newest."""
    console().print(list_table(root))


@app.command("consolidate")
def consolidate_command(
    directory: _Directory,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="Folder (safetensors) or file (.ckpt, .pt) to make."
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast floating-point model tensors: bf16, fp16, fp32."),
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="auto (by OUT), safetensors, ckpt or pt.")
    ] = "auto",
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Also the optimizer states.")
    ] = False,
    workers: Annotated[
        int, typer.Option(help="Threads; each makes one safetensors file at a time.")
    ] = 1,
    max_shard_size: Annotated[
        str, typer.Option(help="Size of a safetensors file.")
    ] = "5GB",
    strip_prefix: Annotated[
        str | None,
        typer.Option(
            help="Taken off tensor names; default: the prefix the checkpoint recorded."
        ),
    ] = None,
    verify_mode: Annotated[
        str, typer.Option("--verify", help="Check before: digests, sizes or none.")
    ] = "digests",
    overwrite: _Overwrite = False,
    allow_pickle: _AllowPickle = False,
) -> None:
    """Write a sharded checkpoint as unsharded tensors, streaming."""
    made = consolidate(
        directory,
        out,
        dtype=dtype,
        output_format=output_format,
        optimizer=optimizer,
        workers=workers,
        max_shard_size=max_shard_size,
        strip_prefix=strip_prefix,
        verify=None if verify_mode == "none" else verify_mode,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        progress=_progress_bar,
    )
    typer.echo(f"{out}: {', '.join(made)}")


@app.command("import")
def import_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Another program's checkpoint file or folder."
        ),
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The checkpoint folder to make.")
    ],
    add_prefix: Annotated[
        str, typer.Option(help="Put in front of model tensor names, e.g. 'model.'.")
    ] = "",
    tie: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=NAME: the first shares memory with the second (repeatable)."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at OUT.")
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read values of other classes. RUNS CODE from the file.",
        ),
    ] = False,
) -> None:
    """Turn a checkpoint of Hugging Face, torch DCP, Lightning or Accelerate into one of
    ours."""
    pairs = [text.partition("=") for text in tie or []]
    if any(not (first and second) for first, _, second in pairs):
        raise CheckpointError(
            "--tie takes NAME=NAME, e.g. --tie lm_head.weight=transformer.wte.weight"
        )
    ties = {first: second for first, _, second in pairs}
    with long_wait(f"importing {source}"):
        kind = import_checkpoint(
            source,
            out,
            add_prefix=add_prefix,
            ties=ties,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
        )
    typer.echo(f"{out}: imported from {kind}")


@app.command("export")
def export_command(
    directory: _Directory,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.")],
    kind: Annotated[
        str,
        typer.Option(
            "--format", help="dcp, lightning (ModelParallel) or accelerate (FSDP2)."
        ),
    ],
    overwrite: _Overwrite = False,
    allow_pickle: _AllowPickle = False,
) -> None:
    """Write a checkpoint as another program's sharded folder. Safetensors and .ckpt:
    see consolidate."""
    with long_wait(f"exporting {directory}"):
        export_checkpoint(
            directory, out, kind, overwrite=overwrite, allow_pickle=allow_pickle
        )
    typer.echo(f"{out}: written for {kind}")
