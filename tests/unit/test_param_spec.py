"""ParamSpec: the properties of a parameter that a layout depends on."""

from typing import Any

import pytest
import torch

from tests.support.oracles import spec
from zeroshard.layout.spec import ParamSpec, make_param_specs


def make_spec(param: torch.Tensor) -> ParamSpec:
    (param_spec,) = make_param_specs([{"params": [param]}])
    return param_spec


TENSORS: dict[str, tuple[torch.Tensor, int, int]] = {
    "contiguous": (torch.empty(3, 4), 12, 12),
    "transposed": (torch.empty(3, 4).t(), 12, 12),
    "channels_last": (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), 120, 120),
    "every second column": (torch.empty(3, 8)[:, ::2], 12, 2 * 8 + 3 * 2 + 1),
    "the last column": (torch.empty(3, 8)[:, -1:], 3, 2 * 8 + 1),
    "expanded": (torch.empty(1).expand(5), 5, 1),
    "0-dim": (torch.empty(()), 1, 1),
    "empty": (torch.empty(0), 0, 0),
    "empty in one dimension": (torch.empty(3, 0, 2), 0, 0),
    "one element of a larger matrix": (torch.empty(9, 9)[4:5, 4:5], 1, 1),
}


@pytest.mark.parametrize(("tensor", "numel", "extent"), TENSORS.values(), ids=TENSORS)
def test_numel_and_storage_numel(tensor: torch.Tensor, numel: int, extent: int) -> None:
    param_spec = make_spec(tensor)
    assert (param_spec.shape, param_spec.stride) == (tuple(tensor.shape), tensor.stride())
    assert (param_spec.numel, param_spec.storage_numel) == (numel, extent)


def test_params_are_numbered_across_groups() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [torch.empty(1), torch.empty(2)], "param_names": ["a", "b.weight"], "lr": 1.0},
        {"params": []},
        {"params": [torch.empty(3, dtype=torch.bfloat16, requires_grad=True)]},
    ]
    param_specs = make_param_specs(groups)
    assert [
        (param_spec.index, param_spec.name, param_spec.group, param_spec.trainable) for param_spec in param_specs
    ] == [
        (0, "a", 0, False),
        (1, "b.weight", 0, False),
        (2, None, 2, True),
    ]
    assert param_specs[2].dtype == torch.bfloat16
    later = make_param_specs(groups[:1], first_index=7, first_group=3)
    assert [(param_spec.index, param_spec.group) for param_spec in later] == [(7, 3), (8, 3)]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_params_are_numbered_too() -> None:
    for sparse in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        assert (make_spec(sparse).shape, make_spec(sparse).stride) == ((2, 2), ())


def test_spec_is_a_snapshot() -> None:
    param = torch.nn.Parameter(torch.empty(2, 2))
    before = make_spec(param)
    param.data = torch.empty(3, dtype=torch.float64)
    param.requires_grad_(False)
    assert before == spec(0, (2, 2))


def test_label_contains_index_and_name() -> None:
    assert spec(3).label == "parameter 3"
    assert spec(3, name="head.bias").label == "parameter 3 (head.bias)"


def test_description_contains_everything_that_must_match_across_ranks() -> None:
    text = spec(1, (2, 3), dtype=torch.bfloat16, group=2, trainable=False, name="w").describe()
    assert text == "parameter 1 (w) in group 2: shape (2, 3), strides (3, 1), bfloat16 on cpu, frozen"


def test_description_differs_if_any_field_differs() -> None:
    reference = spec(0, (2, 2), name="w")
    others = [
        spec(1, (2, 2), name="w"),
        spec(0, (2, 2), name="v"),
        spec(0, (4, 1), name="w"),
        spec(0, (2, 2), stride=(1, 2), name="w"),
        spec(0, (2, 2), name="w", dtype=torch.float64),
        spec(0, (2, 2), name="w", device="cuda:0"),
        spec(0, (2, 2), name="w", group=1),
        spec(0, (2, 2), name="w", trainable=False),
    ]
    assert reference.describe() not in {other.describe() for other in others}


def test_description_omits_device_index() -> None:
    assert spec(device="cuda:0").describe() == spec(device="cuda:5").describe()
