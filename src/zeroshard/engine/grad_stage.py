"""The ZeRO stage of a `GradReducer`: what happens to `param.grad` around a reduce.

::

                                ZeRO-1 (`Stage1`)                       ZeRO-2 (`Stage2`)
    param.grad after a reduce   the sum of this rank's own passes       freed; a `GradPlaceholder` whose use raises
    the next backward pass      adds to it                              starts at None
    the next reduce             sends the sum, overwrites the shard     adds to the shard
    after clipping, unscaling   later passes start at None and add      the same as before
                                to the shard
    the user clears gradients   nothing to do: the next reduce          placeholders are gone: shards are cleared
                                overwrites the shard
    the user edits a gradient   `GradVersions` detects it               impossible, but assigning one is detected
    large gradients             are packed with their bucket            are packed, and freed, as soon as ready
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar, NoReturn
from weakref import ReferenceType, ref

import torch

from .._logging import warn_at_caller
from .._torch_compat import AMP_UNSCALE_OP, TO_COPY_OP, is_view, make_wrapper_subclass, sparse_values, tree_leaves
from ..layout.spec import ParamSpec
from .grad_bucket import ReduceBucket

# ---------------------------------------------------------------------------------------------------------------------
# Stage: the strategy of a reducer.


CHANGED_AFTER_REDUCTION = (
    "was changed in param.grad after it was reduced, clipped or unscaled. param.grad holds this rank's own gradient, "
    "not the average, so torch.nn.utils.clip_grad_norm_() would clip by another norm on every rank. Use "
    "optimizer.clip_grad_norm_(), clip_grad_value_() or zeroshard.GradScaler. Edit gradients inside no_sync(), before "
    "step(), or set new ones after zero_grad()."
)


class GradStage(ABC):
    """What happens to `param.grad` around a reduce. Parameters are given by their index in the layout.

    Not thread-safe: `GradReducer` calls it with its lock held while backward runs, and without it between passes.
    """

    number: ClassVar[int]
    """The ZeRO stage."""
    frees_grads: ClassVar[bool]
    """A reduce takes the gradient out of `param.grad` and frees it once it is sent. Otherwise `param.grad` stays."""
    is_used = False
    """A step has used the gradients, and a backward pass that adds to them must warn."""

    def __init__(self) -> None:
        self._specs: Sequence[ParamSpec] = ()
        self._params: Sequence[torch.Tensor] = ()

    def extend(self, specs: Sequence[ParamSpec], params: Sequence[torch.Tensor]) -> None:
        """Add parameters. `specs` and `params` are those of all parameters, old and new."""
        self._specs, self._params = specs, params

    # Backward.

    def start_backward(self) -> None:  # noqa: B027 (nothing, by default)
        """Record that another backward pass accumulates its first gradient."""

    @abstractmethod
    def prepare_accumulation(self, index: int) -> None:
        """Prepare `param.grad`, to which backward is about to add."""

    def warn_used(self) -> None:
        """Warn once that gradients are about to be added to those that a step has used."""
        self.is_used = False
        warn_at_caller(
            "gradients of the last step were not cleared, so this backward pass adds to them. "
            "Call optimizer.zero_grad() after each step."
        )

    def copy_early(self, index: int, bucket: ReduceBucket) -> None:  # noqa: B027 (nothing, by default)
        """Copy a large gradient to its bucket before the others are ready, if `param.grad` can be freed then."""

    @abstractmethod
    def take_grad(self, index: int, provided: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of a parameter to send it, or None if there is nothing to send.

        `provided` is a gradient that replaces `param.grad`.
        """

    @property
    @abstractmethod
    def should_add_to_shard(self) -> bool:
        """Whether a reduce adds to the shard; otherwise it carries all accumulated gradients and overwrites it."""

    def record_written_grad(self, index: int, *, was_sent: bool) -> None:  # noqa: B027 (nothing, by default)
        """Record that DDP has written a provided gradient to `param.grad`."""

    def install_placeholders(self, grad_mask: Sequence[int], hooked: Collection[int]) -> None:  # noqa: B027
        """Put placeholders into `param.grad` for gradients that exist only as shards.

        Args:
            grad_mask: Whether each parameter has a gradient in the shards.
            hooked: Parameters for which `prepare_accumulation` is called before backward accumulates.
        """

    # Step.

    def is_untouched(self) -> bool:
        """Return whether no `param.grad` has changed since `install_placeholders`, and none holds a gradient to send.

        If so, no gradient was cleared, set or edited since: one comparison of all parameters replaces several searches.
        """
        return False

    def has_placeholders_for(self, grad_mask: Sequence[int], hooked: Collection[int]) -> bool:  # noqa: ARG002
        """Return whether `install_placeholders` was called with these arguments the last time.

        Hazard: that does not follow from `is_untouched`. A pass that ends without `finish_backward` (it failed, or was
        nested) fills shards and leaves None in `param.grad`, as it was before.
        """
        return False

    @abstractmethod
    def find_cleared(self) -> tuple[list[int], list[int]]:
        """Return the parameters whose reduced gradients were cleared in `param.grad`, and those where they were not.

        Both lists are empty if `param.grad` does not decide what is in the shards.
        """

    def forget_removed(self, indices: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        """Accept that individual gradients were removed. Return the parameters to drop from the shards."""
        return ()

    def check_no_late_edits(self, unsent_flags: Sequence[int]) -> None:
        """Raise if a user has changed a gradient in `param.grad` after it was reduced.

        `unsent_flags` say of each parameter whether its gradient is ready and has not been sent.
        """
        index = self._find_late_edit(unsent_flags)
        if index is not None:
            raise RuntimeError(f"the gradient of {self._specs[index].label} {CHANGED_AFTER_REDUCTION}")

    @abstractmethod
    def _find_late_edit(self, unsent_flags: Sequence[int]) -> int | None: ...

    @abstractmethod
    def find_unsent(self, bucketed: Container[int], unsent_flags: Sequence[int], grad_mask: Sequence[int]) -> list[int]:
        """Return the parameters in buckets whose `param.grad` must be sent, whether backward or the user has set it."""

    @abstractmethod
    def current_grad_mask(self, grad_mask: Sequence[int]) -> bytes:
        """Return whether each parameter has a gradient; `grad_mask` says whether it has one in the shards."""

    def mark_scaled(self) -> None:  # noqa: B027 (nothing, by default)
        """Record that the shards are about to be clipped or unscaled."""

    @abstractmethod
    def mark_stepped(self, *, was_applied: bool) -> None:
        """Record that a step has ended; `was_applied` is False if it was skipped or failed."""

    # Clearing.

    @abstractmethod
    def clear(self, *, set_to_none: bool) -> None:
        """Record that `param.grad` and the shards were cleared, or set to zero."""

    def drop_placeholders(self) -> None:
        """Remove placeholders from `param.grad`, also those of another optimizer."""
        for param in self._params:
            drop_placeholder(param)

    def drop_grads(self) -> None:
        """Free all gradients in `param.grad`."""
        for param in self._params:
            param.grad = None


# ---------------------------------------------------------------------------------------------------------------------
# ZeRO-1: reduced gradients stay in `param.grad`, where users may write to them.


@dataclass
class _ReducedGrad:
    """The gradient of a parameter as it was when it was reduced."""

    grad_ref: ReferenceType[torch.Tensor]
    version: int
    accumulation_count: int
    is_unused: bool = True
    """No step has used it yet, and it has not been cleared."""


class GradVersions:
    """Detects changes of reduced gradients that stay in `param.grad`, by tensor identity and version."""

    def __init__(self) -> None:
        self._reduced: dict[int, _ReducedGrad] = {}
        self._accumulation_count = 0
        self.is_scaled = False
        """The average was clipped or unscaled. It must not be computed again from gradients that were not."""

    def record(self, index: int, grad: torch.Tensor | None) -> None:
        """Record `grad` as the reduced gradient of a parameter; None removes the record."""
        if grad is None:
            self._reduced.pop(index, None)
        else:
            self._reduced[index] = _ReducedGrad(ref(grad), _tensor_version(grad), self._accumulation_count)

    def __contains__(self, index: int) -> bool:
        return index in self._reduced

    def mark_scaled(self, params: Sequence[torch.Tensor]) -> None:
        """Record that the average is being clipped or unscaled. It consists of gradients still in `param.grad`."""
        self._reduced = {index: reduced for index, reduced in self._reduced.items() if params[index].grad is not None}
        self.is_scaled = True

    def clear(self) -> None:
        self._reduced.clear()

    def split_cleared(
        self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Split parameters into those whose gradients were cleared, or set for another step, since they were reduced,
        and the others.

        Gradients that backward has written since then are in neither list: they may be zero by chance.
        """
        cleared: list[int] = []
        others: list[int] = []
        for index, reduced in self._reduced.items():
            grad = params[index].grad
            if grad is None:
                cleared.append(index)
            elif not self.is_changed(index, grad):
                others.append(index)
            elif not written_by_backward[index] and not self._may_share_version(reduced, grad):
                (cleared if not reduced.is_unused or _is_all_zero(grad) else others).append(index)
        return cleared, others

    def _may_share_version(self, reduced: _ReducedGrad, grad: torch.Tensor) -> bool:
        """Return whether an accumulation into another gradient may have changed this one's version.

        Hazard: views of one DDP bucket share a version counter, so adding to one gradient changes it for its neighbors.
        """
        return is_view(grad) and reduced.accumulation_count != self._accumulation_count

    def mark_accumulation(self) -> None:
        """Record that a backward pass accumulates into some gradients."""
        self._accumulation_count += 1

    def mark_zeroed(self, params: Sequence[torch.Tensor]) -> None:
        """Record that all gradients, and their averages, were set to zero."""
        for index in list(self._reduced):
            self.record(index, params[index].grad)
        self.mark_stepped()

    def mark_stepped(self) -> None:
        """Treat gradients that are written from now on as those of another step."""
        for reduced in self._reduced.values():
            reduced.is_unused = False

    def is_changed(self, index: int, grad: torch.Tensor) -> bool:
        """Return whether a reduced gradient was replaced or written to."""
        reduced = self._reduced.get(index)
        return reduced is not None and (reduced.grad_ref() is not grad or reduced.version != _tensor_version(grad))

    def find_late_edit(self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]) -> int | None:
        """Return the first gradient that was changed, not by backward, between its reduction and the step."""
        grads = ((index, params[index].grad) for index in self._reduced if not written_by_backward[index])
        return next((index for index, grad in grads if grad is not None and self._is_late_edit(index, grad)), None)

    def _is_late_edit(self, index: int, grad: torch.Tensor) -> bool:
        if not self.is_changed(index, grad):
            return False
        reduced = self._reduced[index]
        if self.is_scaled:
            return True
        if not reduced.is_unused:
            return False  # a gradient that the user has set for the next step: it will be sent
        return not self._may_share_version(reduced, grad) and not _is_all_zero(grad)


def _is_all_zero(grad: torch.Tensor) -> bool:
    """Return whether a gradient is all zeros, as `model.zero_grad(set_to_none=False)` leaves it."""
    values = sparse_values(grad) if grad.layout == torch.sparse_coo else grad
    return not values.detach().count_nonzero()


def _tensor_version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Stage1(GradStage):
    """ZeRO-1: `param.grad` is kept and holds the sum of this rank's own backward passes, not the average.

    A reduce sends that sum and overwrites the shard. Once the shard was clipped or unscaled, which `param.grad` was
    not, later passes start at None and add to the shard. A user who modifies `param.grad` after it was reduced makes
    the step raise on all ranks.
    """

    number = 1
    frees_grads = False

    def __init__(self) -> None:
        super().__init__()
        self._versions = GradVersions()
        self._accumulated_flags = bytearray()
        """Parameters to whose `param.grad` backward has added since it was last sent."""

    def extend(self, specs: Sequence[ParamSpec], params: Sequence[torch.Tensor]) -> None:
        super().extend(specs, params)
        self._accumulated_flags.extend(bytes(len(params) - len(self._accumulated_flags)))

    def prepare_accumulation(self, index: int) -> None:
        if self._is_in_scaled_shard(index):
            self._params[index].grad = None
        self._accumulated_flags[index] = 1
        self._versions.mark_accumulation()

    def _is_in_scaled_shard(self, index: int) -> bool:
        """Return whether the content of `param.grad` was sent, and was then clipped or unscaled in the shard."""
        return self._versions.is_scaled and index in self._versions and not self._accumulated_flags[index]

    def take_grad(self, index: int, provided: torch.Tensor | None) -> torch.Tensor | None:
        if self._is_in_scaled_shard(index):
            return None
        self._accumulated_flags[index] = 0
        grad = local_grad(self._params[index])
        self._versions.record(index, grad if provided is None else None)
        return grad if provided is None else provided

    @property
    def should_add_to_shard(self) -> bool:
        return self._versions.is_scaled

    def record_written_grad(self, index: int, *, was_sent: bool) -> None:
        grad = self._params[index].grad
        # Hazard: it may have been sent with its bucket before DDP passed it to the hook and wrote it again.
        if grad is not None and (was_sent or index in self._versions):
            self._versions.record(index, grad)

    def find_cleared(self) -> tuple[list[int], list[int]]:
        if self._versions.is_scaled:
            return self._versions.split_cleared(self._params, self._accumulated_flags)
        return [], []  # the next reduce sends all of `param.grad` and overwrites the shards

    def _find_late_edit(self, unsent_flags: Sequence[int]) -> int | None:
        # Hazard: inside DDP's no_sync() gradients accumulate, but nothing marks them as ready.
        by_backward = [ready or added for ready, added in zip(unsent_flags, self._accumulated_flags, strict=True)]
        return self._versions.find_late_edit(self._params, by_backward)

    def find_unsent(self, bucketed: Container[int], unsent_flags: Sequence[int], grad_mask: Sequence[int]) -> list[int]:
        present = ((i, grad) for i, grad in enumerate(map(local_grad, self._params)) if grad is not None)
        return [
            i
            for i, grad in present
            if i in bucketed and (unsent_flags[i] or not grad_mask[i] or self._versions.is_changed(i, grad))
        ]

    def current_grad_mask(self, grad_mask: Sequence[int]) -> bytes:  # noqa: ARG002
        return bytes([param.grad is not None for param in self._params])

    def mark_scaled(self) -> None:
        self._versions.mark_scaled(self._params)

    def mark_stepped(self, *, was_applied: bool) -> None:  # noqa: ARG002
        self._versions.mark_stepped()

    def clear(self, *, set_to_none: bool) -> None:
        if set_to_none:
            self._accumulated_flags[:] = bytes(len(self._accumulated_flags))
            self._versions.clear()
        else:
            self._versions.mark_zeroed(self._params)
        self._versions.is_scaled = False


# ---------------------------------------------------------------------------------------------------------------------
# ZeRO-2: a placeholder in `param.grad` for a gradient that is sharded across ranks.


class GradPlaceholder(torch.Tensor):
    """A tensor with the shape, dtype and device of its parameter but no storage. Operations on it raise."""

    _label: str

    @staticmethod
    def __new__(
        cls,
        param: torch.Tensor,
        label: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> "GradPlaceholder":
        placeholder: GradPlaceholder = make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype or param.dtype, device=device or param.device
        )
        placeholder._label = label
        return placeholder

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GradPlaceholder({self._label}, shape={tuple(self.shape)})"

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
            f"the gradient of {self._label} is sharded across ranks, so param.grad cannot be used ({operation}). To "
            "clip, call optimizer.clip_grad_norm_(max_norm) or clip_grad_value_() on all ranks; max_norm=math.inf "
            "returns only the norm. To scale, use zeroshard.GradScaler. To edit gradients, accumulate them inside "
            "optimizer.no_sync(). If step() of another optimizer caused this, remove that optimizer."
        )

    def share_memory_(self) -> "GradPlaceholder":
        """Do nothing. Hazard: torch's own method would access the storage, which does not exist, and crash."""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is AMP_UNSCALE_OP:
            return None  # torch's GradScaler, perhaps on one rank only: its step then raises on all ranks
        if func is TO_COPY_OP:  # a model is cast or moved together with its gradients
            options = {key: (kwargs or {}).get(key) for key in ("dtype", "device")}
            return GradPlaceholder(args[0], args[0]._label, **options)
        placeholder = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GradPlaceholder))
        raise placeholder._usage_error(func)


