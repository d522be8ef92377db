"""Examples run unchanged, in separate processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.launch import torchrun
from zeroshard import checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "train_sharded.py"


def load_plain_optimizer(directory: Path) -> torch.optim.AdamW:
    """Load a checkpoint into the unsharded optimizer of a new model."""
    model = nn.Sequential(nn.Linear(32, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 1))
    params = sorted(model.parameters(), key=lambda param: param.dim() <= 1)
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    checkpoint.load(directory, model=model, optimizer=optimizer)
    return optimizer


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_train_sharded_resumes_at_another_world_size(tmp_path: Path) -> None:
    for steps, ranks in ((20, 2), (40, 3), (60, 1)):
        assert f"step {steps}: loss" in torchrun(SCRIPT, ranks, tmp_path)
        optimizer = load_plain_optimizer(tmp_path / "checkpoints" / f"step-{steps:09d}")
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert [state["step"].item() for state in optimizer.state.values()] == [steps] * 6


def parse_losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"ranks: loss (\S+)", printed)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_job_resumes_without_losing_a_step(tmp_path: Path) -> None:
    """Bitwise on the same number of ranks; on other numbers float32 sums have another order."""
    script, directories = SCRIPT.with_name("resume.py"), [tmp_path / "uninterrupted", tmp_path / "stopped"]
    for directory in directories:
        directory.mkdir()
    uninterrupted = parse_losses(torchrun(script, 2, directories[0], "--steps", "16", "--every", "5"))
    stopped: list[float] = []
    for ranks, stop in ((2, 4), (2, 8), (3, 12), (1, 16)):
        stopped += parse_losses(torchrun(script, ranks, directories[1], "--steps", "16", "--stop-at", str(stop)))
    assert len(uninterrupted) == len(stopped) == 16
    assert stopped[:8] == uninterrupted[:8]
    assert stopped[8:] == pytest.approx(uninterrupted[8:], rel=1e-6)
    assert uninterrupted[-1] < uninterrupted[0] - 0.5


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_train_gpt_sharded(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("train_gpt.py"), 2, tmp_path, "--mode", "shard", "--steps", "2")
    assert "rank 0: last loss" in printed
    assert "rank 1: last loss" in printed


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_train_muon_resumes_at_another_world_size(tmp_path: Path) -> None:
    script, last_loss = SCRIPT.with_name("train_muon.py"), 9.9
    for steps, ranks, options in ((15, 2, ["--measured"]), (30, 3, []), (45, 1, [])):
        printed = torchrun(script, ranks, tmp_path, "--steps", "15", "--layers", "2", "--width", "32", *options)
        (loss,) = map(float, re.findall(rf"step {steps}: loss (\S+) on {ranks} ranks", printed))
        assert loss < last_loss
        last_loss = loss


@pytest.mark.timeout(180)
def test_dropin_shards_optimizer_state_under_ddp(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("dropin.py"), 2, tmp_path)
    first, last = map(float, re.findall(r"loss (\S+)", printed))
    assert last < first / 4
    numel_by_rank = {
        int(rank): int(count.replace(",", "")) for rank, count in re.findall(r"rank (\d) holds (\S+) of", printed)
    }
    (total,) = set(re.findall(r"of (\S+) elements", printed))
    assert numel_by_rank.keys() == {0, 1}
    assert sum(numel_by_rank.values()) == int(total.replace(",", ""))
    assert max(numel_by_rank.values()) < 0.6 * sum(numel_by_rank.values())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_unfrozen_layers_train_and_get_state(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("finetune.py"), 2, tmp_path)
    (head_loss, head_numel), (full_loss, full_numel) = re.findall(r"loss (\S+), rank 0 holds (\S+) elements", printed)
    assert float(full_loss) < float(head_loss) / 2
    # Half of both moments: of the head, then of all parameters; shards are aligned.
    assert (head_numel, full_numel) == ("66", "24,962")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_bf16_model_needs_master_weights_for_small_updates(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("bf16_masters.py"), 2, tmp_path)
    masters, plain = map(int, re.findall(r"(\d+)% with", printed))
    assert masters > 70
    assert plain < 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_compares_memory_and_results_with_ddp(tmp_path: Path) -> None:
    for name in ("rich", "typer", "matplotlib"):  # the demo must not need them
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    paths = [str(tmp_path), str(SCRIPT.parents[1] / "src")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT.with_name("demo.py"))]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    assert max(map(len, process.stdout.splitlines())) <= 80
    cells = re.findall(r"^(\S.*?)((?: +[\d.]+){4})$", process.stdout, re.MULTILINE)
    rows = {name: [float(value) for value in values.split()] for name, values in cells}
    ddp, *sharded = rows["optimizer state, MiB"]
    assert sharded == pytest.approx([ddp / 2] * 3, rel=0.05)
    assert rows["gradients, MiB"][3] == pytest.approx(rows["gradients, MiB"][0] / 2, rel=0.05)
    assert rows["peak memory, MiB"][3] < rows["peak memory, MiB"][0]
    assert len(set(rows["loss of the first step"])) == len(set(rows["loss of the last step"])) == 1
    assert rows["parameters differ by"] == [0] * 4


def test_each_example_has_its_own_checkpoint_folder() -> None:
    """A folder that two examples share makes the second one load a checkpoint of another model."""
    folders = [
        (folder, file.name)
        for file in SCRIPT.parent.glob("*.py")
        for folder in set(re.findall(r'"(checkpoints[\w-]*)"', file.read_text(encoding="utf-8")))
    ]
    assert ("checkpoints-muon", "train_muon.py") in folders
    assert len(folders) == len(dict(folders)), folders


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_model_that_does_not_fit_under_ddp_fits_when_sharded(tmp_path: Path) -> None:
    script, losses = SCRIPT.with_name("out_of_memory.py"), []
    torchrun(script, 2, tmp_path, "--mode", "ddp", "--memory", "0.75", status=1)
    for options in (["--mode", "ddp"], ["--mode", "shard", "--memory", "0.75"]):
        losses += re.findall(r"loss (\S+)", torchrun(script, 2, tmp_path, *options))
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_readme_lists_all_examples() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (SCRIPT.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in SCRIPT.parent.glob("*.py"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_report_and_trace_write_their_files(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("report.py"), 2, tmp_path, "report.png")
    assert "AdamW on 3,241,472 elements of 52 parameters, shared by 2 ranks" in printed
    torchrun(SCRIPT.with_name("trace.py"), 2, tmp_path, "trace.png")
    names = {"report.png", "trace.png", "trace-0.json", "trace-1.json"}
    assert names == {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_surviving_ranks_continue_after_one_is_killed(tmp_path: Path) -> None:
    command, settings = [sys.executable, str(SCRIPT.with_name("recover.py"))], {"GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert len(re.findall(r"a rank was lost in step 24, held is step 20", process.stdout)) == 2
    assert len(re.findall(r"step 40, loss 0\.\d+", process.stdout)) == 2
