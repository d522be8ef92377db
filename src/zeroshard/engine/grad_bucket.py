"""Gradients of a bucket as one flat run of memory, copied only where they must be."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from .._types import Span
from ..comm.transport import ReduceWork, ShardTransport
from ..config import sum_dtype
from ..layout.layout import Bucket, BucketSlot, Layout
from ..layout.spec import ParamSpec
from ..profiling import Phase, StepProfiler
from ..state.tensor_utils import dense_flat_view

MAX_IDLE_BUFFERS = 3
"""Idle buffers of a kind: one that is filled while two are under way."""

FOREACH_BATCH_SIZE = 256
"""Gradients that are copied by one call."""

OptionalGrads = Iterable[torch.Tensor | None]
"""Looked at one after the other, and only once."""


class GradSlot:
    """Where a parameter lies in a bucket."""

    def __init__(self, bucket_slot: BucketSlot, spec: ParamSpec) -> None:
        (self.param, self.span), self.spec = bucket_slot, spec

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat buffer, in its shape."""
        return flat[slice(*self.span)].as_strided(self.spec.shape, self.spec.stride)


class BucketBuffer:
    """Flat memory, and the views of it that buckets have made."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views: dict[int, list[torch.Tensor]] = {}


class BufferPool:
    """Buffers of one dtype on one device, each large enough for every bucket that several parameters share."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._buffer_numel = 0
        self._idle: list[BucketBuffer] = []

    def idle_buffers(self) -> list[torch.Tensor]:
        """The memory of idle buffers."""
        return [buffer.flat for buffer in self._idle]

    def reserve(self, numel: int) -> None:
        if numel > self._buffer_numel:
            self._buffer_numel = numel
            self._idle.clear()

    def acquire(self, numel: int) -> BucketBuffer:
        """A buffer for so many elements at least. One for more than there is room for is not kept."""
        if self._idle and numel <= self._buffer_numel:
            return self._idle.pop()
        return BucketBuffer(torch.empty(max(numel, self._buffer_numel), dtype=self.dtype, device=self._device))

    def release(self, buffer: BucketBuffer) -> None:
        if len(self._idle) < MAX_IDLE_BUFFERS and buffer.flat.numel() == self._buffer_numel:
            self._idle.append(buffer)


