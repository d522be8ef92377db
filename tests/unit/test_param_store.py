"""Where parameters lie, and the parcels that carry them from their owners to the others."""

import io
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from tests.support.monitoring import allocated
from zeroshard.engine import param_store
from zeroshard.engine.param_store import FlatParamBuffers, InPlaceMessage, ParamStore, StagedMessage, UnflattenedParams
from zeroshard.errors import BindingError
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import FlatShards, WholeParams
from zeroshard.layout.spec import make_param_specs

RANKS = 3
Kind = Callable[[], ParamStore]
STORES: list[Kind] = [UnflattenedParams, FlatParamBuffers, partial(FlatParamBuffers, by_owner=True)]


def filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    kind = dtype if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=kind).to(dtype)


FORMS: dict[str, Callable[[int], torch.Tensor]] = {
    "matrix": lambda seed: filled(3, 5, seed=seed),
    "square": lambda seed: filled(4, 4, seed=seed),
    "vector": lambda seed: filled(7, seed=seed),
    "channels_last": lambda seed: filled(2, 3, 4, 4, seed=seed).to(memory_format=torch.channels_last),
    "transposed": lambda seed: filled(4, 4, seed=seed).t(),
    "with gaps": lambda seed: filled(4, 6, seed=seed)[:, ::2],
    "0-dim": lambda seed: filled(seed=seed),
    "empty": lambda seed: filled(0, 3, seed=seed),
    "large": lambda seed: filled(20, 20, seed=seed),
    "large and transposed": lambda seed: filled(30, 20, seed=seed).t(),
    "float64": lambda seed: filled(3, dtype=torch.float64, seed=seed),
    "bf16": lambda seed: filled(5, 3, dtype=torch.bfloat16, seed=seed),
    "fp16, transposed": lambda seed: filled(5, 3, dtype=torch.float16, seed=seed).t(),
    "complex": lambda seed: filled(3, 3, dtype=torch.complex64, seed=seed),
    "integers": lambda seed: (filled(9, dtype=torch.float64, seed=seed) * 9).to(torch.int64),
    "flags": lambda seed: filled(9, dtype=torch.float64, seed=seed) > 0,
}


def make_params(seed: int = 0) -> list[torch.Tensor]:
    tensors = [form(seed + i) for i, form in enumerate(FORMS.values())]
    return [nn.Parameter(t, requires_grad=t.is_floating_point() or t.is_complex()) for t in tensors]


def layout_of(params: Sequence[torch.Tensor], world_size: int = RANKS) -> Layout:
    return WholeParams().extend(Layout.empty(world_size), make_param_specs([{"params": params}]))


