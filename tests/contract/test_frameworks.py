"""What torch-smp takes from Lightning, Accelerate, Transformers, DCP and other parts of
torch: names, hooks."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import accelerate_smp
import lightning_smp
from smp_core.checkpoint.foreign.dcp_folder import read_dcp_folder

FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "torch")
# Private names of torch, of Transformers' modules and the like, by where they are
# imported from.
TAKEN = {
    "torch": (
        "_assert_async",
        "_foreach_norm",
        "_foreach_mul_",
        "_foreach_copy_",
        "_scaled_mm",
    ),
    "torch._subclasses.fake_tensor": ("FakeTensorMode", "unset_fake_temporarily"),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
    "torch.distributed._symmetric_memory": ("enable_symm_mem_for_group",),
    "torch.distributed.distributed_c10d": ("Work",),
    "torch.distributed.checkpoint.filesystem": (
        "FileSystemReader",
        "FileSystemWriter",
        "_StorageInfo",
    ),
    "torch.distributed.checkpoint.default_planner": (
        "DefaultLoadPlanner",
        "DefaultSavePlanner",
    ),
    "torch.utils.checkpoint": (
        "create_selective_checkpoint_contexts",
        "set_checkpoint_early_stop",
    ),
    "torch.nn.modules.batchnorm": ("_BatchNorm",),
    "lightning.pytorch.strategies.launchers.subprocess_script": (
        "_SubprocessScriptLauncher",
    ),
    "transformers.integrations.sdpa_attention": ("sdpa_attention_forward",),
    "transformers.loss.loss_utils": ("ForCausalLMLoss", "ForMaskedLMLoss"),
    "transformers.trainer": (
        "Accelerator",
        "OPTIMIZER_NAME",
        "SCHEDULER_NAME",
        "TRAINER_STATE_NAME",
    ),
    "transformers.trainer_callback": ("ExportableState",),
    "transformers.trainer_utils": (
        "PREFIX_CHECKPOINT_DIR",
        "has_length",
        "sort_checkpoints",
    ),
}
# Hooks and methods that our classes override, by the class that calls them; a framework
# that renames one would pass ours by in silence.
OVERRIDDEN = {
    "lightning.pytorch.strategies.ParallelStrategy": (
        *(
            "connect",
            "setup_environment",
            "setup",
            "setup_optimizers",
            "model_to_device",
            "teardown",
            "reduce",
        ),
        *(
            "tensor_init_context",
            "model_sharded_context",
            "distributed_sampler_kwargs",
            "precision_plugin",
        ),
        *(
            "process_dataloader",
            "batch_to_device",
            "backward",
            "training_step",
            "validation_step",
            "test_step",
        ),
        *(
            "predict_step",
            "block_backward_sync",
            "optimizer_step",
            "lightning_module_state_dict",
            "optimizer_state",
        ),
        *(
            "save_checkpoint",
            "load_checkpoint",
            "load_model_state_dict",
            "load_optimizer_state_dict",
        ),
        *(
            "remove_checkpoint",
            "barrier",
            "broadcast",
            "on_exception",
            "root_device",
            "on_train_start",
        ),
        *(
            "on_train_batch_start",
            "on_validation_start",
            "on_test_start",
            "on_predict_start",
            "on_validation_end",
        ),
        *("on_test_end", "on_predict_end", "_configure_launcher"),
    ),
    "lightning.pytorch.Callback": (
        *(
            "on_fit_start",
            "on_train_start",
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
        ),
        *(
            "on_train_batch_end",
            "on_train_end",
            "on_validation_start",
            "on_validation_batch_end",
        ),
        *("on_validation_end", "on_exception", "setup"),
    ),
    "lightning.pytorch.callbacks.WeightAveraging": (
        "_swap_models",
        "_copy_average_to_current",
    ),
    "lightning.pytorch.callbacks.StochasticWeightAveraging": (
        *(
            "update_parameters",
            "transfer_weights",
            "_load_average_model_state",
            "on_train_epoch_start",
        ),
    ),
    "lightning.pytorch.callbacks.ModelCheckpoint": (
        "state_key",
        "state_dict",
        "load_state_dict",
    ),
    "accelerate.Accelerator": (
        *(
            "prepare",
            "prepare_model",
            "prepare_optimizer",
            "prepare_scheduler",
            "prepare_data_loader",
            "backward",
        ),
        *(
            "no_sync",
            "clip_grad_norm_",
            "clip_grad_value_",
            "gather",
            "gather_for_metrics",
            "join_uneven_inputs",
        ),
        *(
            "save_state",
            "load_state",
            "skip_first_batches",
            "get_state_dict",
            "save",
            "wait_for_everyone",
        ),
        *(
            "free_memory",
            "end_training",
            "num_processes",
            "process_index",
            "parallelism_config",
            "torch_device_mesh",
        ),
    ),
    "accelerate.scheduler.AcceleratedScheduler": ("step",),
    "transformers.Trainer": (
        *(
            "create_accelerator_and_postprocess",
            "log",
            "evaluation_loop",
            "save_model",
            "training_step",
        ),
        *(
            "compute_loss",
            "prediction_step",
            "get_train_dataloader",
            "_save_checkpoint",
        ),
    ),
    "transformers.TrainerCallback": (
        *(
            "on_train_begin",
            "on_train_end",
            "on_log",
            "on_step_begin",
            "on_step_end",
            "on_pre_optimizer_step",
        ),
        *("on_evaluate", "on_save", "on_prediction_step"),
    ),
    "transformers.PreTrainedModel": (
        "set_attn_implementation",
        "_no_split_modules",
        "_init_weights",
        "tp_plan",
    ),
}


@pytest.mark.parametrize("module", TAKEN)
def test_names_are_where_they_are_taken_from(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in TAKEN[module] if not hasattr(there, name)] == []


@pytest.mark.parametrize("path", OVERRIDDEN)
def test_hooks_and_methods_that_are_overridden_are_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    assert [each for each in OVERRIDDEN[path] if not hasattr(kind, each)] == []


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(package.__path__):
        if found.name != "run":  # it is a program
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def overrides() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, our function and the framework's for each that a class of the faces
    overrides."""
    for module in (*modules_of(lightning_smp), *modules_of(accelerate_smp)):
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            bases = [
                base
                for base in kind.__mro__[1:]
                if base.__module__.split(".")[0] in FRAMEWORKS
            ]
            for name, ours in vars(kind).items():
                theirs = next(
                    (vars(base)[name] for base in bases if name in vars(base)), None
                )
                if (
                    inspect.isfunction(ours)
                    and inspect.isfunction(theirs)
                    and name != "__init__"
                ):
                    yield f"{module.__name__}.{kind.__name__}.{name}", ours, theirs


