"""Draw docs/ring-speed.png, the figure of the README, from docs/results/ring-2-h100.json: `python docs/figure.py`."""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RESULT = DOCS / "results/ring-2-h100.json"
SHAPES = {"8k-h16-16-d128": "8k tokens per GPU", "32k-h16-16-d128": "32k tokens per GPU"}
NAMES = {  # rows of the result, fastest design last
    "torch-cp-alltoall": "torch context_parallel, cuDNN",
    "ulysses-sdpa-cudnn": "Ulysses, cuDNN",
    "ulysses-fa4": "Ulysses, FlashAttention-4",
    "ulysses": "Ringspan Ulysses",
    "ring-zigzag-copy": "Ringspan ring",
    "alone": "one GPU alone, no communication",
}
OURS, BASELINE, LIMIT = "#2a6fbb", "#a9b1bb", "#e3e6ea"


def draw(result: dict, path: Path) -> None:
    from matplotlib import pyplot

    tflops = {(row["setting"], row["name"]): row["both_tflops"] for row in result["rows"] if row["status"] == "ok"}
    figure, axes = pyplot.subplots(1, len(SHAPES), figsize=(10, 2.9), sharex=True, sharey=True, layout="constrained")
    for axis, (shape, title) in zip(axes, SHAPES.items(), strict=True):
        values = [tflops[shape, name] for name in NAMES]
        colors = [LIMIT if name == "alone" else OURS if "Ringspan" in label else BASELINE for name, label in NAMES.items()]
        axis.barh(list(NAMES.values()), values, color=colors, height=0.72)
        for row, value in enumerate(values):
            ink = "white" if colors[row] == OURS else "black"
            axis.text(value - 8, row, f"{value:.0f}", va="center", ha="right", fontsize=9, color=ink)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    about = f"TFLOP/s per GPU, forward + backward, causal, 16 heads × 128, bf16, {result['ranks']} × {result['device']}"
    figure.suptitle(about, fontsize=10)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(json.loads(RESULT.read_text()), DOCS / "ring-speed.png")