def bound(kind: Kind, params: Sequence[torch.Tensor]) -> ParamStore:
    made = kind()
    made.extend(layout_of(params), params)
    return made


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a few hundred elements reach."""
    monkeypatch.setattr(param_store, "MIN_IN_PLACE_BYTES", 1024)
    monkeypatch.setattr(param_store, "MESSAGE_BYTES", 1536)
    monkeypatch.setattr(param_store, "STAGING_BYTES", 6144)


# ---- flat buffers


@pytest.mark.parametrize("name", FORMS)
def test_a_flat_store_keeps_what_the_user_sees(name: str) -> None:
    index = list(FORMS).index(name)
    params = make_params()
    param = params[index]
    before, grad = param.detach().clone(), torch.zeros_like(param)
    stride, trainable, pointer = param.stride(), param.requires_grad, param.data_ptr()
    param.grad = grad if trainable else None
    bound(FlatParamBuffers, params)
    assert torch.equal(param, before)
    assert (param.shape, param.stride(), param.dtype) == (before.shape, stride, before.dtype)
    assert (param.requires_grad, param.is_leaf) == (trainable, True)
    assert param.grad is (grad if trainable else None)
    assert param.data_ptr() != pointer or not param.numel()


def test_parameters_of_a_dtype_lie_in_one_buffer_as_the_layout_says() -> None:
    params = make_params()
    bound(FlatParamBuffers, params)
    for bucket in layout_of(params).buckets:
        pieces = [piece for piece in bucket.param_shards if params[piece.param].numel()]
        starts = {params[piece.param].data_ptr() - piece.in_bucket.start * bucket.dtype.itemsize for piece in pieces}
        assert len(starts) == 1
        assert starts.pop() % 64 == 0


def test_each_parameter_has_a_storage_of_its_own() -> None:
    """Saving one parameter writes that one."""
    params = make_params()
    bound(FlatParamBuffers, params)
    for spec, param in zip(make_param_specs([{"params": params}]), params, strict=True):
        assert param.untyped_storage().nbytes() == spec.storage_numel * param.element_size()
    buffer = io.BytesIO()
    torch.save(params[2], buffer)
    assert len(buffer.getvalue()) < 2500


def test_later_parameters_do_not_move_the_earlier_ones() -> None:
    first, second = make_params(), make_params(seed=50)
    store = bound(FlatParamBuffers, first)
    pointers = [param.data_ptr() for param in first]
    values = [param.detach().clone() for param in second]
    specs = make_param_specs([{"params": second}], first_index=len(first), first_group=1)
    store.extend(WholeParams().extend(layout_of(first), specs), second)
    assert [param.data_ptr() for param in first] == pointers
    assert all(map(torch.equal, second, values))


# ---- parameters on their way in


def in_buckets(params: Sequence[torch.Tensor], nbytes: int) -> Layout:
    return FlatShards(bucket_bytes=nbytes).extend(Layout.empty(RANKS), make_param_specs([{"params": params}]))


def test_they_move_bucket_by_bucket_so_that_only_one_is_there_twice() -> None:
    params = [nn.Parameter(filled(100, seed=seed)) for seed in range(6)]
    layout = in_buckets(params, 2 * 400)
    assert len(layout.buckets) == 3
    old = [ref(param.untyped_storage()) for param in params]
    left: list[int] = []

    class Counting(FlatParamBuffers):
        def _allocate_buffers(self, *given: Any) -> None:
            left.append(sum(storage() is not None for storage in old))
            super()._allocate_buffers(*given)

    Counting().prepare(layout, params)
    assert left == [6, 4, 2]
    assert not any(storage() is not None for storage in old)


def test_buffers_of_owners_are_filled_one_after_the_other() -> None:
    """So that only one owner's share is there twice, and padding is zero."""
    params = [nn.Parameter(filled(100, seed=seed)) for seed in range(9)]
    values = [param.detach().clone() for param in params]
    with allocated() as found:
        inside = [nn.Parameter(value.clone()) for value in values]
        store = bound(partial(FlatParamBuffers, by_owner=True), inside)
    padded = 4 * 112  # 64 bytes are the alignment
    assert found.peak <= 9 * 400 + 3 * padded + 400
    assert found.kept <= 9 * padded
    assert isinstance(store, FlatParamBuffers)
    assert [buffer.numel() for buffer in store.buffers()] == [3 * 112] * RANKS
    assert all(not buffer.view(3, 112)[:, 100:].any() for buffer in store.buffers())
    assert all(map(torch.equal, inside, values))


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_those_that_are_not_taken_in_have_memory_of_their_own_again() -> None:
    first, second = make_params(), make_params(seed=50)
    store = FlatParamBuffers()
    layout = layout_of(first)
    store.prepare(layout, first)
    store.extend(layout, first)
    homes = [param.data_ptr() for param in first]
    values, strides = [it.detach().clone() for it in second], [it.stride() for it in second]
    specs = make_param_specs([{"params": second}], first_index=len(first), first_group=1)
    grown = WholeParams().extend(layout, specs)
    store.prepare(grown, [*first, *second])
    buffers = [store.buffer(bucket) for bucket in range(len(grown.buckets))]  # alive, so that nobody gets their memory
    store.rollback()
    assert [param.data_ptr() for param in first] == homes
    assert all(map(torch.equal, second, values))
    assert [param.stride() for param in second] == strides
    assert {memory_of(it) for it in buffers}.isdisjoint(memory_of(param) for param in second if param.numel())
    store.prepare(grown, [*first, *second])
    store.extend(grown, second)
    assert all(map(torch.equal, second, values))


def test_what_cannot_be_moved_leaves_the_others_with_memory_of_their_own() -> None:
    params = [nn.Parameter(filled(100, seed=seed)) for seed in range(4)]
    values = [param.detach().clone() for param in params]
    layout = in_buckets(params, 2 * 400)
    store = FlatParamBuffers()
    with pytest.raises(RuntimeError, match="must match"):
        store.prepare(layout, [nn.Parameter(filled(99)), *params[1:]])  # it comes last
    assert params[2].untyped_storage().data_ptr() != 0
    store.rollback()
    assert all(map(torch.equal, params, values))
    store.prepare(layout, params)
    store.extend(layout, params)
    assert all(map(torch.equal, params, values))


