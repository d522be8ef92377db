"""Can those who receive it read it? Types beyond torch's own must be allowed on every rank."""

import io
import pickletools
import zipfile
from collections.abc import Sequence

import torch

from ..comm.collectives import Comm
from ..errors import RankMismatchError


def find_custom_types(data: bytes) -> list[str]:
    """Names of the types in it that torch's own list does not have, and the user has allowed."""
    return sorted(_pickled_type_names(data) & _user_safe_globals())


def check_types_allowed(comm: Comm, call: str, used_types: Sequence[str]) -> None:
    """Raise on all ranks if one of them sends a type that another has not allowed. Called on all ranks.

    What ranks have allowed and nobody uses may differ: many libraries allow their types when they are imported.
    """
    everyone = comm.data_parallel
    if comm.is_single_rank or not everyone.all_reduce_max([bool(used_types)])[0]:
        return
    wanted = {name for text in everyone.all_gather_text("\n".join(used_types)) for name in text.splitlines()}
    lacking = everyone.all_gather_text(", ".join(sorted(wanted - _user_safe_globals())))
    if any(lacking):
        told = "; ".join(f"rank {rank} has not allowed {names}" for rank, names in enumerate(lacking) if names)
        raise RankMismatchError(f"{call}: {told}. Call torch.serialization.add_safe_globals on every rank.")


def _user_safe_globals() -> set[str]:
    """What the user, or a library, has allowed beyond torch's own list."""
    allowed = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
    return {f"{entry.__module__}.{entry.__qualname__}" for entry in allowed}


def _pickled_type_names(data: bytes) -> set[str]:
    """Of the types that are needed to read it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return {
            str(name).replace(" ", ".") for op, name, _ in pickletools.genops(archive.read(path)) if op.name == "GLOBAL"
        }
