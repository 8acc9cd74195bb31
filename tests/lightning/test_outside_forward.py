"""What users do with weights in hooks, outside of forward: numbers of them, loading,
copies, calls of submodules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule
from tests.lightning.running import Run, assert_same, make_trainer, report, together


class Numbers(LanguageModule):
    """Statistics of weights in a hook, as numbers, are among the losses that are
    compared; and a decision by one."""

    def on_train_batch_end(self, *_: Any) -> None:
        # 13 rows; 3 rows, fewer than ranks; a 0-d tensor. An empty part has no maximum,
        # in torch.
        weights = (
            self.model.blocks[0].up.weight,
            self.model.blocks[1].narrow.weight,
            self.model.gain,
        )
        for number, weight in enumerate(weights):
            found = [
                float(weight.norm()),
                weight.mean().item(),
                float((weight > 0).sum()),
            ]
            found += [] if number == 1 else [float(weight.abs().max())]
            self.losses.append(
                torch.tensor(
                    [*found, float(bool(weight.isnan().any()))], dtype=torch.float64
                ).sum()
            )
        if (
            self.model.blocks[0].up.bias.max()
            > self.model.blocks[0].up.bias.abs().mean()
        ):
            self.losses.append(torch.tensor(1.0))


class Restoring(LanguageModule):
    """Goes back to whole weights of its own in the middle: of the root, and of a
    block."""

    def on_train_start(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.whole = {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype) / 4
            for name, value in self.model.state_dict().items()
        }
        self.whole["head.weight"] = self.whole["embed.weight"]  # tied

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.load_state_dict(self.whole)
        elif batch_idx == 2:
            block = {
                name.removeprefix("blocks.1."): value
                for name, value in self.whole.items()
                if "blocks.1" in name
            }
            self.model.blocks[1].load_state_dict(block)


def fit(kind: type[LanguageModule], knobs: dict[str, Any] | None = None) -> Run:
    module = kind(batches=5)
    trainer = make_trainer(knobs, precision="64-true", accumulate_grad_batches=2)
    trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        (Numbers, {"shard_degree": 4}),
        (Restoring, {"shard_degree": 2, "optimizer_shard": "world"}),
    ],
)
def test_hooks_see_and_load_whole_weights_as_in_one_process(
    kind: type[LanguageModule], knobs: dict[str, Any]
) -> None:
    assert_same(together(fit, kind, knobs), fit(kind))


class CallsSubmodule(LanguageModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        hidden = torch.randn(2, 8)
        if self.options["how"] == "as a call":
            parallel = self.trainer.strategy.parallel
            inside = (
                parallel.call(self.model.blocks[0].up, hidden),
                parallel.call(self.model.blocks[0], hidden),
            )
            assert [
                each.shape[1]
                for each in (parallel.call(self.model.head, hidden), *inside)
            ] == [23, 13, 8]
        else:
            assert self.model.head(hidden).shape[1] == 23


def calls_submodule() -> None:
    for how in ("by itself", "as a call"):
        make_trainer({"shard_degree": 2}).fit(CallsSubmodule(batches=1, how=how))


def test_a_submodule_may_be_called_in_a_hook() -> None:
    run_ranks(calls_submodule, 2)
