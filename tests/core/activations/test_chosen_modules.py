"""Which modules are checkpointed: patterns, tensors by name, models of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_core.activations.checkpointing import apply_checkpointing
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh, parallelize
from smp_core.plan.checkpointed import plan_checkpointing
from smp_core.topology import Topology
from smp_core.torch_facts.compat import caches_in
from tests.core.activations.models import tokens
from tests.harness import run_ranks
from tests.logged import warnings_said

BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class TakesMask(nn.Module):
    """Random numbers, and tensors by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, *, hidden: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.dropout(self.linear(hidden), 0.5) * (1.0 if scale is None else scale)


def test_tensors_given_by_name() -> None:
    def gradient(mode: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(TakesMask())
        for chosen in plan_checkpointing(model, ["0"], mode):
            apply_checkpointing(model, chosen)
        hidden = torch.randn(3, 8, requires_grad=True)
        model[0](hidden=hidden, scale=torch.full((8,), 3.0)).square().sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    assert torch.equal(gradient("full"), gradient("none"))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(5)
        )
        self.head = nn.Linear(2, 2)


def planned(setting: Any, blocks: tuple[str, ...] = BLOCKS) -> dict[str, str]:
    return {
        each.name: each.mode for each in plan_checkpointing(Tower(), blocks, setting)
    }


def test_which_modules_are_chosen() -> None:
    assert planned("none") == {}
    assert planned("full") == dict.fromkeys(BLOCKS, "full")
    assert planned("selective") == dict.fromkeys(BLOCKS, "selective")
    assert planned("every:3") == {"blocks.0": "full", "blocks.3": "full"}
    assert planned("every:9") == {"blocks.0": "full"}
    assert planned({"head": "full", "blocks.*": "every:2"}) == dict.fromkeys(
        ("blocks.0", "blocks.2", "blocks.4", "head"), "full"
    )
    # "blocks.*" matches blocks.1.0 too, which is inside of one that was decided about.
    assert planned({"blocks.1": "none", "blocks.*": "selective"}) == dict.fromkeys(
        ("blocks.0", "blocks.2", "blocks.3", "blocks.4"), "selective"
    )
    assert planned({"Sequential": "full"}) == {f"blocks.{i}": "full" for i in range(5)}


def test_patterns_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'Sequential'"):
        planned({"Sequentail": "full"})
    with pytest.raises(
        ValueError, match=r"blocks\.0\.0 and all else that it matches lie inside"
    ):
        planned({"blocks.[0-9]": "full", "*.[0-9].0": "full"})
    with pytest.raises(ValueError, match="has no repeated blocks"):
        planned("full", blocks=())


def test_what_the_knob_accepts() -> None:
    assert (
        SmpConfig.from_env({"SMP_ACTIVATIONS": "every:2"}).activations.checkpoint
        == "every:2"
    )
    by_glob = SmpConfig.from_env(
        {
            "SMP_ACTIVATIONS": '{"checkpoint": {"*.mlp": "full", "Attention": "selective"}}'
        }
    )
    assert by_glob.activations.checkpoint == {"*.mlp": "full", "Attention": "selective"}
    assert SmpConfig.from_dict(by_glob.to_dict()) == by_glob
    assert by_glob.effective()["activations.checkpoint"] == {
        "*.mlp": "full",
        "Attention": "selective",
    }
    for wrong in (
        "ful",
        "every:0",
        "every:x",
        {},
        {"a": "ful"},
        {"": "full"},
        {1: "full"},
        ["full"],
    ):
        with pytest.raises(ValueError, match=r"activations\.checkpoint"):
            SmpConfig(activations={"checkpoint": wrong})


class Llama(nn.Module):
    """Its own checkpointing on or off; a cache where Transformers makes one by
    itself."""

    def __init__(self, own: bool, use_cache: bool = True) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=use_cache,
        )
        self.model = LlamaForCausalLM(config)
        if own:
            if hasattr(self.model, "activation_checkpointing_enable"):
                self.model.activation_checkpointing_enable()
            else:  # Transformers 4, which would take the reentrant one
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def train_llamas() -> dict[str, Any]:
    """On ranks: gradients of a Llama under each setting, the knob in effect, and what
    was said."""
    found: dict[str, Any] = {}
    with warnings_said() as heard:
        for name, own, setting in (
            ("plain", False, "none"),
            ("no cache", False, "none"),
            ("own", True, "none"),
            ("full", False, "full"),
            ("selective", False, "selective"),
            ("both", True, "full"),
        ):
            torch.manual_seed(0)
            mesh, config = build_mesh(
                SmpConfig(shard_degree=2, activations={"checkpoint": setting}),
                Topology.discover(),
                "cpu",
            )
            heard.clear()
            parallel = parallelize(
                Llama(own, use_cache=name != "no cache"), config, mesh=mesh
            )
            parallel.module.train()
            parallel.module(tokens(mesh.rank)).backward()
            gradients = [p.grad.full_tensor() for p in parallel.module.parameters()]
            said = [line for line in heard if "checkpointing" in line]
            found[name] = (gradients, parallel.config.activations.checkpoint, said)
    return found


def test_caches_have_the_names_of_all_versions() -> None:
    """Transformers 5.24 says "cache"; what is no cache of keys and values may have that
    name."""
    from transformers import DynamicCache

    kept = DynamicCache()
    assert caches_in(
        {"past_key_values": kept, "layer_past": (), "past_key_value": None}
    ) == [
        "past_key_values",
        "layer_past",
    ]
    assert caches_in({"hidden_states": 1, "cache": kept}) == ["cache"]
    assert caches_in({"cache": {"pictures": 3}}) == caches_in({"cache": None}) == []


def test_a_transformers_model_with_a_cache_or_its_own_checkpointing() -> None:
    for rank, found in enumerate(run_ranks(train_llamas, 2)):
        # Transformers' own recomputation goes without the cache, which changes
        # roundings in Transformers 4 by itself.
        torch.testing.assert_close(
            found["no cache"][0], found["plain"][0], atol=1e-7, rtol=1e-5
        )
        for name, (gradients, _, _) in found.items():
            expected = found["no cache" if name in ("own", "both") else "plain"][0]
            assert name == "no cache" or all(map(torch.equal, gradients, expected)), (
                name
            )
        assert {name: setting for name, (_, setting, _) in found.items()} == {
            "plain": "none",
            "no cache": "none",
            "own": "none",
            "full": "full",
            "selective": "selective",
            "both": "none",
        }
        assert found["full"][2] == []
        said = found["both"][2]  # by rank 0 for all
        assert [True] * (rank == 0) == [
            "own gradient checkpointing is on" in line for line in said
        ]
