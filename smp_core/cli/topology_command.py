"""`smp topology`: who sits where, in which groups, and how fast the links are."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from smp_core.cluster import LINKS_VARIABLE, Layout, Links
from smp_core.comm import SIZES, TIMEOUT, measure
from smp_core.outside import console
from smp_core.plan import svg_picture, text_picture
from smp_core.topology import Topology
from smp_core.torch_facts import is_rank_0

logger = logging.getLogger("smp")


def topology(
    shard_degree: Annotated[
        str, typer.Option(help="a number of ranks, 'node' or 'world'")
    ] = "node",
    nodes: Annotated[
        int,
        typer.Option(
            min=0, help="draw this many nodes instead of asking the processes"
        ),
    ] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="ranks on each of --nodes")] = 8,
    svg: Annotated[
        Path | None, typer.Option(help="also write the picture here")
    ] = None,
    measure_links: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="time gathers and reductions inside and between nodes; under torchrun",
        ),
    ] = False,
    largest_mib: Annotated[
        int,
        typer.Option(
            min=1,
            help="the largest tensor of --measure, in MiB; sizes end earlier on slow links",
        ),
    ] = SIZES[-1] >> 20,
    store: Annotated[
        Path | None, typer.Option(help="write the measurement here, for SMP_LINKS")
    ] = None,
) -> None:
    """Print ranks, nodes and groups; under torchrun or srun those of the processes
    started."""
    # Options that would have no effect are refused.
    if nodes and measure_links:
        raise typer.BadParameter(
            "--measure times the links of processes that are there; leave out --nodes"
        )
    if store is not None and not measure_links:
        raise typer.BadParameter(
            "--store keeps what --measure finds; write --measure too"
        )
    # torchrun's processes have to talk to find each other's nodes.
    began = False
    if (
        not nodes
        and int(os.environ.get("WORLD_SIZE", "1")) > 1
        and not dist.is_initialized()
    ):
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
        began = True
    try:
        # Drawn from numbers, or asked of the processes.
        found = Topology.uniform(nodes * ranks, ranks) if nodes else Topology.discover()
        degree = found.resolve_shard_degree(
            int(shard_degree) if shard_degree.isdecimal() else shard_degree
        )
        # A measurement that is about to be made replaces a stored one.
        links = None if measure_links else Links.stored(found)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if measure_links:
        if not dist.is_initialized():
            raise typer.BadParameter(
                "--measure needs several processes: torchrun ... -m smp_core.cli topology"
            )
        # NCCL is asked about devices, the way it was initialised.
        on_cuda = "nccl" in dist.get_backend()
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if on_cuda
            else torch.device("cpu")
        )
        links = measure(
            found, device, sizes=[size for size in SIZES if size <= largest_mib << 20]
        )
    if is_rank_0():
        _show(found, degree, links, svg)
        if store is not None and links is not None:
            links.save(store)
            typer.echo(
                f"stored; {LINKS_VARIABLE}={store} lets collectives.hierarchical='auto' and prefetching follow it"
            )
    if began:  # not after an error: other ranks may not come to this
        dist.destroy_process_group()


def _show(found: Topology, degree: int, links: Links | None, svg: Path | None) -> None:
    typer.echo(text_picture(found, degree))
    if links is not None:
        console().print(links.table())
        if (poor := links.poor_fits()) is not None:
            logger.warning("%s", poor)
    if svg is not None:
        svg.write_text(
            svg_picture(found, Layout.of_world(found.world_size, degree), links),
            encoding="utf-8",
        )
