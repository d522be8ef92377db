"""The public API: names, signatures, docstrings and imports."""

import importlib
import inspect
import subprocess
import sys
from importlib import metadata, resources
from typing import Any, get_type_hints

import pytest
import torch
from torch.distributed.algorithms.join import Joinable

import zeroshard
from zeroshard import ZeroRedundancyOptimizer, ddp_hooks

PUBLIC = {
    "ZeroRedundancyOptimizer",
    "ZeroConfig",
    "WholeParams",
    "FlatShards",
    "GradScaler",
    "ShardedOptimizer",
    "shard",
    "CPUOffload",
    "PeerCheckpoint",
    "replace_torch",
    "ParamRule",
    "matrix_params",
    "remaining_params",
    "checkpoint",
    "ddp_hooks",
    "ZeroError",
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "ConsistencyCheck",
    "ReplicaMismatchError",
    "LayoutError",
    "NonFiniteGrads",
    "NonFiniteError",
    "RankFailedError",
    "RankLostError",
    "RankMismatchError",
}
HOOKS = {"hook_with_zero_step", "hook_with_zero_step_interleaved"}
ATTRIBUTES = {
    "optim",
    "process_group",
    "world_size",
    "rank",
    "global_rank",
    "parameters_as_bucket_view",
    "initialized",
    "param_groups",
    "state",
}
METHODS = {
    "add_param_group",
    "add_param_groups",
    "consolidate_state_dict",
    "full_state_dict",
    "state_dict",
    "load_state_dict",
    "step",
    "zero_grad",
    "join_hook",
    "join_device",
    "join_process_group",
}


def run_python(code: str, *options: str) -> str:
    """Run `code` in a fresh interpreter and return its output."""
    result = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_public_names() -> None:
    assert set(zeroshard.__all__) == PUBLIC
    assert set(ddp_hooks.__all__) == HOOKS
    assert all(hasattr(zeroshard, name) for name in PUBLIC)
    assert all(callable(getattr(ddp_hooks, name)) for name in HOOKS)
    assert importlib.import_module("zeroshard.ddp_hooks") is ddp_hooks


def test_version_matches_metadata() -> None:
    assert metadata.version("zeroshard") == zeroshard.__version__


def test_py_typed_is_shipped() -> None:
    assert resources.files("zeroshard").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_docstrings(name: str) -> None:
    assert inspect.getdoc(getattr(zeroshard, name))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_have_docstrings(name: str) -> None:
    assert inspect.getdoc(inspect.getattr_static(ZeroRedundancyOptimizer, name))


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hooks_have_docstrings(name: str) -> None:
    assert inspect.getdoc(getattr(ddp_hooks, name))


def test_error_hierarchy() -> None:
    errors = {name: getattr(zeroshard, name) for name in PUBLIC if name.endswith("Error")}
    assert all(issubclass(error, zeroshard.ZeroError) for error in errors.values())
    values = {name for name, error in errors.items() if issubclass(error, ValueError)}
    runtime = {name for name, error in errors.items() if issubclass(error, RuntimeError)}
    assert values == {"ConfigError", "CheckpointError"}
    assert runtime == {
        "BindingError",
        "RankMismatchError",
        "RankFailedError",
        "RankLostError",
        "ReplicaMismatchError",
        "NonFiniteError",
    }


def signature_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(param.name, param.kind, param.default) for param in inspect.signature(function).parameters.values()]


