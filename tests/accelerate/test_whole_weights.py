"""Every way in which scripts save a model writes whole weights, or refuses at the call
and hangs nobody."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    TrainingArguments,
)

from accelerate_smp.trainer import SmpTrainer
from smp_core.sharding.weights.unsharded import unsharded
from smp_core.watch.rank_watch import stop_watching
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import make_dataset, make_model
from tests.harness import run_ranks


class Published(nn.Module, PyTorchModelHubMixin):
    """A model of a user's own that the Hub's mixin saves, and a Transformers model
    inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(3)
        self.head = nn.Linear(61, 3)
        self.dummy_inputs = tokens()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(tokens).logits)


def tokens() -> torch.Tensor:
    return torch.stack([row["input_ids"] for row in make_dataset(4)])


def stepped(model: nn.Module, **knobs: Any) -> tuple[Any, Any]:
    accelerator = fresh_accelerator(**knobs)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    model, optimizer = accelerator.prepare(model, optimizer)

    @accelerator.pipeline_step  # without stages nothing
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        return getattr(output, "logits", output).float().square().mean()

    accelerator.backward(loss_of(tokens()))
    optimizer.step()
    return accelerator, model


def endings(folder: str, **knobs: Any) -> dict[str, torch.Tensor]:
    """What scripts write at their end, all on every rank unless they say otherwise
    themselves."""
    accelerator, model = stepped(make_model(), **knobs)
    main, unwrapped = accelerator.is_main_process, accelerator.unwrap_model(model)
    accelerator.wait_for_everyone()
    unwrapped.save_pretrained(
        f"{folder}/plain", is_main_process=main, save_function=accelerator.save
    )
    state = accelerator.get_state_dict(model)
    more = {"is_main_process": main, "save_function": accelerator.save}
    # Transformers empties it.
    unwrapped.save_pretrained(f"{folder}/given", **more, state_dict=dict(state))
    unwrapped.save_pretrained(
        f"{folder}/shards", **more, state_dict=unwrapped.state_dict()
    )
    accelerator.save_model(model, f"{folder}/save_model")
    accelerator.save_model(model, f"{folder}/bin", safe_serialization=False)
    if main:
        accelerator.save(state, f"{folder}/state.pt")
        torch.save(state, f"{folder}/torch.pt")
        safetensors.torch.save_file(
            {n: t.clone() for n, t in state.items()}, f"{folder}/file.safetensors"
        )
    accelerator.save(state, f"{folder}/state.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    accelerator, model = stepped(Published(), **knobs)
    accelerator.unwrap_model(model).save_pretrained(f"{folder}/hub")
    accelerator.unwrap_model(model).inner.save_pretrained(f"{folder}/inner")
    part = accelerator.get_state_dict(accelerator.unwrap_model(model).inner)
    state["part"] = part.get("lm_head.weight")
    accelerator.wait_for_everyone()
    return state


KNOBS = [
    {"shard_degree": 2},
    {"shard_degree": 1, "optimizer_shard": "world"},
    {"shard_degree": 1, "pipeline_parallel_degree": 2},
]


@pytest.mark.parametrize(
    "knobs", [pytest.param(KNOBS[0], marks=pytest.mark.slow), *KNOBS[1:]], ids=str
)
def test_every_ending_of_a_script_writes_whole_weights(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    expected, nothing = run_ranks(endings, 2, str(tmp_path), **knobs)
    inner = expected.pop("part")
    assert nothing.keys() == {"part"}
    for name in ("plain", "given", "shards"):
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict()
        assert all(
            torch.equal(loaded[key], value) for key, value in expected.items()
        ), name
    read: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
        "save_model/model.safetensors": safetensors.torch.load_file,
        "bin/pytorch_model.bin": torch.load,
        "state.pt": torch.load,
        "torch.pt": torch.load,
        "file.safetensors": safetensors.torch.load_file,
        "state.safetensors": safetensors.torch.load_file,
    }
    for name, load in read.items():
        loaded = load(tmp_path / name)
        assert (
            all(torch.equal(value, expected[key]) for key, value in loaded.items())
            and len(loaded) > 20
        ), name
    published = Published.from_pretrained(tmp_path / "hub")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "inner")
    assert torch.equal(published.inner.lm_head.weight, inner) and torch.equal(
        again.lm_head.weight, inner
    )


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, pickle.PicklingError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(folder: str) -> dict[str, str]:
    """Rank 0's shards given to a saver; and calls of all ranks that rank 0 makes alone,
    the others going on."""
    accelerator, model = stepped(make_model(), shard_degree=2)
    main, unwrapped = accelerator.is_main_process, accelerator.unwrap_model(model)
    save = accelerator.save
    seen = {
        "save": said(lambda: save(unwrapped.state_dict(), f"{folder}/x.pt")),
        "save safe": said(
            lambda: save(
                unwrapped.state_dict(), f"{folder}/x.pt", safe_serialization=True
            )
        ),
        "torch": said(lambda: torch.save(unwrapped.state_dict(), f"{folder}/x.pt")),
    }
    alone = {
        "save_pretrained": lambda: unwrapped.save_pretrained(f"{folder}/x"),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "save_state": lambda: accelerator.save_state(f"{folder}/x"),
    }
    for name, call in alone.items():
        seen[name] = said(call if main else accelerator.wait_for_everyone)
    # What would follow on rank 1 is a forward pass; rank 0 sees that it has begun,
    # without the other rank's help.
    if main:
        seen["forward"] = said(lambda: unwrapped.save_pretrained(f"{folder}/x"))
    accelerator._watch.meetings.forwards += 1
    accelerator._watch.meetings._held[0, 1] += not main
    accelerator.wait_for_everyone()
    if main:
        seen["end"] = said(lambda: unwrapped.save_pretrained(f"{folder}/x"))
    stop_watching()
    return seen


