"""Part 2: payloads and casts against the copy bandwidth, FP8 linear layers against
other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.device import Device
from benchmarks.gpu.items import Rows
from smp_core.codecs.codec import codec
from smp_core.fp8 import Fp8Recipe, convert_to_fp8
from smp_core.fp8.backends import convert_with
from smp_core.fp8.casting import amax_of, cast_eager, transposed, transposed_eager
from smp_core.fp8.scaling import E4M3, LARGEST, scale_for
from smp_core.torch_facts import has_triton

COPY_GOAL, LAYER_GOAL = 0.7, 1.5


def codecs(on: Device) -> Rows:
    elements = 2**12 if on.rehearsal else 2**28
    source = torch.randn(elements, device=on.device)
    copied = torch.empty_like(source)
    n_bytes = 2 * source.numel() * source.element_size()
    rate = n_bytes / on.milliseconds(lambda: copied.copy_(source)) / 1e6
    yield "copy", lambda: {"GB/s": rate}
    for name in ("int8", "int4", "fp8", "bfloat16"):
        for way in ("encode", "decode", "sum of 8"):
            yield f"{name} {way}", partial(_codec, on, name, way, source, rate)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"cast {dtype} to FP8, both layouts", partial(_cast, on, dtype, rate)
    yield "transpose of FP8 numbers", partial(_transpose, on, transposed, rate)
    yield "the same by torch's copy", partial(_transpose, on, transposed_eager, rate)


def _codec(
    on: Device, name: Any, way: str, source: torch.Tensor, rate: float
) -> dict[str, Any]:
    coder, ranks = codec(name), 8
    if way == "sum of 8":
        source = source[: source.numel() // ranks]
    payload = torch.zeros(
        ranks if way == "sum of 8" else 1, coder.size(source.numel()), dtype=torch.uint8
    )
    payload = payload.to(on.device)
    coder.encode(source, payload[0])
    out = torch.empty_like(source)
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: coder.encode(source, payload[0]),
        "decode": lambda: coder.decode(payload[0], out),
        "sum of 8": lambda: coder.sum_rows(payload, source, 0, {}),
    }
    moved = payload.numel() + source.numel() * source.element_size() * (
        2 if way == "sum of 8" else 1
    )
    return _against_copy(on, works[way], moved, rate)


def _cast(on: Device, dtype: torch.dtype, rate: float) -> dict[str, Any]:
    x = torch.randn(
        (64, 64) if on.rehearsal else (16384, 8192), device=on.device, dtype=dtype
    )
    scale = scale_for(amax_of(x), LARGEST[E4M3])
    if on.rehearsal or not has_triton():
        return _against_copy(
            on,
            lambda: cast_eager(x, scale, E4M3),
            x.numel() * (x.element_size() + 1),
            rate,
        )
    from smp_core.fp8.triton_casts import cast_fused

    work = partial(cast_fused, x, scale, E4M3, columns=True)
    return _against_copy(on, work, x.numel() * (x.element_size() + 2), rate)


def _transpose(
    on: Device, how: Callable[[torch.Tensor], torch.Tensor], rate: float
) -> dict[str, Any]:
    x8 = torch.zeros(
        (64, 64) if on.rehearsal else (14336, 4096), device=on.device, dtype=E4M3
    )
    return _against_copy(on, lambda: how(x8), 2 * x8.numel(), rate)


def _against_copy(
    on: Device, work: Callable[[], object], n_bytes: int, rate: float
) -> dict[str, Any]:
    seen = n_bytes / on.milliseconds(work) / 1e6
    met = seen >= COPY_GOAL * rate
    return {
        "GB/s": seen,
        "of copying": seen / rate,
        "goal": f">= {COPY_GOAL} of copying",
        "met": met,
    }


def layers(on: Device) -> Rows:
    """Measure linear layers of Llama 3.1 8B and 70B, forward and backward, casts
    included."""
    shapes = {
        "8B attention": (4096, 4096),
        "8B up": (4096, 14336),
        "8B down": (14336, 4096),
        "70B up": (8192, 28672),
        "70B down": (28672, 8192),
    }
    tokens = (8192, 16384)
    if on.rehearsal:
        shapes, tokens = {"tiny": (32, 48)}, (20,)
    for count in tokens:
        for name, (inputs, outputs) in shapes.items():
            yield (
                f"{name}, {inputs} to {outputs}, {count} tokens",
                partial(_layer, on, count, inputs, outputs),
            )


def _layer(on: Device, tokens: int, inputs: int, outputs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    x = torch.randn(
        tokens, inputs, device=on.device, dtype=torch.bfloat16, requires_grad=True
    )
    g = torch.randn(tokens, outputs, device=on.device, dtype=torch.bfloat16) * 1e-3
    for kind, make in LAYERS.items():
        # Layers of one kind and other shapes would be compiled for symbolic sizes.
        torch.compiler.reset()
        torch.manual_seed(0)
        if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
            found[kind] = "not installed"
            continue
        try:
            net = nn.Sequential(
                nn.Linear(
                    inputs, outputs, bias=False, device=on.device, dtype=torch.bfloat16
                )
            )
            found[kind] = on.milliseconds(make(on, net, x, g), 20, 6)
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    on.give_back()
    broken = [kind for kind in OURS if isinstance(found[kind], str)]
    if broken:
        return {"ok": False, "milliseconds": found}
    ours = min(found["native"], found["native, compiled"])
    peers = [found[kind] for kind in NEEDS if isinstance(found[kind], float)]
    ratio = found["bfloat16"] / ours
    met = ratio >= LAYER_GOAL and all(ours <= peer for peer in peers)
    goal = f">= {LAYER_GOAL} x bfloat16, and no slower than others"
    return {"milliseconds": found, "x bfloat16": ratio, "goal": goal, "met": met}


def _forward_backward(net: Any, x: torch.Tensor, g: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        x.grad = None
        for parameter in net.parameters():
            parameter.grad = None
        net(x).backward(g)

    return work


def _compiled(on: Device, net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager" if on.rehearsal else "inductor")


def _plain(
    on: Device, net: nn.Module, x: torch.Tensor, g: torch.Tensor
) -> Callable[[], None]:
    return _forward_backward(net, x, g)


def _native(
    on: Device, net: nn.Module, x: torch.Tensor, g: torch.Tensor, compiled: bool = False
) -> Callable[[], None]:
    fp8 = convert_to_fp8(net, Fp8Recipe(exclude=()))
    _forward_backward(net, x, g)()
    fp8.step()  # calibrated from here on: one pass for each cast
    assert all(map(all, fp8.state.calibrated))
    return _forward_backward(_compiled(on, net) if compiled else net, x, g)


def _torchao(
    on: Device, net: nn.Module, x: torch.Tensor, g: torch.Tensor
) -> Callable[[], None]:
    recipe = Fp8Recipe(
        backend="torchao", scaling="dynamic", fp8_all_gather=False, exclude=()
    )
    convert_with(net, recipe, on.device)
    return _forward_backward(_compiled(on, net), x, g)


def _transformer_engine(
    on: Device, net: nn.Module, x: torch.Tensor, g: torch.Tensor
) -> Callable[[], None]:
    convert_with(
        net,
        Fp8Recipe(backend="transformer_engine", fp8_all_gather=False, exclude=()),
        on.device,
    )
    return _forward_backward(net, x, g)


LAYERS: dict[str, Callable[..., Callable[[], None]]] = {
    "bfloat16": _plain,
    "native": _native,
    "native, compiled": partial(_native, compiled=True),
    "torchao, compiled": _torchao,
    "Transformer Engine": _transformer_engine,
}
OURS = ("bfloat16", "native", "native, compiled")
NEEDS = {"torchao, compiled": "torchao", "Transformer Engine": "transformer_engine"}
