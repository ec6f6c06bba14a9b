"""A benchmark's report for people: a table for the terminal, a Markdown page, plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from deploy.bench.hf import ASSISTED, GENERATE
from deploy.bench.report import PARTS, PLAIN
from deploy.bench.statistics import shown, spread

COLUMNS = (
    "load", "variant", "tokens/s", "against plain", "TTFT p50, ms", "a token p50, ms", "p95, ms", "accepted", "tokens a block",
    "differing",
)  # fmt: skip


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row a point, as in COLUMNS. Times in milliseconds."""
    found: list[tuple[str, ...]] = []
    for point in report["points"]:
        ratio, stats = point.get("throughput_speedup"), point["speculation"]
        token = point["time_per_output_token_ms"]
        found.append(
            (
                point["load"],
                point["variant"],
                f"{point['tokens_per_s']:.1f}",
                shown(ratio) if ratio else "1",
                f"{point['ttft_ms']['p50']:.0f}",
                f"{token['p50']:.1f}" if token else "",
                f"{token['p95']:.1f}" if token else "",
                f"{100 * stats['acceptance_rate']:.0f} %" if stats["acceptance_rate"] is not None else "",
                f"{stats['mean_acceptance_length']:.2f}" if stats["mean_acceptance_length"] is not None else "",
                str(point.get("answers_that_differ", "")),
            )
        )
    return found


def table(report: dict[str, Any]) -> Table:
    """For the terminal."""
    made = Table(*COLUMNS, title="specwire bench")
    for row in rows(report):
        made.add_row(*row)
    return made


def recommendation(each: dict[str, Any]) -> str:
    """A line of the terminal."""
    return f"{each['load']}: {each['choose']}. {_sentence(each['why'])}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _safe(text: str) -> str:
    """Text of others in Markdown."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>()#+!|" else char for char in text).replace("\n", " ")


def comparison(each: dict[str, Any]) -> str:
    """A sentence."""
    ratio = each["throughput_ratio"]
    return f"{each['variant']} through the service: {ratio['value']:.2f} times {each['against']}{spread(ratio)}"


def markdown(report: dict[str, Any], plots: Sequence[str]) -> str:
    """The page. `plots`: names of the images that lie beside it."""
    machine, settings = report["machine"], report["settings"]
    kinds = _safe(", ".join(dict.fromkeys(item["kind"] for item in settings["items"])))
    lines = [
        "# specwire bench",
        "",
        f"Specwire {report['specwire']}, {machine['cores']} cores ({machine['processor']}). {len(settings['items'])} prompts "
        f"({kinds}), greedy, {settings['repeats']} passes of each variant at each load in turn, method {settings['method']}. In "
        "brackets 95 % intervals.",
        "",
        *(
            f"- {_safe(worker['name'])}: {_safe(worker['model'])}, {worker['device']}, {worker['precision']}"
            + (f", {worker['resident_mb']:.0f} MB resident" if "resident_mb" in worker else "")
            for worker in report["workers"]
        ),
        "",
        "## What to choose",
        "",
        *(f"- {each['load']}: **{each['choose']}**. {_sentence(each['why'])}" for each in report["advice"]),
        *(f"- {_sentence(comparison(each))}" for each in report["comparisons"]),
        "",
        "## Numbers",
        "",
        *_grid(COLUMNS, rows(report)),
        "",
        "*differing*: answers whose tokens are not those of plain decoding in the pass beside it. Where kernels round by the shape "
        "of a batch, two scores equal within rounding may swap. `report.json` has the rest: all percentiles, acceptance by "
        "position, bytes, speedup by kind.",
        "",
        "## Where a token's time went",
        "",
        "Milliseconds of a request's critical path per token, prompt included. *Recovery* is time spent on drafts that came too "
        "late and on workers that were lost.",
        "",
        *_grid(
            ("load", "variant", *PARTS),
            [
                (point["load"], point["variant"], *(f"{point['anatomy_ms_per_token'][part]:.2f}" for part in PARTS))
                for point in _ours(report["points"])
            ],
        ),
        "",
        *(line for plot in plots for line in (f"![{plot}]({plot})", "")),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def plots(report: dict[str, Any], folder: Path) -> list[str]:
    """Draws what there is to see; returns the files' names. Empty without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("agg")
    from matplotlib import pyplot

    made = []
    for name, draw in (
        ("speedup_by_length", _by_length),
        ("speedup_by_concurrency", _by_concurrency),
        ("latency_throughput", _latency),
        ("anatomy", _anatomy),
    ):
        figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
        if draw(axes, _ours(report["points"])):
            file = f"{name}.svg"
            figure.savefig(folder / file)
            made.append(file)
        pyplot.close(figure)
    return made


def _ours(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [point for point in points if point["variant"] not in (GENERATE, ASSISTED)]


def _errors(points: Sequence[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    ratios = [point["throughput_speedup"] for point in points]
    values = [ratio["value"] for ratio in ratios]
    spans = [
        [abs(ratio["value"] - (ratio["value"] if ratio[end] is None else ratio[end])) for ratio in ratios]
        for end in ("low", "high")
    ]
    return values, spans


def _by_length(axes: Any, points: Sequence[dict[str, Any]]) -> bool:
    """Speedup by block length, a line a load, `auto` at the right."""
    names = [name for name in dict.fromkeys(point["variant"] for point in points) if name != PLAIN]
    if len(names) < 2:
        return False
    for load in dict.fromkeys(point["load"] for point in points):
        here = {point["variant"]: point for point in points if point["load"] == load}
        values, spans = _errors([here[name] for name in names])
        axes.errorbar(range(len(names)), values, yerr=spans, marker="o", capsize=3, label=load)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="num_speculative_tokens", ylabel="tokens/s over plain decoding")
    axes.legend()
    return True


def _by_concurrency(axes: Any, points: Sequence[dict[str, Any]]) -> bool:
    """Speedup by requests at once, a line a variant."""
    closed = [point for point in points if point["concurrency"] and point["variant"] != PLAIN]
    if len({point["concurrency"] for point in closed}) < 2:
        return False
    for name in dict.fromkeys(point["variant"] for point in closed):
        here = [point for point in closed if point["variant"] == name]
        values, spans = _errors(here)
        axes.errorbar([p["concurrency"] for p in here], values, yerr=spans, marker="o", capsize=3, label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="requests at once", ylabel="tokens/s over plain decoding")
    axes.legend()
    return True


def _latency(axes: Any, points: Sequence[dict[str, Any]]) -> bool:
    """Time per token against throughput, a line a variant through its loads."""
    for name in dict.fromkeys(point["variant"] for point in points):
        here = [point for point in points if point["variant"] == name and point["time_per_output_token_ms"]]
        x, y = [p["tokens_per_s"] for p in here], [p["time_per_output_token_ms"]["p50"] for p in here]
        axes.plot(x, y, marker="o", label=name)
    axes.set(xlabel="tokens/s of all requests", ylabel="ms per output token, median")
    axes.legend()
    return bool(points)


def _anatomy(axes: Any, points: Sequence[dict[str, Any]]) -> bool:
    """Where a token's time went, a bar a point."""
    names = [f"{point['load']}\n{point['variant']}" for point in points]
    left = [0.0] * len(points)
    for part in PARTS:
        widths = [point["anatomy_ms_per_token"][part] for point in points]
        if max(widths) < 0.005:
            continue
        axes.barh(names, widths, left=left, label=part)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms of a request's critical path per token")
    axes.legend(fontsize="small")
    return True