def test_a_save_that_cannot_be_whole_is_refused_and_hangs_nobody(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(refused, 2, str(tmp_path))
    for seen in (first, second):
        assert (
            "ValueError: accelerator.save" in seen["save"]
            and "get_state_dict(model)" in seen["save safe"]
        )
        assert "PicklingError" in seen["torch"]
        for name in ("save_pretrained", "get_state_dict", "save_state"):
            assert "RuntimeError" in seen[name] and f"{name}(" in seen[name], seen[name]
            assert (
                "rank 1 at accelerator.wait_for_everyone()" in seen[name]
                or "rank 1 is at" in seen[name]
            )
    assert "the model's next forward pass" in first["forward"]
    assert "rank 1 at the end of its process" in first["end"]
    assert not (tmp_path / "x").exists()


def pictured() -> LlavaForConditionalGeneration:
    """A model that Transformers writes under other names than its own, which it finds
    by the names of classes."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=4, patch_size=2),
        text_config=LlamaConfig(**sizes, vocab_size=9),
    )
    return LlavaForConditionalGeneration(config)


def saved_pictured(folder: str) -> str:
    model = fresh_accelerator(shard_degree=2).prepare(pictured())
    model.save_pretrained(folder)
    return type(model).__name__


def test_files_have_the_names_that_one_process_gives(tmp_path: Path) -> None:
    kinds = run_ranks(saved_pictured, 2, f"{tmp_path}/ours")
    assert kinds == ["FSDPLlavaForConditionalGeneration"] * 2, "as before"
    pictured().save_pretrained(tmp_path / "plain")
    ours, plain = (
        safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        for name in ("ours", "plain")
    )
    assert ours.keys() == plain.keys()
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())


class Encoder(nn.Module):
    """Its save runs the model: the whole of it, a part and a method of its own, as
    model cards with examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.up.weight.register_hook(lambda gradient: gradient)
        self.called: list[int] = []
        self.first.register_forward_hook(lambda *_: self.called.append(1))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(rows))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.encode(rows))))

    def save_pretrained(self, folder: str) -> None:
        rows = torch.linspace(-1, 1, 24).view(3, 8).to(next(self.parameters()).device)
        shown = {"all": self(rows), "part": self.up(rows), "method": self.encode(rows)}
        shown["norm"] = torch.cat(
            [parameter.flatten() for parameter in self.parameters()]
        ).norm()
        torch.save(
            {"shown": shown, "state": self.state_dict(), "called": len(self.called)},
            f"{folder}/saved.pt",
        )


