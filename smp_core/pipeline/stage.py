"""One rank's stage of a model: what it holds of the parameters, and what its forward
leaves out.

The model keeps all its modules and names. A parameter of another stage is a DTensor on
that stage's mesh, of which this rank has nothing: optimizers, state dicts and
checkpoints list it like any other, and step, save and load nothing here.

A forward of the model runs the user's code as ever. Modules before the blocks give
zeros or their input where another stage holds them, blocks before this stage's give
what they take, and the stage's first block takes what was received. Behind the last one
of a stage that is not the last :class:`_Cut` leaves the model's own code; the root's
forward returns its tensor, so that FSDP2's hooks see an ordinary call; and
:class:`StageDone` leaves the code that called the root. Both are no ``Exception``, so
that nothing in between catches them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from smp_core.checkpoint import iterate_tensors, map_tensors, of_kind
from smp_core.cluster import SmpMesh
from smp_core.pipeline.stand_ins import Played
from smp_core.plan import Stages
from smp_core.plan.chain import StandIn, argument, given_by, with_argument
from smp_core.torch_facts import caches_in, first_names, is_absent, lies_in

Outside = Callable[[Callable[[], Any], Any], Any]
"""(forward of the root, its arguments) -> what the last stage's gave."""

TriesCall = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any], int], None
]
"""Takes the root, arguments of its forward with what the chunk receives first, that
forward, the chunk's number."""


