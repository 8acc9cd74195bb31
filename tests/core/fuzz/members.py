"""What is in the blocks of random models: maps of (samples, length, WIDTH) to the
same."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

WIDTH = 8


class OwnScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale / self.temperature


class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.named = nn.ParameterDict(
            {
                "a": torch.randn(WIDTH),
                "b": nn.Parameter(torch.randn(WIDTH), requires_grad=False),
            }
        )

    def forward(self, x: torch.Tensor) -> Any:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x + self.named["a"] * self.named["b"]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attend(x, x, x, need_weights=False)[0]


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=0)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.table((x.mean(-1).abs() * 10).long() % 5)


class Spectral(nn.Module):
    """A complex parameter, as Fourier operators have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4
        )

    def forward(self, x: torch.Tensor) -> Any:
        return torch.fft.irfft(
            torch.fft.rfft(x, dim=1) @ self.weight, n=x.shape[1], dim=1
        )


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3, persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.last = x.detach()
        return self.linear(x) * self.mask / (1 + 0.1 * self.calls)


class Reassigned(nn.Module):
    """Buffers that the forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("age", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        self.age = self.age + 1
        return self.linear(x) * (1 + 0.01 * self.age)


class NormalOutput(nn.Module):
    """A distribution as output, as policies and variational models return."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        mean, scale = self.both(x).chunk(2, -1)
        return torch.distributions.Normal(mean, F.softplus(scale) + 0.1)


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = NormalOutput()

    def forward(self, x: torch.Tensor) -> Any:
        found = self.policy(x)
        return found.mean * found.scale


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = (
            nn.Linear(WIDTH, 2, bias=False),
            nn.Linear(2, WIDTH, bias=False),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


class Teacher(nn.Module):
    """A copy that is called without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - 0.5 * target


class TwoWays(nn.Module):
    """A layer called with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            target = self.layer(x.roll(1, 1))
        return self.layer(x) - 0.5 * target


class Untrained(nn.Module):
    """A member that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.also_unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


class Inside(nn.Module):
    """Gradients with respect to an input, taken in the forward (forces, penalties)."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(
                self.energy(x).sum(), x, create_graph=torch.is_grad_enabled()
            )
        return x + forces


class FunctionalCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        weights = {name: value * 0.5 for name, value in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


class ReadsInner(nn.Module):
    """A forward that reads the weights of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return F.linear(x, self.inner.weight.tanh(), self.inner.bias) + self.inner(x)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.symbolic_trace(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.graph(x)


class Clone(nn.Module):
    """Parameters by a registered name that is no attribute's usual one, and
    non-contiguous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(
            "weight-of-it".replace("-", "_"),
            nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).t()),
        )
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight_of_it


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad * x * weight, (grad * x * x).sum((0, 1))


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> Any:
        return Square.apply(torch.tanh(x), self.weight)


def _pruned() -> nn.Module:
    return nn.Sequential(
        prune.random_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.3)
    )


def _old_weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))


def _lazy() -> nn.Module:
    layer = nn.LazyLinear(WIDTH)
    layer(torch.zeros(1, WIDTH))
    return layer


MEMBERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "perceptron": lambda: nn.Sequential(
        nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)
    ),
    "ordered": lambda: nn.Sequential(
        collections.OrderedDict(up=nn.Linear(WIDTH, 16), down=nn.Linear(16, WIDTH))
    ),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "own scale": OwnScale,
    "parameter lists": ParameterLists,
    "conv": Convolved,
    "lstm": lambda: Recurrent(nn.LSTM),
    "two-way gru": lambda: nn.Sequential(
        Recurrent(nn.GRU, bidirectional=True), nn.Linear(2 * WIDTH, WIDTH)
    ),
    "attention": Attends,
    "encoder layer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 16, 0.0, batch_first=True
    ),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True
        ),
        2,
        enable_nested_tensor=False,
    ),
    "embedding": LooksUp,
    "complex": Spectral,
    "buffers": Buffers,
    "reassigned buffer": Reassigned,
    "distribution": Sampled,
    "adapters": Frozen,
    "teacher": Teacher,
    "two ways": TwoWays,
    "unused": Untrained,
    "inner gradient": Inside,
    "functional call": FunctionalCall,
    "reads inner": ReadsInner,
    "traced": Traced,
    "transposed": Clone,
    "own function": OwnFunction,
    "pruned": _pruned,
    "old weight norm": _old_weight_norm,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "lazy": _lazy,
    "prelu": lambda: nn.PReLU(),
    "relu in place": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
    ),
    "identity": nn.Identity,
}
