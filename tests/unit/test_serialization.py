"""Nested state containers: traversal, copies, and serialization to bytes that cannot execute code."""

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from zeroshard.errors import CheckpointError
from zeroshard.state.serialization import dumps, extract_tensors, loads
from zeroshard.state.tensor_utils import deepcopy_except_tensors, dense_flat_view, map_tensors, snapshot_to_host


class Pair(NamedTuple):
    left: Any
    right: Any


class History(list[Any]):
    pass


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value


def make_state() -> dict[str, Any]:
    """Build state with every container type that optimizers use, holding tensors 0 to 6 in order."""
    tensors = [torch.full((2,), float(i)) for i in range(7)]
    return {
        "tensor": tensors[0],
        "ordered": OrderedDict(b=tensors[1], a=1),
        "default": defaultdict(list, {"x": [tensors[2]]}),
        "pair": Pair(tensors[3], (tensors[4], None)),
        "history": History([tensors[5], "text"]),
        "deep": [{1: ({"y": tensors[6]},)}],
        "size": torch.Size([2, 3]),
        "count": Counter(a=2),
        "plain": (1, 2.5, True, None, "s", b"b", 1j, torch.float16),
        "empty": [{}, [], ()],
    }


def collect_tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def has_same_structure(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(has_same_structure(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(has_same_structure, left, right))
    return isinstance(left, torch.Tensor) or bool(left == right)


def test_map_tensors_preserves_container_types_and_order() -> None:
    doubled = map_tensors(make_state(), lambda tensor: tensor * 2)
    assert has_same_structure(doubled, make_state())
    assert [int(tensor[0]) for tensor in collect_tensors(doubled)] == [0, 2, 4, 6, 8, 10, 12]
    assert doubled["default"].default_factory is list


def test_map_tensors_does_not_modify_its_input() -> None:
    state = make_state()
    map_tensors(state, lambda _: None)
    assert has_same_structure(state, make_state())
    assert [int(tensor[0]) for tensor in collect_tensors(state)] == list(range(7))


def test_map_tensors_returns_other_values_unchanged() -> None:
    custom = Custom(torch.zeros(1))
    assert map_tensors([custom], lambda _: None)[0] is custom
    assert map_tensors(custom, lambda _: None) is custom


def test_snapshot_is_independent_of_its_source() -> None:
    state = make_state() | {"custom": Custom([1])}
    snapshot = snapshot_to_host(state)
    for tensor in collect_tensors(state):
        tensor.fill_(99)
    state["history"].append(1)
    state["default"]["x"].clear()
    state["deep"][0][1][0].clear()
    state["custom"].value.append(2)
    assert snapshot.pop("custom").value == [1]
    assert has_same_structure(snapshot, make_state())
    assert [int(tensor[0]) for tensor in collect_tensors(snapshot)] == list(range(7))


def test_snapshot_holds_plain_tensors_with_same_strides() -> None:
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    snapshot = snapshot_to_host({"a": param, "b": param[:1], "c": param * 2})
    assert all(not value.requires_grad and type(value) is torch.Tensor for value in snapshot.values())
    assert torch.equal(snapshot["a"], param)
    assert snapshot["a"].stride() == param.stride()
    assert len({value.untyped_storage().data_ptr() for value in snapshot.values()}) == 3


def test_deepcopy_except_tensors() -> None:
    state = make_state() | {"custom": Custom([1])}
    copied = deepcopy_except_tensors(state)
    assert [id(tensor) for tensor in collect_tensors(copied)] == [id(tensor) for tensor in collect_tensors(state)]
    assert copied["custom"].value is not state["custom"].value
    assert copied["deep"][0] is not state["deep"][0]
    del copied["custom"], state["custom"]
    assert has_same_structure(copied, state)


BASE = torch.arange(120.0)
DENSE: dict[str, torch.Tensor] = {
    "contiguous": BASE.view(2, 60),
    "slice": BASE[10:20],
    "transposed": BASE.view(2, 60).t(),
    "permuted": BASE.view(2, 3, 20).permute(1, 2, 0),
    "channels_last": BASE.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "0-dim": BASE[7],
    "empty": BASE[:0],
    "empty with unusual strides": BASE.view(10, 12)[::2, :0],
    "single element of a matrix": BASE.view(10, 12)[3:4, 5:6],
    "transposed column": BASE[:6].view(6, 1).t(),
    "transposed around a size-1 dimension": BASE[:12].as_strided((4, 1, 3), (1, 2, 4)),
    "complex": torch.complex(BASE, BASE).view(4, 30).t(),
    "bool": (BASE > 3).view(3, 40).t(),
}
NON_DENSE: dict[str, torch.Tensor] = {
    "every second element": BASE[::2],
    "columns": BASE.view(10, 12)[:, :4],
    "transposed columns": BASE.view(10, 12)[:, :4].t(),
    "rows with gaps, transposed": BASE.view(10, 12)[::2].t(),
    "expanded": BASE[:3].expand(4, 3),
    "sliding window": BASE.unfold(0, 3, 1),
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_dense_tensor_has_flat_view_of_same_memory(tensor: torch.Tensor) -> None:
    flat = dense_flat_view(tensor)
    assert flat is not None
    assert (flat.shape, flat.data_ptr()) == ((tensor.numel(),), tensor.data_ptr())
    assert flat.is_contiguous()
    assert sorted(map(repr, flat.tolist())) == sorted(map(repr, tensor.reshape(-1).tolist()))
    back = flat.as_strided(tensor.shape, tensor.stride())
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("tensor", NON_DENSE.values(), ids=NON_DENSE)
def test_tensor_with_gaps_or_overlaps_has_no_flat_view(tensor: torch.Tensor) -> None:
    assert dense_flat_view(tensor) is None


def test_extract_tensors_in_order() -> None:
    skeleton, tensors = extract_tensors(make_state())
    assert [int(tensor[0]) for tensor in tensors] == list(range(7))
    assert has_same_structure(skeleton, make_state())
    assert all(placeholder.is_meta for placeholder in collect_tensors(skeleton))


LAZY_VIEWS = {"conjugated": DENSE["complex"].conj(), "negated": DENSE["complex"].conj().imag}


@pytest.mark.parametrize(
    "tensor", [*DENSE.values(), *NON_DENSE.values(), *LAZY_VIEWS.values()], ids=[*DENSE, *NON_DENSE, *LAZY_VIEWS]
)
def test_placeholders_describe_memory_layout(tensor: torch.Tensor) -> None:
    """The placeholder alone tells a receiver where the sent memory belongs."""
    (placeholder,), (sent,) = extract_tensors([tensor])
    received = torch.empty_strided(placeholder.shape, placeholder.stride(), dtype=placeholder.dtype)
    target, memory = dense_flat_view(received), dense_flat_view(sent)
    assert target is not None
    target.copy_(sent.contiguous().view(-1) if memory is None else memory)
    assert torch.equal(received, tensor)
    if dense_flat_view(tensor) is not None:
        assert received.stride() == tensor.stride()


@pytest.mark.parametrize("tensor", [*DENSE.values(), *NON_DENSE.values()], ids=[*DENSE, *NON_DENSE])
def test_extract_tensors_does_not_copy(tensor: torch.Tensor) -> None:
    assert extract_tensors([tensor])[1][0].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("tensor", LAZY_VIEWS.values(), ids=LAZY_VIEWS)
def test_extract_tensors_resolves_lazy_views(tensor: torch.Tensor) -> None:
    assert tensor.is_conj() or tensor.is_neg()
    (sent,) = extract_tensors([tensor])[1]
    assert (sent.is_conj(), sent.is_neg()) == (False, False)


def test_params_are_extracted_as_plain_tensors() -> None:
    (placeholder,), (sent,) = extract_tensors([torch.nn.Parameter(torch.ones(2))])
    assert not sent.requires_grad
    assert type(placeholder) is type(sent) is torch.Tensor


def test_sparse_tensors_stay_in_skeleton() -> None:
    skeleton, tensors = extract_tensors({"sparse": torch.eye(2).to_sparse(), "dense": torch.ones(1)})
    assert [tensor.shape for tensor in tensors] == [(1,)]
    loaded = loads(dumps(skeleton))
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(2))
    assert loaded["dense"].is_meta


def test_dumps_and_loads_round_trip() -> None:
    state = make_state()
    del state["pair"], state["history"], state["default"]
    loaded = loads(dumps(state))
    assert has_same_structure(loaded, state)
    assert all(map(torch.equal, collect_tensors(loaded), collect_tensors(state)))


def test_serialized_skeleton_excludes_tensor_data() -> None:
    skeleton, _ = extract_tensors({"small": torch.empty(1), "large": torch.empty(1 << 20)})
    data = dumps(skeleton)
    assert len(data) < 4096
    assert loads(data)["large"].shape == (1 << 20,)


executed: list[str] = []


class Evil:
    """Executes code when unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return executed.append, ("ran",)


UNSAFE: dict[str, tuple[Any, str]] = {
    "object": (Custom(1), "the value itself: a Custom cannot be sent safely: .*Custom"),
    "nested object": ({"a": [1, Custom(1)]}, r"\['a'\]\[1\]: a Custom cannot be sent safely"),
    "named tuple": (Pair(1, 2), "a Pair cannot be sent safely"),
    "list subclass": (History([1]), "a History cannot be sent safely"),
    "builtin function": (len, "a builtin_function_or_method cannot be sent safely"),
    "lambda": (lambda: None, "a function cannot be sent safely"),
    "object that executes code": (Evil(), "a Evil cannot be sent safely"),
}


@pytest.mark.parametrize(("value", "message"), UNSAFE.values(), ids=UNSAFE)
def test_dumps_rejects_unsafe_types(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        dumps(value)
    assert "torch.serialization.add_safe_globals" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not executed


def test_loads_does_not_execute_code() -> None:
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    with pytest.raises(Exception, match="Weights only load failed"):
        loads(buffer.getvalue())
    assert not executed


def test_safe_globals_are_serialized() -> None:
    with torch.serialization.safe_globals([Custom]):
        assert loads(dumps(Custom(5))).value == 5
