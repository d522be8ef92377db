"""State as nested containers: walked, copied, and turned into bytes that run no code."""

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


def tree() -> dict[str, Any]:
    """Every container that optimizers keep, with the tensors 0 to 6 in order."""
    t = [torch.full((2,), float(i)) for i in range(7)]
    return {
        "tensor": t[0],
        "ordered": OrderedDict(b=t[1], a=1),
        "default": defaultdict(list, {"x": [t[2]]}),
        "pair": Pair(t[3], (t[4], None)),
        "history": History([t[5], "text"]),
        "deep": [{1: ({"y": t[6]},)}],
        "size": torch.Size([2, 3]),
        "count": Counter(a=2),
        "plain": (1, 2.5, True, None, "s", b"b", 1j, torch.float16),
        "empty": [{}, [], ()],
    }


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def same_types(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same_types(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_types, left, right))
    return isinstance(left, torch.Tensor) or bool(left == right)


def test_containers_keep_their_types_and_order() -> None:
    doubled = map_tensors(tree(), lambda tensor: tensor * 2)
    assert same_types(doubled, tree())
    assert [int(tensor[0]) for tensor in tensors_in(doubled)] == [0, 2, 4, 6, 8, 10, 12]
    assert doubled["default"].default_factory is list


def test_what_is_walked_through_stays_as_it_was() -> None:
    given = tree()
    map_tensors(given, lambda _: None)
    assert same_types(given, tree())
    assert [int(tensor[0]) for tensor in tensors_in(given)] == list(range(7))


def test_other_values_are_passed_on() -> None:
    custom = Custom(torch.zeros(1))
    assert map_tensors([custom], lambda _: None)[0] is custom
    assert map_tensors(custom, lambda _: None) is custom


def test_a_snapshot_does_not_change_later() -> None:
    given = tree() | {"custom": Custom([1])}
    taken = snapshot_to_host(given)
    for tensor in tensors_in(given):
        tensor.fill_(99)
    given["history"].append(1)
    given["default"]["x"].clear()
    given["deep"][0][1][0].clear()
    given["custom"].value.append(2)
    assert taken.pop("custom").value == [1]
    assert same_types(taken, tree())
    assert [int(tensor[0]) for tensor in tensors_in(taken)] == list(range(7))


def test_a_snapshot_is_plain_memory_with_the_same_strides() -> None:
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    taken = snapshot_to_host({"a": param, "b": param[:1], "c": param * 2})
    assert all(not value.requires_grad and type(value) is torch.Tensor for value in taken.values())
    assert torch.equal(taken["a"], param)
    assert taken["a"].stride() == param.stride()
    assert len({value.untyped_storage().data_ptr() for value in taken.values()}) == 3


def test_a_copy_of_all_but_tensors() -> None:
    given = tree() | {"custom": Custom([1])}
    copied = deepcopy_except_tensors(given)
    assert [id(tensor) for tensor in tensors_in(copied)] == [id(tensor) for tensor in tensors_in(given)]
    assert copied["custom"].value is not given["custom"].value
    assert copied["deep"][0] is not given["deep"][0]
    del copied["custom"], given["custom"]
    assert same_types(copied, given)


