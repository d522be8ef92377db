"""Take the pictures of `zeroshard plan`: its table in a terminal and its page in a browser. Needs chromium.

python docs/drawings/plan_pictures.py
"""

import io
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console

from zeroshard import ZeroConfig
from zeroshard.cli.app import main
from zeroshard.cli.plan import print_plan
from zeroshard.planner import plan
from zeroshard.planner.shapes import load_model_shape

PICTURES = Path(__file__).parent.parent / "pictures"
COMMAND = "plan llama-3-8b --precision bf16+fp32 --ranks 4,64 --memory 80GB --activations 10GB"


def draw_table(folder: Path) -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    model = load_model_shape("llama-3-8b").cast(torch.bfloat16)
    config = ZeroConfig(master_dtype=torch.float32)
    print_plan(plan(model, torch.optim.AdamW, ranks=(4, 64), config=config, memory=80e9, activations=10e9), console)
    page = folder / "table.html"
    svg = console.export_svg(title=f"zeroshard {COMMAND}")
    page.write_text(f"<body style='margin:0'><div style='width:1750px'>{svg}</div>", encoding="utf-8")
    take_screenshot(page, "plan-table.png", 1750, 478)


def draw_page(folder: Path) -> None:
    page = folder / "page.html"
    with suppress(SystemExit):
        main([*COMMAND.split(), "--html", str(page)])
    take_screenshot(page, "plan-page.png", 1180, 1175)


def take_screenshot(page: Path, name: str, width: int, height: int) -> None:
    browser = shutil.which("chromium")
    assert browser, "needs chromium: apt-get install chromium"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = [browser, *options, f"--screenshot={PICTURES / name}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        draw_table(Path(temporary))
        draw_page(Path(temporary))
