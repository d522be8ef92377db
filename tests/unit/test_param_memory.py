"""Parameter storage, and the messages that broadcast parameters from their owners."""

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

from tests.support.monitoring import track_allocations
from zeroshard.engine import param_memory
from zeroshard.engine.param_memory import (
    FlatParamBuffers,
    InPlaceMessage,
    ParamMemory,
    StagedMessage,
    UnflattenedParams,
)
from zeroshard.errors import BindingError
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import FlatShards, WholeParams
from zeroshard.layout.spec import make_param_specs

RANKS = 3
StoreFactory = Callable[[], ParamMemory]
STORES: list[StoreFactory] = [UnflattenedParams, FlatParamBuffers, partial(FlatParamBuffers, by_owner=True)]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    random_dtype = dtype if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=random_dtype).to(dtype)


TENSORS: dict[str, Callable[[int], torch.Tensor]] = {
    "matrix": lambda seed: random_tensor(3, 5, seed=seed),
    "square": lambda seed: random_tensor(4, 4, seed=seed),
    "vector": lambda seed: random_tensor(7, seed=seed),
    "channels_last": lambda seed: random_tensor(2, 3, 4, 4, seed=seed).to(memory_format=torch.channels_last),
    "transposed": lambda seed: random_tensor(4, 4, seed=seed).t(),
    "with gaps": lambda seed: random_tensor(4, 6, seed=seed)[:, ::2],
    "0-dim": lambda seed: random_tensor(seed=seed),
    "empty": lambda seed: random_tensor(0, 3, seed=seed),
    "large": lambda seed: random_tensor(20, 20, seed=seed),
    "large and transposed": lambda seed: random_tensor(30, 20, seed=seed).t(),
    "float64": lambda seed: random_tensor(3, dtype=torch.float64, seed=seed),
    "bf16": lambda seed: random_tensor(5, 3, dtype=torch.bfloat16, seed=seed),
    "fp16, transposed": lambda seed: random_tensor(5, 3, dtype=torch.float16, seed=seed).t(),
    "complex": lambda seed: random_tensor(3, 3, dtype=torch.complex64, seed=seed),
    "integers": lambda seed: (random_tensor(9, dtype=torch.float64, seed=seed) * 9).to(torch.int64),
    "flags": lambda seed: random_tensor(9, dtype=torch.float64, seed=seed) > 0,
}


def make_params(seed: int = 0) -> list[torch.Tensor]:
    tensors = [make(seed + i) for i, make in enumerate(TENSORS.values())]
    return [nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors]


def make_layout(params: Sequence[torch.Tensor], world_size: int = RANKS) -> Layout:
    return WholeParams().extend(Layout.empty(world_size), make_param_specs([{"params": params}]))


