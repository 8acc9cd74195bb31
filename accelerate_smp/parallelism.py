"""The run's layout in Accelerate's terms: its data loaders, Trainer and TRL read
``accelerator.parallelism_config``.

dp_replicate_size   replicas of the model states
dp_shard_size       ranks of a partition group that read different samples: shard_degree / context degree
cp_size             ranks that share a sequence; Accelerate counts them beside the shard ranks, we inside them
tp_size             ranks that read the same batch: those that hold parts of one layer, on all pipeline stages
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp_core.cluster import SmpMesh


@dataclass
class SmpParallelism(ParallelismConfig):
    """A ``ParallelismConfig`` that describes the run, to read from. Made by :meth:`of`;
    nothing is set through it."""

    @classmethod
    def of(cls, mesh: SmpMesh) -> SmpParallelism:
        """Describe the layout of ``mesh``. Collective where batches are shared."""
        config = cls(
            dp_replicate_size=mesh.replicate_degree,
            dp_shard_size=mesh.shard_degree // mesh.context_degree,
            cp_size=mesh.context_degree,
            tp_size=mesh.tensor_degree * mesh.pipeline_degree,
        )
        config.device_mesh = _device_mesh(mesh)
        return config

    def __post_init__(self) -> None:
        # Not the base's: it reads sizes from the environment, and refuses replicas
        # whose ranks all share sequences. Accelerate before 1.12 has none.
        self.cp_backend, self.sp_backend, self.sp_size = "torch", "deepspeed", 1

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axis for FSDP2: the partition group alone; smp_core reduces across
        replicas."""
        return ["dp_shard_cp"]

    @property
    def non_data_parallel_size(self) -> int:
        """The number by which Trainer divides its count of targets before Transformers
        5.20: 1, see ``SmpTrainerMixin.get_tp_size``.
        """
        return 1

    @property
    def cp_enabled(self) -> bool:
        """The flag of torch's context parallelism, which Accelerate and Trainer would
        switch on: False, smp_core shares sequences.
        """
        return False

    @property
    def tp_enabled(self) -> bool:
        """The flag of a model that Transformers split before it was prepared: False,
        smp_core splits it."""
        return False


def _device_mesh(mesh: SmpMesh) -> DeviceMesh | None:
    """Return the same ranks on axes of Accelerate's names, those of more than one rank.

    No new process groups are made unless batches are shared.
    """
    sizes = {
        "pp": mesh.pipeline_degree,
        "dp_replicate": mesh.replicate_degree,
        "dp_shard": mesh.shard_degree // mesh.context_degree,
        "cp": mesh.context_degree,
        "tp": mesh.tensor_degree,
    }
    active = {name: size for name, size in sizes.items() if size > 1}
    if not active:
        return None
    names = tuple(active)
    # Axes of Accelerate's that no group of ours has.
    if mesh.batch_degree > 1:
        return init_device_mesh(
            mesh.device.type, tuple(active.values()), mesh_dim_names=names
        )
    # Only these two are there without ranks that share a batch.
    ours = {"dp_replicate": mesh.replicate_group, "dp_shard": mesh.shard_group}
    ranks = torch.arange(mesh.topology.world_size).view(tuple(active.values()))
    groups = [ours[name] for name in names]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(
        groups, mesh.device.type, mesh=ranks, mesh_dim_names=names
    )
