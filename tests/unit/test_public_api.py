"""What the package shows to its users, and what it needs from them."""

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
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_the_documented_ones() -> None:
    assert set(zeroshard.__all__) == PUBLIC
    assert set(ddp_hooks.__all__) == HOOKS
    assert all(hasattr(zeroshard, name) for name in PUBLIC)
    assert all(callable(getattr(ddp_hooks, name)) for name in HOOKS)
    assert importlib.import_module("zeroshard.ddp_hooks") is ddp_hooks


def test_the_version_is_that_of_the_package() -> None:
    assert metadata.version("zeroshard") == zeroshard.__version__


def test_types_are_shipped() -> None:
    assert resources.files("zeroshard").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(zeroshard, name))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(inspect.getattr_static(ZeroRedundancyOptimizer, name))


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_hook_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(getattr(ddp_hooks, name))


def test_the_errors_form_a_tree() -> None:
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


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_signature_is_torchs_and_ours_is_keyword_only() -> None:
    word, keyword, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect._empty
    assert parameters_of(ZeroRedundancyOptimizer) == [
        ("params", word, empty),
        ("optimizer_class", word, empty),
        ("process_group", word, None),
        ("parameters_as_bucket_view", word, False),
        ("overlap_with_ddp", word, False),
        ("config", keyword, None),
        ("defaults", inspect.Parameter.VAR_KEYWORD, empty),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_own_class_has_the_same_signature() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs

    ours = [entry for entry in parameters_of(ZeroRedundancyOptimizer) if entry[0] != "config"]
    assert ours == parameters_of(Theirs)
    for name in METHODS - {"add_param_groups", "full_state_dict", "join_device", "join_process_group"}:
        mine, theirs = parameters_of(getattr(ZeroRedundancyOptimizer, name)), parameters_of(getattr(Theirs, name))
        mine = [entry for entry in mine if entry[1] != inspect.Parameter.KEYWORD_ONLY or entry in theirs]
        assert [kind for _, kind, _ in mine] == [kind for _, kind, _ in theirs], name
        names = [entry for entry in mine if entry[1] != inspect.Parameter.VAR_KEYWORD]
        assert names == [entry for entry in theirs if entry[1] != inspect.Parameter.VAR_KEYWORD], name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_hooks_have_torchs_signatures() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as theirs

    for name in HOOKS:
        pairs = zip(parameters_of(getattr(ddp_hooks, name)), parameters_of(getattr(theirs, name)), strict=True)
        assert all(mine == other for mine, other in pairs)


def test_it_is_an_optimizer_and_can_be_joined() -> None:
    assert issubclass(ZeroRedundancyOptimizer, torch.optim.Optimizer)
    assert issubclass(ZeroRedundancyOptimizer, Joinable)


def test_everything_public_is_typed() -> None:
    functions = [getattr(ZeroRedundancyOptimizer, name) for name in METHODS if not name.startswith("join_")]
    functions += [zeroshard.broadcast_object, *(getattr(ddp_hooks, name) for name in HOOKS)]
    for function in functions:
        hints = get_type_hints(function)
        named = [p for p in inspect.signature(function).parameters if p != "self"]
        assert hints.keys() == {*named, "return"}, function


def test_modules_that_few_programs_need_are_imported_on_use() -> None:
    code = """if True:
        import sys, zeroshard
        lazy = ["checkpoint", "peer_checkpoint", "planner", "report"]
        print(*[name for name in lazy if f"zeroshard.{name}" in sys.modules])
        print(*[name for name in lazy if not getattr(zeroshard, name)])
    """
    assert run_python(code).split() == []


def test_importing_it_gives_no_warning_and_brings_in_torch_alone() -> None:
    code = """if True:
        import sys, torch, torch.distributed.algorithms.join, torch.nn.parallel
        before = set(sys.modules)
        import zeroshard
        fresh = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(fresh - sys.stdlib_module_names))
    """
    assert set(run_python(code, "-W", "error").split()) <= {"zeroshard", "torch"}


def test_it_works_without_the_extras_numpy_and_torchs_own_class() -> None:
    """An interpreter in which these cannot be imported makes a step."""
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
