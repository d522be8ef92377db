"""Our class and hooks in the place of torch's, and torch's back in theirs."""

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


def seen() -> list[dict[str, Any]]:
    """Torch's names, as its modules have them."""
    hooks = {name: getattr(ddp_zero_hook, name) for name in HOOKS}
    modules = (optim, zero_redundancy_optimizer, ddp_zero_hook)
    return [{NAME: getattr(module, NAME), **hooks} for module in modules]


@pytest.fixture
def user() -> Iterator[ModuleType]:
    """A module that has imported torch's before, the class by another name."""
    module = ModuleType("a_user_of_torchs")
    module.__dict__.update(ZeRO=THEIRS[NAME], hook=THEIRS[HOOKS[0]], other=len)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(autouse=True)
def _torchs_is_back() -> Iterator[None]:
    yield
    assert seen() == [THEIRS] * 3


def test_torchs_names_are_ours_until_the_end(user: ModuleType) -> None:
    with zeroshard.replace_torch() as done:
        assert seen() == [OURS] * 3
        assert vars(user)["ZeRO"] is OURS[NAME]
        assert vars(user)["hook"] is OURS[HOOKS[0]]
        assert vars(user)["other"] is len
        assert {"a_user_of_torchs.ZeRO", "a_user_of_torchs.hook", f"torch.distributed.optim.{NAME}"} <= {
            *done.patched_names
        }
    assert vars(user)["ZeRO"] is THEIRS[NAME]
    assert vars(user)["hook"] is THEIRS[HOOKS[0]]
    assert done.patched_names == ()


def test_private_names_of_torchs_module_are_ours_too() -> None:
    theirs = {name: vars(zero_redundancy_optimizer)[name] for name in compat.PATCHED_NAMES}
    with zeroshard.replace_torch():
        assert all(vars(zero_redundancy_optimizer)[name] is getattr(compat, name) for name in theirs)
        assert not any(getattr(compat, name) is it for name, it in theirs.items())
    assert {name: vars(zero_redundancy_optimizer)[name] for name in theirs} == theirs
    assert vars(zero_redundancy_optimizer)["functional_optim_map"] is compat.functional_optim_map


def test_it_is_undone_when_what_is_inside_fails() -> None:
    with pytest.raises(KeyError), zeroshard.replace_torch():
        raise KeyError
    assert seen() == [THEIRS] * 3


def test_undone_twice_is_undone_once(user: ModuleType) -> None:
    done = zeroshard.replace_torch()
    assert done.undo() == ()
    with zeroshard.replace_torch():
        assert done.undo() == ()
        assert seen() == [OURS] * 3


def test_a_second_call_inside_replaces_only_what_is_new(user: ModuleType) -> None:
    with zeroshard.replace_torch():
        vars(user)["ZeRO"] = THEIRS[NAME]
        with zeroshard.replace_torch() as inner:
            assert inner.patched_names == ("a_user_of_torchs.ZeRO",)
            assert vars(user)["ZeRO"] is OURS[NAME]
        assert vars(user)["ZeRO"] is THEIRS[NAME]
        assert seen() == [OURS] * 3
        vars(user)["ZeRO"] = OURS[NAME]


def test_one_after_the_other() -> None:
    for _ in range(2):
        with zeroshard.replace_torch():
            assert seen() == [OURS] * 3
        assert seen() == [THEIRS] * 3


def test_undone_in_the_order_of_the_calls() -> None:
    first, second = zeroshard.replace_torch(), zeroshard.replace_torch()
    first.undo()
    assert seen() == [THEIRS] * 3
    assert second.undo() == ()


def test_what_was_set_to_something_else_meanwhile_is_left_alone(user: ModuleType) -> None:
    done = zeroshard.replace_torch()
    vars(user)["ZeRO"] = dict
    del vars(user)["hook"]
    with pytest.warns(UserWarning, match=r"a_user_of_torchs\.ZeRO, a_user_of_torchs\.hook$") as caught:
        left = done.undo()
    assert left == ("a_user_of_torchs.ZeRO", "a_user_of_torchs.hook")
    assert vars(user)["ZeRO"] is dict
    assert not hasattr(user, "hook")
    assert caught[0].filename == __file__


def test_a_module_that_is_there_by_two_names(user: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script is after it has started processes: `__main__` and `__mp_main__`."""
    monkeypatch.setitem(sys.modules, "by_another_name", user)
    done = zeroshard.replace_torch()
    assert done.patched_names.count("a_user_of_torchs.ZeRO") == 1
    assert done.undo() == ()
    assert vars(user)["ZeRO"] is THEIRS[NAME]


def test_modules_that_import_more_when_they_are_asked_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    def loads(_: Any) -> Any:
        raise AssertionError

    proxy: Any = type("Proxy", (), {"__dict__": property(loads), "__class__": property(lambda _: ModuleType)})
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "a_proxy", proxy())
    with zeroshard.replace_torch():
        assert seen() == [OURS] * 3


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_patch._make_patches.cache_clear()
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed, which this build of torch does not have"):
        zeroshard.replace_torch()


def test_in_a_fresh_interpreter_it_gives_no_warning() -> None:
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
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_filters_of_warnings_stay_as_they_were() -> None:
    before = list(warnings.filters)
    torch_patch._make_patches.cache_clear()
    zeroshard.replace_torch().undo()
    assert warnings.filters == before