# ---- parameters whose memory was exchanged


@pytest.mark.parametrize("change", [torch.clone, lambda t: t.clone().t().contiguous().t(), torch.zeros_like])
def test_exchanged_memory_moves_home_with_its_values(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    params = make_params()
    store = bound(FlatParamBuffers, params)
    param = params[0]
    home, stride = param.data_ptr(), param.stride()
    fresh = change(param.data + 1)
    param.data = fresh.clone(memory_format=torch.preserve_format)
    assert param.data_ptr() != home
    store.rebind_if_moved()
    assert (param.data_ptr(), param.stride()) == (home, stride)
    assert torch.equal(param, fresh)


def test_parameters_that_changed_places_change_back_with_their_values() -> None:
    one, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
    store = bound(FlatParamBuffers, [one, other])
    homes = [one.data_ptr(), other.data_ptr()]
    one.data, other.data = other.data, one.data
    store.rebind_if_moved()
    assert [one.data_ptr(), other.data_ptr()] == homes
    assert (one.tolist(), other.tolist()) == ([2.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("kind", STORES)
def test_parcels_follow_exchanged_memory(kind: Kind) -> None:
    params = make_params()
    store = bound(kind, params)
    moving = bytes([1] * len(params))
    store.plan_broadcast(moving)
    with torch.no_grad():
        params[2].data = params[2].data + 1
        store.rebind_if_moved()
        for parcel in store.plan_broadcast(moving).messages:
            parcel.pack()
            parcel.payload.zero_()
            parcel.unpack()
    assert not any(param.any() for param in params)


@pytest.mark.parametrize("kind", STORES)
def test_what_stayed_needs_no_new_parcels(kind: Kind) -> None:
    params = make_params()
    store = bound(kind, params)
    moving = bytes([1] * len(params))
    shipment = store.plan_broadcast(moving)
    params[0].data.add_(1)
    store.rebind_if_moved()
    assert store.plan_broadcast(moving) is shipment


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda t: t.double(), r"torch.float64 on cpu with shape \(3, 5\) now"),
        (lambda t: t[:2].clone(), r"torch.float32 on cpu with shape \(2, 5\) now"),
    ],
    ids=["cast", "cut"],
)
def test_another_kind_of_parameter_is_refused(
    kind: Kind, change: Callable[[torch.Tensor], torch.Tensor], now: str
) -> None:
    params = make_params()
    store = bound(kind, params)
    params[0].data = change(params[0].data)
    with pytest.raises(BindingError, match=rf"parameter 0 was torch.float32 on cpu with shape \(3, 5\).*{now}"):
        store.rebind_if_moved()


# ---- parcels, between several ranks' stores in one process


class Ranks:
    """The stores of all ranks over parameters of the same kinds and different values."""

    def __init__(self, kind: Kind) -> None:
        self.params = [make_params(seed=100 * rank) for rank in range(RANKS)]
        self.stores = [bound(kind, params) for params in self.params]
        self.layout = layout_of(self.params[0])

    @property
    def everything(self) -> bytes:
        return bytes([1] * len(FORMS))

    def sizes(self, moving: bytes) -> list[list[tuple[int, int]]]:
        """Owner and bytes of each parcel, as each rank sees them."""
        return [[(p.owner, p.payload.nbytes) for p in store.plan_broadcast(moving).messages] for store in self.stores]

    @torch.no_grad()
    def ship(self, moving: bytes) -> None:
        """Send as real ranks do, each parcel unpacked as late as the window allows."""
        shipments = [store.plan_broadcast(moving) for store in self.stores]
        waiting: deque[tuple[param_store.BroadcastMessage, ...]] = deque()
        window = min(shipment.max_in_flight for shipment in shipments)
        for parcels in zip(*(shipment.messages for shipment in shipments), strict=True):
            if len(waiting) == window:
                self._arrive(waiting.popleft())
            source = parcels[parcels[0].owner]
            source.pack()
            for parcel in parcels:
                if parcel is not source:
                    parcel.payload.copy_(source.payload)
            waiting.append(parcels)
        while waiting:
            self._arrive(waiting.popleft())

    def _arrive(self, parcels: tuple[param_store.BroadcastMessage, ...]) -> None:
        for rank, parcel in enumerate(parcels):
            if rank != parcel.owner:
                parcel.unpack()


