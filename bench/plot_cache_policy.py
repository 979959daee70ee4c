"""Draws the CSV of bench/cache_policy: hit rate over slots, one panel per trace and number of variants.

    python3 bench/plot_cache_policy.py cache_policy.csv[.xz] cache_policy.png
Needs matplotlib (and Pillow, which comes with it). With several seeds the mean is drawn.
"""

import csv
import lzma
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

STYLES = {
    "optimum": ("clairvoyant optimum", "black", ":"),
    "arc": ("ARC", "tab:blue", "--"),
    "lru": ("LRU", "tab:green", "--"),
    "lfu": ("LFU, full history", "tab:orange", "--"),
    "ours": ("bitdelta", "tab:red", "-"),
}


def read(path):
    """{(trace, variants): {slots: {policy: [hit rates]}}}, traces in file order"""
    panels = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    opened = lzma.open if path.endswith(".xz") else open
    with opened(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            point = panels[row["trace"], int(row["variants"])][int(row["slots"])]
            for policy in STYLES:
                point[policy].append(float(row[policy]))
    return panels


def draw(axes, points, title):
    slots = sorted(points)
    for policy, (label, colour, line) in STYLES.items():
        rates = [sum(points[n][policy]) / len(points[n][policy]) for n in slots]
        axes.plot(slots, rates, line, color=colour, label=label, linewidth=1.4)
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks([2, 5, 10] + [n for n in (20, 50, 100, 200, 500, 1000) if n <= slots[-1]])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    panels = read(sys.argv[1])
    traces = list(dict.fromkeys(trace for trace, _ in panels))
    counts = sorted({variants for _, variants in panels})
    figure, grid = plt.subplots(len(traces), len(counts), squeeze=False,
                                figsize=(4 * len(counts), 2.6 * len(traces)))
    for row, trace in enumerate(traces):
        for column, variants in enumerate(counts):
            if (trace, variants) in panels:
                draw(grid[row][column], panels[trace, variants], f"{trace}, {variants} variants")
        grid[row][0].set_ylabel("hit rate, %")
    for axes in grid[-1]:
        axes.set_xlabel("slots")
    grid[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=70)
    picture = Image.open(sys.argv[2]).convert("RGB").quantize(32, dither=Image.Dither.NONE)  # a quarter of the bytes
    picture.save(sys.argv[2], optimize=True)


if __name__ == "__main__":
    main()
