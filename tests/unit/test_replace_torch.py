"""`replace_torch`: patching torch's ZeRO class and hooks, and undoing it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import optim
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.optim import zero_redundancy_optimizer

import zeroshard
from zeroshard import ddp_hooks, torch_patch
from zeroshard import zero_redundancy_optimizer as compat

HOOKS = ("hook_with_zero_step", "hook_with_zero_step_interleaved")
NAME = "ZeroRedundancyOptimizer"
THEIRS = {NAME: optim.ZeroRedundancyOptimizer, **{name: getattr(ddp_zero_hook, name) for name in HOOKS}}
OURS = {NAME: zeroshard.ZeroRedundancyOptimizer, **{name: getattr(ddp_hooks, name) for name in HOOKS}}


def current_names() -> list[dict[str, Any]]:
    """Return the current values of torch's names, per module."""
    hooks = {name: getattr(ddp_zero_hook, name) for name in HOOKS}
    modules = (optim, zero_redundancy_optimizer, ddp_zero_hook)
    return [{NAME: getattr(module, NAME), **hooks} for module in modules]


@pytest.fixture
def user() -> Iterator[ModuleType]:
    """A module that imported torch's names earlier, the class under an alias."""
    module = ModuleType("a_user_of_torchs")
    module.__dict__.update(ZeRO=THEIRS[NAME], hook=THEIRS[HOOKS[0]], other=len)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(autouse=True)
def _torch_is_restored() -> Iterator[None]:
    yield
    assert current_names() == [THEIRS] * 3


def test_torch_names_are_replaced_inside_the_context(user: ModuleType) -> None:
    with zeroshard.replace_torch() as patch:
        assert current_names() == [OURS] * 3
        assert vars(user)["ZeRO"] is OURS[NAME]
        assert vars(user)["hook"] is OURS[HOOKS[0]]
        assert vars(user)["other"] is len
        assert {"a_user_of_torchs.ZeRO", "a_user_of_torchs.hook", f"torch.distributed.optim.{NAME}"} <= {
            *patch.patched_names
        }
    assert vars(user)["ZeRO"] is THEIRS[NAME]
    assert vars(user)["hook"] is THEIRS[HOOKS[0]]
    assert patch.patched_names == ()


def test_private_torch_names_are_replaced_too() -> None:
    theirs = {name: vars(zero_redundancy_optimizer)[name] for name in compat.PATCHED_NAMES}
    with zeroshard.replace_torch():
        assert all(vars(zero_redundancy_optimizer)[name] is getattr(compat, name) for name in theirs)
        assert not any(getattr(compat, name) is original for name, original in theirs.items())
    assert {name: vars(zero_redundancy_optimizer)[name] for name in theirs} == theirs
    assert vars(zero_redundancy_optimizer)["functional_optim_map"] is compat.functional_optim_map


def test_undone_after_exception() -> None:
    with pytest.raises(KeyError), zeroshard.replace_torch():
        raise KeyError
    assert current_names() == [THEIRS] * 3


def test_second_undo_does_nothing(user: ModuleType) -> None:
    patch = zeroshard.replace_torch()
    assert patch.undo() == ()
    with zeroshard.replace_torch():
        assert patch.undo() == ()
        assert current_names() == [OURS] * 3


def test_nested_call_replaces_only_new_names(user: ModuleType) -> None:
    with zeroshard.replace_torch():
        vars(user)["ZeRO"] = THEIRS[NAME]
        with zeroshard.replace_torch() as inner:
            assert inner.patched_names == ("a_user_of_torchs.ZeRO",)
            assert vars(user)["ZeRO"] is OURS[NAME]
        assert vars(user)["ZeRO"] is THEIRS[NAME]
        assert current_names() == [OURS] * 3
        vars(user)["ZeRO"] = OURS[NAME]


def test_repeated_replacement() -> None:
    for _ in range(2):
        with zeroshard.replace_torch():
            assert current_names() == [OURS] * 3
        assert current_names() == [THEIRS] * 3


def test_outer_undo_before_inner_undo() -> None:
    first, second = zeroshard.replace_torch(), zeroshard.replace_torch()
    first.undo()
    assert current_names() == [THEIRS] * 3
    assert second.undo() == ()


def test_names_changed_by_others_are_left_alone(user: ModuleType) -> None:
    patch = zeroshard.replace_torch()
    vars(user)["ZeRO"] = dict
    del vars(user)["hook"]
    with pytest.warns(UserWarning, match=r"a_user_of_torchs\.ZeRO, a_user_of_torchs\.hook$") as caught:
        not_restored = patch.undo()
    assert not_restored == ("a_user_of_torchs.ZeRO", "a_user_of_torchs.hook")
    assert vars(user)["ZeRO"] is dict
    assert not hasattr(user, "hook")
    assert caught[0].filename == __file__


def test_module_with_two_names(user: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a script in a spawned process: `__main__` and `__mp_main__`."""
    monkeypatch.setitem(sys.modules, "by_another_name", user)
    patch = zeroshard.replace_torch()
    assert patch.patched_names.count("a_user_of_torchs.ZeRO") == 1
    assert patch.undo() == ()
    assert vars(user)["ZeRO"] is THEIRS[NAME]


def test_lazy_modules_are_not_triggered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    def fail(_: Any) -> Any:
        raise AssertionError

    proxy: Any = type("Proxy", (), {"__dict__": property(fail), "__class__": property(lambda _: ModuleType)})
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "a_proxy", proxy())
    with zeroshard.replace_torch():
        assert current_names() == [OURS] * 3


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_patch._make_patches.cache_clear()
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed, which this build of torch does not have"):
        zeroshard.replace_torch()


def test_no_warnings_in_fresh_interpreter() -> None:
    code = """if True:
        import torch, zeroshard
        done = zeroshard.replace_torch()
        import torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook as hooks
        from torch.distributed.optim import ZeroRedundancyOptimizer
        assert ZeroRedundancyOptimizer is zeroshard.ZeroRedundancyOptimizer
        assert hooks.hook_with_zero_step is zeroshard.ddp_hooks.hook_with_zero_step
        done.undo()
        assert hooks.hook_with_zero_step is not zeroshard.ddp_hooks.hook_with_zero_step
        # This one was imported while torch's was replaced.
        assert ZeroRedundancyOptimizer is zeroshard.ZeroRedundancyOptimizer
        assert torch.distributed.optim.ZeroRedundancyOptimizer is not ZeroRedundancyOptimizer
    """
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_warning_filters_are_unchanged() -> None:
    before = list(warnings.filters)
    torch_patch._make_patches.cache_clear()
    zeroshard.replace_torch().undo()
    assert warnings.filters == before