def some(seed: int) -> bytes:
    rng = random.Random(seed)
    return bytes(rng.random() < 0.6 for _ in FORMS)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", STORES)
def test_what_moves_arrives_and_the_rest_stays(kind: Kind) -> None:
    ranks = Ranks(kind)
    for moving in (some(1), some(2), bytes(len(FORMS)), ranks.everything, some(3)):
        before = [[param.detach().clone() for param in params] for params in ranks.params]
        ranks.ship(moving)
        for index, flag in enumerate(moving):
            owner = ranks.layout.owner_of(index)
            for rank in range(RANKS):
                expected = before[owner if flag else rank][index]
                assert torch.equal(ranks.params[rank][index], expected), (list(FORMS)[index], rank)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", STORES)
def test_strides_of_one_rank_do_not_matter_to_the_others(kind: Kind) -> None:
    """All ranks agree on owners and sizes of parcels, though the memory of one of them is laid out otherwise."""
    ranks = Ranks(kind)
    expected = {moving: ranks.sizes(moving)[0] for moving in (some(1), some(2), ranks.everything)}
    for param in ranks.params[1]:
        other = param.data.t().contiguous().t() if param.dim() == 2 else param.data.contiguous()
        param.data = other.clone(memory_format=torch.preserve_format)
    ranks.stores[1].rebind_if_moved()
    for moving, sizes in expected.items():
        assert ranks.sizes(moving) == [sizes] * RANKS
    ranks.ship(ranks.everything)
    for params in ranks.params[1:]:
        assert all(map(torch.equal, params, ranks.params[0]))


@pytest.mark.parametrize("kind", STORES)
def test_strides_may_change_in_place(kind: Kind) -> None:
    """A square matrix that is transposed on all ranks stays where it is; its parcel was made before."""
    ranks = Ranks(kind)
    index, moving = list(FORMS).index("square"), bytes(name == "square" for name in FORMS)
    square = [params[index] for params in ranks.params]
    ranks.ship(moving)
    for param, store in zip(square, ranks.stores, strict=True):
        param.data = param.data.t()
        store.rebind_if_moved()
    expected = filled(4, 4, seed=77)
    square[ranks.layout.owner_of(index)].data.copy_(expected)
    ranks.ship(moving)
    assert all(torch.equal(param, expected) for param in square)


@pytest.mark.parametrize("kind", STORES)
def test_a_remote_update_counts_as_a_change_in_place(kind: Kind) -> None:
    ranks = Ranks(kind)
    moving = some(1)
    before = [[param._version for param in params] for params in ranks.params]
    ranks.ship(moving)
    for index, flag in enumerate(moving):
        owner = ranks.layout.owner_of(index)
        arrives = bool(flag) and ranks.params[0][index].numel() > 0
        for rank in range(RANKS):
            changed = ranks.params[rank][index]._version != before[rank][index]
            assert changed == (arrives and rank != owner)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", STORES)
def test_owners_take_turns(kind: Kind) -> None:
    ranks = Ranks(kind)
    for moving in (ranks.everything, some(4)):
        owners = [parcel.owner for parcel in ranks.stores[0].plan_broadcast(moving).messages]
        turns = [owners[:place].count(owner) for place, owner in enumerate(owners)]
        assert list(zip(turns, owners, strict=True)) == sorted(zip(turns, owners, strict=True))


@pytest.mark.parametrize("kind", STORES)
def test_nothing_to_move_needs_no_parcels(kind: Kind) -> None:
    ranks = Ranks(kind)
    assert ranks.stores[0].plan_broadcast(bytes(len(FORMS))).messages == []
    empty = bytes(name == "empty" for name in FORMS)
    assert ranks.stores[0].plan_broadcast(empty).messages == []


@pytest.mark.parametrize("kind", STORES)
def test_a_bucket_travels_by_itself(kind: Kind) -> None:
    ranks = Ranks(kind)
    for number, bucket in enumerate(ranks.layout.buckets):
        parcels = ranks.stores[0].plan_bucket_broadcast(number).messages
        owners = {piece.owner for piece in bucket.param_shards if piece.in_param.length}
        assert {parcel.owner for parcel in parcels} == owners
        assert {parcel.payload.dtype for parcel in parcels} == {bucket.dtype}
        assert ranks.stores[0].plan_bucket_broadcast(number).messages == parcels


