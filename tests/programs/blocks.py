"""Blocks of models. Each is a function of the hidden state and of the model's inputs.

Scripts contain the source of the classes that they use: a class must not use other names of this module.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

WIDTH = 8


class MLP(nn.Module):
    def __init__(self, variant: int) -> None:
        super().__init__()
        hidden = (5, 8, 16)[variant]
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8, bias=variant != 1)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(x)))
        return output


class Conv(nn.Module):
    """`variant` 1: channels_last. 2: several groups."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 2, padding="same", groups=2 if variant == 2 else 1)
        if variant == 1:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(x.view(-1, 2, 2, 2))))
        return output.reshape(-1, 8)


class Embedding(nn.Module):
    """`variant` 1: with a padding index. 2: tied to the projection back."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant = variant
        self.embed = nn.Embedding(11, 8, padding_idx=0 if variant == 1 else None)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.embed((inputs[:, :3] * 7).long() % 11).sum(1)
        return functional.linear(output, self.embed.weight).tanh()[:, :8] if self.variant == 2 else output


class Tied(nn.Module):
    """`variant` 1: one parameter under two names. 0: one parameter, also used transposed."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8 if variant == 1 else 5)
        self.decode = nn.Linear(8, 8) if variant == 1 else None
        if self.decode is not None:
            self.decode.weight = self.encode.weight

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.encode(x))
        output: Tensor = (
            functional.linear(hidden, self.encode.weight.t()) if self.decode is None else self.decode(hidden)
        )
        return output


class Shared(nn.Module):
    """One module, applied several times."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.times, self.layer = 2 + variant, nn.Linear(8, 8)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Experts(nn.Module):
    """The input chooses the expert."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 + variant))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.experts[int(inputs[0, 0].abs() * 100) % len(self.experts)](x)
        return output


class RankExperts(nn.Module):
    """The rank chooses the expert. `variant` 1: the last rank uses none. 2: rank 0 uses none."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant = variant
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        rank = dist.get_rank()
        if self.variant and rank == (dist.get_world_size() - 1 if self.variant == 1 else 0):
            return x
        output: Tensor = self.experts[rank % 2](x)
        return output


class Unused(nn.Module):
    """Parameters that no rank uses: never, or (`variant` 1) for some inputs."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant, self.used, self.unused = variant, nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.used(x)
        if self.variant and inputs[0, 0] > 0:
            output = output + self.unused(x).sum(1, keepdim=True)
        return output


class LoRA(nn.Module):
    """A frozen layer with a trainable low-rank update."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(8, 2) * 0.3), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.base(x) + x @ self.a @ self.b
        return output


class BatchNorm(nn.Module):
    def __init__(self, variant: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)  # the gradient of a bias would be noise around zero
        self.norm = nn.BatchNorm1d(8, affine=variant != 1, momentum=None if variant == 2 else 0.1)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(self.layer(x))
        return output


class Centre(nn.Module):
    """The output depends on a buffer that each pass changes."""

    centre: Tensor
    count: Tensor

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        if self.training:
            self.centre.lerp_(inputs.mean(0), 0.5)
            self.count.add_(1)
        output: Tensor = self.layer(x - self.centre) / (1 + self.count % 3)
        return output


class Listed(nn.Module):
    """`variant` 1: a ParameterDict."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        values = [torch.randn(8, 8) * 0.3, torch.randn(8), torch.ones(1, 8)]
        self.listed = nn.ParameterList(values) if variant == 0 else None
        self.named = nn.ParameterDict(dict(zip("abc", values, strict=True))) if variant else None

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        matrix, bias, scale = self.listed if self.listed is not None else dict(self.named or {}).values()
        output: Tensor = (x @ matrix + bias) * scale
        return output


class Symmetric(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.triu() + value.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    """`variant` 0: weight_norm, 1: a symmetric weight, 2: spectral_norm, whose buffers forward changes."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        if variant == 0:
            parametrizations.weight_norm(self.layer)
        elif variant == 1:
            parametrize.register_parametrization(self.layer, "weight", Symmetric())
        else:
            parametrizations.spectral_norm(self.layer)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Complex(nn.Module):
    def __init__(self, variant: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.2)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.complex64))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        value = x.to(torch.complex64) @ self.weight * self.scale
        return (value.real + value.imag).to(x.dtype)


class Mixed(nn.Module):
    """Layers in other dtypes: float64, bfloat16, or (`variant` 2) both."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        dtypes = ((torch.float64,), (torch.bfloat16,), (torch.float64, torch.bfloat16))[variant]
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        value = x
        for layer in self.layers:
            value = torch.tanh(layer(value.to(next(layer.parameters()).dtype)))
        return value.to(x.dtype)


class Empty(nn.Module):
    def __init__(self, variant: int) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0) if variant == 0 else torch.empty(3, 0, 2))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.empty.sum()
        return output


class Scalar(nn.Module):
    def __init__(self, variant: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift)


class Transposed(nn.Module):
    """Parameters that are dense but not contiguous, or (`variant` 1) with gaps."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).mul_(0.3).t())
        if variant == 1:
            self.weight = nn.Parameter(torch.randn(8, 16).mul_(0.3)[:, ::2])

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)
