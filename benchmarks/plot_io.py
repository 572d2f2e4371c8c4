"""Draws the results of io_fio.py.

python benchmarks/plot_io.py results/io_fio.json results/io_fio.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    "fio": "#bbbbbb",
    "fio-huge": "#888888",
    "deepspeed": "#d08a4a",
    "threads": "#9dbcd9",
    "libaio": "#4878a8",
    "uring": "#24527a",
}
NAMES = {"fio-huge": "fio, huge pages", "deepspeed": "DeepSpeed aio_handle"}


def main() -> None:
    """Read the JSON, write the picture."""
    source, target = map(Path, sys.argv[1:3])
    result = json.loads(source.read_text(encoding="utf-8"))
    table, settings = result["table"], result["settings"]
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    width = 0.8 / len(COLOURS)
    for i, (who, colour) in enumerate(COLOURS.items()):
        places = [k for k, rows in enumerate(table.values()) if who in rows]
        values = [rows[who]["GB/s"] for rows in table.values() if who in rows]
        label = NAMES.get(who, who if who == "fio" else f"infinity, {who}")
        axes.bar([k + (i - 2.5) * width for k in places], values, width, color=colour, label=label)
    axes.set_xticks(range(len(table)), list(table))
    axes.set_ylabel("GB/s (median)")
    axes.set_title(f"{settings['block'] >> 20} MiB × {settings['depth']}, O_DIRECT, one file", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