class StageDone(BaseException):
    """Leaves the user's code behind the call of the model, on every stage but the last.

    Attributes:
        given: what is sent to the next stage.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__("the rest of this step runs on the last pipeline stage")
        self.given = given


class _Cut(BaseException):
    def __init__(self, given: Tensor) -> None:
        self.given = given


@torch.no_grad()
def leave_out_other_stages(model: nn.Module, mesh: SmpMesh, stages: Stages) -> None:
    """Put a DTensor of which this rank has nothing in the place of every parameter of
    another stage, before anything is sharded.
    """
    # Every stage's mesh exists on every rank, so that all parameters have one.
    meshes = mesh.holders()
    own = stages.owned(mesh.stage)
    names = first_names(model)
    absent: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if names[parameter] in own:
                continue
            # Tied parameters stay one parameter.
            if parameter not in absent:
                owner = stages.owners[names[parameter]][0]
                absent[parameter] = _absent(parameter, meshes[owner])
            setattr(module, name, absent[parameter])


def _absent(parameter: nn.Parameter, owners: DeviceMesh) -> nn.Parameter:
    # from_local takes an empty shape for none given, and then the shape of the local
    # tensor.
    nothing = torch.empty(
        0 if parameter.ndim else (), dtype=parameter.dtype, device=owners.device_type
    )
    whole = torch.empty(parameter.shape, device="meta")
    placement = Shard(0) if parameter.ndim else Replicate()
    made = DTensor.from_local(
        nothing,
        owners,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


class Stage:
    """Forwards of one stage, chunk by chunk. Made when the model is sharded: its hooks
    come outside of FSDP2's.

    Attributes:
        incoming: what the chunk's first block takes, of every chunk but the first.
        is_running: whether calls of the model are part of a step that all stages take.
        calls: of the model in the present micro-batch.
        in_step: the stage of the model whose step this process takes at present.
    """

    in_step: ClassVar[Stage | None] = None

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        stage: int,
        played: Mapping[str, Played],
        *,
        dtype: torch.dtype | None,
        outside: Outside,
        entered: Callable[[], None],
        passed: Callable[[int], None],
        replaced: Callable[[Tensor], None],
        try_call: TriesCall = lambda *_: None,
        try_output: Callable[[nn.Module, Any], None] = lambda *_: None,
    ) -> None:
        """Hook into the model.

        Args:
            played: of :func:`smp_core.pipeline.stand_ins.played_of`.
            dtype: what activations are computed in; None: the parameters' own.
            outside: takes a forward of the root outside of a step through all stages.
            entered: called where a step comes to the chunk's first block.
            passed: called where a step has passed a module that has a stand-in
                elsewhere, with their count so far.
            replaced: called with what ``incoming`` takes the place of: the first
                block's argument without its values.
            try_call: called before the root's forward, with what does as much for other
                arguments.
            try_output: called with the root and what the last chunk's forward gives, in
                a step.
        """
        self._outside = outside
        self._entered = entered
        self._passed = passed
        self._replaced, self._try_call = replaced, try_call
        self._try_output = try_output
        self._n_passed = 0
        self.incoming: Tensor | None = None
        self.is_running = False
        self.calls = 0
        self._is_before_own = True
        # Chunks are consecutive blocks; a stage may have several of them.
        chain = stages.chain
        self._chain = chain
        self._stages = stages
        self._dtype = dtype
        self.show(stage)
        # The model's forward: begun with what is received, ended behind the stage's
        # last block.
        root = model.get_submodule(chain.module)
        self._name = type(root).__name__.removeprefix("FSDP")
        self._undo: list[Callable[[], Any]] = []
        # Outside of FSDP2's own hooks: before the first, and behind the last.
        begin = root.register_forward_pre_hook(
            self._begin, prepend=True, with_kwargs=True
        )
        self._replace_forward(root, self._caught(root, root.forward))
        leave = root.register_forward_hook(self._leave)
        self._undo += [begin.remove, leave.remove]
        # Modules before the blocks, which other stages hold.
        for stand_in in chain.stand_ins:
            module = model.get_submodule(stand_in.name)
            forward = self._standing_in(
                stand_in, module, played.get(stand_in.name), is_held=stage == 0
            )
            self._replace_forward(module, forward)
        self._refuse_absent(model)
        # The blocks, by their numbers: a call decides by these what it has to do.
        self._numbers = {
            model.get_submodule(name): number
            for number, name in enumerate(chain.blocks)
        }
        self._kinds: dict[type[nn.Module], Any] = {}
        for block in self._numbers:
            self._take_over_calls(block)

    def remove(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        own = vars(module)
        before = own.get("forward")
        module.forward = forward  # type: ignore[method-assign]
        self._undo.append(
            lambda: own.pop("forward") if before is None else own.update(forward=before)
        )

    def _refuse_absent(self, model: nn.Module) -> None:
        """Let modules that other stages hold, and that nothing stands in for, refuse
        calls: they did not run when the chain was recorded."""
        blocks = self._chain.blocks
        covered = [*blocks, *(each.name for each in self._chain.stand_ins)]

        def refusing(name: str) -> Callable[..., None]:
            def refuse(*_: Any) -> None:
                raise ValueError(
                    f"pipeline_parallel_degree={self._stages.count}: {name} was called on a stage that has none of "
                    f"its parameters: it did not run in the call that {self._name} was cut into stages by. Let that "
                    "call have what makes it run (pixel_values, for example), as a mapping: "
                    "model.example_input_array = {...} before it is prepared; or write pipeline_parallel_degree=1"
                )

            return refuse

        for name, module in model.named_modules():
            # A module around blocks is called on every stage.
            is_around = any(lies_in(block, name) for block in blocks)
            is_covered = any(lies_in(name, each) for each in covered)
            is_elsewhere = any(map(is_absent, module.parameters(recurse=False)))
            if is_elsewhere and not is_around and not is_covered:
                hook = module.register_forward_pre_hook(refusing(name), prepend=True)
                self._undo.append(hook.remove)

    def show(self, chunk: int) -> None:
        """Let calls of the model compute one of this stage's chunks."""
        self._chunk, self._own, self._is_before_own = (
            chunk,
            self._stages.blocks(chunk),
            True,
        )
        self._is_first, self.is_last = chunk == 0, chunk == self._stages.n_chunks - 1

    def _take_over_calls(self, block: nn.Module) -> None:
        """Let calls of a block receive, compute and end, as the present chunk wants it,
        or be left out with all its hooks, which would gather its parameters. Not by
        hooks: they would be a part of compiled blocks."""
        kind: Any = type(block)
        if kind not in self._kinds:
            # Python looks `__call__` up in the class, so a class of its own is needed.
            def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._call(block, kind.__call__, args, kwargs)

            # One class for all blocks of a kind, which the compiler tells apart by
            # their classes.
            self._kinds[kind] = type(
                kind.__name__,
                (kind,),
                {"__call__": call, "__module__": kind.__module__},
            )
        block.__class__ = self._kinds[kind]
        self._undo.append(lambda: setattr(block, "__class__", kind))

    def _call(
        self,
        block: nn.Module,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        number = self._numbers[block]
        # Outside of the model's forward nothing ends the step where this stage ends.
        if self.is_running and not self.calls:
            name = type(block).__name__.removeprefix("FSDP")
            raise ValueError(
                f"a step called {name} by itself; with pipeline_parallel_degree={self._stages.count} a step calls the "
                f"model, {self._name}, once, and each stage runs its blocks inside: move the step's calls of layers "
                f"into the forward of {self._name}"
            )
        # Another stage's block gives what it takes, and none of its hooks run.
        if number not in self._own:
            return self._passing_on(*args, **kwargs)
        # The chunk begins: seeds of its own, and what was received for what it was
        # given.
        if number == self._own.start:
            if self.is_running:
                self._entered()
            if not self._is_first:
                self._is_before_own = False
                self._replaced(argument(args, kwargs, self._chain.takes))
                args, kwargs = with_argument(
                    args, kwargs, self._chain.takes, self.incoming
                )
        output = compute(block, *args, **kwargs)
        # The chunk ends, and with it the model's forward on this stage.
        if number == self._own.stop - 1 and not self.is_last:
            raise _Cut(given_by(output, self._chain.gives))
        return output

    def _begin(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._is_before_own = True
        # A call of the user's outside of a step goes through all stages, without
        # gradients.
        if not self.is_running:
            # All stages would have to call it, and each comes here by itself, or never.
            if Stage.in_step is not None:
                raise ValueError(
                    f"{self._name} was called inside a step of {Stage.in_step._name}, and both have pipeline stages; "
                    "call it before the step, or leave it unprepared: model.to(device)"
                )
            self._require_forward_only(kwargs)
            return
        self.calls += 1
        self._n_passed = 0
        # The other stages have ended their step at the first call.
        if self.calls > 1:
            raise ValueError(
                f"{self._name} was called twice in one step; with pipeline_parallel_degree a step may call it once: "
                "the other stages have left the step after the first call"
            )

    def _require_forward_only(self, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self._name} was called outside of a step, and this rank has one stage of it; with "
                "pipeline_parallel_degree it is trained inside training_step (Lightning), compute_loss (Trainer) or a "
                "function under @accelerator.pipeline_step; without gradients it may be called anywhere: write "
                "`with torch.no_grad():`"
            )
        if caches_in(kwargs):
            raise ValueError(
                f"{self._name}: keys and values of the tokens before are on their own stages, and positions are "
                "counted by those of the first block; write generate(use_cache=False)"
            )

    # Three layers: end at the cut; receive something else (for trials); choose by where
    # the call comes from.
    def _caught(
        self, root: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def caught(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except _Cut as cut:
                return cut.given

        def receiving(incoming: Tensor | None, *args: Any, **kwargs: Any) -> Any:
            received, self.incoming = self.incoming, incoming
            try:
                return caught(*args, **kwargs)
            finally:
                self.incoming, self._is_before_own = received, True

        @functools.wraps(forward)
        def staged(*args: Any, **kwargs: Any) -> Any:
            if self.is_running:
                self._try_call(
                    root, (self.incoming, *args), kwargs, receiving, self._chunk
                )
                output = caught(*args, **kwargs)
                if self.is_last:
                    self._try_output(root, output)
                return output
            return self._outside(
                functools.partial(caught, *args, **kwargs), [args, kwargs]
            )

        return staged

    def _standing_in(
        self, stand_in: StandIn, module: nn.Module, played: Played | None, is_held: bool
    ) -> Callable[..., Any]:
        forward, weight = module.forward, next(module.parameters())

        # One element, expanded: values that are never read take no memory.
        def zeros(
            shape: tuple[int, ...],
            device: torch.device,
            dtype: torch.dtype | None = None,
        ) -> Tensor:
            return torch.zeros(
                (), dtype=dtype or self._dtype or weight.dtype, device=device
            ).expand(shape)

        @functools.wraps(forward)
        def standing_in(*args: Any, **kwargs: Any) -> Any:
            if not self._is_before_own:  # it may work behind the blocks too
                return forward(*args, **kwargs)
            # The first chunk computes it where it is held; every other one gives zeros
            # of the same shape.
            given = (
                forward(*args, **kwargs)
                if is_held and self._is_first
                else stood_in(*args, **kwargs)
            )
            # What follows draws the same numbers on stages that computed the module and
            # on those that did not.
            if self.is_running:
                self._n_passed += 1
                self._passed(self._n_passed)
            return given

        def stood_in(*args: Any, **kwargs: Any) -> Any:
            # Device and shape of the first argument decide those of the zeros.
            taken = next(
                (tensor for _, tensor in iterate_tensors([args, kwargs])), weight
            )
            # Its outputs are known from a copy without values.
            if played is not None:
                given = played(*args, **kwargs)
                return map_tensors(
                    given,
                    lambda t: zeros(
                        t.shape,
                        taken.device,
                        None if t.is_floating_point() else t.dtype,
                    ),
                )
            if stand_in.features is None:
                return taken
            shape = taken.shape[:-1] if stand_in.rows else taken.shape
            return zeros((*shape, stand_in.features), taken.device)

        return standing_in

    def _passing_on(self, *args: Any, **kwargs: Any) -> Any:
        # Blocks that return several things have the chain's tensor in one place.
        gives = self._chain.gives
        taken = argument(args, kwargs, self._chain.takes)
        if gives is None:
            return taken
        return of_kind(
            self._chain.kind,
            tuple(taken if number == gives[0] else None for number in range(gives[1])),
        )

    def _leave(self, root: nn.Module, _: Any, output: Tensor) -> None:
        if self.is_running and not self.is_last:
            raise StageDone(output)