def test_overridden_methods_take_what_their_callers_pass() -> None:
    wrong, count = [], 0
    for name, ours, theirs in overrides():
        mine, count = inspect.signature(ours).parameters, count + 1
        kinds = {parameter.kind for parameter in mine.values()}
        by_place, by_name = (
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
        )
        plain = [
            each
            for each in inspect.signature(theirs).parameters.values()
            if each.kind < each.VAR_POSITIONAL
        ]
        named = [
            each.name
            for each in inspect.signature(theirs).parameters.values()
            if each.kind == each.KEYWORD_ONLY
        ]
        if not by_place and len(plain) > len(
            [each for each in mine.values() if each.kind < each.VAR_POSITIONAL]
        ):
            if not by_name:
                wrong.append(f"{name} takes fewer arguments than its base")
        wrong += [
            f"{name} takes no {each}="
            for each in named
            if each not in mine and not by_name
        ]
    assert wrong == [] and count > 100


def test_attributes_of_trainers_loops_and_accelerators_are_there() -> None:
    assert "_data_fetcher" in _FitLoop.__init__.__code__.co_names
    assert "_batches_that_stepped" in _TrainingEpochLoop.__init__.__code__.co_names
    assert hasattr(_TrainingEpochLoop, "_should_check_val_fx")
    lists = {"_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"}
    hooks = {"_save_model_state_pre_hook", "_load_model_state_pre_hook"}
    assert (lists | hooks) - set(Accelerator.__init__.__code__.co_names) == set()


def test_transformers_attention_and_mask_registries_are_asked() -> None:
    calls: list[str] = []

    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        **kwargs: Any,
    ) -> Any:
        calls.append("attention")
        assert query.ndim == 4 and {"scaling", "dropout"} <= kwargs.keys()
        return query.transpose(1, 2).contiguous(), None

    def mask(*args: Any, **kwargs: Any) -> Any:
        calls.append("mask")
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register("contract", attend)
    AttentionMaskInterface.register("contract", mask)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes))
    model.set_attn_implementation("contract")
    assert model.config._attn_implementation == "contract"
    tokens = torch.zeros(1, 4, dtype=torch.long)
    loss = model(input_ids=tokens, labels=tokens).loss
    assert calls == ["mask", "attention"] and loss.ndim == 0
    assert (
        model._no_split_modules == ["LlamaDecoderLayer"]
        or "LlamaDecoderLayer" in model._no_split_modules
    )
    assert {
        "layers.*.self_attn.q_proj",
        "layers.*.mlp.down_proj",
    } <= model.config.base_model_tp_plan.keys()


def test_transformers_losses_take_the_number_of_targets() -> None:
    taken = inspect.signature(ForCausalLMLoss).parameters.keys()
    assert {"logits", "labels", "vocab_size", "num_items_in_batch"} <= taken
    assert isinstance(
        inspect.getattr_static(PreTrainedModel, "loss_function"), property
    )


def test_folders_of_dcp_are_read(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "step": 3}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    read = read_dcp_folder(tmp_path)
    assert read["step"] == 3
    assert torch.equal(read["model"]["weight"].load(), state["model"]["weight"])