def test_one_message_an_owner_and_dtype() -> None:
    """However many parameters there are."""
    params = [nn.Parameter(torch.zeros(10)) for _ in range(200)]
    for kind in STORES:
        assert len(bound(kind, params).plan_broadcast(bytes([1] * 200)).messages) == RANKS


def test_a_flat_parcel_is_a_run_of_neighbours() -> None:
    """What does not move splits a run. One that is alone is the memory of its parameters; several are packed."""
    params = [nn.Parameter(torch.zeros(16)) for _ in range(9)]
    store = bound(FlatParamBuffers, params)
    for moving in ([1] * 9, [1, 1, 1, 0, 1, 1, 1, 1, 0], [0, 1, 0] * 3):
        parcels = store.plan_broadcast(bytes(moving)).messages
        owned = [[moving[i] for i in range(rank, 9, RANKS)] for rank in range(RANKS)]
        runs = [sum(flag for flag, _ in groupby(flags)) for flags in owned]
        assert [runs[parcel.owner] > 1 for parcel in parcels] == [isinstance(it, StagedMessage) for it in parcels]
        assert len(parcels) == sum(count > 0 for count in runs)
        for parcel in parcels:
            parcel.payload.fill_(1)
            parcel.unpack()
        assert [int(param.detach().min()) for param in params] == list(moving)
        assert [int(param.detach().max()) for param in params] == list(moving)
        for param in params:
            param.data.zero_()


@pytest.mark.usefixtures("small_limits")
def test_large_parameters_travel_alone_and_small_ones_together() -> None:
    sizes = [100, 255, 256, 700, 90, 255, 3]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    store = UnflattenedParams()
    store.extend(layout_of(params, world_size=1), params)
    parcels = store.plan_broadcast(bytes([1] * len(params))).messages
    alone = [parcel for parcel in parcels if isinstance(parcel, InPlaceMessage)]
    packed = [parcel for parcel in parcels if isinstance(parcel, StagedMessage)]
    assert [parcel.payload.data_ptr() for parcel in alone] == [params[2].data_ptr(), params[3].data_ptr()]
    assert [parcel.payload.numel() for parcel in packed] == [100 + 255, 90 + 255 + 3]  # 384 are the limit


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("world_size", [1, 4])
def test_staging_stays_within_its_bound(world_size: int) -> None:
    """Over all shipments that a store keeps, and whatever they are asked for in between."""
    params = [nn.Parameter(torch.zeros(1 + 7 * i % 250)) for i in range(60)]
    params += [nn.Parameter(torch.zeros(40, 30).t())]
    store = UnflattenedParams()
    store.extend(layout_of(params, world_size), params)
    rng = random.Random(0)
    wishes = [bytes(rng.random() < share for _ in params) for share in (0.1, 0.9, 0.3, 1.0)]
    for moving in (*wishes, *reversed(wishes)):
        store.plan_broadcast(moving)
    storages: dict[int, int] = {}
    for moving in wishes:
        shipment = store.plan_broadcast(moving)
        staged = [parcel.payload for parcel in shipment.messages if isinstance(parcel, StagedMessage)]
        largest = max(wire.nbytes for wire in staged)
        assert shipment.max_in_flight == 1 or shipment.max_in_flight * largest <= param_store.STAGING_BYTES
        storages |= {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in staged}
    assert sum(storages.values()) <= param_store.STAGING_BYTES


@pytest.mark.usefixtures("small_limits")
def test_parcels_within_a_window_do_not_share_memory() -> None:
    params = [nn.Parameter(torch.zeros(200)) for _ in range(40)]
    store = UnflattenedParams()
    store.extend(layout_of(params, world_size=1), params)
    shipment = store.plan_broadcast(bytes([1] * 40))
    assert len(shipment.messages) > shipment.max_in_flight > 1
    for first in range(len(shipment.messages) - shipment.max_in_flight + 1):
        wires = [parcel.payload for parcel in shipment.messages[first : first + shipment.max_in_flight]]
        spans = sorted((wire.data_ptr(), wire.data_ptr() + wire.nbytes) for wire in wires)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