BASE = torch.arange(120.0)
DENSE: dict[str, torch.Tensor] = {
    "contiguous": BASE.view(2, 60),
    "a slice": BASE[10:20],
    "transposed": BASE.view(2, 60).t(),
    "permuted": BASE.view(2, 3, 20).permute(1, 2, 0),
    "channels_last": BASE.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "0-dim": BASE[7],
    "empty": BASE[:0],
    "empty with odd strides": BASE.view(10, 12)[::2, :0],
    "a column of one row": BASE.view(10, 12)[3:4, 5:6],
    "a long column of width one": BASE[:6].view(6, 1).t(),
    "transposed around a dimension of one": BASE[:12].as_strided((4, 1, 3), (1, 2, 4)),
    "complex": torch.complex(BASE, BASE).view(4, 30).t(),
    "bool": (BASE > 3).view(3, 40).t(),
}
GAPPED: dict[str, torch.Tensor] = {
    "every second": BASE[::2],
    "columns": BASE.view(10, 12)[:, :4],
    "transposed columns": BASE.view(10, 12)[:, :4].t(),
    "rows with gaps, transposed": BASE.view(10, 12)[::2].t(),
    "expanded": BASE[:3].expand(4, 3),
    "a sliding window": BASE.unfold(0, 3, 1),
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_dense_memory_is_one_flat_alias(tensor: torch.Tensor) -> None:
    flat = dense_flat_view(tensor)
    assert flat is not None
    assert (flat.shape, flat.data_ptr()) == ((tensor.numel(),), tensor.data_ptr())
    assert flat.is_contiguous()
    assert sorted(map(repr, flat.tolist())) == sorted(map(repr, tensor.reshape(-1).tolist()))
    back = flat.as_strided(tensor.shape, tensor.stride())
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("tensor", GAPPED.values(), ids=GAPPED)
def test_memory_with_gaps_or_overlaps_is_not_dense(tensor: torch.Tensor) -> None:
    assert dense_flat_view(tensor) is None


def test_tensors_are_taken_out_in_order() -> None:
    skeleton, tensors = extract_tensors(tree())
    assert [int(tensor[0]) for tensor in tensors] == list(range(7))
    assert same_types(skeleton, tree())
    assert all(stand_in.is_meta for stand_in in tensors_in(skeleton))


LAZY = {"conjugated": DENSE["complex"].conj(), "negated": DENSE["complex"].conj().imag}


@pytest.mark.parametrize("tensor", [*DENSE.values(), *GAPPED.values(), *LAZY.values()], ids=[*DENSE, *GAPPED, *LAZY])
def test_stand_ins_describe_the_memory_that_is_sent(tensor: torch.Tensor) -> None:
    """A receiver that knows the stand-in alone puts the sent memory into the right places."""
    (stand_in,), (sent,) = extract_tensors([tensor])
    received = torch.empty_strided(stand_in.shape, stand_in.stride(), dtype=stand_in.dtype)
    target, memory = dense_flat_view(received), dense_flat_view(sent)
    assert target is not None
    target.copy_(sent.contiguous().view(-1) if memory is None else memory)
    assert torch.equal(received, tensor)
    if dense_flat_view(tensor) is not None:
        assert received.stride() == tensor.stride()


@pytest.mark.parametrize("tensor", [*DENSE.values(), *GAPPED.values()], ids=[*DENSE, *GAPPED])
def test_taking_out_copies_nothing(tensor: torch.Tensor) -> None:
    assert extract_tensors([tensor])[1][0].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("tensor", LAZY.values(), ids=LAZY)
def test_lazy_views_are_resolved(tensor: torch.Tensor) -> None:
    assert tensor.is_conj() or tensor.is_neg()
    (sent,) = extract_tensors([tensor])[1]
    assert (sent.is_conj(), sent.is_neg()) == (False, False)


def test_parameters_are_sent_as_plain_tensors() -> None:
    (stand_in,), (sent,) = extract_tensors([torch.nn.Parameter(torch.ones(2))])
    assert not sent.requires_grad
    assert type(stand_in) is type(sent) is torch.Tensor


def test_tensors_without_plain_memory_stay_in_the_skeleton() -> None:
    skeleton, tensors = extract_tensors({"sparse": torch.eye(2).to_sparse(), "dense": torch.ones(1)})
    assert [tensor.shape for tensor in tensors] == [(1,)]
    back = loads(dumps(skeleton))
    assert torch.equal(back["sparse"].to_dense(), torch.eye(2))
    assert back["dense"].is_meta


def test_bytes_are_read_back_as_they_were() -> None:
    plain = tree()
    del plain["pair"], plain["history"], plain["default"]
    back = loads(dumps(plain))
    assert same_types(back, plain)
    assert all(map(torch.equal, tensors_in(back), tensors_in(plain)))


def test_a_skeleton_costs_nothing_for_its_tensors() -> None:
    skeleton, _ = extract_tensors({"small": torch.empty(1), "large": torch.empty(1 << 20)})
    data = dumps(skeleton)
    assert len(data) < 4096
    assert loads(data)["large"].shape == (1 << 20,)


ran: list[str] = []


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return ran.append, ("ran",)


UNSAFE: dict[str, tuple[Any, str]] = {
    "an object": (Custom(1), "the value itself: a Custom cannot be sent safely: .*Custom"),
    "an object inside": ({"a": [1, Custom(1)]}, r"\['a'\]\[1\]: a Custom cannot be sent safely"),
    "a named tuple": (Pair(1, 2), "a Pair cannot be sent safely"),
    "a list of a class of its own": (History([1]), "a History cannot be sent safely"),
    "a function": (len, "a builtin_function_or_method cannot be sent safely"),
    "a lambda": (lambda: None, "a function cannot be sent safely"),
    "what runs code": (Evil(), "a Evil cannot be sent safely"),
}


@pytest.mark.parametrize(("value", "message"), UNSAFE.values(), ids=UNSAFE)
def test_what_would_need_code_is_refused_by_the_sender(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        dumps(value)
    assert "torch.serialization.add_safe_globals" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not ran


def test_bytes_from_elsewhere_run_no_code() -> None:
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    with pytest.raises(Exception, match="Weights only load failed"):
        loads(buffer.getvalue())
    assert not ran


def test_classes_that_the_user_allowed_are_sent() -> None:
    with torch.serialization.safe_globals([Custom]):
        assert loads(dumps(Custom(5))).value == 5
