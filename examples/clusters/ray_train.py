"""The training of train.py by Ray Train, which starts all workers anew when one of them
is lost.

    python examples/clusters/ray_train.py --folder /shared/runs/one --workers 16 --gpus

Run it on the head of a Ray cluster (``ray job submit`` does). The folder is one that
all nodes see.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from train import parser, train  # noqa: E402


def worker(flags: dict[str, Any]) -> None:
    """Train as one rank. Ray has set the launcher's variables; the environment says
    where Lightning reads them."""
    train(
        Path(flags["folder"]),
        flags["steps"],
        flags["save_every"],
        plugins=[RayLightningEnvironment()],
    )


def main() -> None:
    known = parser()
    known.add_argument("--workers", type=int, default=2, help="ranks in all")
    known.add_argument("--gpus", action="store_true", help="give each of them one")
    flags = known.parse_args()
    # Workers import train.py from this folder, which their nodes have to see, too.
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    TorchTrainer(
        worker,
        train_loop_config={**vars(flags), "folder": str(flags.folder.resolve())},
        scaling_config=ScalingConfig(num_workers=flags.workers, use_gpu=flags.gpus),
        run_config=RunConfig(
            name=flags.folder.name,
            storage_path=str(flags.folder.resolve() / "ray"),
            failure_config=FailureConfig(max_failures=20),
        ),
    ).fit()


if __name__ == "__main__":
    main()