def local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return `param.grad`, or None if it is a placeholder."""
    grad = param.grad
    return None if type(grad) is GradPlaceholder else grad


def drop_placeholder(param: torch.Tensor) -> None:
    """Set `param.grad` to None if it is a placeholder."""
    if type(param.grad) is GradPlaceholder:
        param.grad = None


_GRAD_TO_SEND = object()


class Stage2(GradStage):
    """ZeRO-2: a gradient is freed when it is packed, and each owner keeps its shard of the average.

    Further backward passes add to that shard: every pass is reduced, so gradients never take more than 1/N of their
    full size. Inside `no_sync()` gradients accumulate in `param.grad` at full size, and nothing is sent.
    """

    number = 2
    frees_grads = True
    should_add_to_shard = True

    def __init__(self) -> None:
        super().__init__()
        self._placeholders: dict[int, GradPlaceholder] = {}
        self._placeholder_params: set[int] = set()
        """Parameters that were given a placeholder. Users may have removed it."""
        self._left_grads: list[object] = []
        """What `install_placeholders` has left in each `param.grad`; `_GRAD_TO_SEND` stands for a gradient."""
        self._left_for: tuple[bytes, int] = (b"", 0)
        """The mask and the number of hooked parameters that it was called with."""
        self._has_stepped = False
        """A step was attempted since the last backward pass: gradients set in `param.grad` now are for the next one."""

    def __del__(self) -> None:
        for index, placeholder in self._placeholders.items():
            if self._params[index].grad is placeholder:
                self._params[index].grad = None

    def start_backward(self) -> None:
        self._has_stepped = False

    def prepare_accumulation(self, index: int) -> None:
        drop_placeholder(self._params[index])
        self._placeholder_params.discard(index)

    @torch.no_grad()
    def copy_early(self, index: int, bucket: ReduceBucket) -> None:
        param = self._params[index]
        if param.grad is not None:
            bucket.copy_in(index, param.grad)
            param.grad = None

    def take_grad(self, index: int, provided: torch.Tensor | None) -> torch.Tensor | None:
        param = self._params[index]
        grad = local_grad(param) if provided is None else provided
        param.grad = None
        return grad

    def install_placeholders(self, grad_mask: Sequence[int], hooked: Collection[int]) -> None:
        """Put placeholders into `param.grad` for sharded gradients: using them raises, instead of reading None."""
        left_grads: list[object] = []
        for index, param in enumerate(self._params):
            grad = param.grad
            # Hazard: a parameter that was unfrozen since the last step has no hook yet that would remove the
            # placeholder before the next backward pass accumulates into it.
            if grad is None and grad_mask[index] and index in hooked:
                if index not in self._placeholders:
                    self._placeholders[index] = GradPlaceholder(param, self._specs[index].label)
                param.grad = grad = self._placeholders[index]
                self._placeholder_params.add(index)
            left_grads.append(grad if grad is None or type(grad) is GradPlaceholder else _GRAD_TO_SEND)
        self._left_grads, self._left_for = left_grads, (bytes(grad_mask), len(hooked))

    def is_untouched(self) -> bool:
        # Hazard: compare identities. `==` would call the tensors.
        grads = [param.grad for param in self._params]
        return len(grads) == len(self._left_grads) and all(map(is_, grads, self._left_grads))

    def has_placeholders_for(self, grad_mask: Sequence[int], hooked: Collection[int]) -> bool:
        return self._left_for == (bytes(grad_mask), len(hooked))

    def find_cleared(self) -> tuple[list[int], list[int]]:
        cleared, others = [], []
        for index in self._placeholder_params:
            grad = self._params[index].grad
            if type(grad) is GradPlaceholder:
                others.append(index)
            elif grad is None or self._has_stepped:  # removed, or replaced after a step by a gradient for the next one
                cleared.append(index)
        return cleared, others

    def forget_removed(self, indices: Sequence[int]) -> Sequence[int]:
        self._placeholder_params.difference_update(indices)
        return indices

    def _find_late_edit(self, unsent_flags: Sequence[int]) -> int | None:  # noqa: ARG002
        return next((i for i in self._placeholder_params if local_grad(self._params[i]) is not None), None)

    def find_unsent(
        self,
        bucketed: Container[int],
        unsent_flags: Sequence[int],  # noqa: ARG002
        grad_mask: Sequence[int],  # noqa: ARG002
    ) -> list[int]:
        grads = list(map(local_grad, self._params))
        # Comparing lists checks identity first. Hazard: `count` would go on to compare every tensor with None.
        if grads == [None] * len(grads):
            return []
        return [i for i, grad in enumerate(grads) if grad is not None and i in bucketed]

    def current_grad_mask(self, grad_mask: Sequence[int]) -> bytes:
        return bytes(grad_mask)

    def mark_stepped(self, *, was_applied: bool) -> None:
        self._has_stepped = True
        self.is_used = self.is_used or was_applied

    def clear(self, *, set_to_none: bool) -> None:
        if set_to_none:
            self._placeholder_params.clear()
        self.is_used = self._has_stepped = False

    def drop_placeholders(self) -> None:
        self._placeholder_params.clear()
        super().drop_placeholders()

    def drop_grads(self) -> None:
        self._placeholder_params.clear()
        super().drop_grads()
