"""The comparison as an image: a bar for each server and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import loads_of, rows_of

PANELS = (
    ("output_tokens_per_second", "output tokens per second\n(more is better)", "linear"),
    ("ttft_p50", "median time to first token, s\n(less is better)", "log"),
    ("itl_p99", "inter-token time, p99, s\n(less is better)", "log"),
)


def draw(results: dict[str, Any], path: Path) -> None:
    """A PNG; a cross if a server has no figure."""
    from matplotlib.figure import Figure  # only here: nothing else needs it

    servers, loads = list(results["servers"]), loads_of(results)
    if not loads:
        return
    figure = Figure(figsize=(max(7.0, 1.3 * len(loads)), 9.0), layout="constrained")
    width = 0.8 / len(servers)
    for axes, (name, label, scale) in zip(figure.subplots(len(PANELS), 1), PANELS, strict=True):
        axes.set_yscale(scale)
        for index, server in enumerate(servers):
            places = [place + (index - (len(servers) - 1) / 2) * width for place in range(len(loads))]
            rows = [row for load in loads for row in rows_of(results, load) if row.server == server]
            values = [row.value(name) for row in rows]
            heights = [float("nan") if value is None else value for value in values]
            axes.bar(places, heights, width, label=server)
            for place, value in zip(places, values, strict=True):
                if value is None:
                    axes.text(place, 0.02, "x", ha="center", transform=axes.get_xaxis_transform())
        axes.set_xticks(range(len(loads)), loads)
        axes.set_xlim(-0.5, len(loads) - 0.5)
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].legend(ncols=len(servers), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    machine = results["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores; {results['date']}" + (", quick" * results["quick"]))
    figure.savefig(path, dpi=120)
