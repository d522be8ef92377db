"""Who may import whom, who may communicate, and what the package may depend on."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import zeroshard

ROOT = Path(zeroshard.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Bottom up, as in ARCHITECTURE.md: a package or module, and those it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "notices": set(),
    "labels": set(),
    "layout": {"units", "errors"},
    "policies": {"errors"},
    "config": {"layout", "policies", "errors"},
    "params": {"layout", "errors"},
    "rules": {"notices", "layout", "state", "errors"},
    "comm": {"labels", "notices", "policies", "units", "errors"},
    "state": {"notices", "layout", "comm", "units", "errors"},
    "runtime": {"labels", "notices", "layout", "policies", "params", "comm", "state", "units", "errors"},
    "adapters": {"labels", "notices", "layout", "comm", "state", "runtime", "units", "errors"},
    "dividing": {"layout", "config", "runtime", "units", "errors"},
    "assembly": {
        *("dividing", "notices", "layout", "config", "params", "policies", "comm", "state", "runtime", "units"),
        "errors",
    },
    "state_dicts": {"labels", "assembly", "layout", "comm", "state", "runtime", "units", "errors"},
    "objects": {"comm", "state", "units", "errors"},
}
MAY_IMPORT["measuring"] = {"rules", "layout", "comm", "runtime", "units", "errors"}
MAY_IMPORT["stepping"] = {"labels", "adapters", "comm", "runtime", "units"}
MAY_IMPORT["stateful"] = {"labels", "state_dicts", "adapters", "comm", "runtime", "state"}
# "optimizer" for annotations, and when its class is asked for: a module with the name of torch's has torch's names.
MAY_IMPORT["zero_redundancy_optimizer"] = {
    *("objects", "adapters", "runtime", "state", "stateful", "units", "errors", "optimizer"),
}
MAY_IMPORT["modes"] = {"comm", "state", "runtime"}
MAY_IMPORT["second_copy"] = {"labels", "notices", "layout", "policies", "comm", "state", "runtime", "units", "errors"}
MAY_IMPORT["pictures"] = {"errors"}
MAY_IMPORT["reporting"] = {
    *("labels", "notices", "layout", "config", "policies", "assembly", "state", "runtime", "second_copy", "units"),
    *("pictures", "errors"),
}
MAY_IMPORT["optimizer"] = set(MAY_IMPORT) - {"objects", "rules", "measuring"}
MAY_IMPORT["sharded"] = set(MAY_IMPORT) - {"objects", "measuring"}
MAY_IMPORT["recovery"] = {"labels", "layout", "comm", "state", "runtime", "second_copy", "optimizer", "units", "errors"}
MAY_IMPORT["checkpoint"] = {
    *("labels", "notices", "layout", "comm", "state", "state_dicts", "runtime", "optimizer", "units", "errors"),
}
MAY_IMPORT["scaler"] = {"optimizer"}
MAY_IMPORT["ddp_hooks"] = {"optimizer", "adapters"}
MAY_IMPORT["planning"] = {"dividing", "rules", "layout", "policies", "config", "state", "runtime", "units", "errors"}
MAY_IMPORT["replacing"] = {"notices", "zero_redundancy_optimizer", "ddp_hooks"}
MAY_IMPORT["__init__"] = {
    *("optimizer", "sharded", "rules", "measuring", "scaler", "ddp_hooks", "objects", "config", "policies", "layout"),
    *("errors", "checkpoint", "second_copy", "recovery", "planning", "replacing", "reporting"),
}
MAY_IMPORT["integrations"] = {
    "objects",
    "scaler",
    "sharded",
    "optimizer",
    "checkpoint",
    "config",
    "comm",
    "errors",
    "notices",
}
MAY_IMPORT["running"] = {"replacing"}
MAY_IMPORT["doctor"] = {"__init__", "comm", "layout", "policies", "config", "sharded", "units", "errors"}
MAY_IMPORT["cli"] = {
    *("checkpoint", "planning", "config", "policies", "rules", "layout", "state", "running", "doctor", "units"),
    *("pictures", "errors"),
}
MAY_IMPORT["__main__"] = {"cli", "running", "doctor", "__init__"}


class Import(NamedTuple):
    module: str
    """Absolute, with dots."""
    names: tuple[str, ...]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    return ".".join(("zeroshard", *path.relative_to(ROOT).with_suffix("").parts))


MODULES = {module_name(path) for path in FILES}


def imports(path: Path, *, run: bool = False) -> list[Import]:
    """All imports of a file, also those inside functions. `run`: without those for annotations alone."""
    package = module_name(path).split(".")[:-1]
    found: list[Import] = []
    tree = parse(path)
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = {id(node) for block in blocks for node in ast.walk(block)} if run else set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found += [Import(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append(Import(module, tuple(alias.name for alias in node.names)))
    return found


def imported_modules(path: Path, *, run: bool = False) -> set[str]:
    """The modules of the package that a file imports."""
    used: set[str] = set()
    for module, names in imports(path, run=run):
        if module.partition(".")[0] != "zeroshard":
            continue
        submodules = {f"{module}.{name}" for name in names} & MODULES
        used |= submodules or {module if module in MODULES else f"{module}.__init__"}
    return used


def layer(module: str) -> str:
    """The top-level package or module that it belongs to."""
    return module.split(".")[1]


def test_imports_follow_the_order_of_layers() -> None:
    assert {layer(module) for module in MODULES} == set(MAY_IMPORT)
    forbidden = []
    for path in FILES:
        own = layer(module_name(path))
        allowed = MAY_IMPORT[own] | {own}
        forbidden += [f"{module_name(path)} -> {it}" for it in imported_modules(path) if layer(it) not in allowed]
    assert not forbidden
    graph = {module_name(path): imported_modules(path, run=True) - {module_name(path)} for path in FILES}
    TopologicalSorter(graph).prepare()  # raises on a cycle


def test_the_core_depends_on_torch_alone() -> None:
    optional = {"cli": {"typer", "rich"}, "reporting": {"matplotlib"}}
    for path in FILES:
        tops = {module.partition(".")[0] for module, _ in imports(path)}
        extra = optional.get(path.parent.name, set())
        extra |= {path.stem} if path.parent.name == "integrations" else set()
        assert tops <= {"torch", "zeroshard"} | extra | sys.stdlib_module_names, path
        for module, names in imports(path):
            is_torchs = module.partition(".")[0] == "torch"
            assert not (is_torchs and "zero_redundancy_optimizer" in {*module.split("."), *names}), path
            assert not (is_torchs and "ZeroRedundancyOptimizer" in names), path


def communicates(name: str) -> bool:
    """Whether a name of torch.distributed is more than a query or a type."""
    value = getattr(dist, name)
    return callable(value) and not isinstance(value, type) and not name.startswith(("get_", "is_"))


def dist_names(path: Path) -> set[str]:
    """What a file takes from torch.distributed, as an attribute or by import."""
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
    """They allocate no tensor and know no process group."""
    for path in sorted((ROOT / "layout").glob("*.py")):
        assert {module for module, _ in imports(path) if module.startswith("torch")} <= {"torch"}, path
        attributes = {ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
        used = {text for text in attributes if text.startswith("torch.")}
        assert used <= {"torch.dtype", "torch.device", "torch.Tensor", "torch.strided"}, path


def test_these_checks_see_what_is_there() -> None:
    """A few imports and calls that certainly exist."""
    assert "zeroshard.units" in imported_modules(ROOT / "layout" / "layout.py")
    assert "zeroshard.layout.specs" in imported_modules(ROOT / "layout" / "layout.py")
    assert "zeroshard.ddp_hooks" in imported_modules(ROOT / "__init__.py")
    assert "zeroshard.comm.group" in imported_modules(ROOT / "objects.py")
    names = ROOT / "zero_redundancy_optimizer.py"
    assert imported_modules(names) - imported_modules(names, run=True) == {"zeroshard.optimizer"}
    assert {"broadcast", "all_reduce", "isend"} <= dist_names(ROOT / "comm" / "collectives.py")
    assert all(map(communicates, ("broadcast", "all_reduce", "isend", "barrier", "new_group")))
    assert not any(map(communicates, ("get_rank", "is_initialized", "ProcessGroup", "GradBucket")))
