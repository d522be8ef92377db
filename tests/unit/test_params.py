"""Parsing and validation of the `params` argument."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.errors import ConfigError
from zeroshard.layout.spec import make_param_specs
from zeroshard.params import check_specs, parse_group, parse_params

MODEL = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
A, B, C, D = MODEL.parameters()
PLAIN = torch.ones(2)
NAMED = list(MODEL.named_parameters())

# Factories, because a generator can be consumed only once.
ACCEPTED: dict[str, Callable[[], Any]] = {
    "a list": lambda: [A, B],
    "a tuple": lambda: (A, B),
    "a generator": MODEL.parameters,
    "the values of a dict": lambda: dict(NAMED).values(),
    "an iterator": lambda: iter([A, B]),
    "a plain tensor": lambda: [PLAIN],
    "named parameters": MODEL.named_parameters,
    "a list of named parameters": lambda: NAMED,
    "one group": lambda: [{"params": [A, B], "lr": 2.0}],
    "a generator of groups": lambda: ({"params": [param]} for param in (A, B)),
    "a generator in a group": lambda: [{"params": MODEL.parameters()}, {"params": iter(())}],
    "a tensor in a group": lambda: [{"params": A}, {"params": B, "lr": 3.0}],
    "named parameters in a group": lambda: [{"params": MODEL[0].named_parameters()}, {"params": NAMED[2:], "lr": 3.0}],
    "an empty and a non-empty group": lambda: [{"params": []}, {"params": [A]}],
}


@pytest.mark.parametrize("make_params", ACCEPTED.values(), ids=ACCEPTED)
def test_accepts_the_same_params_as_torch(make_params: Callable[[], Any]) -> None:
    expected = torch.optim.SGD(make_params(), lr=1.0)
    groups, plain = parse_params(make_params())
    ours = torch.optim.SGD(groups, lr=1.0)
    assert plain == (not isinstance(next(iter(make_params())), dict))
    assert len(ours.param_groups) == len(expected.param_groups)
    for mine, theirs in zip(ours.param_groups, expected.param_groups, strict=True):
        assert mine.keys() == theirs.keys()
        assert [id(param) for param in mine["params"]] == [id(param) for param in theirs["params"]]
        assert (mine["lr"], mine.get("param_names")) == (theirs["lr"], theirs.get("param_names"))


REJECTED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a bare tensor": (lambda: A, TypeError, "params to be an iterable of tensors or dicts, got a tensor"),
    "a number": (lambda: 3, TypeError, "iterable of tensors or dicts, got int"),
    "None": (lambda: None, TypeError, "got NoneType"),
    "a module": (lambda: nn.Linear(1, 1), TypeError, "got the module Linear. Pass its parameters()"),
    "a string": (lambda: "weights", TypeError, "got str"),
    "a dict of parameters": (lambda: dict(NAMED), TypeError, "got dict"),
    "one group without a list": (lambda: {"params": [A]}, TypeError, "got dict"),
    "a set": (lambda: {A, B}, TypeError, "ordered, got a set, whose order differs"),
    "a frozenset": (lambda: frozenset([A]), TypeError, "ordered, got a frozenset, whose order differs"),
    "an empty list": (list, ValueError, "empty parameter list"),
    "an empty generator": (lambda: iter(()), ValueError, "empty parameter list"),
    "a tensor and a group": (lambda: [A, {"params": [B]}], TypeError, "all tensors or all dicts, got dict"),
    "a group and a tensor": (lambda: [{"params": [B]}, A], TypeError, "all tensors or all dicts, got dict"),
    "another type": (lambda: [A, "bias"], TypeError, "got str among"),
    "numbers": (lambda: [1.0, 2.0], TypeError, "got float among"),
    "bytes": (lambda: b"ab", TypeError, "got int among"),
    "lists of tensors": (lambda: [[A], [B]], TypeError, "got list among"),
    "a reversed (tensor, name) pair": (lambda: [(A, "a")], TypeError, "got tuple among"),
    "a name without a tensor": (lambda: [("a", None)], TypeError, "got tuple among"),
    "a group without params": (lambda: [{"lr": 1.0, "b": 2}], ValueError, r"no key 'params', only \['b', 'lr'\]"),
    "another type in a group": (lambda: [{"params": [A, 1]}], TypeError, "got int among"),
    "a group in a group": (lambda: [{"params": [{"params": [A]}]}], TypeError, "got dict among"),
    "a set in a group": (lambda: [{"params": {A, B}}], TypeError, "'params' of a group to be ordered"),
    "a string in a group": (lambda: [{"params": "weights"}], TypeError, "'params' of a group to be an iterable"),
    "a dict as names": (lambda: [{"params": [A], "param_names": {}}], TypeError, "to be a list of 1 name, got {}"),
    "too few names": (lambda: [{"params": [A, B], "param_names": ["a"]}], TypeError, "to be a list of 2 names"),
    "None in a group": (lambda: [{"params": None}], TypeError, "got NoneType"),
}


@pytest.mark.parametrize(("make_params", "error", "message"), REJECTED.values(), ids=REJECTED)
def test_invalid_params_are_rejected(make_params: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_params(make_params())


def test_param_group_must_be_a_dict() -> None:
    with pytest.raises(TypeError, match="expected a parameter group to be a dict, got list"):
        parse_group([A])


def test_input_is_not_modified() -> None:
    listed = [A, B]
    group = {"params": listed, "lr": 1.0}
    given_groups = [group]
    parsed = parse_params(given_groups).groups
    parsed[0]["lr"] = 5.0
    parsed[0]["params"].append(C)
    parsed.append({})
    assert given_groups == [group]
    assert group == {"params": listed, "lr": 1.0}
    assert [id(param) for param in listed] == [id(A), id(B)]
    flat = parse_params(listed).groups[0]["params"]
    flat.clear()
    assert len(listed) == 2


class Wrapper(torch.Tensor):
    """A wrapper subclass, like quantized and distributed tensors."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        assert isinstance(wrapper, Wrapper)
        wrapper.wrapped = inner
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> "Wrapper":
        return cls(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls(args[0].wrapped) if func is torch.ops.aten.detach.default else NotImplemented


def check_params(*params: torch.Tensor, mixed: bool = False, names: list[str] | None = None) -> None:
    group = {"params": list(params), "param_names": names}
    check_specs(make_param_specs([group]), params, allow_mixed_dtypes=mixed)


GRID = torch.zeros(6, 6)
UNSUPPORTED: dict[str, tuple[torch.Tensor, str]] = {
    "sparse": (torch.eye(3).to_sparse(), "layout torch.sparse_coo, but only dense"),
    "expanded": (torch.zeros(1, 3).expand(4, 3), r"share memory \(strides \(0, 1\)\)"),
    "a sliding window": (torch.zeros(9).unfold(0, 3, 1), r"share memory \(strides \(1, 1\)\)"),
    "partly overlapping rows": (torch.zeros(9).as_strided((2, 4), (3, 1)), "share memory"),
    "a wrapper subclass": (Wrapper(torch.zeros(2)), "is a Wrapper, which cannot be sharded"),
}


@pytest.mark.parametrize(("param", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_params_are_rejected(param: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_params(torch.zeros(2), param, names=["fine", "odd"])
    assert str(caught.value).startswith("parameter 1 (odd)")
    assert isinstance(caught.value, ValueError)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_param_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"parameter 0 has layout torch\.sparse_csr"):
        check_params(torch.eye(3).to_sparse_csr())


SUPPORTED: dict[str, Iterable[torch.Tensor]] = {
    "none": [],
    "transposed, channels_last, with gaps": [
        torch.zeros(2, 3).t(),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(4, 4)[:, ::2],
    ],
    "0-dim and empty": [torch.zeros(()), torch.zeros(0), torch.zeros(3, 0), torch.zeros(1, 0).expand(4, 0)],
    "neighbours in one buffer": torch.split(torch.zeros(10), [4, 6]),
    "columns of one matrix": torch.split(GRID, 2, dim=1),
    "every second column": [GRID[:, ::2], GRID[:, 1::2]],
    "empty views of a parameter": [GRID, GRID[:0], GRID[2:2]],
    "on the meta device": [torch.empty(3, device="meta"), torch.empty(3, device="meta")],
}


@pytest.mark.parametrize("params", SUPPORTED.values(), ids=SUPPORTED)
def test_supported_params(params: Iterable[torch.Tensor]) -> None:
    check_params(*params)


OVERLAPPING: dict[str, list[torch.Tensor]] = {
    "the same memory": [GRID, GRID.detach()],
    "a different shape": [GRID, GRID.view(36)],
    "transposed": [GRID, GRID.t()],
    "a row": [GRID, GRID[2]],
    "a column": [GRID, GRID[:, 3]],
    "two strided views with the same start": [GRID[:, ::2], GRID[:, ::3]],
    "not adjacent in the list": [GRID[3:], torch.zeros(3), GRID[:4]],
}


@pytest.mark.parametrize("params", OVERLAPPING.values(), ids=OVERLAPPING)
def test_overlapping_params_are_rejected(params: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"parameter \d and parameter \d share memory\. To tie them"):
        check_params(*params)


def test_mixed_dtypes_require_opt_in() -> None:
    params = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(
        ConfigError, match=r"parameter 0 is torch.float32, parameter 2 is torch.float64.*allow_mixed_dtypes"
    ):
        check_params(*params)
    check_params(*params, mixed=True)
