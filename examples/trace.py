"""Trace one iteration on each rank with torch.profiler, and plot zeroshard's phases.

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
"""Colors by a pattern in the label, from the Okabe-Ito palette, which is safe for color-blind readers."""


def record_trace(path: Path) -> None:
    """Trace one iteration after a few warm-up iterations."""
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
    """Return the labeled events, ordered by start time."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    pattern = "zeroshard: |forward$|backward$"
    labeled = [event for event in events if event.get("ph") == "X" and re.match(pattern, event["name"])]
    return sorted(labeled, key=lambda event: (event["ts"], -event["dur"]))


def color(name: str) -> str:
    return next(value for pattern, value in COLORS.items() if re.search(pattern, name))


def draw_spans(axes: Any, events: list[dict[str, Any]], first: float, last: float) -> None:
    """Draw events, each below the event that contains it."""
    ends: list[float] = []
    for event in events:
        ends = [end for end in ends if end > event["ts"]]
        left, right = (max(event["ts"], first) - first) / 1e3, (event["ts"] + event["dur"] - first) / 1e3
        axes.barh(len(ends), right - left, left=left, height=0.85, align="edge", color=color(event["name"]))
        text = event["name"].removeprefix("zeroshard: ")
        if right - left > 0.016 * len(text) * (last - first) / 1e3:
            axes.text((left + right) / 2, len(ends) + 0.42, text, ha="center", va="center", fontsize=7)
        ends.append(event["ts"] + event["dur"])
    axes.set(xlim=(0, (last - first) / 1e3), ylim=(3.1, -0.1), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(events_per_rank: list[list[dict[str, Any]]], path: str) -> None:
    figure = Figure(figsize=(14, 1.3 + 1.5 * len(events_per_rank)), layout="constrained")
    panels = figure.subplots(len(events_per_rank), 2, squeeze=False, width_ratios=(1.2, 1))
    for rank, ((whole, end), events) in enumerate(zip(panels, events_per_rank, strict=True)):
        last = max(event["ts"] + event["dur"] for event in events)
        backward = next(event for event in events if event["name"] == "backward")
        after = backward["ts"] + backward["dur"]
        draw_spans(whole, events, events[0]["ts"], last)
        draw_spans(end, [event for event in events if event["ts"] + event["dur"] > after - 1e3], after - 1e3, last)
        whole.set_title(f"rank {rank}: one iteration", loc="left", fontsize=10)
        end.set_title(f"rank {rank}: after backward", loc="left", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("host time, ms")
    names = {key: re.sub(r"\((.*)\|(.*)\)", r"\1, \2", key) or "other phases" for key in COLORS}
    handles = [Patch(color=value, label=names[key]) for key, value in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    target = Path(f"trace-{dist.get_rank()}.json")
    record_trace(target)
    dist.barrier()
    if dist.get_rank() == 0 and len(sys.argv) > 1:
        draw([spans(Path(f"trace-{rank}.json")) for rank in range(dist.get_world_size())], sys.argv[1])
    dist.destroy_process_group()