def saving_runs_the_model(folder: str, knobs: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    accelerator = fresh_accelerator(**knobs)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.linspace(-2, 2, 32).view(4, 8)
    losses = []
    for step in range(3):
        loss = model(rows + step).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if folder and step == 1:
            accelerator.unwrap_model(model).save_pretrained(folder)
    return losses, accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"optimizer_shard": "world", "shard_degree": 1},
    ],
    ids=str,
)
def test_a_class_that_runs_its_model_while_it_saves(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    knobs = {"forward_methods": ("encode",), "units": {"modules": ["Linear"]}, **knobs}
    (losses, state), _ = run_ranks(saving_runs_the_model, 2, str(tmp_path), knobs)
    (undisturbed, expected), _ = run_ranks(saving_runs_the_model, 2, "", knobs)
    assert losses == undisturbed and all(
        torch.equal(state[name], value) for name, value in expected.items()
    )
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)
    alone = Encoder()
    alone.load_state_dict(saved["state"])
    alone.save_pretrained(str(tmp_path))
    plain = torch.load(tmp_path / "saved.pt", weights_only=False)
    for name, value in plain["shown"].items():
        assert torch.allclose(saved["shown"][name], value, atol=1e-6), name
    assert saved["called"] > 2  # the user's own hooks run


def saving_runs_a_split_model(folder: str) -> str:
    accelerator = fresh_accelerator(
        tensor_parallel_degree=2,
        tensor_parallel={"plan": {"up": "column", "head": "row"}},
    )
    model = accelerator.prepare(Encoder())
    return said(lambda: accelerator.unwrap_model(model).save_pretrained(folder))


def test_one_rank_cannot_run_a_split_model_while_it_saves(tmp_path: Path) -> None:
    for words in run_ranks(saving_runs_a_split_model, 2, str(tmp_path)):
        assert (
            "called on one rank alone" in words and "tensor_parallel_degree=2" in words
        )


def hooked_states(folder: str) -> list[int]:
    """diffusers' hooks: what they save or load themselves they take out of the lists
    that they are given."""
    accelerator, model = stepped(make_model(), shard_degree=2)
    seen = []

    def saving(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        for _ in range(len(weights)):
            models[-1].save_pretrained(f"{output_dir}/model")
            weights.pop()
        seen.append(len(models))

    def loading(models: list[nn.Module], input_dir: str) -> None:
        while models:
            loaded = GPT2LMHeadModel.from_pretrained(f"{input_dir}/model").state_dict()
            models.pop().load_state_dict(loaded)
            seen.append(len(loaded))

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
    before = accelerator.get_state_dict(model)
    for _ in range(2):
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return seen


def test_hooks_of_saved_states_pop_what_they_handle_themselves(tmp_path: Path) -> None:
    for seen in run_ranks(hooked_states, 2, str(tmp_path)):
        assert seen[0] == seen[2] == 1 and seen[1] == seen[3] > 20


class WritesItself(SmpTrainer):
    """A Trainer whose weights a method of the user's writes."""

    is_full = False

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.is_full:
            raise OSError("the disk is full")
        assert output_dir is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(state_dict, Path(output_dir) / f"of rank {dist.get_rank()}.pt")


def written_by_a_users_method(folder: str) -> str:
    trainer = WritesItself(
        model=make_model(),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=make_dataset(8),
        smp_config={"shard_degree": 2},
    )
    trainer.train()
    trainer.save_model(folder)
    trainer.is_full = True
    return said(lambda: trainer.save_model(folder))


def test_a_users_method_writes_on_one_rank_and_fails_on_all(tmp_path: Path) -> None:
    for words in run_ranks(written_by_a_users_method, 2, str(tmp_path)):
        assert "save_model" in words and "the disk is full" in words
    (written,) = tmp_path.glob("*.pt")
    state = torch.load(written, weights_only=True)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in make_model().state_dict().items()
    }


def test_integers_stand_in_the_place_of_trained_weights() -> None:
    """``save_pretrained(state_dict=codes)`` of a prepared model raised torch's refusal
    of gradients of integers."""
    layer = nn.Linear(3, 2)
    codes = {"weight": torch.ones(2, 3, dtype=torch.int8), "bias": torch.ones(2)}
    trained = layer.weight
    with unsharded(layer, codes):
        assert layer.weight.dtype == torch.int8 and layer.bias.requires_grad
    assert layer.weight is trained
