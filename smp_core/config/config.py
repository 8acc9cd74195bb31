"""SmpConfig: every knob of torch-smp once, validated, with the value that took effect
and why.

Owns the knobs' names and defaults, the ways to build them (keywords, dict, YAML,
environment, the `parameters` block of SageMaker SMP) and the record of what each one
became. A knob is never dropped in silence: an unknown name, a value out of range and
knobs that cannot go together are errors that say what to type.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from smp_core.config import values as read
from smp_core.config.fp8_recipe import Fp8Recipe
from smp_core.config.plan_recipes import AutoPlan, Planner
from smp_core.config.recipe import Knob, Recipe, setting
from smp_core.config.recipes import (
    RECIPES,
    Activations,
    Checkpoint,
    Collectives,
    Compile,
    Compression,
    DelayedInit,
    Pipeline,
    TensorParallel,
    Units,
    WrapRule,
)
from smp_core.config.rules import contradictions, unknown_knob
from smp_core.config.smp_parameters import translate_smp_parameters
from smp_core.config.sources import knobs_in_environment, knobs_in_yaml
from smp_core.config.table import DEFAULT, as_asked, effective_table, plain

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger("smp")

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Fields = Mapping[str, Any]
C = TypeVar("C", bound=type)


_DEGREE = read.integer(minimum=1)
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE = read.either(
    read.nothing(),
    read.dtype_name(*_DTYPES),
    allowed="'auto', 'float32', 'bfloat16', 'float16', none",
)


def _holds(recipe: type[Recipe]) -> Any:
    """Make the field of a knob that holds a recipe: all defaults, or None for one that
    may be off."""
    return setting(
        None if recipe.OPTIONAL else recipe(), lambda _, value: recipe.read(value)
    )


def _refuses_other_names(config: C) -> C:
    """Let keywords that are no knobs be refused as they are elsewhere."""
    # The dataclass's own __init__ would answer an unknown keyword with a TypeError.
    made: Any = config.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **knobs: Any) -> None:
        self.require_known(knobs)
        made(self, *args, **knobs)
        # Which knobs were written decides what a planner may choose.
        object.__setattr__(self, "_given", frozenset(knobs))

    config.__init__ = init  # type: ignore[misc]
    return config


@_refuses_other_names
@dataclass(frozen=True, kw_only=True)
class SmpConfig:
    """All knobs of torch-smp. Frozen; a knob that is read as an attribute gives the
    value in effect.

    Text is accepted for every value where it can mean one thing only ("4", "true",
    '["Block"]'), because YAML files, command lines and environment variables carry
    text. Some knobs hold a recipe, whose fields are read as attributes of it
    (config.compression.gather); they take a word for what is asked for most, a mapping
    of fields, or the recipe.

    Args:
        shard_degree: Ranks that together hold one copy of parameters, gradients and
            optimizer states (the partition group of MiCS); the world is filled with
            world / shard_degree replicas of it. An integer >= 1 that divides the world
            and fits whole nodes (1: plain replicas, nothing is sharded), "node" (the
            ranks of one node), "world" (all ranks, no replicas) or "auto" (default; the
            smallest degree whose model states fit the device once the model is known;
            on CPU "node").
        context_parallel_degree: Ranks that hold pieces of the same sequence, inside the
            partition group: at most shard_degree, and a divisor of it. Integer >= 1;
            default 1 (each rank has whole sequences).
        expert_parallel_degree: Ranks that divide the experts of each layer of a mixture
            of experts, neighbours inside the partition group, which tokens travel
            between instead of experts: a divisor of shard_degree and of the experts.
            Integer >= 1, "node" (the most inside a node) or "auto" (the same, or 1
            where that is not built); default 1 (experts are gathered as other layers
            are).
        router_balance: Whose tokens the auxiliary loss of a Transformers mixture of
            experts (output_router_logits) is of. "global" (those of all ranks in a
            micro-batch, as in one process: one small sum over ranks in each forward),
            "rank" (each rank's own) or "auto" (default; "global" where it is built).
        router_bias_update_rate: How far the bias that routers like DeepSeek-V3's choose
            experts by (e_score_correction_bias) moves in each optimizer step, towards
            experts with fewer tokens than the mean of all ranks' tokens. A number > 0,
            or None (default; it stays).
        expert_capacity_factor: The most tokens of a micro-batch that an expert takes in
            training, as a multiple of an even share; it is left out for those of all
            ranks in which its weight is smallest. A number > 0, or None (default; no
            token is dropped).
        tensor_parallel_degree: Ranks that split each matrix product, neighbours inside
            a node; shard_degree does not count them. Integer >= 1; default 1 (off).
        tensor_parallel: How layers are split over tensor ranks. "auto", or fields of
            TensorParallel ({"plan": {"*.q_proj": "column", "*.o_proj": "row"}}).
            Default TensorParallel(): by the model's plan, with tokens split between the
            layers.
        pipeline_parallel_degree: Stages the layers are dealt out to, of consecutive
            ranks: whole nodes, or equal parts of one. The other degrees are those
            inside a stage. Integer >= 1; default 1 (off).
        pipeline: How a batch goes through the stages. "1f1b", "gpipe" or
            "interleaved:2", or fields of Pipeline. Default Pipeline(): one forward, one
            backward, as many micro-batches as stages.
        reshard_after_forward: Whether a unit frees its gathered parameters after
            forward and gathers them again in backward. True (least memory), False (kept
            until backward: one gather less), "node" (each node keeps a copy sharded
            over its ranks, so that backward gathers stay inside), an integer >= 2 that
            divides shard_degree (a copy sharded over that many neighbours) or "auto"
            (default; True where keep_between_micro_batches is "shards", otherwise
            False).
        keep_between_micro_batches: What a rank holds whole from one micro-batch of an
            optimizer step to the next, to spare collectives. "shards" (default;
            nothing: the memory of ZeRO-3, two gathers and one reduction per
            micro-batch), "parameters" (what the first micro-batch gathered stays until
            the last backward pass: one gather per step, for the memory of the whole
            model as it is gathered; ZeRO-2) or "gradients" (gradients too, which the
            last backward pass reduces: one reduction per step, for the memory of the
            whole model in the dtype that gradients are reduced in; ZeRO-1; with
            reshard_after_forward=true, "node" or an integer gradients alone). Without
            gradient accumulation nothing is kept.
        units: Which modules become FSDP units, each gathered and freed as a whole.
            "auto", a list of class names or globs, a function, or fields of Units.
            Default Units(): the blocks a Transformers model names, otherwise repeated
            blocks of an nn.ModuleList.
        forward_methods: Methods besides forward that use parameters and therefore have
            to gather them: a method of the root ("decode") or of a submodule
            ("model.encode"); a root's generate and get_*_features are known. List of
            names; default none.
        delayed_init: Whether the model is built on the meta device and materialised
            shard by shard, so that no rank ever holds the whole model. True, fields of
            DelayedInit ({"seed": 1}), or False or None (default).
        param_dtype: Dtype of the gathered parameters, in which forward and backward
            compute. "float32", "bfloat16", "float16", None (the parameters' own dtype)
            or "auto" (default; follows the trainer's precision).
        reduce_dtype: Dtype in which gradients are reduced. "float32", "bfloat16", None
            (the gradients' own dtype) or "auto" (default; float32 for half precision
            parameters, otherwise their own). "float16" is refused when training starts:
            gradients are added up before they are divided and would overflow.
        master_dtype: Dtype in which the optimizer steps weights of a half precision
            model (bf16-true, or loaded in bfloat16), which compute in their own: they
            are stored in it, with their gradients and optimizer states. "float32", None
            (their own dtype: most small updates are rounded away) or "auto" (default;
            float32 where optimizer_shard or state_offload make masters, otherwise None,
            with a warning).
        on_nonfinite_grad_norm: What a gradient norm that is inf or nan does. "ignore"
            (default; the step is taken, as plain torch does), "skip" (the step is
            skipped: its gradients are dropped, weights and optimizer states stay as
            they are) or "raise" (the run ends on all ranks). Where a gradient scaler
            skips such steps it is "ignore".
        optimizer_shard: Where optimizer states live. "shard" (default; sharded like the
            parameters, over the partition group) or "world" (over all ranks, for
            optimizers that look at one element at a time: AdamW, SGD, ...; each rank
            steps float32 masters of its part, parameters are stored in half precision
            where param_dtype is, and optimizer.state_dict() is collective).
        state_offload: What lives in host memory instead of the device. None (default;
            nothing), "optimizer" (the optimizer's states and float32 masters of half
            precision parameters; the step is taken there; with optimizer_shard="world"
            those of this rank's part) or "all" (shards of parameters and gradients too;
            what computes is brought unit by unit).
        frozen_storage: What frozen matrices (requires_grad=False when the model is
            prepared) are stored and gathered as, for adapters to be trained beside them
            (LoRA, QLoRA). "int8" (1.01 bytes an element), "int4" (0.53) or None
            (default; their own dtype). Each unit is decoded when it is gathered.
            docs/low-bit-bases.md.
        activations: What is done about the memory of activations. "none", "full",
            "every:N" or "selective" (which of them are computed again in backward), or
            fields of Activations ({"checkpoint": "full", "offload": true}). Default
            Activations(): nothing.
        compile: Whether torch.compile makes graphs of the model's repeated blocks, of
            each for itself; gathers stay outside. True, a mode ("max-autotune"), fields
            of Compile ({"dynamic": true}), or False or None (default).
        compression: In which form parameters and gradients cross between nodes. "none",
            "int8" (both as 8-bit codes), "fp8" (parameters), "int4" or "bf16"
            (gradients), or fields of Compression ({"gather": "int8"}). Default
            Compression(): as they are.
        fp8: FP8 matrix products in the linear layers (docs/fp8.md). None (default;
            off), True (delayed scaling with its defaults), "delayed", "dynamic", or an
            Fp8Recipe or a mapping of its fields ({"amax_history_len": 16, "margin":
            1}).
        chunked_cross_entropy: Tokens whose vocabulary logits exist at one time when a
            Transformers causal language model computes its training loss; they are made
            again in backward, and the model returns no logits beside the loss. Integer
            >= 1, or None (default; the logits of all tokens).
        collectives: How collectives run: stages, prefetching, buffers. Fields of
            Collectives ({"hierarchical": false}). Default Collectives(): by the
            cluster.
        plan: Whether all knobs that were not given are planned for the machines that
            training starts on: degrees, recomputation, offloading, what is kept between
            micro-batches. "auto", fields of AutoPlan ({"sequence": 2048, "micro_batch":
            4}), or None (default; knobs are as they are, shard_degree="auto" by states
            alone).
        planner: What shard_degree="auto" plans with. Fields of Planner
            ({"memory_headroom": 0.2}). Default Planner().
        checkpoint: How checkpoints are written and resumed. "sharded", "full" (one
            ordinary file), "async" (written while training goes on), or fields of Checkpoint
            ({"async_save": true, "verify": "digests"}). Default Checkpoint(): sharded
            folders, while training waits.

    Raises:
        ValueError: a value is not allowed, or two knobs contradict each other; the
            message says what to type.
    """

    shard_degree: int | Literal["node", "world", "auto"] = setting(
        "auto",
        read.either(
            _DEGREE,
            read.word("node", "world", "auto"),
            allowed="an integer of at least 1, 'node', 'world', 'auto'",
        ),
    )
    context_parallel_degree: int = setting(1, _DEGREE)
    expert_parallel_degree: int | Literal["node", "auto"] = setting(
        1,
        read.either(
            _DEGREE,
            read.word("node", "auto"),
            allowed="an integer of at least 1, 'node', 'auto'",
        ),
    )
    router_balance: Literal["auto", "rank", "global"] = setting(
        "auto", read.word("auto", "rank", "global")
    )
    router_bias_update_rate: float | None = setting(
        None,
        read.either(read.nothing(), read.number(0.0), allowed="a number above 0, none"),
    )
    expert_capacity_factor: float | None = setting(
        None,
        read.either(read.nothing(), read.number(0.0), allowed="a number above 0, none"),
    )
    tensor_parallel_degree: int = setting(1, _DEGREE)
    tensor_parallel: Knob[TensorParallel, str | Fields] = _holds(TensorParallel)
    pipeline_parallel_degree: int = setting(1, _DEGREE)
    pipeline: Knob[Pipeline, str | Fields] = _holds(Pipeline)
    reshard_after_forward: bool | int | Literal["node", "auto"] = setting(
        "auto",
        read.either(
            # The integer first where text could be either: "1" is refused as a degree
            # and then read as true.
            read.integer(minimum=2),
            read.boolean(),
            read.word("node", "auto"),
            allowed="true, false, an integer of at least 2, 'node', 'auto'",
        ),
    )
    keep_between_micro_batches: Literal["shards", "parameters", "gradients"] = setting(
        "shards", read.word("shards", "parameters", "gradients")
    )
    units: Knob[Units, str | Sequence[str] | WrapRule | Fields] = _holds(Units)
    forward_methods: tuple[str, ...] = setting((), read.names())
    delayed_init: Knob[DelayedInit | None, bool | str | Fields] = _holds(DelayedInit)
    param_dtype: DtypeName | None = setting("auto", _DTYPE)
    reduce_dtype: DtypeName | None = setting("auto", _DTYPE)
    master_dtype: Literal["auto", "float32"] | None = setting(
        "auto",
        read.either(
            read.nothing(),
            read.word("auto", "float32"),
            allowed="'auto', 'float32', none",
        ),
    )
    on_nonfinite_grad_norm: Literal["ignore", "skip", "raise"] = setting(
        "ignore", read.word("ignore", "skip", "raise")
    )
    optimizer_shard: Literal["shard", "world"] = setting(
        "shard", read.word("shard", "world")
    )
    state_offload: Literal["optimizer", "all"] | None = setting(
        None,
        read.either(
            read.nothing(),
            read.word("optimizer", "all"),
            allowed="none, 'optimizer', 'all'",
        ),
    )
    frozen_storage: Literal["int8", "int4"] | None = setting(
        None,
        read.either(
            read.nothing(), read.word("int8", "int4"), allowed="none, 'int8', 'int4'"
        ),
    )
    activations: Knob[Activations, str | Fields] = _holds(Activations)
    compile: Knob[Compile | None, bool | str | Fields] = _holds(Compile)
    compression: Knob[Compression, str | Fields | None] = _holds(Compression)
    fp8: Knob[Fp8Recipe | None, bool | str | Fields] = _holds(Fp8Recipe)
    chunked_cross_entropy: int | None = setting(
        None,
        read.either(read.nothing(), _DEGREE, allowed="an integer of at least 1, none"),
    )
    collectives: Knob[Collectives, str | Fields] = _holds(Collectives)
    plan: Knob[AutoPlan | None, str | Fields] = _holds(AutoPlan)
    planner: Knob[Planner, str | Fields] = _holds(Planner)
    checkpoint: Knob[Checkpoint, str | Fields] = _holds(Checkpoint)

    # Records beside the knobs; not compared, and not carried over by
    # dataclasses.replace: the configuration before the first `with_resolved`, why
    # settings became what they are, where they were written, and which were.
    _before: SmpConfig | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _reasons: Mapping[str, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _origins: Mapping[str, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _given: frozenset[str] = field(
        default=frozenset(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Every value is read strictly, and stored as what it means.
        for knob, reader in self.readers().items():
            object.__setattr__(self, knob, reader(knob, getattr(self, knob)))
        # Each is fine by itself by now; all that is wrong together is said at once.
        wrong = list(contradictions(self))
        if wrong:
            raise ValueError("\n".join(wrong))

    @classmethod
    def knobs(cls) -> tuple[str, ...]:
        """Return the names of all knobs, in the order of their documentation."""
        return tuple(cls.readers())

    @classmethod
    @functools.cache
    def readers(cls) -> dict[str, read.Reader]:
        """Return knob -> the strict reader of its value."""
        return {
            knob.name: knob.metadata["reader"]
            for knob in fields(cls)
            if "reader" in knob.metadata
        }

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the dotted names of everything that can be set: the knobs, and in the
        place of a recipe its fields."""
        return tuple(name for knob in cls.readers() for name in cls.settings_of(knob))

    @classmethod
    def settings_of(cls, name: str) -> tuple[str, ...]:
        """Return the settings that a knob or a setting stands for.

        Raises:
            ValueError: unknown.
        """
        # A field of a recipe counts only if the knob always has one.
        knob, _, inner = name.partition(".")
        fields = _FIELDS.get(knob, ())
        if knob not in cls.readers() or (inner and name not in fields):
            raise unknown_knob(name, cls.knobs())
        return fields if fields and not inner else (name,)

    @classmethod
    def require_known(
        cls, values: Mapping[str, Any], *, arguments: Iterable[str] = ()
    ) -> None:
        """Refuse names that are no knobs.

        Args:
            values: name -> value.
            arguments: what else could have been meant where the names were written: the
                other arguments of a class.

        Raises:
            ValueError: see :func:`smp_core.config.rules.unknown_knob`.
        """
        for name in values:
            if name not in cls.readers():
                raise unknown_knob(str(name), cls.knobs(), arguments=arguments)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SmpConfig:
        """Return the configuration with the knobs in `values`, the others at their
        defaults.

        Raises:
            ValueError: a name is not a knob (the nearest one is named), or a value is
                not allowed.
        """
        cls.require_known(values)
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SmpConfig:
        """Return the configuration in a YAML file: its `smp_config:` section, or the
        knobs at its top level.

        Raises:
            ValueError: no such file, no valid YAML, neither section nor knobs in it, a
                knob written twice, an unknown knob, or a value that is not allowed; the
                file is named.
        """
        values = knobs_in_yaml(path, cls.readers())
        try:
            config = cls.from_dict(values)
        except ValueError as error:
            # Knobs that contradict each other; the others already name the file.
            raise ValueError(f"{os.fspath(path)}: {error}") from None
        return config._with_origins({knob: os.path.basename(path) for knob in values})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SmpConfig:
        """Return the configuration in environment variables: SMP_ and the knob's name,
        as in SMP_SHARD_DEGREE=4.

        SMP_CONFIG_FILE names a YAML file that the other variables override, knob by
        knob. Lists and fields are written as JSON: SMP_UNITS='["GPT2Block"]',
        SMP_ACTIVATIONS='{"checkpoint": "full", "offload": true}'.

        Args:
            environ: variables and their text; default os.environ.

        Raises:
            ValueError: a value is not allowed, or a variable looks like a misspelt
                knob. A variable that does not look like one (another program's) is
                named in a warning.
        """
        # Variables win over the file that one of them names.
        values, origins = knobs_in_environment(
            os.environ if environ is None else environ, cls.readers()
        )
        return cls.from_dict(values)._with_origins(origins)

    @classmethod
    def from_code(
        cls, written: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> SmpConfig:
        """Return the configuration with the knobs that are written in code, over those
        in environment variables.

        Args:
            environ: as of `from_env`.

        Raises:
            ValueError: as of `from_dict` and `from_env`.
        """
        # What code says wins; variables that lose are named, not dropped in silence.
        values, origins = knobs_in_environment(
            os.environ if environ is None else environ, cls.readers()
        )
        cls.require_known(written)
        config = cls.from_dict({**values, **written})
        config._name_unused(values, origins)
        return config._with_origins(
            {knob: origin for knob, origin in origins.items() if knob not in written}
        )

    def name_unused_variables(self) -> None:
        """Warn of environment variables that ask for something else than this
        configuration, which was made in code."""
        try:
            self._name_unused(*knobs_in_environment(os.environ, self.readers()))
        except ValueError as error:
            logger.warning(
                "%s. The environment has no effect: all knobs are settled in code",
                error,
            )

    def _name_unused(
        self, values: Mapping[str, Any], origins: Mapping[str, str]
    ) -> None:
        for knob, value in values.items():
            if value != self.asked(knob):
                logger.warning(
                    "%s has no effect: %s is settled in code", origins[knob], knob
                )

    @classmethod
    def from_smp_parameters(
        cls, parameters: Mapping[str, Any], *, sharding_strategy: str | None = None
    ) -> SmpConfig:
        """Return the configuration that does what a `parameters` block of SageMaker SMP
        v1 or v2 asks for.

        Every option is translated, accepted without effect where there is nothing to
        set here, or refused with what to use instead; the logger "smp" says which, one
        line for each option. docs/migrating-from-smp.md lists them.

        Args:
            parameters: the dict under `smdistributed: modelparallel: parameters`.
            sharding_strategy: the FSDP sharding strategy of the training script, which
                SMP v2 takes the shard degree from when `hybrid_shard_degree` is 0:
                "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2" or
                "NO_SHARD".

        Raises:
            ValueError: an option is unknown (the nearest one is named), refused, or has
                a value that is not allowed.
        """
        # The log says what became of each option; the table of effective values where
        # it came from.
        translation = translate_smp_parameters(
            parameters, sharding_strategy=sharding_strategy
        )
        for line in translation.lines:
            logger.info("%s", line)
        for line in translation.warnings:
            logger.warning("%s", line)
        return cls.from_dict(translation.knobs)._with_origins(translation.origins)

    def to_dict(self) -> dict[str, Any]:
        """Return knob -> value as it was asked for, such that `from_dict(to_dict())`
        equals the configuration as asked.

        The values can be written as JSON or YAML, except a function among `units`.
        """
        return {knob: as_asked(self.asked(knob)) for knob in self.knobs()}

    def asked(self, name: str) -> Any:
        """Return the value that was asked for; differs from the attribute once
        `with_resolved` was called for it.

        Args:
            name: a knob, or a field of one ("compression.gather").
        """
        return attrgetter(name)(self._before or self)

    def with_resolved(self, name: str, value: Any, why: str) -> SmpConfig:
        """Return a copy in which a knob has the value in effect; what was asked for and
        `why` it became this are remembered.

        Args:
            name: a knob, or a field of one ("compression.gather").
            value: the value in effect. It need not be one that can be asked for (a
                resolved dtype may be "float64").
            why: one short sentence for the table of effective values.

        Raises:
            ValueError: unknown knob.
        """
        # A knob with fields may be resolved as a whole: the reason is then each
        # field's.
        reasons = {**self._reasons, **dict.fromkeys(self.settings_of(name), why)}
        knob, _, inner = name.partition(".")
        held = tuple(value) if isinstance(value, list) else value
        # Recipes are frozen, and shared between copies: the changed one is a copy.
        if inner:
            recipe = copy.copy(getattr(self, knob))
            object.__setattr__(recipe, inner, held)
            held = recipe
        # The first resolution keeps the configuration as it was asked for.
        resolved = copy.copy(self)
        for attribute, changed in (
            (knob, held),
            ("_reasons", reasons),
            ("_before", self._before or self),
        ):
            object.__setattr__(resolved, attribute, changed)
        return resolved

    @property
    def given(self) -> frozenset[str]:
        """The knobs that were written, also at their defaults. Where all are
        (LightningCLI gives every argument, dataclasses.replace every field), those that
        are not at their defaults."""
        # A tool that writes every argument has asked for none of them in particular.
        if len(self._given) < len(self.knobs()):
            return self._given
        return frozenset(
            knob for knob in self.knobs() if self.asked(knob) != getattr(DEFAULTS, knob)
        )

    def with_asked(self, by: str = "", /, **knobs: Any) -> SmpConfig:
        """Return a copy in which other values were asked for of some knobs. What the
        others became stays.

        Args:
            by: who asked for them, for the table of effective values; "": the user.

        Raises:
            ValueError: unknown knob, a value that is not allowed, knobs that contradict
                each other.
        """
        self.require_known(knobs)
        # Values are read as if they had been written in the first place.
        readers = self.readers()
        values = {knob: readers[knob](knob, value) for knob, value in knobs.items()}
        # The configuration as asked changes, and is checked as a whole.
        asked = copy.copy(self._before or self)
        for knob, value in values.items():
            object.__setattr__(asked, knob, value)
        origins = {**self._origins, **dict.fromkeys(knobs, by)} if by else self._origins
        object.__setattr__(asked, "_origins", origins)
        wrong = list(contradictions(asked))
        if wrong:
            raise ValueError("\n".join(wrong))
        # Nothing is resolved yet: what was asked for is all there is.
        if self._before is None:
            return asked
        # What other knobs became stays, with the reasons; these are open again.
        changed = copy.copy(self)
        anew = {name for knob in knobs for name in self.settings_of(knob)}
        reasons = {name: why for name, why in self._reasons.items() if name not in anew}
        for attribute, value in {
            **values,
            "_reasons": reasons,
            "_origins": origins,
            "_before": asked,
        }.items():
            object.__setattr__(changed, attribute, value)
        return changed

    @property
    def unresolved(self) -> SmpConfig:
        """The configuration before anything was resolved."""
        return self._before or self

    def effective(self) -> dict[str, Any]:
        """Return setting -> value in effect, in plain JSON types, for experiment
        loggers. Fields have dotted names."""
        return {name: plain(attrgetter(name)(self)) for name in self.settings()}

    def effective_table(self) -> Table:
        """Return a table for the terminal: knob, asked, in effect, and why; below it
        what is at its default."""
        return effective_table(self)

    def why(self, name: str) -> str:
        """Return why a knob, or a field of one, has the value in effect: "default", "as
        asked", where it was asked, or what resolved it."""
        reasons: list[str] = []
        for each in self.settings_of(name):
            knob, _, inner = each.partition(".")
            is_default = self.asked(each) == attrgetter(each)(DEFAULTS)
            # A recipe that was written somewhere leaves most of its fields alone.
            origin = self._origins.get(each) or (
                None if inner and is_default else self._origins.get(knob)
            )
            why = self._reasons.get(each)
            if why is None:
                why = origin or (DEFAULT if is_default else "as asked")
            elif origin:  # resolved: why, and where it was asked for
                why += f" (asked by {origin})"
            # Fields of one knob may have several reasons; defaults are no reason.
            if why != DEFAULT and why not in reasons:
                reasons.append(why)
        return "; ".join(reasons) or DEFAULT

    def _with_origins(self, origins: Mapping[str, str]) -> SmpConfig:
        config = copy.copy(self)
        object.__setattr__(config, "_origins", dict(origins))
        return config


# The dotted names of the fields of each knob that always has a recipe.
_FIELDS: dict[str, tuple[str, ...]] = {}
for _knob, _recipe in RECIPES.items():
    _FIELDS[_knob] = tuple(f"{_knob}.{name}" for name in _recipe.readers())

DEFAULTS = SmpConfig()
