"""A placeholder in `param.grad` for a gradient that is sharded across ranks: whoever uses it gets an error."""

from typing import Any, NoReturn

import torch


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
