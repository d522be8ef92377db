"""The rooms of the house: who may import whom, who may talk to other ranks, how large a thing may get."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import zeroshard

ROOT = Path(zeroshard.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Bottom up, as in ARCHITECTURE.md: a room, and the rooms it may use.
ROOMS: dict[str, set[str]] = {
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
    "state": {"layout", "comm", "units", "errors"},
    "runtime": {"labels", "notices", "layout", "policies", "params", "comm", "state", "units", "errors"},
    "adapters": {"labels", "layout", "comm", "state", "runtime", "units", "errors"},
    "dividing": {"layout", "config", "runtime", "units", "errors"},
    "assembly": {
        *("dividing", "notices", "layout", "config", "params", "policies", "comm", "state", "runtime", "units"),
        "errors",
    },
    "state_dicts": {"labels", "assembly", "layout", "comm", "state", "runtime", "units", "errors"},
    "objects": {"comm", "state", "units", "errors"},
}
ROOMS["measuring"] = {"rules", "layout", "comm", "runtime", "units", "errors"}
ROOMS["stepping"] = {"labels", "adapters", "comm", "runtime", "units"}
ROOMS["stateful"] = {"labels", "state_dicts", "adapters", "comm", "runtime", "state"}
ROOMS["modes"] = {"comm", "state", "runtime"}
ROOMS["second_copy"] = {"labels", "notices", "layout", "policies", "comm", "state", "runtime", "units", "errors"}
ROOMS["reporting"] = {
    *("labels", "notices", "layout", "config", "policies", "assembly", "state", "runtime", "second_copy", "units"),
    "errors",
}
ROOMS["optimizer"] = set(ROOMS) - {"objects", "rules", "measuring"}
ROOMS["sharded"] = set(ROOMS) - {"objects", "measuring"}
ROOMS["recovery"] = {"labels", "layout", "comm", "state", "runtime", "second_copy", "optimizer", "units", "errors"}
ROOMS["checkpoint"] = {"labels", "notices", "layout", "comm", "state", "runtime", "optimizer", "units", "errors"}
ROOMS["scaler"] = {"optimizer"}
ROOMS["ddp_hooks"] = {"optimizer", "adapters"}
ROOMS["planning"] = {"dividing", "rules", "layout", "policies", "config", "state", "runtime", "units", "errors"}
ROOMS["replacing"] = {"notices", "optimizer", "ddp_hooks"}
ROOMS["__init__"] = {
    *("optimizer", "sharded", "rules", "measuring", "scaler", "ddp_hooks", "objects", "config", "policies", "layout"),
    *("errors", "checkpoint", "second_copy", "recovery", "planning", "replacing", "reporting"),
}
ROOMS["integrations"] = {
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
ROOMS["running"] = {"replacing"}
ROOMS["doctor"] = {"__init__", "comm", "layout", "policies", "config", "sharded", "units", "errors"}
ROOMS["cli"] = {
    *("checkpoint", "planning", "config", "policies", "rules", "layout", "state", "running", "doctor", "units"),
    "errors",
}
ROOMS["__main__"] = {"cli", "running", "doctor", "__init__"}

MOST_LINES_OF_A_FUNCTION = 40
MOST_LINES_OF_A_FILE = 420


class Import(NamedTuple):
    module: str
    """Absolute, with dots."""
    names: tuple[str, ...]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return ".".join(("zeroshard", *path.relative_to(ROOT).with_suffix("").parts))


def imports(path: Path) -> list[Import]:
    """All imports of a file, also those inside functions."""
    package = name_of(path).split(".")[:-1]
    found: list[Import] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append(Import(module, tuple(alias.name for alias in node.names)))
    return found


def used_files(path: Path) -> set[str]:
    """The files of the package that a file imports, as modules."""
    known = {name_of(file) for file in FILES}
    used: set[str] = set()
    for module, names in imports(path):
        if module.partition(".")[0] != "zeroshard":
            continue
        inside = {f"{module}.{name}" for name in names} & known
        used |= inside or {module if module in known else f"{module}.__init__"}
    return used


def room_of(module: str) -> str:
    return module.split(".")[1]


every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def test_every_room_is_known() -> None:
    assert {room_of(name_of(path)) for path in FILES} == set(ROOMS)


def test_the_reader_of_imports_sees_them() -> None:
    """Guard of the guard: a few imports that are certainly there."""
    assert "zeroshard.units" in used_files(ROOT / "layout" / "layout.py")
    assert "zeroshard.layout.specs" in used_files(ROOT / "layout" / "layout.py")
    assert "zeroshard.ddp_hooks" in used_files(ROOT / "__init__.py")
    assert "zeroshard.comm.group" in used_files(ROOT / "objects.py")


@every_file
def test_top_uses_bottom(path: Path) -> None:
    room = room_of(name_of(path))
    strangers = {module for module in used_files(path) if room_of(module) not in ROOMS[room] | {room}}
    assert not strangers


def test_there_are_no_circles() -> None:
    graph = {name_of(path): used_files(path) - {name_of(path)} for path in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)


@every_file
def test_torch_and_the_standard_library_are_all_that_is_imported(path: Path) -> None:
    tops = {module.partition(".")[0] for module, _ in imports(path)}
    extra = {"cli": {"typer", "rich"}, "reporting": {"matplotlib"}}.get(path.parent.name, set())
    extra |= {path.stem} if path.parent.name == "integrations" else set()
    assert tops <= {"torch", "zeroshard"} | extra | sys.stdlib_module_names


def test_torchs_own_class_is_imported_nowhere() -> None:
    for path in FILES:
        for module, names in imports(path):
            assert "zero_redundancy_optimizer" not in module
            assert not (module.startswith("torch") and "ZeroRedundancyOptimizer" in names)


def communicates(name: str) -> bool:
    """Whether a name of torch.distributed does more than tell something or be a type."""
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


def test_one_folder_talks_to_other_ranks() -> None:
    talking = {path for path in FILES if any(map(communicates, dist_names(path)))}
    assert {path.parent for path in talking} == {ROOT / "comm"}


def test_the_lister_of_verbs_sees_them() -> None:
    assert {"broadcast", "all_reduce", "isend"} <= dist_names(ROOT / "comm" / "collectives.py")
    assert all(map(communicates, ("broadcast", "all_reduce", "isend", "barrier", "new_group")))
    assert not any(map(communicates, ("get_rank", "is_initialized", "ProcessGroup", "GradBucket")))


@pytest.mark.parametrize("path", sorted((ROOT / "layout").glob("*.py")), ids=lambda path: path.name)
def test_layouts_are_pure(path: Path) -> None:
    """No tensor is allocated there and no process group is known."""
    assert {module for module, _ in imports(path) if module.startswith("torch")} <= {"torch"}
    attributes = {ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
    used = {text for text in attributes if text.startswith("torch.")}
    assert used <= {"torch.dtype", "torch.device", "torch.Tensor", "torch.strided"}


@every_file
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_A_FILE
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MOST_LINES_OF_A_FUNCTION, node.name


@every_file
def test_every_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parse(path))
