"""SmpConfig: every knob of torch-smp once, validated, with the value that took effect and why.

Owns the knobs' names, defaults and rules, the ways to build them (keywords, dict, YAML, environment, the `parameters`
block of SageMaker SMP) and the record of what each one became. A knob is never dropped in silence: an unknown name, a
value out of range and a feature that is not built yet are errors that say what to type.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from smp_core.config_sources import knobs_in_environment, knobs_in_yaml
from smp_core.fp8.recipe import Fp8Recipe
from smp_core.knob_rules import NOT_BUILT, READERS, contradictions, unknown_knob
from smp_core.knob_table import DEFAULT, as_asked, effective_table, plain, shown
from smp_core.smp_parameters import translate_smp_parameters

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger("smp")

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WrapRule = Callable[[str, Any], bool]
"""(module's name, module) -> whether it is a unit. Any: command lines read the types, and torch is not loaded here."""


@dataclass(frozen=True, kw_only=True)
class SmpConfig:
    """All knobs of torch-smp. Frozen; a knob that is read as an attribute gives the value in effect.

    Text is accepted for every value where it can mean one thing only ("4", "true", '["Block"]'), because YAML files,
    command lines and environment variables carry text.

    Args:
        shard_degree: Ranks that together hold one copy of parameters, gradients and optimizer states (the partition
            group of MiCS); the world is filled with world / shard_degree replicas of it. An integer >= 1 that divides
            the world and fits whole nodes (1: plain replicas, nothing is sharded), "node" (the ranks of one node),
            "world" (all ranks, no replicas) or "auto" (default; the smallest degree whose model states fit the device
            once the model is known; on CPU "node").
        context_parallel_degree: Ranks that hold pieces of the same sequence, inside the partition group: at most
            shard_degree, and a divisor of it. Integer >= 1; default 1 (each rank has whole sequences).
        context_head_groups: In how many groups the key and value heads travel between context ranks, so that one
            group's gather runs behind the attention of the one before. Integer >= 1 (at most the number of key and
            value heads; the next smaller divisor of it is taken) or "auto" (default; 2 on an accelerator, 1 on CPU).
        tensor_parallel_degree: Ranks that split each matrix product. Integer >= 1; default 1 (off). Others than 1 are
            not built yet.
        pipeline_parallel_degree: Stages the layers are dealt out to. Integer >= 1; default 1 (off). Others than 1 are
            not built yet.
        hierarchical: Whether a partition or replication group that spans nodes gathers and reduces in two stages,
            between nodes and inside them, which sends fewer bytes over the slow link. True, False or "auto" (default;
            on when the group spans more than one node and has more than one rank on each, unless the links that
            SMP_LINKS names make one stage faster for the model's units).
        reshard_after_forward: Whether a unit frees its gathered parameters after forward and gathers them again in
            backward. True (default; least memory), False (kept until backward: one gather less), "node" (each node
            keeps a copy sharded over its ranks, so that backward gathers stay inside) or an integer >= 2 that divides
            shard_degree (a copy sharded over that many neighbours).
        reshard_after_backward: Whether a unit frees its gathered parameters after each backward pass. True (default),
            or False, together with reshard_after_forward=false: what a window's first micro-batch gathered stays until
            its last backward pass, one gather per optimizer step instead of two per micro-batch, for the memory of the
            whole model as it is gathered. Without gradient accumulation nothing is kept.
        reduce_every_micro_batch: Whether each micro-batch's gradients are reduced inside the partition group at once.
            True (default), or False: each rank adds up whole gradients, which the window's last backward pass reduces,
            once per optimizer step instead of once per micro-batch, for the memory of the whole model in the dtype that
            gradients are reduced in. Without gradient accumulation nothing is held.
        forward_prefetch: How many units ahead of the one that runs gathers are started in forward, in the order in
            which units are registered. Integer >= 0, or "auto" (default; by the links that SMP_LINKS names, otherwise
            0: on CPU none, elsewhere as far as streams overlap).
        backward_prefetch: How many units ahead gathers are started in backward. Integer >= 1, or "auto" (default; by
            the links that SMP_LINKS names, otherwise 1).
        reduce_scatter_buffers: How many units' gradients may be in flight inside the partition group; more take memory
            and let backward go on where reductions are slower than it. CUDA and torch >= 2.13. Integer >= 1, or "auto"
            (default; by the links that SMP_LINKS names, otherwise 1).
        separate_reduce_scatter_group: Whether reductions in the partition group have a communicator of their own
            beside that of gathers, so that both can be on the wire at once. CUDA and torch >= 2.13, collectives in one
            stage. True or False (default).
        symmetric_memory: Whether NCCL gathers and reduces from symmetric memory, by torch's own communication objects.
            CUDA, collectives in one stage that are not quantised; the meter does not count them. True or False
            (default).
        wrap: Which modules become FSDP units, each gathered and freed as a whole. "auto" (default; the blocks a
            Transformers model names, otherwise repeated blocks of an nn.ModuleList), a list of class names or globs
            over module names (["GPT2Block", "encoder.layers.*"]), or a function (module_name, module) -> bool. The
            root is always a unit, so that every parameter is sharded.
        wrap_min_parameters: Modules that hold at least this many own parameters (elements, not bytes) become units
            too, for example a large embedding. Integer >= 0; default 0 (off).
        forward_methods: Methods besides forward that use parameters and therefore have to gather them: a method of the
            root ("decode") or of a submodule ("model.encode"); a root's generate and get_*_features are known. List of
            names; default none.
        delayed_init: Whether the model is built on the meta device and materialised shard by shard, so that no rank
            ever holds the whole model. The numbers depend only on init_seed and parameter names, not on the number of
            ranks. True or False (default).
        init_seed: Seed of the delayed initialisation. Integer >= 0; default 0.
        param_dtype: Dtype of the gathered parameters, in which forward and backward compute. "float32", "bfloat16",
            "float16", None (the parameters' own dtype) or "auto" (default; follows the trainer's precision).
        reduce_dtype: Dtype in which gradients are reduced. "float32", "bfloat16", None (the gradients' own dtype) or
            "auto" (default; float32 for half precision parameters, otherwise their own). "float16" is refused when
            training starts: gradients are added up before they are divided and would overflow.
        replica_reduce_dtype: Dtype in which gradients travel between nodes when replicas are added up; sums are taken
            in float32. "bf16" (half of float32's bytes) or None (default; reduce_dtype).
        on_nonfinite_grad_norm: What a gradient norm that is inf or nan does. "ignore" (default; the step is taken, as
            plain torch does), "skip" (the gradients are dropped, so that the optimizer step changes nothing) or
            "raise".
        memory_headroom: Share of device memory that shard_degree="auto" leaves to activations and buffers. A number in
            [0, 1); default 0.35.
        device_memory_gib: Device memory in GiB that shard_degree="auto" plans for. A number > 0, or None (default; the
            device is asked).
        planned_optimizer: What optimizer shard_degree="auto" plans memory for: "adamw", "adamw-amsgrad", "adam",
            "adam-amsgrad", "adagrad", "rmsprop", "lion", "sgd-momentum", "sgd" or "auto" (default; the one that is
            prepared together with the model, as under Accelerate; otherwise AdamW, and a warning if Lightning's
            configure_optimizers makes one for which another degree would have been chosen).
        save_full_state_dict: Whether a checkpoint is one ordinary file with the full state dict instead of a folder
            that every rank writes its shards to. True or False (default).
        async_save: Whether a checkpoint is copied to host memory and written behind training, so that training stalls
            for the copy only. At most one is in flight. True or False (default).
        verify_checkpoint: What is checked before a checkpoint is loaded. "sizes" (headers and sizes of all files),
            "digests" (every byte is read once more) or "auto" (default; digests when an interrupted save lies beside
            it, sizes otherwise).
        allow_batch_change: Whether a run may resume with another number of samples per optimizer step than it was saved
            with, where accumulation cannot be adapted to keep it. True or False (default; refused).
        comm_meter: Whether bytes and seconds of collectives are counted by kind and link class. True (default) or
            False.
        fp8: FP8 matrix products in the linear layers (docs/fp8.md). None (default; off), True (delayed scaling with
            its defaults), "delayed", "dynamic", or an Fp8Recipe or a mapping of its fields
            ({"amax_history_len": 16, "margin": 1}).
        chunked_cross_entropy: Tokens whose vocabulary logits exist at one time when a Transformers causal language
            model computes its training loss; they are made again in backward, and the model returns no logits beside
            the loss. Integer >= 1, or None (default; the logits of all tokens).
        activation_checkpointing: Which activations are computed again in backward instead of kept. "none" (default),
            "full" (each wrapped block keeps its inputs only), "every:N" (the same for each N-th block), "selective"
            (each block keeps its inputs and the outputs of matrix products, attention and communication) or a mapping
            from class names or globs over module names to one of these ({"*.mlp": "full", "*.attn": "selective"});
            the first pattern that matches decides about a module and all inside it.
        activation_checkpointing_check: Whether the outputs of every recomputation are compared with those of forward,
            bit by bit; an error names the module that differs. True or False (default; only shapes and dtypes are
            compared).
        activation_offloading: Whether the inputs of checkpointed modules wait in host memory for backward, copied out
            and back beside compute. Needs activation_checkpointing. True or False (default).
        activation_loading_horizon: How many checkpointed modules' inputs may be on the device at once when they are
            offloaded: those of the last modules stay, and backward fetches this many less one ahead. Integer >= 1;
            default 2.
        activation_offloading_min_bytes: Inputs smaller than this stay on the device. Integer >= 0; default 65536.
        activation_offloading_host_gib: Host memory in GiB that offloaded inputs may take on each rank; more is an
            error. A number > 0, or None (default; four fifths of what the node has available at the start, divided by
            its ranks).
        quantized_all_gather: Payload of the parameter gather between nodes: 8-bit codes with a scale for each 256
            elements. None (default; as is), "int8" or "fp8". Every rank computes with the decoded weights; units
            whose weights are inf or nan are gathered as they are.
        quantize_inside_nodes: Whether quantized_all_gather also encodes what travels inside a node. True or False
            (default).
        quantize_after_steps: Optimizer steps that still gather exactly before quantized_all_gather sets in. Integer >=
            0; default 0.
        quantize_exclude: Parameters that quantized_all_gather leaves exact: globs over full names (["*norm*",
            "*.bias"]). Default none.
        quantized_reduce: Payload of the gradient reduction between nodes, inside a partition group and across
            replicas; sums are taken in float32. None (default; as is), "int8" or "int4".
        error_feedback: Whether what quantized_reduce rounds off is added to the next gradients. It costs a float32 copy
            of what a rank sends between nodes. True, False or "auto" (default; with quantized_reduce).
        optimizer_shard: Where optimizer states live. "shard" (default; sharded like the parameters, over the partition
            group) or "world" (over all ranks, for optimizers that look at one element at a time: AdamW, SGD, ...; each
            rank steps float32 masters of its part, parameters are stored in half precision where param_dtype is, and
            optimizer.state_dict() is collective).
        state_offload: What lives in host memory instead of the device. None (default; nothing), "optimizer" (the
            optimizer's states and float32 masters of half precision parameters; the step is taken there; with
            optimizer_shard="world" those of this rank's part) or "all" (shards of parameters and gradients too; what
            computes is brought unit by unit).

    Raises:
        ValueError: a value is not allowed, or two knobs contradict each other; the message says what to type.
    """

    shard_degree: int | Literal["node", "world", "auto"] = "auto"
    context_parallel_degree: int = 1
    context_head_groups: int | Literal["auto"] = "auto"
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    hierarchical: bool | Literal["auto"] = "auto"
    reshard_after_forward: bool | int | Literal["node"] = True
    reshard_after_backward: bool = True
    reduce_every_micro_batch: bool = True
    forward_prefetch: int | Literal["auto"] = "auto"
    backward_prefetch: int | Literal["auto"] = "auto"
    reduce_scatter_buffers: int | Literal["auto"] = "auto"
    separate_reduce_scatter_group: bool = False
    symmetric_memory: bool = False
    wrap: Literal["auto"] | tuple[str, ...] | WrapRule = "auto"
    wrap_min_parameters: int = 0
    forward_methods: tuple[str, ...] = ()
    delayed_init: bool = False
    init_seed: int = 0
    param_dtype: DtypeName | None = "auto"
    reduce_dtype: DtypeName | None = "auto"
    replica_reduce_dtype: Literal["bf16"] | None = None
    on_nonfinite_grad_norm: Literal["ignore", "skip", "raise"] = "ignore"
    memory_headroom: float = 0.35
    device_memory_gib: float | None = None
    planned_optimizer: str = "auto"
    save_full_state_dict: bool = False
    async_save: bool = False
    verify_checkpoint: Literal["auto", "sizes", "digests"] = "auto"
    allow_batch_change: bool = False
    comm_meter: bool = True
    fp8: Fp8Recipe | None = None
    chunked_cross_entropy: int | None = None
    activation_checkpointing: str | Mapping[str, str] = "none"
    activation_checkpointing_check: bool = False
    activation_offloading: bool = False
    activation_loading_horizon: int = 2
    activation_offloading_min_bytes: int = 65536
    activation_offloading_host_gib: float | None = None
    quantized_all_gather: Literal["int8", "fp8"] | None = None
    quantize_inside_nodes: bool = False
    quantize_after_steps: int = 0
    quantize_exclude: tuple[str, ...] = ()
    quantized_reduce: Literal["int8", "int4"] | None = None
    error_feedback: bool | Literal["auto"] = "auto"
    optimizer_shard: Literal["shard", "world"] = "shard"
    state_offload: Literal["optimizer", "all"] | None = None

    # Records beside the knobs; not compared, and not carried over by dataclasses.replace.
    _resolved: Mapping[str, tuple[Any, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _origins: Mapping[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for knob, reader in READERS.items():
            object.__setattr__(self, knob, reader(knob, getattr(self, knob)))
        wrong = list(contradictions(self))
        if wrong:
            raise ValueError("\n".join(wrong))

    @classmethod
    def knobs(cls) -> tuple[str, ...]:
        """The names of all knobs, in the order of their documentation."""
        return tuple(READERS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SmpConfig:
        """The configuration with the knobs in `values`, the others at their defaults.

        Raises:
            ValueError: a name is not a knob (the nearest one is named), or a value is not allowed.
        """
        for name in values:
            if name not in READERS:
                raise unknown_knob(str(name))
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SmpConfig:
        """The configuration in a YAML file: its `smp_config:` section, or the knobs at its top level.

        Raises:
            ValueError: no such file, no valid YAML, neither section nor knobs in it, a knob written twice, an unknown
                knob, or a value that is not allowed; the file is named.
        """
        values = knobs_in_yaml(path)
        try:
            config = cls.from_dict(values)
        except ValueError as error:  # knobs that contradict each other; the others already name the file
            raise ValueError(f"{os.fspath(path)}: {error}") from None
        return config._with_origins({knob: os.path.basename(path) for knob in values})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SmpConfig:
        """The configuration in environment variables: SMP_ and the knob's name, as in SMP_SHARD_DEGREE=4.

        SMP_CONFIG_FILE names a YAML file that the other variables override. Lists are written as JSON:
        SMP_WRAP='["GPT2Block"]'.

        Args:
            environ: variables and their text; default os.environ.

        Raises:
            ValueError: a value is not allowed, or a variable looks like a misspelt knob. A variable that does not look
                like one (another program's) is named in a warning.
        """
        values, origins = knobs_in_environment(os.environ if environ is None else environ)
        return cls.from_dict(values)._with_origins(origins)

    @classmethod
    def from_smp_parameters(cls, parameters: Mapping[str, Any], *, sharding_strategy: str | None = None) -> SmpConfig:
        """The configuration that does what a `parameters` block of SageMaker SMP v1 or v2 asks for.

        Every option is translated, accepted without effect where there is nothing to set here, or refused with what to
        use instead; the logger "smp" says which, one line for each option. docs/migrating-from-smp.md lists them.

        Args:
            parameters: the dict under `smdistributed: modelparallel: parameters`.
            sharding_strategy: the FSDP sharding strategy of the training script, which SMP v2 takes the shard degree
                from when `hybrid_shard_degree` is 0: "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD",
                "_HYBRID_SHARD_ZERO2" or "NO_SHARD".

        Raises:
            ValueError: an option is unknown (the nearest one is named), refused, or has a value that is not allowed.
        """
        translation = translate_smp_parameters(parameters, sharding_strategy=sharding_strategy)
        for line in translation.lines:
            logger.info("%s", line)
        for line in translation.warnings:
            logger.warning("%s", line)
        return cls.from_dict(translation.knobs)._with_origins(translation.origins)

    def to_dict(self) -> dict[str, Any]:
        """Knob -> value as it was asked for, such that `from_dict(to_dict())` equals the configuration as asked.

        The values can be written as JSON or YAML, except a function given as `wrap`.
        """
        asked = {knob: self.asked(knob) for knob in READERS}
        return {knob: as_asked(value) for knob, value in asked.items()}

    def asked(self, knob: str) -> Any:
        """The value that was asked for; differs from the attribute once `with_resolved` was called for the knob."""
        return self._resolved[knob][0] if knob in self._resolved else getattr(self, knob)

    def with_resolved(self, knob: str, value: Any, why: str) -> SmpConfig:
        """A copy in which `knob` has the value in effect; what was asked for and `why` it became this are remembered.

        Args:
            knob: name of the knob.
            value: the value in effect. It need not be one that can be asked for (a resolved dtype may be "float64").
            why: one short sentence for the table of effective values.

        Raises:
            ValueError: unknown knob.
        """
        if knob not in READERS:
            raise unknown_knob(knob)
        resolved = copy.copy(self)
        object.__setattr__(resolved, "_resolved", {**self._resolved, knob: (self.asked(knob), why)})
        object.__setattr__(resolved, knob, tuple(value) if isinstance(value, list) else value)
        return resolved

    def require_built(self) -> None:
        """Refuse the knobs whose feature this version does not have.

        Raises:
            ValueError: names each such knob, its value, and what to write instead.
        """
        refused = [
            f"{knob}={shown(getattr(self, knob))}: {missing.feature} not built yet; {missing.instead}"
            for knob, missing in NOT_BUILT.items()
            if not missing.is_built(getattr(self, knob))
        ]
        if refused:
            raise ValueError("\n".join(refused))

    def effective(self) -> dict[str, Any]:
        """Knob -> value in effect, in plain JSON types, for experiment loggers."""
        return {knob: plain(getattr(self, knob)) for knob in READERS}

    def effective_table(self) -> Table:
        """A table for the terminal: knob, asked, in effect, and why; below it what is at its default."""
        return effective_table(self)

    def why(self, knob: str) -> str:
        """Why the knob has the value in effect: "default", "as asked", where it was asked, or what settled it."""
        origin = self._origins.get(knob)
        if knob in self._resolved:
            why = self._resolved[knob][1]
            return f"{why} (asked by {origin})" if origin else why
        if origin:
            return origin
        return DEFAULT if getattr(self, knob) == type(self).__dataclass_fields__[knob].default else "as asked"

    def _with_origins(self, origins: Mapping[str, str]) -> SmpConfig:
        config = copy.copy(self)
        object.__setattr__(config, "_origins", dict(origins))
        return config