class BucketPacker:
    """How the gradients of a bucket are laid out on the way: as in the bucket, but without the padding at its end."""

    def __init__(
        self, layout: Layout, bucket: Bucket, dtype: torch.dtype, *, include_padding: bool, scale: float = 1.0
    ) -> None:
        """`padded`: the padding at the end travels too, so that all shards are equally long. `share`: a factor that
        gradients are multiplied by when they are packed."""
        self._bucket_index, self._dtype, self._scale = bucket.index, dtype, scale
        self.slots = _make_slots(layout, bucket)
        filled = max((place.span.stop for place in self.slots), default=0)
        self.numel = bucket.numel if include_padding else filled
        self.shards = bucket.shards.truncate(self.numel)
        self._padding_spans = _find_padding(self.slots, self.numel)
        self._slots_with_gaps = {n for n, place in enumerate(self.slots) if place.spec.storage_numel > place.spec.numel}

    def zero_copy_view(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The only gradient of a bucket itself, if it lies in memory as it would be packed."""
        spec = self.slots[0].spec
        if grad is None or grad.layout != torch.strided or self._padding_spans:
            return None
        lies_so = (grad.dtype, grad.shape, grad.stride()) == (self._dtype, spec.shape, spec.stride)
        return dense_flat_view(grad) if lies_so else None

    def copy_in(self, slot_index: int, grad: torch.Tensor, buffer: BucketBuffer) -> None:
        """Copy one gradient into a buffer."""
        view = self._views_of(buffer)[slot_index]
        if slot_index in self._slots_with_gaps:
            self._zero_gaps(slot_index, buffer)
        if self._scale == 1:
            view.copy_(_to_dense(grad))
        else:
            torch.mul(_to_dense(grad), self._scale, out=view)

    def pack(self, grads: OptionalGrads, buffer: BucketBuffer, already_copied: Container[int] = ()) -> torch.Tensor:
        """Copy them into a buffer, with zeros for what is missing. To those that were `put` there before they are
        added."""
        flat = buffer.flat[: self.numel]
        for span in self._padding_spans:
            flat[slice(*span)].zero_()
        copies = _ForeachBatch(self._copy_batch)
        for place, (view, grad) in enumerate(zip(self._views_of(buffer), grads, strict=True)):
            if place in already_copied:
                if grad is not None:
                    view.add_(_to_dense(grad), alpha=self._scale)
                continue
            if place in self._slots_with_gaps:
                self._zero_gaps(place, buffer)
            if grad is None:
                view.zero_()
            else:
                copies.add(view, _to_dense(grad))
        copies.flush()
        return flat

    def _copy_batch(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(targets, sources)
        if self._scale != 1:
            torch._foreach_mul_(targets, self._scale)

    def add(self, grads: OptionalGrads, buffer: BucketBuffer) -> None:
        """Add them to what is in a buffer."""
        sums = _ForeachBatch(partial(torch._foreach_add_, alpha=self._scale))
        for view, grad in zip(self._views_of(buffer), grads, strict=True):
            if grad is not None:
                sums.add(view, _to_dense(grad))
        sums.flush()

    def _zero_gaps(self, slot_index: int, buffer: BucketBuffer) -> None:
        """Zeros where the strides of a parameter leave gaps."""
        buffer.flat[slice(*self.slots[slot_index].span)].zero_()

    def _views_of(self, buffer: BucketBuffer) -> list[torch.Tensor]:
        if self._bucket_index not in buffer.views:
            buffer.views[self._bucket_index] = [place.view_in(buffer.flat) for place in self.slots]
        return buffer.views[self._bucket_index]


class _ForeachBatch:
    """Pairs of tensors for one call, of which there are not too many at a time.

    Gradients exist for Python only while they are looked at. Thousands at once would each time set off the garbage
    collector, and all be old when they are let go: it would then look at everything there is.
    """

    def __init__(self, foreach_op: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> None:
        self._foreach_op = foreach_op
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)
        if len(self._targets) == FOREACH_BATCH_SIZE:
            self.flush()

    def flush(self) -> None:
        if self._targets:
            self._foreach_op(self._targets, self._sources)
            self._targets.clear()
            self._sources.clear()


def _make_slots(layout: Layout, bucket: Bucket) -> list[GradSlot]:
    return [GradSlot(room, layout.params[room.param]) for room in bucket.slots]


def _find_padding(slots: Sequence[GradSlot], numel: int) -> list[Span]:
    """What lies between parameters, and behind the last."""
    edges = [0, *(edge for place in slots for edge in place.span), numel]
    return [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _to_dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()


# ---------------------------------------------------------------------------------------------------------------------
# A placeholder in `param.grad` for a gradient that is sharded across ranks: whoever uses it gets an error.


class ShardedGrad(torch.Tensor):
    """Has the shape, dtype and device of its parameter and no storage. Operations on it raise."""

    _label: str

    @staticmethod
    def __new__(
        cls,
        param: torch.Tensor,
        label: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> "ShardedGrad":
        placeholder: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype or param.dtype, device=device or param.device
        )
        placeholder._label = label
        return placeholder

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGrad({self._label}, shape={tuple(self.shape)})"

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        raise self._usage_error("numpy")

    def tolist(self) -> NoReturn:
        raise self._usage_error("tolist")

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise self._usage_error("__dlpack__")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise self._usage_error("pickling")

    def _usage_error(self, operation: object) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self._label} is sharded across ranks, so param.grad cannot be used ({operation}). "
            "To clip, call optimizer.clip_grad_norm_() or optimizer.clip_grad_value_(); for the norm alone, "
            "optimizer.clip_grad_norm_(math.inf); to clear, optimizer.zero_grad(); to unscale, use "
            "zeroshard.GradScaler. To edit gradients, accumulate them inside optimizer.no_sync(). If it is the step() "
            "of another optimizer, remove that one."
        )

    def share_memory_(self) -> "ShardedGrad":
        """Do nothing. Hazard: torch's own method would read the storage that is not there, and crash."""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            return None  # torch's GradScaler, perhaps on one rank: the step that it makes is refused on all
        if func is torch.ops.aten._to_copy.default:  # a model is cast or moved, and its gradients with it
            options = {key: (kwargs or {}).get(key) for key in ("dtype", "device")}
            return ShardedGrad(args[0], args[0]._label, **options)
        flat: list[Any] = []
        torch.utils._pytree.tree_map_only(ShardedGrad, flat.append, (args, kwargs))
        raise flat[0]._error(func)


def local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient in `param.grad`, if it is a real one."""
    grad = param.grad
    return None if type(grad) is ShardedGrad else grad


def drop_placeholder(param: torch.Tensor) -> None:
    if type(param.grad) is ShardedGrad:
        param.grad = None


# ---------------------------------------------------------------------------------------------------------------------
# A bucket as gradients see it, and one round of them on its way.


class GradBucket:
    """A bucket as gradients see it."""

    def __init__(
        self, layout: Layout, bucket: Bucket, transport: ShardTransport, pool: BufferPool, profiler: StepProfiler
    ) -> None:
        self.index, self._transport, self._pool, self._profiler = bucket.index, transport, pool, profiler
        self.needs_packing = len(bucket.slots) > 1
        """Gradients are copied together before they are sent."""
        share = 1 / transport.num_ranks
        # What would be rounded more than once, or is sent as it lies, is better multiplied after it was added up.
        exact = pool.dtype == bucket.dtype == sum_dtype(pool.dtype)
        before = share if transport.reduces_on_host and exact and self.needs_packing else 1.0
        self._post_scale = share / before
        self.packer = BucketPacker(
            layout, bucket, pool.dtype, include_padding=transport.needs_equal_shards, scale=before
        )
        self.slots = self.packer.slots
        self.has_grads = False
        """Its shard has gradients, to which further ones are added."""
        self.params = [place.param for place in self.slots]
        self.num_expected = self.num_missing = 0
        """Parameters that train, and those of them of which the gradients are awaited."""
        if self.needs_packing:
            pool.reserve(self.packer.numel)
        self._slot_index_of = {param: place for place, param in enumerate(self.params)}
        self._open_buffer: BucketBuffer | None = None
        self._copied_slots: set[int] = set()
        self._shard_buffer: BucketBuffer | None = None

    def large_params(self, min_bytes: int) -> list[int]:
        """Parameters of so many bytes or more."""
        return [
            place.param for place in self.slots if place.spec.storage_numel * place.spec.dtype.itemsize >= min_bytes
        ]

    @property
    def copied_params(self) -> list[int]:
        """Parameters whose gradients have been copied already, and wait for the others."""
        return [self.params[place] for place in self._copied_slots]

    def copy_in(self, param: int, grad: torch.Tensor) -> None:
        """Copy a gradient to where it will be sent from, so that it can be freed."""
        place = self._slot_index_of[param]
        with self._profiler.phase(Phase.PACK_GRADS, self.index):
            self.packer.copy_in(place, grad, self._get_open_buffer())
        self._copied_slots.add(place)

    def start_reduce(self, grads: OptionalGrads, output: "ReduceOutput", *, owns_grads: bool) -> "PendingReduce":
        """Send them, with those that were put in.

        `ours`: nobody else holds them; else the next backward pass may add to them under way.
        """
        if not self.needs_packing:
            (grad,) = grads = list(grads)
            if owns_grads and (flat := self.packer.zero_copy_view(grad)) is not None:
                return self._launch_reduce(flat, output, None)
        buffer = self._get_open_buffer()
        with self._profiler.phase(Phase.PACK_GRADS, self.index):
            flat = self.packer.pack(grads, buffer, self._copied_slots)
        self._open_buffer, self._copied_slots = None, set()
        return self._launch_reduce(flat, output, buffer)

    def start_reduce_zeros(self, output: "ReduceOutput") -> "PendingReduce":
        """Send what nobody will use."""
        buffer = self._pool.acquire(self.packer.numel)
        flat = self.packer.pack([None] * len(self.slots), buffer)
        return self._launch_reduce(flat, output, buffer)._replace(is_needed=False)

    def _launch_reduce(
        self, flat: torch.Tensor, output: "ReduceOutput", buffer: BucketBuffer | None
    ) -> "PendingReduce":
        with self._profiler.phase(Phase.SEND_GRADS, self.index):
            arriving = self._transport.reduce_scatter(flat, self.packer.shards, output.tensor, self._post_scale)
        return PendingReduce(self, arriving, output, buffer)

    def bytes_to_send(self, shard_dtype: torch.dtype) -> int:
        """What this rank sends of it in a round. `into`: what its shard of gradients is."""
        return self._transport.reduce_scatter_nbytes(self.packer.shards, self._pool.dtype, shard_dtype)

    def open_buffers(self) -> list[torch.Tensor]:
        """Memory that waits for further gradients."""
        return [] if self._open_buffer is None else [self._open_buffer.flat]

    def clear(self, *, set_to_none: bool) -> None:
        """Forget what was put in, or make it zero."""
        if set_to_none:
            self._copied_slots.clear()
        for place in self._copied_slots:
            self.slots[place].view_in(self._get_open_buffer().flat).zero_()

    def release(self, pending: "PendingReduce") -> None:
        if pending.buffer is not None:
            self._pool.release(pending.buffer)

    def wrap_shard(self, shard: torch.Tensor) -> BucketBuffer:
        """The shard as something to pack into, with views made once."""
        if self._shard_buffer is None or self._shard_buffer.flat is not shard:
            self._shard_buffer = BucketBuffer(shard)
        return self._shard_buffer

    def _get_open_buffer(self) -> BucketBuffer:
        if self._open_buffer is None:
            self._open_buffer = self._pool.acquire(self.packer.numel)
        return self._open_buffer


class ReduceOutput(NamedTuple):
    """Where the average is made."""

    tensor: torch.Tensor
    is_shard: bool
    """It is the shard itself; else it has to be brought there."""


class PendingReduce(NamedTuple):
    bucket: GradBucket
    work: ReduceWork
    output: ReduceOutput
    buffer: BucketBuffer | None
    """What must be given back once it has arrived."""
    is_needed: bool = True
    """It was not cleared on the way."""
