"""The launchers that Lightning does not detect by itself: ``mpirun`` (with mpi4py it
does) and SageMaker, one process per host.

torchrun and SLURM are Lightning's own environments; those are left to it.
"""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from smp_core.cluster import MPI_RANKS, LaunchEnvironment, launch_environment


class PlatformEnvironment(ClusterEnvironment):
    """A ClusterEnvironment over what :func:`smp_core.cluster.launch.launch_environment`
    found."""

    def __init__(self, launch: LaunchEnvironment) -> None:
        super().__init__()
        self._launch = launch

    @classmethod
    def detected(cls) -> PlatformEnvironment | None:
        """Return the environment if ``mpirun`` or SageMaker started this process; None
        leaves the choice to Lightning."""
        if not {*MPI_RANKS, "SM_HOSTS"} & os.environ.keys():
            return None
        # One process alone needs no environment, and Lightning's own does for it.
        launch = launch_environment()
        return (
            cls(launch)
            if launch.kind not in ("torchrun", "slurm") and launch.world_size > 1
            else None
        )

    @staticmethod
    @override
    def detect() -> bool:
        return PlatformEnvironment.detected() is not None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._launch.master_addr

    @property
    @override
    def main_port(self) -> int:
        return self._launch.master_port

    @override
    def world_size(self) -> int:
        return self._launch.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore the size, which the launcher decides; :meth:`validate_settings`
        compares."""

    @override
    def global_rank(self) -> int:
        return self._launch.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank, which the launcher decides."""

    @override
    def local_rank(self) -> int:
        return self._launch.local_rank

    @override
    def node_rank(self) -> int:
        return self._launch.rank // (self._launch.local_world_size or 1)

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        # A launcher has started all processes already: the Trainer cannot make more or
        # fewer.
        if num_devices * num_nodes != self._launch.world_size:
            raise ValueError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) makes {num_devices * num_nodes} ranks, but "
                f"{self._launch.kind} started {self._launch.world_size}; write "
                f"devices={self._launch.local_world_size or 'ranks per node'} and num_nodes to match"
            )
