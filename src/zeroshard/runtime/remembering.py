"""What self-tests have found, kept while the process lives: a class of torch's own is asked once for the same options.

Others are asked each time: what they do may depend on what nobody here can see.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from .inner import ParamGroup, Recipe

T = TypeVar("T")

_OWN = "torch.optim."
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

_found: dict[Hashable, Any] = {}


def remembered(test: Callable[[Recipe], T], recipe: Recipe) -> T:
    """What `test` says of the recipe, or has said of one that it cannot tell from it.

    It looks at the class, its options, and dimensions, dtypes and devices of parameters.
    """
    key = _key(recipe)
    if key is None:
        return test(recipe)
    if (test, key) not in _found:
        _found[test, key] = test(recipe)
    found: T = _found[test, key]
    return found


def _key(recipe: Recipe) -> Hashable | None:
    factory = recipe.factory
    if not isinstance(factory, type) or not factory.__module__.startswith(_OWN):
        return None
    try:
        groups = tuple(map(_of_group, recipe.groups))
        methods = tuple(getattr(factory, name, None) for name in ("__init__", "step"))  # others may have replaced them
        return factory, methods, recipe.plain, _frozen(recipe.defaults), groups, torch.get_default_dtype()
    except _NotPlain:
        return None


def _of_group(group: ParamGroup) -> Hashable:
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    params = [(param.dim(), param.dtype, param.device) for param in group["params"]]
    return _frozen(options), "param_names" in group, tuple(dict.fromkeys(params))


class _NotPlain(Exception):  # noqa: N818 (an answer)
    """An option that may change under the same name, such as a tensor."""


def _frozen(value: Any) -> Hashable:
    if type(value) in _PLAIN:
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_frozen, value))
    if type(value) is dict:
        return dict, tuple((key, _frozen(it)) for key, it in value.items())
    raise _NotPlain
