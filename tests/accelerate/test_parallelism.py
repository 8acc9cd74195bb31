"""What Accelerate and those who stand on it read about the layout, and what they may
say about it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader

from accelerate_smp.parallelism import SmpParallelism
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh
from smp_core.topology import Topology
from tests.accelerate.running import fresh_accelerator
from tests.core.models import TroubledModel
from tests.harness import run_ranks


def layout(accelerator: Any) -> dict[str, Any]:
    config, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    return {
        "sizes": (
            config.dp_replicate_size,
            config.dp_shard_size,
            config.cp_size,
            config.tp_size,
        ),
        "total": config.total_size,
        "axes": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "ranks": (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank),
        "fsdp": config.fsdp_dim_names,
        "groups are ours": all(
            set(dist.get_process_group_ranks(mesh.get_group(name)))
            == set(dist.get_process_group_ranks(group))
            and mesh.get_group(name) is group
            for name, group in (
                ("dp_replicate", accelerator.mesh.replicate_group),
                ("dp_shard", accelerator.mesh.shard_group),
            )
            if name in mesh.mesh_dim_names
        ),
    }


def layouts() -> list[dict[str, Any]]:
    seen = [
        layout(fresh_accelerator(shard_degree=degree)) for degree in (1, 2, "world")
    ]
    seen.append(
        layout(
            fresh_accelerator(
                parallelism_config=ParallelismConfig(
                    dp_replicate_size=2, dp_shard_size=2
                )
            )
        )
    )
    return seen


def test_parallelism_config_tells_the_layout() -> None:
    """From the start, in Accelerate's terms, and on our own process groups."""
    for rank, (whole, halves, sharded, asked) in enumerate(
        run_ranks(layouts, 4, ranks_per_node=2)
    ):
        assert (whole["sizes"], whole["axes"]) == ((4, 1, 1, 1), {"dp_replicate": 4})
        assert (halves["sizes"], halves["axes"]) == (
            (2, 2, 1, 1),
            {"dp_replicate": 2, "dp_shard": 2},
        )
        assert (sharded["sizes"], sharded["axes"]) == ((1, 4, 1, 1), {"dp_shard": 4})
        assert asked == halves
        assert (whole["ranks"], halves["ranks"], sharded["ranks"]) == (
            (rank, 0),
            (rank // 2, rank % 2),
            (0, rank),
        )
        for seen in (whole, halves, sharded):
            assert (
                seen["total"] == 4
                and seen["fsdp"] == ["dp_shard_cp"]
                and seen["groups are ours"]
            )


def automatic() -> tuple[Any, ...]:
    accelerator = fresh_accelerator()
    before = accelerator.parallelism_config, accelerator.torch_device_mesh
    with pytest.raises(RuntimeError, match="settled when the first model is prepared"):
        _ = accelerator.mesh
    samples = [torch.tensor([float(n)]) for n in range(16)]
    early = accelerator.prepare(DataLoader(samples, batch_size=2))
    accelerator.prepare(TroubledModel())
    late = accelerator.prepare(DataLoader(samples, batch_size=2))
    read = [
        accelerator.gather(batch).flatten().tolist()
        for loader in (early, late)
        for batch in loader
    ]
    config = accelerator.parallelism_config
    return (
        before,
        (config.dp_replicate_size, config.dp_shard_size),
        accelerator.mesh.shard_degree,
        read,
    )


def test_auto_is_told_when_it_is_known() -> None:
    """And data loaders share out samples in the same way before and after."""
    for before, sizes, degree, read in run_ranks(automatic, 4, ranks_per_node=2):
        assert before == (None, None)
        assert sizes == (4 // degree, degree)
        half = len(read) // 2
        assert read[:half] == read[half:] and [
            n for batch in read[:half] for n in batch
        ] == [float(n) for n in range(16)]


def shared_sequences() -> list[tuple[Any, ...]]:
    """Layouts with context ranks, which the mesh knows already; each with what loaders
    give this rank."""
    from accelerate.data_loader import prepare_data_loader

    fresh_accelerator(shard_degree=4)  # Accelerate's loaders want its state
    seen = []
    for degree, context in ((4, 2), (2, 2), (4, 4)):
        config = SmpConfig(shard_degree=degree, context_parallel_degree=context)
        mesh, _ = build_mesh(config, Topology.discover(), "cpu")
        layout = SmpParallelism.of(mesh)
        loader = DataLoader([torch.tensor(n) for n in range(8)], batch_size=1)
        mine = prepare_data_loader(
            loader, put_on_device=False, torch_device_mesh=layout.device_mesh
        )
        read = torch.cat(list(mine)).tolist()
        assert not layout.cp_enabled, (
            "Accelerate would switch on torch's context parallelism"
        )
        seen.append(
            (
                (layout.dp_replicate_size, layout.dp_shard_size, layout.cp_size),
                layout.total_size,
                read,
            )
        )
    return seen


def test_ranks_that_share_a_sequence_read_the_same_samples() -> None:
    results = run_ranks(shared_sequences, 4, ranks_per_node=2)
    for case, (degree, context) in enumerate(((4, 2), (2, 2), (4, 4))):
        for rank, seen in enumerate(results):
            sizes, total, read = seen[case]
            assert sizes == (4 // degree, degree // context, context) and total == 4
            readers = 4 // context
            assert read == list(range(rank // context, 8, readers))


def trainer_settings(folder: str) -> tuple[Any, ...]:
    from tests.accelerate.trainers import make_trainer

    plain, _ = make_trainer(
        folder,
        8,
        1,
        {},
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    )
    fsdp, _ = make_trainer(
        folder,
        8,
        1,
        {},
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"], "version": 2},
    )
    fsdp.train()
    wrapped = sum(
        unit.name.startswith("transformer.h.")
        for unit in fsdp.accelerator.parallel.units
    )
    sizes = [
        (t.accelerator.mesh.replicate_degree, t.accelerator.mesh.shard_degree)
        for t in (plain, fsdp)
    ]
    return sizes, wrapped, plain.get_total_train_batch_size(plain.args)


def test_trainer_takes_the_settings_of_training_arguments(tmp_path: Any) -> None:
    """``parallelism_config=`` is the layout; ``fsdp=True`` shards over the world, block
    by block."""
    for sizes, wrapped, batch in run_ranks(
        trainer_settings, 4, str(tmp_path), ranks_per_node=2
    ):
        assert sizes == [(2, 2), (1, 4)] and wrapped == 2 and batch == 8


def copied() -> tuple[int, int, bool]:
    """What a copy of the accelerator in another process would tell, after something was
    prepared."""
    accelerator = fresh_accelerator(shard_degree=2)
    accelerator.prepare(torch.nn.Linear(4, 4))
    copy = pickle.loads(pickle.dumps(accelerator))
    return copy.process_index, copy.num_processes, copy.sharding


def test_an_accelerator_is_pickled_for_other_processes() -> None:
    assert run_ranks(copied, 2) == [(0, 2, False), (1, 2, False)]