def make_store(store_factory: StoreFactory, params: Sequence[torch.Tensor]) -> ParamMemory:
    store = store_factory()
    store.extend(make_layout(params), params)
    return store


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits so that a few hundred elements reach them."""
    monkeypatch.setattr(param_memory, "MIN_IN_PLACE_BYTES", 1024)
    monkeypatch.setattr(param_memory, "MESSAGE_BYTES", 1536)
    monkeypatch.setattr(param_memory, "STAGING_BYTES", 6144)


# ---- flat buffers


@pytest.mark.parametrize("name", TENSORS)
def test_flattening_preserves_user_visible_properties(name: str) -> None:
    index = list(TENSORS).index(name)
    params = make_params()
    param = params[index]
    before, grad = param.detach().clone(), torch.zeros_like(param)
    stride, trainable, pointer = param.stride(), param.requires_grad, param.data_ptr()
    param.grad = grad if trainable else None
    make_store(FlatParamBuffers, params)
    assert torch.equal(param, before)
    assert (param.shape, param.stride(), param.dtype) == (before.shape, stride, before.dtype)
    assert (param.requires_grad, param.is_leaf) == (trainable, True)
    assert param.grad is (grad if trainable else None)
    assert param.data_ptr() != pointer or not param.numel()


def test_one_buffer_per_dtype_in_layout_order() -> None:
    params = make_params()
    make_store(FlatParamBuffers, params)
    for bucket in make_layout(params).buckets:
        param_shards = [param_shard for param_shard in bucket.param_shards if params[param_shard.param].numel()]
        starts = {
            params[param_shard.param].data_ptr() - param_shard.in_bucket.start * bucket.dtype.itemsize
            for param_shard in param_shards
        }
        assert len(starts) == 1
        assert starts.pop() % 64 == 0


def test_each_param_has_its_own_storage() -> None:
    """Saving one parameter does not write the whole buffer."""
    params = make_params()
    make_store(FlatParamBuffers, params)
    for spec, param in zip(make_param_specs([{"params": params}]), params, strict=True):
        assert param.untyped_storage().nbytes() == spec.storage_numel * param.element_size()
    buffer = io.BytesIO()
    torch.save(params[2], buffer)
    assert len(buffer.getvalue()) < 2500


def test_adding_params_does_not_move_existing_ones() -> None:
    first, second = make_params(), make_params(seed=50)
    store = make_store(FlatParamBuffers, first)
    pointers = [param.data_ptr() for param in first]
    values = [param.detach().clone() for param in second]
    specs = make_param_specs([{"params": second}], first_index=len(first), first_group=1)
    store.extend(WholeParams().extend(make_layout(first), specs), second)
    assert [param.data_ptr() for param in first] == pointers
    assert all(map(torch.equal, second, values))


def test_only_an_overloaded_owner_broadcasts() -> None:
    """Other ranks relay a broadcast. Balanced owners send straight to their peers."""
    for sizes, is_balanced in (([300, 290, 310], [True] * 3), ([900, 90, 100], [False, True, True]), ([900], [False])):
        params = [nn.Parameter(torch.zeros(size)) for size in sizes]
        plan = make_store(UnflattenedParams, params).plan_broadcast(b"\1" * len(params))
        owners = {message.owner: message.is_balanced for message in plan.messages}
        assert [owners[make_layout(params).owner_of(index)] for index in range(len(params))] == is_balanced


# ---- moving parameters into the buffers


def make_flat_layout(params: Sequence[torch.Tensor], nbytes: int) -> Layout:
    return FlatShards(bucket_bytes=nbytes).extend(Layout.empty(RANKS), make_param_specs([{"params": params}]))


def test_params_are_moved_one_bucket_at_a_time() -> None:
    params = [nn.Parameter(random_tensor(100, seed=seed)) for seed in range(6)]
    layout = make_flat_layout(params, 2 * 400)
    assert len(layout.buckets) == 3
    old_storages = [ref(param.untyped_storage()) for param in params]
    num_alive: list[int] = []

    class Counting(FlatParamBuffers):
        def _allocate_buffers(self, *args: Any) -> None:
            num_alive.append(sum(storage() is not None for storage in old_storages))
            super()._allocate_buffers(*args)

    Counting().prepare(layout, params)
    assert num_alive == [6, 4, 2]
    assert not any(storage() is not None for storage in old_storages)


def test_owner_buffers_are_filled_one_at_a_time() -> None:
    """At most one owner's shard exists twice, and padding is zero."""
    params = [nn.Parameter(random_tensor(100, seed=seed)) for seed in range(9)]
    values = [param.detach().clone() for param in params]
    with track_allocations() as usage:
        stored = [nn.Parameter(value.clone()) for value in values]
        store = make_store(partial(FlatParamBuffers, by_owner=True), stored)
    padded = 4 * 112  # aligned to 64 bytes
    assert usage.peak <= 9 * 400 + 3 * padded + 400
    assert usage.kept <= 9 * padded
    assert isinstance(store, FlatParamBuffers)
    assert [buffer.numel() for buffer in store.param_tensors()] == [3 * 112] * RANKS
    assert all(not buffer.view(3, 112)[:, 100:].any() for buffer in store.param_tensors())
    assert all(map(torch.equal, stored, values))


def storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_rollback_restores_separate_storage() -> None:
    first, second = make_params(), make_params(seed=50)
    store = FlatParamBuffers()
    layout = make_layout(first)
    store.prepare(layout, first)
    store.extend(layout, first)
    addresses = [param.data_ptr() for param in first]
    values, strides = [param.detach().clone() for param in second], [param.stride() for param in second]
    specs = make_param_specs([{"params": second}], first_index=len(first), first_group=1)
    extended = WholeParams().extend(layout, specs)
    store.prepare(extended, [*first, *second])
    # Kept alive so that their memory is not reused.
    buffers = [store.buffer(bucket) for bucket in range(len(extended.buckets))]
    store.rollback()
    assert [param.data_ptr() for param in first] == addresses
    assert all(map(torch.equal, second, values))
    assert [param.stride() for param in second] == strides
    assert {storage_address(buffer) for buffer in buffers}.isdisjoint(
        storage_address(param) for param in second if param.numel()
    )
    store.prepare(extended, [*first, *second])
    store.extend(extended, second)
    assert all(map(torch.equal, second, values))


