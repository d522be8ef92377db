"""Rules for imports between modules, for communication, and for dependencies of the package."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import zeroshard

ROOT = Path(zeroshard.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Bottom up, as in ARCHITECTURE.md: a package or module imports only from those above it in this list. Imports inside
# functions and for annotations may reach further down: they load heavy modules on first use.
LAYERS = (
    *("errors", "_torch_compat", "_types", "_formatting", "_logging", "_tracebacks", "_plotting", "profiling"),
    *("layout", "params", "config", "comm", "state", "engine"),
    *("rules", "build", "summary", "state_dict_mixin", "zero_redundancy_optimizer", "optimizer", "shard"),
    *("grad_scaler", "ddp_hooks", "torch_patch", "__init__"),
    *("peer_checkpoint", "report", "checkpoint", "planner", "doctor", "integrations", "cli", "__main__"),
)


class Import(NamedTuple):
    module: str
    """The absolute dotted name."""
    names: tuple[str, ...]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    return ".".join(("zeroshard", *path.relative_to(ROOT).with_suffix("").parts))


MODULES = {module_name(path) for path in FILES}


def imports(path: Path, *, on_load: bool = False) -> list[Import]:
    """All imports of a file. `on_load`: only those that run when the module is loaded."""
    package = module_name(path).split(".")[:-1]
    found: list[Import] = []
    for node in _walk(parse(path), on_load=on_load):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append(Import(module, tuple(alias.name for alias in node.names)))
    return found


def _walk(node: ast.AST, *, on_load: bool) -> Iterator[ast.AST]:
    """Yield all descendants. `on_load`: skip the bodies of functions and of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not (on_load and (is_function or is_for_types)):
            yield child
            yield from _walk(child, on_load=on_load)


def imported_modules(path: Path, *, on_load: bool = False) -> set[str]:
    """The modules of this package that a file imports."""
    used: set[str] = set()
    for module, names in imports(path, on_load=on_load):
        if module.partition(".")[0] != "zeroshard":
            continue
        submodules = {f"{module}.{name}" for name in names} & MODULES
        used |= submodules or {module if module in MODULES else f"{module}.__init__"}
    return used


def layer(module: str) -> str:
    """The top-level package or module that contains `module`."""
    return module.split(".")[1]


def test_imports_follow_the_order_of_layers() -> None:
    assert {layer(module) for module in MODULES} == set(LAYERS)
    position = {name: index for index, name in enumerate(LAYERS)}
    violations = []
    for path in FILES:
        importer = module_name(path)
        used = imported_modules(path, on_load=True)
        violations += [
            f"{importer} -> {module}" for module in used if position[layer(module)] > position[layer(importer)]
        ]
    assert not violations
    graph = {module_name(path): imported_modules(path, on_load=True) - {module_name(path)} for path in FILES}
    TopologicalSorter(graph).prepare()  # raises on a cycle


def test_the_core_depends_on_torch_alone() -> None:
    optional = {"cli": {"typer", "rich"}, "zeroshard": {"matplotlib"}, "planner": {"matplotlib"}}
    for path in FILES:
        top_level = {module.partition(".")[0] for module, _ in imports(path)}
        extra = optional.get(path.parent.name, set())
        extra |= {path.stem} if path.parent.name == "integrations" else set()
        assert top_level <= {"torch", "zeroshard"} | extra | sys.stdlib_module_names, path
        for module, names in imports(path):
            is_torch = module.partition(".")[0] == "torch"
            assert not (is_torch and "zero_redundancy_optimizer" in {*module.split("."), *names}), path
            assert not (is_torch and "ZeroRedundancyOptimizer" in names), path


def communicates(name: str) -> bool:
    """Whether a name of torch.distributed is a function that communicates, not a query or a type."""
    value = getattr(dist, name)
    return callable(value) and not isinstance(value, type) and not name.startswith(("get_", "is_"))


def dist_names(path: Path) -> set[str]:
    """Names of torch.distributed that a file reads as attributes or imports."""
    found: set[str] = set()
    aliases = {"dist"}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module in (
            "torch.distributed",
            "torch.distributed.distributed_c10d",
        ):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases | {"torch.distributed"}:
            found.add(node.attr)
    return {name for name in found if hasattr(dist, name)}


def test_only_comm_communicates() -> None:
    callers = {path for path in FILES if any(map(communicates, dist_names(path)))}
    assert {path.parent for path in callers} == {ROOT / "comm"}


def test_layouts_are_pure() -> None:
    """They allocate no tensors and use no process groups."""
    for path in sorted((ROOT / "layout").glob("*.py")):
        assert {module for module, _ in imports(path) if module.startswith("torch")} <= {"torch"}, path
        attributes = {ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
        used = {text for text in attributes if text.startswith("torch.")}
        assert used <= {"torch.dtype", "torch.device", "torch.Tensor", "torch.strided"}, path


def test_checks_detect_known_imports_and_calls() -> None:
    """The helpers find a few imports and calls that exist."""
    assert "zeroshard._types" in imported_modules(ROOT / "layout" / "layout.py")
    assert "zeroshard.layout.spec" in imported_modules(ROOT / "layout" / "layout.py")
    assert "zeroshard.ddp_hooks" in imported_modules(ROOT / "__init__.py")
    assert "zeroshard.comm.process_group" in imported_modules(ROOT / "zero_redundancy_optimizer.py")
    lazy = imported_modules(ROOT / "optimizer.py") - imported_modules(ROOT / "optimizer.py", on_load=True)
    assert lazy == {"zeroshard.report", "zeroshard.peer_checkpoint.snapshot"}
    assert {"broadcast", "all_reduce", "isend"} <= dist_names(ROOT / "comm" / "collectives.py")
    assert all(map(communicates, ("broadcast", "all_reduce", "isend", "barrier", "new_group")))
    assert not any(map(communicates, ("get_rank", "is_initialized", "ProcessGroup", "GradBucket")))


FACETS = {"grads", "params", "param_sync", "state"}
FACTS = {"comm", "layout", "profiler", "checks", "steps", "restore_step_count"}


def test_tools_use_only_the_facets_of_the_engine() -> None:
    tools = ("checkpoint", "peer_checkpoint", "report", "integrations", "planner", "summary", "state_dict_mixin")
    used = {
        (module_name(path), node.attr)
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and module_name(path).split(".")[1:2] and _is_engine(node.value)
        if module_name(path).split(".")[1] in tools
    }
    assert {attribute for _, attribute in used} >= {"params", "state"}  # the search finds something
    assert [use for use in sorted(used) if use[1] not in FACETS | FACTS] == []


def _is_engine(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("engine", "_engine")
