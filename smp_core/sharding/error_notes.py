"""Notes under errors of torch's and of others about a sharded model: what they mean,
and what to type.

They come from places that are not ours (an operator that meets a shard, a copy of a
module), and cannot be refused before. A note is printed with the traceback wherever the
error is printed.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

_MIXED = (
    "parameters are shards outside of the model's forward, and this operation was given one with a plain tensor. Write "
    "parameter.full_tensor(), on all ranks, to compute with a whole weight. Where it happened in a method of the model "
    "name that, forward_methods=['sample']; or, in Lightning, write trainer.strategy.parallel.call(submodule, x), on "
    "all ranks. Copies of submodules that were made since stay shards (PEFT's modules_to_save): load_adapter and "
    "add_adapter them before prepare."
)
NOT_IN_GRAPH = (
    "parameters of a sharded model are shards outside of its forward, and a graph holds what was gathered for it. For "
    "gradients of parameters call loss.backward() and read parameter.grad when the window is closed; "
    "torch.autograd.grad works for inputs and activations, also with create_graph=True."
)
_TWICE = (
    "gradients of gradients go through layers of plain torch only, not through layers split over tensor ranks, FP8 "
    "layers or SyncBatchNorm on CPU: write tensor_parallel_degree=1, fp8=None, or leave those layers out."
)
_COPY = (
    "a sharded model cannot be copied. Copy it before it is prepared (in Lightning: in __init__ or configure_model), "
    "and prepare the copy with it; for an average of weights use Lightning's EMAWeightAveraging, or "
    "smp_core.engine.averaging.ShardedAverage(parallel); for the weights alone, {name: p.detach().clone() for name, "
    "p in model.named_parameters()}, which are shards as well."
)
_NO_SYNC = (
    "no_sync is DistributedDataParallel's. To hold gradients back write `with accelerator.no_sync(model):`, or in "
    "Lightning `with trainer.strategy.block_backward_sync():`. LocalSGD, which lets replicas drift apart, has no "
    "counterpart: leave it out; gradient accumulation saves as many messages with one process's numbers."
)
_NOT_TOGETHER = (
    "another rank did not come to this collective, or has ended. Every rank has to make each call into a sharded "
    "model, equally often: take it out of `if rank == 0:`, give all ranks as many batches; a batch whose error one "
    "rank catches (out of memory) has to be left by all. Where a rank failed, its own error or a line of torch-smp "
    "names it."
)
_FREED = (
    "backward came to a unit whose parameters were freed behind its forward and not gathered again: FSDP2 gathers when "
    "a tensor that forward returned gets its gradient, and loses sight of a returned view (of a transpose, a slice) "
    "that is written into afterwards. Write x = x + y for x += y behind the module, return x.clone() from it, or keep "
    "parameters gathered: reshard_after_forward=False."
)
_NO_MEMORY = (
    "a number that is made of a shard (its norm, its mean) is a DTensor, and torch.tensor([...]) reads the memory of "
    "what it is given, which a DTensor lacks: write float(x) for each x, on all ranks. For Lightning's grad_norm("
    "module, 2) write {name: float(p.grad.norm()) for name, p in module.named_parameters() if p.grad is not None}."
)
_NUMPY = (
    "numpy has no shards. Write parameter.full_tensor().numpy(), on all ranks (add_histogram(name, "
    "parameter.full_tensor()) of TensorBoard), and parameter.copy_(torch.from_numpy(values)) under torch.no_grad() to "
    "write values back."
)
_HELD = (
    "parameters of a sharded model are freed behind its forward, and something had taken the memory of a gathered one: "
    "numpy(), DLPack, a hook of torch.autograd.graph.saved_tensors_hooks that calls one of them. Copy first: "
    "tensor.detach().clone().numpy()."
)
_NO_LOGITS = (
    "a model whose loss is computed from parts of its logits (tensor_parallel_degree, chunked_cross_entropy) returns "
    "None for them beside that loss. Called without labels it returns whole logits; compute the loss from these: "
    "labels = inputs.pop('labels'); logits = model(**inputs).logits."
)
_CAST = (
    "a sharded model keeps the dtype that it had in its first forward. Cast it before it is prepared: "
    "model.to(torch.bfloat16), or from_pretrained(..., dtype=torch.bfloat16); to compute in another dtype than weights "
    "are kept in write mixed_precision='bf16' (Trainer: bf16=True; Lightning: precision='bf16-mixed')."
)
_LAYOUT = (
    "shards are stretches of a parameter's rows, and stay contiguous: leave model.to(memory_format=...) of a prepared "
    "model out. Batches may be in another format: batch.to(memory_format=torch.channels_last)."
)
_NO_STRATEGY = (
    "torch has no such operation on a sharded parameter. Compute with the whole one, on all ranks alike, and write it "
    "back, with torch.no_grad(): value = parameter.full_tensor(); torch.manual_seed(0); nn.init.orthogonal_(value); "
    "parameter.copy_(value). For a norm of all gradients write trainer.strategy.parallel.clip_grad_norm_(bound), in "
    "Lightning self.clip_gradients(optimizer, bound), under Accelerate accelerator.clip_grad_norm_(parameters, bound)."
)
# Signs in an error's text, as patterns; the first one that is found counts.
_NOTES = {
    "got mixed torch.Tensor and DTensor": _MIXED,
    "appears to not have been used in the graph": NOT_IN_GRAPH,
    "trying to differentiate twice": _TWICE,
    "FSDP does not support deepcopy": _COPY,
    "object has no attribute 'no_sync'": _NO_SYNC,
    "are out of bounds for storage of size 0": _FREED,
    "its data is not allocated yet": _NO_MEMORY,
    r"numpy\(\) is not supported for tensor subclasses": _NUMPY,
    "Trying to resize storage that is not resizable": _HELD,
    "does not have a sharding strategy registered": _NO_STRATEGY,
    "Sharding propagation failed": _NO_STRATEGY,
    "Expected out tensor to have dtype": _CAST,
    "gloo/.*(closed by peer|reset by peer|Broken pipe)": _NOT_TOGETHER,
    "Timed out waiting": _NOT_TOGETHER,
}


def explain(error: BaseException) -> None:
    """Add the note that belongs to an error, if there is one and it has not got it."""
    text = str(error)
    # The first sign that is found in the text names the note.
    note = next((note for sign, note in _NOTES.items() if re.search(sign, text)), None)
    # Of all errors about None only those where a model has left its logits out.
    if "'NoneType' object" in text and _has_loss_without_logits(error.__traceback__):
        note = _NO_LOGITS
    # Of all views only the one that FSDP2 makes of a shard with another layout.
    if "view size is not compatible" in text and _is_of_shard(error.__traceback__):
        note = _LAYOUT
    said = f"torch-smp: {note}"
    # A note is added once, although an error may be explained in several places.
    add_note = getattr(error, "add_note", None)  # Python >= 3.11
    if (
        note is not None
        and add_note is not None
        and said not in getattr(error, "__notes__", [])
    ):
        add_note(said)


def _is_of_shard(trace: TracebackType | None) -> bool:
    """Return whether an error comes from where FSDP2 looks at a shard again."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and frames[-1].name == "reset_sharded_param"


def _has_loss_without_logits(trace: TracebackType | None) -> bool:
    """Return whether code on the way to an error holds a model's outputs that have a
    loss, and None for logits."""
    # Locals of every frame, since the outputs may be held by any caller.
    for frame, _ in traceback.walk_tb(trace):
        for value in frame.f_locals.values():
            if not isinstance(value, Mapping) or value.get("loss") is None:
                continue
            if value.get("logits", getattr(value, "logits", 0)) is None:
                return True
    return False


def explain_uncaught(
    before: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Add the note to an uncaught error, too; in the place of ``sys.excepthook``."""
    explain(error)
    before(kind, error, trace)