def test_signature_and_keyword_only_config() -> None:
    positional, keyword, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect._empty
    assert signature_of(ZeroRedundancyOptimizer) == [
        ("params", positional, empty),
        ("optimizer_class", positional, empty),
        ("process_group", positional, None),
        ("parameters_as_bucket_view", positional, False),
        ("overlap_with_ddp", positional, False),
        ("config", keyword, None),
        ("defaults", inspect.Parameter.VAR_KEYWORD, empty),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_signatures_match_torch() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs

    ours = [entry for entry in signature_of(ZeroRedundancyOptimizer) if entry[0] != "config"]
    assert ours == signature_of(Theirs)
    for name in METHODS - {"add_param_groups", "full_state_dict", "join_device", "join_process_group"}:
        mine, theirs = signature_of(getattr(ZeroRedundancyOptimizer, name)), signature_of(getattr(Theirs, name))
        mine = [entry for entry in mine if entry[1] != inspect.Parameter.KEYWORD_ONLY or entry in theirs]
        assert [kind for _, kind, _ in mine] == [kind for _, kind, _ in theirs], name
        names = [entry for entry in mine if entry[1] != inspect.Parameter.VAR_KEYWORD]
        assert names == [entry for entry in theirs if entry[1] != inspect.Parameter.VAR_KEYWORD], name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hook_signatures_match_torch() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as theirs

    for name in HOOKS:
        pairs = zip(signature_of(getattr(ddp_hooks, name)), signature_of(getattr(theirs, name)), strict=True)
        assert all(mine == other for mine, other in pairs)


def test_is_optimizer_and_joinable() -> None:
    assert issubclass(ZeroRedundancyOptimizer, torch.optim.Optimizer)
    assert issubclass(ZeroRedundancyOptimizer, Joinable)


def test_public_functions_are_typed() -> None:
    functions = [getattr(ZeroRedundancyOptimizer, name) for name in METHODS if not name.startswith("join_")]
    functions += [zeroshard.broadcast_object, *(getattr(ddp_hooks, name) for name in HOOKS)]
    for function in functions:
        hints = get_type_hints(function)
        params = [param for param in inspect.signature(function).parameters if param != "self"]
        assert hints.keys() == {*params, "return"}, function


def test_optional_modules_are_imported_lazily() -> None:
    code = """if True:
        import sys, zeroshard
        lazy = ["checkpoint", "peer_checkpoint", "planner", "report"]
        print(*[name for name in lazy if f"zeroshard.{name}" in sys.modules])
        print(*[name for name in lazy if not getattr(zeroshard, name)])
    """
    assert run_python(code).split() == []


def test_import_gives_no_warnings_and_only_imports_torch() -> None:
    code = """if True:
        import sys, torch, torch.distributed.algorithms.join, torch.nn.parallel
        before = set(sys.modules)
        import zeroshard
        fresh = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(fresh - sys.stdlib_module_names))
    """
    assert set(run_python(code, "-W", "error").split()) <= {"zeroshard", "torch"}


def test_checkpoint_without_numpy_says_how_to_install_it() -> None:
    code = """if True:
        import sys
        sys.modules["numpy"] = None
        import zeroshard
        try:
            import zeroshard.checkpoint
        except ImportError as error:
            print(type(error).__name__, error)
    """
    expected = (
        "zeroshard.checkpoint needs numpy, which torch.distributed.checkpoint uses. Install it: pip install numpy"
    )
    assert run_python(code, "-W", "ignore") == f"ModuleNotFoundError {expected}\n"


def test_works_without_extras_numpy_and_torch_zero() -> None:
    """A step succeeds in an interpreter that cannot import these modules."""
    code = """if True:
        import sys, warnings
        theirs = "torch.distributed.optim.zero_redundancy_optimizer"
        for name in ("rich", "typer", "matplotlib", "numpy", theirs):
            sys.modules[name] = None
        warnings.simplefilter("ignore")
        import torch, torch.distributed as dist, zeroshard
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        param = torch.nn.Parameter(torch.ones(2))
        for view in (False, True):
            made = zeroshard.ZeroRedundancyOptimizer([param], torch.optim.SGD, None, view, lr=0.25)
            param.grad = torch.ones(2)
            made.step()
        missing = {attributes} - set(dir(made))
        dist.destroy_process_group()
        print(param.tolist(), sorted(missing))
    """.replace("{attributes}", repr(ATTRIBUTES))
    assert run_python(code) == "[0.5, 0.5] []\n"
