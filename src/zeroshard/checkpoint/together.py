"""What goes wrong with a checkpoint is the same error on all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn import Module

from ..comm.consensus import Prepared, prepare_all
from ..comm.collectives import Comm
from ..errors import CheckpointError, ConfigError, RankFailedError, RankLostError, RankMismatchError
from .._types import Rank


@contextmanager
def errors_as_checkpoint_error(path: object) -> Iterator[None]:
    """A job that catches it and falls back to something else must do so on all ranks."""
    try:
        yield
    except (CheckpointError, ConfigError, RankMismatchError, RankLostError):
        raise
    except RankFailedError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error


def check_components(components: Mapping[str, Any], method: str, progress: object) -> None:
    """Raise if a model, an optimizer, a scheduler or a display is none. `method`: of theirs that will be called."""
    model, optimizer, scheduler = components["model"], components["optimizer"], components["scheduler"]
    odd = [
        (model, isinstance(model, Module), "model= must be a torch.nn.Module"),
        (
            optimizer,
            _has_attributes(optimizer, "param_groups", method),
            f"optimizer= must have param_groups and {method}()",
        ),
        (scheduler, _has_attributes(scheduler, method), f"scheduler= must have {method}()"),
        (progress, isinstance(progress, bool) or callable(progress), "progress= must be True, False or a function"),
    ]
    for it, fits, text in odd:
        if it is not None and not fits:
            raise ConfigError(f"{text}, or be None; it is a {type(it).__name__}")


def _has_attributes(obj: object, *names: str) -> bool:
    return all(hasattr(obj, name) for name in names)


def run_on_rank0(comm: Comm, call: str, action: Callable[[], Path], must_match: Sequence[str] = ()) -> Path:
    """What rank 0 makes of it, on all ranks; what fails there is raised on all."""
    mine = comm.group.rank == 0
    made = prepare_all(comm, call, lambda: Prepared(action() if mine else Path(), must_match))
    if comm.group.size == 1:
        return made
    return Path(comm.broadcast_bytes(str(made).encode() if mine else None, Rank(0)).decode())