def test_failed_move_leaves_other_params_intact() -> None:
    params = [nn.Parameter(random_tensor(100, seed=seed)) for seed in range(4)]
    values = [param.detach().clone() for param in params]
    layout = make_flat_layout(params, 2 * 400)
    store = FlatParamBuffers()
    with pytest.raises(RuntimeError, match="must match"):
        store.prepare(layout, [nn.Parameter(random_tensor(99)), *params[1:]])  # moved last
    assert params[2].untyped_storage().data_ptr() != 0
    store.rollback()
    assert all(map(torch.equal, params, values))
    store.prepare(layout, params)
    store.extend(layout, params)
    assert all(map(torch.equal, params, values))


# ---- parameters whose data was reassigned


@pytest.mark.parametrize("change", [torch.clone, lambda t: t.clone().t().contiguous().t(), torch.zeros_like])
def test_reassigned_data_is_moved_back_with_its_values(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    params = make_params()
    store = make_store(FlatParamBuffers, params)
    param = params[0]
    address, stride = param.data_ptr(), param.stride()
    reassigned = change(param.data + 1)
    param.data = reassigned.clone(memory_format=torch.preserve_format)
    assert param.data_ptr() != address
    store.rebind_if_moved()
    assert (param.data_ptr(), param.stride()) == (address, stride)
    assert torch.equal(param, reassigned)


def test_swapped_params_are_moved_back_with_their_values() -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
    store = make_store(FlatParamBuffers, [first, second])
    addresses = [first.data_ptr(), second.data_ptr()]
    first.data, second.data = second.data, first.data
    store.rebind_if_moved()
    assert [first.data_ptr(), second.data_ptr()] == addresses
    assert (first.tolist(), second.tolist()) == ([2.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("store_factory", STORES)
def test_messages_follow_reassigned_data(store_factory: StoreFactory) -> None:
    params = make_params()
    store = make_store(store_factory, params)
    selected = bytes([1] * len(params))
    store.plan_broadcast(selected)
    with torch.no_grad():
        params[2].data = params[2].data + 1
        store.rebind_if_moved()
        for message in store.plan_broadcast(selected).messages:
            message.pack()
            message.payload.zero_()
            message.unpack()
    assert not any(param.any() for param in params)


@pytest.mark.parametrize("store_factory", STORES)
def test_plan_is_reused_if_nothing_moved(store_factory: StoreFactory) -> None:
    params = make_params()
    store = make_store(store_factory, params)
    selected = bytes([1] * len(params))
    plan = store.plan_broadcast(selected)
    params[0].data.add_(1)
    store.rebind_if_moved()
    assert store.plan_broadcast(selected) is plan


@pytest.mark.parametrize("store_factory", STORES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.double(), r"got torch.float64 on cpu with shape \(3, 5\)\. "),
        (lambda t: t[:2].clone(), r"got torch.float32 on cpu with shape \(2, 5\)\. "),
    ],
    ids=["dtype", "shape"],
)
def test_changed_dtype_or_shape_is_rejected(
    store_factory: StoreFactory, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    params = make_params()
    store = make_store(store_factory, params)
    params[0].data = change(params[0].data)
    expected = r"expected torch.float32 on cpu with shape \(3, 5\)"
    with pytest.raises(BindingError, match=rf"parameter 0 changed: {expected}.*{message}"):
        store.rebind_if_moved()


# ---- messages between the stores of several ranks in one process


class Ranks:
    """The stores of all ranks. Their parameters have the same shapes and different values."""

    def __init__(self, store_factory: StoreFactory) -> None:
        self.params = [make_params(seed=100 * rank) for rank in range(RANKS)]
        self.stores = [make_store(store_factory, params) for params in self.params]
        self.layout = make_layout(self.params[0])

    @property
    def all_params(self) -> bytes:
        return bytes([1] * len(TENSORS))

    def sizes(self, selected: bytes) -> list[list[tuple[int, int]]]:
        """Return owner and size in bytes of each message, for each rank."""
        return [
            [(message.owner, message.payload.nbytes) for message in store.plan_broadcast(selected).messages]
            for store in self.stores
        ]

    @torch.no_grad()
    def broadcast(self, selected: bytes) -> None:
        """Broadcast like real ranks do, unpacking each message as late as the in-flight window allows."""
        plans = [store.plan_broadcast(selected) for store in self.stores]
        waiting: deque[tuple[param_memory.BroadcastMessage, ...]] = deque()
        window = min(plan.max_in_flight for plan in plans)
        for messages in zip(*(plan.messages for plan in plans), strict=True):
            if len(waiting) == window:
                self._deliver(waiting.popleft())
            source = messages[messages[0].owner]
            source.pack()
            for message in messages:
                if message is not source:
                    message.payload.copy_(source.payload)
            waiting.append(messages)
        while waiting:
            self._deliver(waiting.popleft())

    def _deliver(self, messages: tuple[param_memory.BroadcastMessage, ...]) -> None:
        for rank, message in enumerate(messages):
            if rank != message.owner:
                message.unpack()


def random_flags(seed: int) -> bytes:
    rng = random.Random(seed)
    return bytes(rng.random() < 0.6 for _ in TENSORS)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("store_factory", STORES)
def test_only_selected_params_are_broadcast(store_factory: StoreFactory) -> None:
    ranks = Ranks(store_factory)
    for selected in (random_flags(1), random_flags(2), bytes(len(TENSORS)), ranks.all_params, random_flags(3)):
        before = [[param.detach().clone() for param in params] for params in ranks.params]
        ranks.broadcast(selected)
        for index, flag in enumerate(selected):
            owner = ranks.layout.owner_of(index)
            for rank in range(RANKS):
                expected = before[owner if flag else rank][index]
                assert torch.equal(ranks.params[rank][index], expected), (list(TENSORS)[index], rank)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("store_factory", STORES)
def test_strides_may_differ_between_ranks(store_factory: StoreFactory) -> None:
    """All ranks agree on owners and sizes of messages even if one rank has a different memory layout."""
    ranks = Ranks(store_factory)
    expected = {selected: ranks.sizes(selected)[0] for selected in (random_flags(1), random_flags(2), ranks.all_params)}
    for param in ranks.params[1]:
        changed = param.data.t().contiguous().t() if param.dim() == 2 else param.data.contiguous()
        param.data = changed.clone(memory_format=torch.preserve_format)
    ranks.stores[1].rebind_if_moved()
    for selected, sizes in expected.items():
        assert ranks.sizes(selected) == [sizes] * RANKS
    ranks.broadcast(ranks.all_params)
    for params in ranks.params[1:]:
        assert all(map(torch.equal, params, ranks.params[0]))


@pytest.mark.parametrize("store_factory", STORES)
def test_strides_may_change_in_place(store_factory: StoreFactory) -> None:
    """A square matrix that is transposed on all ranks stays in place; its message was planned before."""
    ranks = Ranks(store_factory)
    index, selected = list(TENSORS).index("square"), bytes(name == "square" for name in TENSORS)
    square = [params[index] for params in ranks.params]
    ranks.broadcast(selected)
    for param, store in zip(square, ranks.stores, strict=True):
        param.data = param.data.t()
        store.rebind_if_moved()
    expected = random_tensor(4, 4, seed=77)
    square[ranks.layout.owner_of(index)].data.copy_(expected)
    ranks.broadcast(selected)
    assert all(torch.equal(param, expected) for param in square)


@pytest.mark.parametrize("store_factory", STORES)
def test_remote_update_increments_version_counter(store_factory: StoreFactory) -> None:
    ranks = Ranks(store_factory)
    selected = random_flags(1)
    before = [[param._version for param in params] for params in ranks.params]
    ranks.broadcast(selected)
    for index, flag in enumerate(selected):
        owner = ranks.layout.owner_of(index)
        is_sent = bool(flag) and ranks.params[0][index].numel() > 0
        for rank in range(RANKS):
            changed = ranks.params[rank][index]._version != before[rank][index]
            assert changed == (is_sent and rank != owner)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("store_factory", STORES)
def test_messages_alternate_between_owners(store_factory: StoreFactory) -> None:
    ranks = Ranks(store_factory)
    for selected in (ranks.all_params, random_flags(4)):
        owners = [message.owner for message in ranks.stores[0].plan_broadcast(selected).messages]
        turns = [owners[:position].count(owner) for position, owner in enumerate(owners)]
        assert list(zip(turns, owners, strict=True)) == sorted(zip(turns, owners, strict=True))


@pytest.mark.parametrize("store_factory", STORES)
def test_no_messages_if_nothing_to_broadcast(store_factory: StoreFactory) -> None:
    ranks = Ranks(store_factory)
    assert ranks.stores[0].plan_broadcast(bytes(len(TENSORS))).messages == []
    empty = bytes(name == "empty" for name in TENSORS)
    assert ranks.stores[0].plan_broadcast(empty).messages == []


@pytest.mark.parametrize("store_factory", STORES)
def test_single_bucket_broadcast(store_factory: StoreFactory) -> None:
    ranks = Ranks(store_factory)
    for index, bucket in enumerate(ranks.layout.buckets):
        messages = ranks.stores[0].plan_bucket_broadcast(index).messages
        owners = {param_shard.owner for param_shard in bucket.param_shards if param_shard.in_param.length}
        assert {message.owner for message in messages} == owners
        assert {message.payload.dtype for message in messages} == {bucket.dtype}
        assert ranks.stores[0].plan_bucket_broadcast(index).messages == messages


def test_one_message_per_owner_and_dtype() -> None:
    """Independent of the number of parameters."""
    params = [nn.Parameter(torch.zeros(10)) for _ in range(200)]
    for store_factory in STORES:
        assert len(make_store(store_factory, params).plan_broadcast(bytes([1] * 200)).messages) == RANKS


def test_flat_message_covers_adjacent_params() -> None:
    """Unselected parameters split a run. A single run is sent in place; several runs are packed."""
    params = [nn.Parameter(torch.zeros(16)) for _ in range(9)]
    store = make_store(FlatParamBuffers, params)
    for selected in ([1] * 9, [1, 1, 1, 0, 1, 1, 1, 1, 0], [0, 1, 0] * 3):
        messages = store.plan_broadcast(bytes(selected)).messages
        owned = [[selected[i] for i in range(rank, 9, RANKS)] for rank in range(RANKS)]
        runs = [sum(flag for flag, _ in groupby(flags)) for flags in owned]
        assert [runs[message.owner] > 1 for message in messages] == [
            isinstance(message, StagedMessage) for message in messages
        ]
        assert len(messages) == sum(count > 0 for count in runs)
        for message in messages:
            message.payload.fill_(1)
            message.unpack()
        assert [int(param.detach().min()) for param in params] == list(selected)
        assert [int(param.detach().max()) for param in params] == list(selected)
        for param in params:
            param.data.zero_()


@pytest.mark.usefixtures("small_limits")
def test_large_params_are_sent_in_place_and_small_ones_packed() -> None:
    sizes = [100, 255, 256, 700, 90, 255, 3]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    store = UnflattenedParams()
    store.extend(make_layout(params, world_size=1), params)
    messages = store.plan_broadcast(bytes([1] * len(params))).messages
    in_place = [message for message in messages if isinstance(message, InPlaceMessage)]
    staged = [message for message in messages if isinstance(message, StagedMessage)]
    assert [message.payload.data_ptr() for message in in_place] == [params[2].data_ptr(), params[3].data_ptr()]
    assert [message.payload.numel() for message in staged] == [100 + 255, 90 + 255 + 3]  # the limit is 384


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("world_size", [1, 4])
def test_staging_memory_is_bounded(world_size: int) -> None:
    """The bound holds over all cached plans, in whatever order they are requested."""
    params = [nn.Parameter(torch.zeros(1 + 7 * i % 250)) for i in range(60)]
    params += [nn.Parameter(torch.zeros(40, 30).t())]
    store = UnflattenedParams()
    store.extend(make_layout(params, world_size), params)
    rng = random.Random(0)
    selections = [bytes(rng.random() < fraction for _ in params) for fraction in (0.1, 0.9, 0.3, 1.0)]
    for selected in (*selections, *reversed(selections)):
        store.plan_broadcast(selected)
    storages: dict[int, int] = {}
    for selected in selections:
        plan = store.plan_broadcast(selected)
        payloads = [message.payload for message in plan.messages if isinstance(message, StagedMessage)]
        largest = max(payload.nbytes for payload in payloads)
        assert plan.max_in_flight == 1 or plan.max_in_flight * largest <= param_memory.STAGING_BYTES
        storages |= {payload.untyped_storage().data_ptr(): payload.untyped_storage().nbytes() for payload in payloads}
    assert sum(storages.values()) <= param_memory.STAGING_BYTES


@pytest.mark.usefixtures("small_limits")
def test_messages_in_flight_do_not_share_memory() -> None:
    params = [nn.Parameter(torch.zeros(200)) for _ in range(40)]
    store = UnflattenedParams()
    store.extend(make_layout(params, world_size=1), params)
    plan = store.plan_broadcast(bytes([1] * 40))
    assert len(plan.messages) > plan.max_in_flight > 1
    for first in range(len(plan.messages) - plan.max_in_flight + 1):
        payloads = [message.payload for message in plan.messages[first : first + plan.max_in_flight]]
        spans = sorted((payload.data_ptr(), payload.data_ptr() + payload.nbytes) for payload in payloads)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
