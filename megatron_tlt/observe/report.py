"""``report.html``: one self-contained page about a run, without network access."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_tlt.observe import report_plots as plots
from megatron_tlt.observe import report_speculation as speculation
from megatron_tlt.observe.drafter_check import DrafterCheck
from megatron_tlt.observe.learning_check import LearningCheck
from megatron_tlt.observe.page import cell, page_environment, render_page
from megatron_tlt.observe.report_data import RunData, is_number, last_rollout, last_step_timeline, load_run, section
from megatron_tlt.observe.report_samples import render_samples
from megatron_tlt.observe.speculation_gain import RunGain
from megatron_tlt.observe.summary import describe_lengths, flatten, time_totals, tokens_per_s
from megatron_tlt.platform.files import atomic_write_text

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Tile:
    """A headline number: ``value`` large, ``detail`` small below it."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Card:
    """A plot with its title; ``svg`` is None if its data is missing."""

    title: str
    caption: str
    svg: Markup | None
    wide: bool = False


def write_report(run_folder: Path | str, refresh_s: int | None = None) -> Path:
    """Renders ``report.html`` from the run's folder; missing parts are left out with a note.

    With ``refresh_s`` the page loads itself again after so many seconds, until its button is pressed.

    Returns:
        The report's path.

    Raises:
        RunError: the folder does not exist, or the disk is full.
    """
    folder = Path(run_folder)
    run = load_run(folder)
    environment = page_environment()
    cards = make_cards(run)
    missing = [card.title.lower() for card in cards if card.svg is None]
    notes = run.notes + LearningCheck().of_run(run.metrics) + DrafterCheck().of_run(run.metrics)
    if constant := plots.constant_metrics(run):
        notes.append(f"The same in every step: {', '.join(f'{title} {cell(v)}' for title, v in constant.items())}.")
    if missing:
        notes.append(f"Not measured in this run: {', '.join(missing)}.")
    page = render_page(
        "report",
        environment,
        refresh_s=refresh_s,
        name=run.name,
        subtitle=make_subtitle(run),
        tiles=make_tiles(run),
        cards=[card for card in cards if card.svg is not None],
        notes=notes,
        samples=render_samples(run.samples, environment),
        facts=fact_tables(run),
        config=config_tables(run.config),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = folder / REPORT_FILE
    atomic_write_text(path, page)
    return path


def make_subtitle(run: RunData) -> str:
    """What the run used: steps, processes, libraries."""
    parts: list[str] = []
    steps = section(run.summary, "steps") or (run.metrics[-1]["step"] if run.metrics else None)
    if steps is not None:
        parts.append(f"{steps} steps")
    world = section(run.summary, "world_size")
    if world is not None:
        parts.append(f"{world} process{'es' if world != 1 else ''}")
    for room in ("actor", "rollout"):
        backend = section(run.summary, room, "backend")
        if backend:
            parts.append(f"{room} {backend}")
    device = section(run.summary, "environment", "gpu_names") or section(run.summary, "environment", "cpu")
    if device:
        parts.append(cell(device))
    return " · ".join(parts)


def make_tiles(run: RunData) -> list[Tile]:
    """The headline numbers: from the summary if present there, else from the metrics."""
    tiles = [_start_end(run), _reward_tile(run), _speed_tile(run), _acceptance_tile(run), _gain_tile(run)]
    lengths: Mapping[str, Any] = section(run.summary, "rollout", "length") or describe_lengths(run.all_lengths())  # type: ignore[arg-type]
    if is_number(lengths.get("max_over_median")):
        detail = f"tokens: median {lengths['median']:.0f}, longest {lengths['max']:.0f}"
        tiles.append(Tile("Longest over median length", f"{lengths['max_over_median']:.1f}×", detail))  # noqa: RUF001
    totals = section(run.summary, "time") or (time_totals(run.metrics) if run.metrics else {})
    if totals.get("total"):
        shares = (f"{name} {(totals.get(name) or 0) / totals['total']:.0%}" for name in ("rollout", "update", "idle"))
        tiles.append(Tile("Time", duration(totals["total"]), " · ".join(shares)))
    k3 = section(run.summary, "rollout", "logprob_mismatch", "k3_kl")
    if is_number(k3):
        largest = section(run.summary, "rollout", "logprob_mismatch", "max_abs")
        tiles.append(Tile("Log-prob mismatch (k3)", f"{k3:.1e}", f"largest |difference| {cell(largest)}"))
    tensors = section(run.summary, "reshard", "tensors")
    if is_number(tensors):
        detail = f"{cell(section(run.summary, 'reshard', 'seconds'))} s"
        verified = section(run.summary, "reshard", "verified_tensors")
        tiles.append(Tile("Tensors verified in engines", f"{cell(verified)} / {tensors}", detail))
    return [tile for tile in tiles if tile is not None]


def _start_end(run: RunData) -> Tile | None:
    start = section(run.summary, "eval", "start", "pass_at_1")
    end = section(run.summary, "eval", "end", "pass_at_1")
    if start is None or end is None:
        values = run.series("eval/pass_at_1")[1]
        if not values:
            return None
        start, end = values[0], values[-1]
    problems = section(run.summary, "eval", "end", "problems")
    detail = f"{end - start:+.3f}" + (f" on {problems} held-out problems" if problems else " on held-out problems")
    return Tile("Held-out pass@1", f"{start:.3f} → {end:.3f}", detail)


def _reward_tile(run: RunData) -> Tile | None:
    values = run.series("reward/mean")[1]
    if not values:
        return None
    mean = sum(values) / len(values)
    return Tile("Mean reward", f"{values[0]:.3f} → {values[-1]:.3f}", f"first and last step; {mean:.3f} over all")


def _speed_tile(run: RunData) -> Tile | None:
    rate, seconds = tokens_per_s(run.metrics), run.series("time/total")[1]
    if rate is None:
        return None
    detail = f"{sum(seconds) / len(seconds):.1f} s per step" if seconds else ""
    return Tile("Rollout tokens per second", f"{rate:,.0f}", detail)


def _acceptance_tile(run: RunData) -> Tile | None:
    if section(run.summary, "speculation", "enabled") is False:
        return Tile("Acceptance length", "off", "speculation disabled")
    value = section(run.summary, "rollout", "acceptance_length")
    if value is None:
        values = run.series("speculation/acceptance_length")[1]
        value = sum(values) / len(values) if values else None
    if value is None:
        return None
    drafter, chain = (section(run.summary, "speculation", key) for key in ("drafter", "num_speculative_tokens"))
    return Tile("Acceptance length", f"{value:.2f}", f"tokens per decode step; {cell(drafter)}, K = {cell(chain)}")


def _gain_tile(run: RunData) -> Tile | None:
    gain = RunGain.of([row for row in run.metrics if row.get("step")])
    if gain is None:
        return None
    lengths = [section(run.summary, "speculation", f"{which}_acceptance_length") for which in ("frozen", "adapted")]
    trained = "; acceptance length {:.2f} (first drafter), {:.2f} (newest)".format(*lengths) if all(lengths) else ""
    if gain.gain is None:
        return Tile("Speculation", "unknown", f"{gain.unknown}{trained}")
    detail = f"estimated time without speculation over measured time, in {gain.known_steps} of {gain.steps} steps"
    return Tile("Speculation", f"{gain.gain:.2f}×", detail + trained)  # noqa: RUF001


def duration(seconds: float) -> str:
    """Seconds in a readable form."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def make_cards(run: RunData) -> list[Card]:
    """All plots of the report, including those without data."""
    made: list[tuple[str, str, str | None]] = [
        ("Reward and held-out accuracy", "held-out: problems not used for training", plots.plot_reward(run)),
        ("Time per step", "by phase; hatched: waiting for the slowest rank", plots.plot_phase_times(run)),
        ("Response length over steps", "in tokens, including the tail", plots.plot_length_bands(run)),
        ("Response lengths", "all responses of the run; logarithmic counts", plots.plot_length_histogram(run)),
        ("Acceptance length", "tokens per decode step and request", speculation.plot_acceptance(run)),
        ("Speculation's gain", "estimated time without speculation over measured time", speculation.plot_gain(run)),
        ("Accepted drafts", "by draft position, and by thirds of the response lengths", speculation.plot_drafts(run)),
        ("Suffix history", "responses kept, and the acceptance of drafts from them", speculation.plot_history(run)),
        ("Rollout against actor", "the two log-probabilities of each sampled token", plots.plot_mismatch(run)),
        (
            "Last rollout's strategies",
            "strategy by batch size, on the rank that decoded longest",
            speculation.plot_strategies(last_rollout(run.trace)),
        ),
        ("Tasks", "reward, held-out accuracy and response length of each", plots.plot_tasks(run)),
        ("Last step's timeline", "by rank; hatched: idle", plots.plot_timeline(last_step_timeline(run.trace))),
        ("Training", "what the optimizer and the engines report", plots.plot_training(run)),
    ]
    wide = ("Accepted drafts", "Tasks", "Last rollout's strategies", "Last step's timeline", "Training")
    return [Card(title, caption, None if svg is None else Markup(svg), title in wide) for title, caption, svg in made]


def fact_tables(run: RunData) -> dict[str, dict[str, Any]]:
    """Tables of the summary: results and environment."""
    results = {key: value for key, value in run.summary.items() if key != "environment"}
    tables = {"Results": flatten(results), "Environment": flatten(section(run.summary, "environment") or {})}
    reasons: dict[str, int] = {}
    for row in run.lengths:
        for reason, count in (section(row, "finish_reasons") or {}).items():
            reasons[reason] = reasons.get(reason, 0) + int(count)
    tables["Finish reasons"] = dict(reasons)
    return {title: rows for title, rows in tables.items() if rows}


def config_tables(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The resolved configuration, one table per section."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
            value = {str(index): entry for index, entry in enumerate(value)}
        rows = flatten(value) if isinstance(value, Mapping) else {"": value}
        if rows:
            tables[key] = rows
    return tables
