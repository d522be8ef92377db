"""A model sharded with rules, beside one under DDP with a plain optimizer for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

from tests.support.oracle import assert_same
from tests.support.pair import Pair, in_rank_order
from zeroshard import FlatShards, KeepFull, Rule, ShardedOptimizer, WholeParams, ZeroConfig, everything_else, matrices
from zeroshard import shard as make_sharded

WORDS, WIDTH = 11, 6
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
TINY = FlatShards(bucket_bytes=200)
"""About one matrix in a bucket."""
CONFIGS = (
    ZeroConfig(),
    ZeroConfig(partition=TINY),
    ZeroConfig(partition=TINY, retention=KeepFull()),
    ZeroConfig(partition=TINY, overlap_gather=True),
    ZeroConfig(partition=WholeParams()),
)


class Words(nn.Module):
    """Six matrices of several shapes between an embedding and a head. A block in `skipped` is not used."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size), nn.Tanh(), nn.Linear(size, WIDTH, bias=False))
            for size in (8, 9, 9, 9)[:blocks]
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.skipped: set[int] = set()

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = x if number in self.skipped else x + block(x)
        result: Tensor = self.head(x)
        return result


def ids(number: int) -> Tensor:
    """Other ones on each rank. No word twice: sums of several in one pass would be made in another order."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randperm(WORDS, generator=generator)[:7]


def next_word(model: nn.Module, number: int) -> Tensor:
    words = ids(number)
    return cross_entropy(model(words).float(), words.roll(1))


def hidden(name: str, param: Tensor) -> bool:
    """The matrices of `Words`, chosen without the code under test."""
    return name.startswith("blocks.") and param.dim() == 2


def rules(**muon: Any) -> list[Rule]:
    return [
        Rule(matrices(exclude=("embed", "head")), Muon, **{**MUON, **muon}),
        Rule(everything_else, AdamW, **ADAMW),
    ]


class Several:
    """Plain optimizers that step one after the other."""

    def __init__(self, *members: Optimizer) -> None:
        self.members = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for member in self.members:
            member.step()
        return loss

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return joined([member.state_dict() for member in self.members])


def muon_and_adamw(model: nn.Module) -> Several:
    named = list(model.named_parameters())
    first = [(name, param) for name, param in named if hidden(name, param)]
    rest = [(name, param) for name, param in named if not hidden(name, param)]
    return Several(Muon(first, **MUON), AdamW(rest, **ADAMW))


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """State dicts of several optimizers as one with all groups."""
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    start = 0
    for part in parts:
        whole["state"] |= {start + number: state for number, state in part["state"].items()}
        for group in part["param_groups"]:
            whole["param_groups"].append({**group, "params": [start + number for number in group["params"]]})
        start += sum(len(group["params"]) for group in part["param_groups"])
    return whole


def parted(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The dict of each group by itself, as the plain optimizer of that group would write it."""
    for group in whole["param_groups"]:
        start, count = min(group["params"], default=0), len(group["params"])
        state = {n - start: state for n, state in sorted(whole["state"].items()) if start <= n < start + count}
        options = {key: value for key, value in group.items() if key != "optimizer"}
        yield {"state": state, "param_groups": [{**options, "params": list(range(count))}]}


class RulesPair(Pair):
    """Trains both, and compares them after each step."""

    def __init__(
        self,
        given: Sequence[Rule] | None = None,
        plain: Callable[[nn.Module], Several] = muon_and_adamw,
        *,
        make: Callable[[], nn.Module] = Words,
        config: ZeroConfig | None = None,
        loss: Callable[[nn.Module, int], Tensor] = next_word,
        find_unused: bool = False,
    ) -> None:
        self.plain_model, self.model = seeded(make), seeded(make)
        self._find_unused = find_unused
        self.wrap_plain()
        self.plain: Any = plain(self.plain_model)
        self.zero: ShardedOptimizer = make_sharded(self.model, given or rules(), config=config)
        self.loss, self.steps = loss, 0

    def wrap_plain(self) -> None:
        """A new DDP: it must be wrapped anew when other parameters train."""
        self.ddp = DistributedDataParallel(self.plain_model, find_unused_parameters=self._find_unused)
        self.ddp.register_comm_hook(None, in_rank_order)

    def check(self) -> None:
        self.zero.wait()
        super().check()

    def check_state(self) -> None:
        """The consolidated state is that of the plain ones, and each group says whose it is."""
        found = self.zero.full_state_dict()
        if found is not None:
            assert_same(list(parted(found)), list(parted(self.plain.state_dict())), "the state dict")
            assert len({group["optimizer"] for group in found["param_groups"]}) == len(self.plain.members)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()
