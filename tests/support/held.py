"""`examples/elastic.py`, in which a process stops before a step, once, and waits to be ended there.

Run as `-m tests.support.held`. Only processes with a `Hold` in their environment stop.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from examples import elastic
from torch import Tensor

SETTING = "ZEROSHARD_HOLD"
LONG = 240.0
"""Seconds: nobody is held longer."""


@dataclass(frozen=True)
class Hold:
    """Where the first that comes there stops, among so many ranks. It writes its process and that one's parent into
    `file`; once that is there nobody stops any more."""

    world_size: int
    step: int
    file: str

    def setting(self) -> dict[str, str]:
        return {SETTING: json.dumps(asdict(self))}

    def meet(self, step: int, world_size: int) -> None:
        if (step, world_size) == (self.step, self.world_size) and self._is_first():
            time.sleep(LONG)
            os._exit(1)

    def _is_first(self) -> bool:
        mine = Path(f"{self.file}.{os.getpid()}")
        mine.write_text(f"{os.getpid()} {os.getppid()}", encoding="ascii")
        with suppress(FileExistsError):
            os.link(mine, self.file)
            return True
        return False


def main() -> None:
    part, asked = elastic.part_of_batch, os.environ.get(SETTING)
    hold = Hold(**json.loads(asked)) if asked else None

    def part_of_batch(step: int, rank: int, world_size: int) -> Tensor:
        if hold is not None:
            hold.meet(step, world_size)
        return part(step, rank, world_size)

    elastic.part_of_batch = part_of_batch
    elastic.main()


if __name__ == "__main__":
    main()
