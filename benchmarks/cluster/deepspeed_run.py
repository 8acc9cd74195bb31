"""DeepSpeed ZeRO-3 and MiCS in the cluster benchmark."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from lab_model import RATE, Model, batch


def start_deepspeed() -> None:
    """Start DeepSpeed's process group. Two of its calls do not exist on gloo and are
    replaced by ones with the same traffic."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["NDEV_PER_NODE"] = os.environ["LOCAL_WORLD_SIZE"]
    import logging

    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # It would be compiled at the start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def all_gather_coalesced(
        self: Any, outputs: Any, inputs: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        works = [
            dist.all_gather_into_tensor(o, i, group=group, async_op=True)
            for o, i in zip(outputs, inputs, strict=True)
        ]

        class Handle:
            def wait(self) -> None:
                for work in works:
                    work.wait()

        return Handle() if async_op else Handle().wait()

    sys.modules[
        "deepspeed.comm.torch"
    ].TorchBackend.all_gather_coalesced = all_gather_coalesced
    deepspeed.comm.has_all_reduce_coalesced = lambda: False
    deepspeed.init_distributed("gloo", verbose=False)


class DeepSpeedRun:
    """ZeRO-3 and MiCS."""

    def __init__(self, scheme: str, micro_batches: int, half: bool) -> None:
        import deepspeed

        zero: dict[str, Any] = {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_scatter": True,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": int(4e6),
            "stage3_prefetch_bucket_size": int(4e6),
            "stage3_max_live_parameters": 1,
            "stage3_max_reuse_distance": 0,
        }
        init = deepspeed.zero.Init
        if scheme == "mics":
            zero.update(
                mics_shard_size=int(os.environ["LOCAL_WORLD_SIZE"]),
                mics_hierarchical_params_gather=False,
            )
            init = deepspeed.zero.MiCS_Init
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "bf16": {"enabled": half},  # gathers and, by its default, sums in bfloat16
        }
        torch.manual_seed(0)
        with init(config_dict_or_path=config):
            model = Model()
        if scheme == "mics":
            # DeepSpeed 0.19.6 sums gradients over the group written on a parameter
            # before the optimizer's own, and MiCS_Init writes the world there: the
            # nodes then wait for one another in different collectives.
            for parameter in model.parameters():
                parameter.ds_process_group = parameter.comm.param_shard_group
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.engine, *_ = deepspeed.initialize(
            model=model, config=config, optimizer=optimizer
        )
        self.metered = None

    def step(self, number: int, micro_batches: int) -> float:
        total = 0.0
        for micro in range(micro_batches):
            loss = self.engine(batch(number, micro, dist.get_rank()))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / micro_batches
        return total
