"""A trace of one iteration on each rank, and a picture of what zeroshard does in it.

torchrun --nproc-per-node 2 examples/trace.py trace.png
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, record_function

import zeroshard
from gpt import GPT  # type: ignore[import-not-found]

COLORS = {
    "forward": "#dddddd",
    "backward": "#bbbbbb",
    "pack gradients": "#56B4E9",
    "send gradients": "#0072B2",
    "(receive|wait for) gradients": "#F0E442",
    "(send|wait for) parameters": "#E69F00",
    "inner step": "#009E73",
    "consensus": "#D55E00",
    "": "#CC79A7",
}
"""By what is in a name; those of Okabe and Ito, which can be told apart by all."""


def traced(path: Path) -> None:
    """One iteration, after a few that are not traced."""
    torch.manual_seed(dist.get_rank())
    model = GPT(vocabulary=256)
    config = zeroshard.ZeroConfig(partition=zeroshard.FlatShards(bucket_bytes=2 << 20), overlap_param_gather=True)
    optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config)

    def iterate() -> None:
        ids = torch.randint(256, (8, 64))
        with record_function("forward"):
            loss = cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        with record_function("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        iterate()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        iterate()
    optimizer.wait_for_params()
    profiler.export_chrome_trace(str(path))


def spans(path: Path) -> list[dict[str, Any]]:
    """What is labelled, in the order in which it begins."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    named = [it for it in events if it.get("ph") == "X" and re.match("zeroshard: |forward$|backward$", it["name"])]
    return sorted(named, key=lambda it: (it["ts"], -it["dur"]))


def color(name: str) -> str:
    return next(value for pattern, value in COLORS.items() if re.search(pattern, name))


def draw_spans(axes: Any, events: list[dict[str, Any]], first: float, last: float) -> None:
    """What lies inside something is drawn below it."""
    ends: list[float] = []
    for it in events:
        ends = [end for end in ends if end > it["ts"]]
        left, right = (max(it["ts"], first) - first) / 1e3, (it["ts"] + it["dur"] - first) / 1e3
        axes.barh(len(ends), right - left, left=left, height=0.85, align="edge", color=color(it["name"]))
        text = it["name"].removeprefix("zeroshard: ")
        if right - left > 0.016 * len(text) * (last - first) / 1e3:
            axes.text((left + right) / 2, len(ends) + 0.42, text, ha="center", va="center", fontsize=7)
        ends.append(it["ts"] + it["dur"])
    axes.set(xlim=(0, (last - first) / 1e3), ylim=(3.1, -0.1), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(found: list[list[dict[str, Any]]], path: str) -> None:
    figure = Figure(figsize=(14, 1.3 + 1.5 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False, width_ratios=(1.2, 1))
    for rank, ((whole, end), events) in enumerate(zip(panels, found, strict=True)):
        last = max(it["ts"] + it["dur"] for it in events)
        backward = next(it for it in events if it["name"] == "backward")
        after = backward["ts"] + backward["dur"]
        draw_spans(whole, events, events[0]["ts"], last)
        draw_spans(end, [it for it in events if it["ts"] + it["dur"] > after - 1e3], after - 1e3, last)
        whole.set_title(f"rank {rank}: an iteration", loc="left", fontsize=10)
        end.set_title(f"rank {rank}: what follows backward", loc="left", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("milliseconds of the host")
    names = {key: re.sub(r"\((.*)\|(.*)\)", r"\1, \2", key) or "other parts" for key in COLORS}
    handles = [Patch(color=value, label=names[key]) for key, value in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    target = Path(f"trace-{dist.get_rank()}.json")
    traced(target)
    dist.barrier()
    if dist.get_rank() == 0 and len(sys.argv) > 1:
        draw([spans(Path(f"trace-{rank}.json")) for rank in range(dist.get_world_size())], sys.argv[1])
    dist.destroy_process_group()
