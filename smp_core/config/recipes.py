"""The recipes of SmpConfig: knobs with fields of their own. Plain values; no torch
here. (`fp8` has its in :mod:`smp_core.config.fp8_recipe`.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from smp_core.config import values as read
from smp_core.config.plan_recipes import Planner
from smp_core.config.recipe import Recipe, setting

WrapRule = Callable[[str, Any], bool]
"""(module's name, module) -> whether it is a unit. Any: command lines read the types,
and torch is not loaded here."""

Overlap = Literal["sums", "pieces", "fused"]

_BOOLEAN = read.boolean()
_GLOBS = read.names()
_COUNT = read.integer(minimum=0)
_AT_LEAST_ONE = read.integer(minimum=1)
_COUNT_OR_AUTO = read.either(
    _COUNT, read.word("auto"), allowed="an integer of at least 0, 'auto'"
)
_AT_LEAST_ONE_OR_AUTO = read.either(
    _AT_LEAST_ONE, read.word("auto"), allowed="an integer of at least 1, 'auto'"
)
_GIB = read.either(read.nothing(), read.number(0.0), allowed="a number above 0, none")

_RECOMPUTATION = read.either(
    read.word("none", "full", "selective"),
    read.pattern(r"every:[1-9][0-9]*"),
    allowed="'none', 'full', 'every:N', 'selective'",
)
_CHECKPOINTING = read.either(
    _RECOMPUTATION,
    read.mapping(_RECOMPUTATION),
    allowed="'none', 'full', 'every:N', 'selective', a mapping from class names or globs to one of these",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorParallel(Recipe):
    """Settings of tensor parallelism: how layers are split over tensor ranks.

    Args:
        plan: Which layer is split how. "auto" (default; by the plan that a Transformers
            model carries, or ours for those that carry none), "infer" (by running the
            model once and looking at which layers feed which) or a mapping from globs
            over module names to roles ({"*.q_proj": "column", "*.o_proj": "row"}):
            "column", "column:N" (N equal blocks in one weight), "column_gather", "row",
            "row_split", "vocabulary", "features", "experts", "sum", "whole",
            "replicate"; the first glob that matches decides about a module.
        sequence_parallel: Whether what stands between split layers (norms, residuals)
            holds 1/T of the tokens. True (default) or False.
        across_nodes: Whether a tensor group may be larger than a node. True, or False
            (default: a larger group is an error).
        overlap: What goes on while tokens are on their way. "sums" (default; the
            gradient of a column layer's input is added up while those of weights are
            computed), "pieces" (besides, linear layers are multiplied in pieces behind
            the messages of the next one, in forward and backward) or "fused" (these
            products by torch's operators over symmetric memory; CUDA, inside a node).
    """

    KNOB: ClassVar[str] = "tensor_parallel"
    MAIN: ClassVar[str | None] = "plan"
    ALLOWED: ClassVar[str] = "'auto', 'infer'"
    EXAMPLE: ClassVar[str] = '{"plan": {"*.q_proj": "column", "*.o_proj": "row"}}'

    plan: Literal["auto", "infer"] | Mapping[str, str] = setting(
        "auto",
        read.either(
            read.word("auto", "infer"),
            read.mapping(read.pattern(r"[a-z_]+(:[0-9]+)?")),
            allowed="'auto', 'infer', a mapping from globs over module names to roles",
        ),
    )
    sequence_parallel: bool = setting(True, _BOOLEAN)
    across_nodes: bool = setting(False, _BOOLEAN)
    overlap: Overlap = setting("sums", read.word("sums", "pieces", "fused"))


@dataclass(frozen=True, kw_only=True, repr=False)
class Pipeline(Recipe):
    """Settings of the pipeline: how a batch goes through its stages.

    Args:
        microbatches: Equal parts into which each batch is cut along its first dim.
            Integer >= 1, or "auto" (default; as many as there are stages).
        schedule: In which order stages work. "1f1b" (one forward, one backward: a stage
            keeps activations of as many micro-batches as there are stages behind it,
            and its own), "gpipe" (all forwards, then all backwards), "interleaved:V"
            (1F1B with V chunks of blocks on each stage: 1/V of the idle time, V times
            the messages; microbatches are a multiple of the stages) or "auto" (default;
            what a planner chooses, otherwise "1f1b").
        split: How many blocks each stage has. "auto" (default; the largest stage has as
            few parameters as possible) or a list with an integer >= 1 for each stage;
            with "interleaved:V" for each chunk, in the order they run in.
    """

    KNOB: ClassVar[str] = "pipeline"
    MAIN: ClassVar[str | None] = "schedule"
    ALLOWED: ClassVar[str] = "'1f1b', 'gpipe', 'interleaved:2'"
    EXAMPLE: ClassVar[str] = '{"microbatches": 8, "schedule": "1f1b"}'

    microbatches: int | Literal["auto"] = setting("auto", _AT_LEAST_ONE_OR_AUTO)
    schedule: str = setting(
        "auto",
        read.either(
            read.word("auto", "1f1b", "gpipe"),
            read.pattern("interleaved:([2-9]|[1-9][0-9]+)"),
            allowed="'auto', '1f1b', 'gpipe', 'interleaved:V' with V >= 2",
        ),
    )
    split: Literal["auto"] | tuple[int, ...] = setting(
        "auto",
        read.either(
            read.word("auto"),
            read.integers(minimum=1),
            allowed="'auto', a list of integers of at least 1",
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Units(Recipe):
    """Settings of FSDP units: which modules are gathered and freed as a whole.

    Args:
        modules: "auto" (default; the blocks a Transformers model names, otherwise
            repeated blocks of an nn.ModuleList), a list of class names or globs over
            module names (["GPT2Block", "encoder.layers.*"]), or a function
            (module_name, module) -> bool. The root is always a unit, so that every
            parameter is sharded.
        min_parameters: Modules that hold at least this many own parameters (elements,
            not bytes) become units too, for example a large embedding. Integer >= 0;
            default 0 (off).
        optional: Modules that some ranks leave out in some micro-batches (samples
            without an image, one adapter or expert of many): class names or globs over
            module names (["visual", "*.adapter_*"]), or "auto": the sub-models of a
            Transformers model that no token goes through (vision and audio towers).
            They and all inside them are gathered and reduced with the unit around them
            (the root, if there is no other) on all ranks, which takes the memory of
            their unsharded parameters and gradients. Default none.
    """

    KNOB: ClassVar[str] = "units"
    MAIN: ClassVar[str | None] = "modules"
    ALLOWED: ClassVar[str] = (
        """'auto', a list of class names or globs (in text a JSON list: '["GPT2Block"]'), a function"""
    )
    EXAMPLE: ClassVar[str] = '{"modules": ["GPT2Block"], "min_parameters": 1000000}'

    modules: Literal["auto"] | tuple[str, ...] | WrapRule = setting(
        "auto",
        read.either(
            read.word("auto"),
            _GLOBS,
            read.function("(module_name, module) -> bool"),
            allowed=ALLOWED,
        ),
    )
    min_parameters: int = setting(0, _COUNT)
    optional: Literal["auto"] | tuple[str, ...] = setting(
        (),
        read.either(
            read.word("auto"),
            _GLOBS,
            allowed="'auto', a list of class names or globs (in text a JSON list)",
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class DelayedInit(Recipe):
    """Settings of delayed initialisation: how a model on the meta device gets its
    weights, shard by shard.

    Args:
        seed: The numbers depend only on it and on parameter names, not on the number of
            ranks. Integer >= 0; default 0.
    """

    KNOB: ClassVar[str] = "delayed_init"
    OPTIONAL: ClassVar[bool] = True
    ALLOWED: ClassVar[str] = "true, false"
    EXAMPLE: ClassVar[str] = '{"seed": 1}'

    seed: int = setting(0, _COUNT)


@dataclass(frozen=True, kw_only=True, repr=False)
class Compile(Recipe):
    """Settings of compiled blocks: the arguments of torch.compile of the same names.

    Args:
        mode: A word that torch.compile knows ("reduce-overhead", "max-autotune"), or
            None (default).
        backend: What the graphs become, by name ("aot_eager", "eager"). Default
            "inductor".
        fullgraph: Whether a block that is not one graph is an error. True or False
            (default).
        dynamic: Whether sizes are symbols from the first call on. True, False or None
            (default; once they change).
        options: The backend's own ({"epilogue_fusion": true}), or None (default).
    """

    KNOB: ClassVar[str] = "compile"
    MAIN: ClassVar[str | None] = "mode"
    OPTIONAL: ClassVar[bool] = True
    ALLOWED: ClassVar[str] = "true, false, a mode of torch.compile ('max-autotune')"
    EXAMPLE: ClassVar[str] = '{"backend": "inductor", "dynamic": true}'

    mode: str | None = setting(
        None,
        read.either(
            read.nothing(),
            read.pattern(r"[a-z][a-z-]+"),
            allowed="a mode of torch.compile, none",
        ),
    )
    backend: str = setting("inductor", read.pattern(r"[A-Za-z_][\w.-]*"))
    fullgraph: bool = setting(False, _BOOLEAN)
    dynamic: bool | None = setting(
        None, read.either(read.nothing(), _BOOLEAN, allowed="true, false, none")
    )
    options: Mapping[str, Any] | None = setting(
        None,
        read.either(
            read.nothing(),
            read.mapping(read.anything()),
            allowed="a mapping of the backend's own, none",
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Activations(Recipe):
    """Settings of activation memory.

    Args:
        checkpoint: Which activations are computed again in backward instead of kept.
            "none" (default), "full" (each wrapped block keeps its inputs only),
            "every:N" (the same for each N-th block), "selective" (each block keeps its
            inputs and the outputs of matrix products, attention and communication; what
            tensor ranks send is sent again) or a mapping from class names or globs over
            module names to one of these ({"*.mlp": "full", "*.attn": "selective"}); the
            first pattern that matches decides about a module and all inside it.
        check: Whether the outputs of every recomputation are compared with those of
            forward, bit by bit; an error names the module that differs. True or False
            (default; only shapes and dtypes are compared).
        offload: Whether the inputs of checkpointed modules wait in host memory for
            backward, copied out and back beside compute. Needs checkpoint. True or
            False (default).
        loading_horizon: How many checkpointed modules' inputs may be on the device at
            once when they are offloaded: those of the last modules stay, and backward
            fetches this many less one ahead. Integer >= 1; default 2.
        offload_min_bytes: Inputs smaller than this stay on the device. Integer >= 0;
            default 65536.
        offload_host_gib: Host memory in GiB that offloaded inputs may take on each
            rank; more is an error. A number > 0, or None (default; four fifths of what
            the node has available at the start, divided by its ranks).
    """

    KNOB: ClassVar[str] = "activations"
    MAIN: ClassVar[str | None] = "checkpoint"
    ALLOWED: ClassVar[str] = "'none', 'full', 'every:N', 'selective'"
    EXAMPLE: ClassVar[str] = '{"checkpoint": "full", "offload": true}'

    checkpoint: str | Mapping[str, str] = setting("none", _CHECKPOINTING)
    check: bool = setting(False, _BOOLEAN)
    offload: bool = setting(False, _BOOLEAN)
    loading_horizon: int = setting(2, _AT_LEAST_ONE)
    offload_min_bytes: int = setting(65536, _COUNT)
    offload_host_gib: float | None = setting(None, _GIB)

    @classmethod
    def _require_known(cls, fields: Mapping[str, Any]) -> None:
        # Globs in the place of fields are most likely meant for `checkpoint`.
        if fields and not any(
            read.nearest_name(str(name), cls.readers(), cutoff=0.7) for name in fields
        ):
            # Only a mapping that `checkpoint` would take is one.
            try:
                globs = _CHECKPOINTING(cls.KNOB, fields)
            except ValueError:
                globs = None
            if globs is not None:
                raise ValueError(
                    f"activations={fields!r}: class names and globs stand under the field `checkpoint`; write "
                    f"activations={{'checkpoint': {globs!r}}}"
                )
        super()._require_known(fields)


@dataclass(frozen=True, kw_only=True, repr=False)
class Compression(Recipe):
    """Settings of compression: in which form parameters and gradients cross between
    nodes.

    Args:
        gather: Form of the parameter gather between nodes: 8-bit codes with a scale for
            each 256 elements. None (default; as is), "int8" or "fp8". Every rank
            computes with the decoded weights; units whose weights are inf or nan are
            gathered as they are.
        gather_inside_nodes: Whether gather also encodes what travels inside a node.
            True or False (default).
        gather_after_steps: Optimizer steps that still gather exactly before gather sets
            in. Integer >= 0; default 0.
        gather_exclude: Parameters that gather leaves exact: globs over full names
            (["*norm*", "*.bias"]). Default none.
        reduce: Form of gradient sums between nodes; sums are taken in float32. None
            (default; as is), "int8" or "int4" (codes, inside a partition group that
            spans nodes and across replicas) or "bf16" (half of float32's bytes, across
            replicas only; inside a partition group gradients travel in reduce_dtype).
        error_feedback: Whether what int8 and int4 codes of gradients round off is added
            to the next gradients. It costs a float32 copy of what a rank sends between
            nodes. True, False or "auto" (default; with these codes).
    """

    KNOB: ClassVar[str] = "compression"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "none": {},
        "int8": {"gather": "int8", "reduce": "int8"},
        "fp8": {"gather": "fp8"},
        "int4": {"reduce": "int4"},
        "bf16": {"reduce": "bf16"},
    }
    ALLOWED: ClassVar[str] = "'none', 'int8', 'fp8', 'int4', 'bf16'"
    EXAMPLE: ClassVar[str] = '{"gather": "int8", "reduce": "int8"}'

    gather: Literal["int8", "fp8"] | None = setting(
        None,
        read.either(
            read.nothing(), read.word("int8", "fp8"), allowed="none, 'int8', 'fp8'"
        ),
    )
    gather_inside_nodes: bool = setting(False, _BOOLEAN)
    gather_after_steps: int = setting(0, _COUNT)
    gather_exclude: tuple[str, ...] = setting((), _GLOBS)
    reduce: Literal["int8", "int4", "bf16"] | None = setting(
        None,
        read.either(
            read.nothing(),
            read.word("int8", "int4", "bf16"),
            allowed="none, 'int8', 'int4', 'bf16'",
        ),
    )
    error_feedback: bool | Literal["auto"] = setting(
        "auto", read.either(_BOOLEAN, read.word("auto"), allowed="true, false, 'auto'")
    )

    @property
    def reduce_codes(self) -> Literal["int8", "int4"] | None:
        """The codes that gradients are compressed to wherever they cross nodes; None:
        none ("bf16" is no code)."""
        return None if self.reduce == "bf16" else self.reduce


@dataclass(frozen=True, kw_only=True, repr=False)
class Collectives(Recipe):
    """Settings of collectives; the defaults follow the cluster.

    Args:
        hierarchical: Whether a partition or replication group that spans nodes gathers
            and reduces in two stages, between nodes and inside them, which sends fewer
            bytes over the slow link. True, False or "auto" (default; on when the group
            spans more than one node and has more than one rank on each, unless the
            links that SMP_LINKS names make one stage faster for the model's units).
        forward_prefetch: How many units ahead of the one that runs gathers are started
            in forward, in the order in which units are registered. Integer >= 0, or
            "auto" (default; by the links that SMP_LINKS names, otherwise 0: on CPU
            none, elsewhere as far as streams overlap).
        backward_prefetch: How many units ahead gathers are started in backward. Integer
            >= 1, or "auto" (default; by the links that SMP_LINKS names, otherwise 1; at
            least 2 with expert ranks, where a layer is two units).
        reduce_scatter_buffers: How many units' gradients may be in flight inside the
            partition group; more take memory and let backward go on where reductions
            are slower than it. CUDA and torch >= 2.13. Integer >= 1, or "auto"
            (default; by the links that SMP_LINKS names, otherwise 1).
        separate_reduce_scatter_group: Whether reductions in the partition group have a
            communicator of their own beside that of gathers, so that both can be on the
            wire at once. CUDA and torch >= 2.13, collectives in one stage. True or
            False (default).
        symmetric_memory: Whether NCCL gathers and reduces from symmetric memory, by
            torch's own communication objects. CUDA, collectives in one stage that are
            not compressed; the meter does not count them. True or False (default).
        context_head_groups: In how many groups the key and value heads travel between
            context ranks, so that one group's gather runs behind the attention of the
            one before. Integer >= 1 (at most the number of key and value heads; the
            next smaller divisor of it is taken) or "auto" (default; 2 on an
            accelerator, 1 on CPU).
        expert_transport: What carries tokens between expert ranks. "all_to_all"
            (default; torch's collective) or "deep_ep" (the kernels of DeepEP, where it
            is installed: CUDA, bfloat16, 2, 4 or 8 expert ranks on a node, or nodes of
            8; never run with the package itself so far).
        meter: Whether bytes and seconds of collectives are counted by kind and link
            class. True (default) or False.
    """

    KNOB: ClassVar[str] = "collectives"
    EXAMPLE: ClassVar[str] = '{"hierarchical": false, "forward_prefetch": 2}'

    hierarchical: bool | Literal["auto"] = setting(
        "auto", read.either(_BOOLEAN, read.word("auto"), allowed="true, false, 'auto'")
    )
    forward_prefetch: int | Literal["auto"] = setting("auto", _COUNT_OR_AUTO)
    backward_prefetch: int | Literal["auto"] = setting("auto", _AT_LEAST_ONE_OR_AUTO)
    reduce_scatter_buffers: int | Literal["auto"] = setting(
        "auto", _AT_LEAST_ONE_OR_AUTO
    )
    separate_reduce_scatter_group: bool = setting(False, _BOOLEAN)
    symmetric_memory: bool = setting(False, _BOOLEAN)
    context_head_groups: int | Literal["auto"] = setting("auto", _AT_LEAST_ONE_OR_AUTO)
    expert_transport: Literal["all_to_all", "deep_ep"] = setting(
        "all_to_all", read.word("all_to_all", "deep_ep")
    )
    meter: bool = setting(True, _BOOLEAN)


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint(Recipe):
    """Settings of checkpoints: how they are written and resumed. Of each run, not of a
    model.

    Args:
        full_state_dict: Whether a checkpoint is one ordinary file with the full state
            dict instead of a folder that every rank writes its shards to. True or False
            (default).
        async_save: Whether a checkpoint is copied to host memory and written behind
            training, so that training stalls for the copy only. At most one is in
            flight. True or False (default).
        verify: What is checked when a checkpoint is loaded. "auto" (default; headers
            and sizes of all files, and each byte of a tensor while it is read),
            "digests" (every byte before anything is loaded; so does "auto" when an
            interrupted save lies beside it) or "sizes" (no bytes of tensors).
        allow_batch_change: Whether a run may resume with another number of samples per
            optimizer step than it was saved with, where accumulation cannot be adapted
            to keep it. True, or False (default: it is an error).
        preemption_grace_s: Seconds between a notice of the job's end (SIGTERM, SIGUSR1)
            and that end, in which all ranks save a checkpoint at the same step and
            leave. A number >= 0; default 30.0, as torchrun, Kubernetes and SLURM give.
            0 leaves signals alone.
        memory_every_n_steps: Optimizer steps between two copies of the newest state in
            shared host memory, from which a run that is started again goes on: ranks
            whose node is still there read nothing from disk, a lost node's part comes
            from another node. Integer >= 0; default 0 (off).
    """

    KNOB: ClassVar[str] = "checkpoint"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sharded": {},
        "full": {"full_state_dict": True},
        "async": {"async_save": True},
    }
    ALLOWED: ClassVar[str] = "'sharded', 'full', 'async'"
    EXAMPLE: ClassVar[str] = '{"async_save": true, "verify": "digests"}'

    full_state_dict: bool = setting(False, _BOOLEAN)
    async_save: bool = setting(False, _BOOLEAN)
    verify: Literal["auto", "sizes", "digests"] = setting(
        "auto", read.word("auto", "sizes", "digests")
    )
    allow_batch_change: bool = setting(False, _BOOLEAN)
    preemption_grace_s: float = setting(30.0, read.number(0.0, include_lowest=True))
    memory_every_n_steps: int = setting(0, _COUNT)


RECIPES: dict[str, type[Recipe]] = {
    recipe.KNOB: recipe
    for recipe in (
        TensorParallel,
        Pipeline,
        Units,
        Activations,
        Compression,
        Collectives,
        Planner,
        Checkpoint,
    )
}
"""Knob -> its recipe, of the knobs that always have one. Their fields have names of
their own ("units.modules"); one that may be off (`fp8`, `delayed_init`) is settled and
shown as a whole."""
