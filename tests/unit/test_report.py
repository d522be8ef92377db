"""Reports as text and as plots, for few and many ranks."""

import sys
from pathlib import Path

import pytest
import torch

from zeroshard import ConfigError, FlatShards, WholeParams
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import Partitioner, compute_balance
from zeroshard.layout.spec import ParamSpec
from zeroshard.profiling import Phase, PhaseTime, StepTimes
from zeroshard.report import CommVolume, Counters, MemoryUse, Report

CPU = torch.device("cpu")
NAME = "transformer.encoder.layers.{}.attention.projection.of.queries.and.keys.weight"
TIMES = StepTimes(
    {
        Phase.STEP: PhaseTime(1, 1e-4, 0.0),
        Phase.INNER_STEP: PhaseTime(1, 3e-3, 0.0),
        Phase.RECEIVE_GRADS: PhaseTime(9, 1e-3, 4e-3),
    },
    0.2,
)


def make_spec(index: int) -> ParamSpec:
    return ParamSpec(index, NAME.format(index), (100 + index, 64), (64, 1), torch.float32, CPU, 0, True)


def make_report(ranks: int, params: int, partition: Partitioner, times: StepTimes = TIMES) -> Report:
    layout = partition.extend(Layout.empty(ranks), tuple(map(make_spec, range(params))))
    return Report(
        rank=ranks - 1,
        shard_rank=ranks - 1,
        world_size=ranks,
        num_replicas=1,
        optimizer_classes=("AdamW",),
        config=("each rank updates its shard of every bucket", "a sentence that goes on " * 12),
        is_layout_final=True,
        balance=compute_balance(layout, lambda spec: spec.numel),
        state_bytes=(None, *[1 << 20] * (ranks - 1)),
        memory=(MemoryUse("parameters", "cpu", 9 << 20), MemoryUse("state", "cuda", 5 << 30)),
        comm_volume=CommVolume(1 << 20, 1 << 19),
        times=times,
        counters=Counters(4),
        layout=layout,
    )


report_sizes = pytest.mark.parametrize(
    "report",
    [
        make_report(2, 3, WholeParams()),
        make_report(64, 400, FlatShards(1 << 16)),
        make_report(1, 1, FlatShards(), StepTimes()),
    ],
    ids=["two", "many", "one"],
)


@report_sizes
def test_text_is_short_and_narrow(report: Report) -> None:
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 60
    assert all(line == line.rstrip() for line in lines)


def test_long_lists_show_first_and_last() -> None:
    report = make_report(64, 400, FlatShards(1 << 16))
    text = str(report)
    assert f"... and {len(report.buckets) - 7} more buckets ..." in text
    assert "... and 57 more ranks ..." in text
    assert "\n  rank 63 " in text
    assert "\n  rank 30 " not in text
    data = report.as_dict()
    assert len(data["ranks"]) == 64
    assert len(data["buckets"]) == len(report.layout.buckets)
    assert [name for bucket in data["buckets"] for name in bucket["parameters"]].count(NAME.format(7)) == 1


def test_times_are_ordered_by_phase() -> None:
    text = str(make_report(2, 3, WholeParams()))
    rows = [line.split() for line in text.splitlines() if line.endswith(("ms", " -"))]
    assert [" ".join(row) for row in rows[-3:]] == [
        "receive gradients 9 1 ms 4 ms",
        "inner step 1 3 ms -",
        "other 1 100 us -",
    ]
    assert "The last step took 4.1 ms, and 200 ms since the one before" in text


@report_sizes
def test_save_plot(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix in ("png", "svg"):
        path = report.save_plot(tmp_path / f"report.{suffix}")
        assert path.stat().st_size > 1000
    assert "<svg" in path.read_text(encoding="utf-8")


def test_plot_file_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report(2, 3, WholeParams())
    assert report.save_plot(tmp_path / "x") == tmp_path / "x.png"
    assert (tmp_path / "x.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="could not be written"):
        report.save_plot(tmp_path / "x.strange")


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ConfigError, match=r"zeroshard\[plot\]"):
            make_report(2, 3, WholeParams()).save_plot(tmp_path / "report.png")
