"""report.html and report.md of a run, from what its notebooks left; nothing is measured here.

The first screen answers the question; everything after it is evidence. report.html carries its
pictures inside, so it can be sent as one file.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gaac_lab import records, runs, tables
from gaac_lab.decision import Decision, Row

TITLES = {
    "00_start_here": "This machine",
    "01_budget": "What the cache costs, and how far lossless can go",
    "02_baseline": "The uncompressed baseline",
    "03_integration": "Plugging it in",
    "04_sweep": "One variable at a time",
    "05_lossless": "Is it lossless?",
    "06_bandwidth": "What the memory allows",
    "07_routes": "The three other routes",
    "08_decision": "The decision",
}
_CLASS = {"enable": "yes", "do not enable": "no", "undecided": "open"}


@dataclass(frozen=True)
class Section:
    """What one notebook found: its title, its headline sentence, its figures."""

    name: str
    title: str
    headline: str | None
    figures: list[runs.Figure]


@dataclass(frozen=True)
class Tile:
    """One number of the first screen."""

    name: str
    value: str
    detail: str
    good: bool | None


def write(run_dir: Path | str) -> Path:
    """Write both reports into the run's folder and return the path of report.html.

    Works on a run in which notebooks failed: the report says which, and why. Raises RunError when
    the folder holds no receipt at all.
    """
    folder = Path(run_dir)
    context = _context(folder)
    environment = Environment(
        loader=PackageLoader("gaac_lab"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=lambda name: bool(name) and ".html" in str(name),
    )
    environment.filters["sentence"] = _sentence
    environment.filters["picture"] = lambda png: _data_uri(folder / png)
    for name in ("report.md", "report.html"):
        text = environment.get_template(f"{name}.j2").render(**context)
        records.write_bytes(folder / name, text.encode())
    return folder / "report.html"


def _context(folder: Path) -> dict[str, Any]:
    receipts = runs.read_receipts(folder)
    if not receipts:
        raise runs.RunError(f"{folder} holds no finished notebook, so there is nothing to report.")
    decision = _decision(folder)
    manifest = _manifest(folder)
    sections = [
        Section(
            name=name,
            title=TITLES.get(name, name),
            headline=receipt.notes.get("headline"),
            figures=receipt.figures,
        )
        for name, receipt in receipts.items()
    ]
    table = tables.decision_table(decision.rows) if decision else None
    return {
        "decision": decision,
        "verdict_class": _CLASS[decision.verdict] if decision else "open",
        "tiles": _tiles(decision) if decision else [],
        "columns": list(table.columns) if table is not None else [],
        "rows": table.to_numpy().tolist() if table is not None else [],
        "sections": sections,
        "manifest": manifest,
        "problems": _problems(manifest),
        "model": _first_note(receipts, "model"),
        "machine": _machine(manifest),
        "prompts": _first_note(receipts, "prompts"),
        "gain": _first_note(receipts, "gain"),
    }


def _decision(folder: Path) -> Decision | None:
    path = folder / runs.DECISION
    return Decision.model_validate(records.read_json(path)) if path.is_file() else None


def _manifest(folder: Path) -> runs.Manifest | None:
    """An interactive run has no manifest."""
    return runs.read_manifest(folder) if (folder / "manifest.json").is_file() else None


def _problems(manifest: runs.Manifest | None) -> list[str]:
    if manifest is None:
        return []
    return [
        f"{name} {state.status}: {state.reason or 'no reason recorded'}"
        for name, state in manifest.notebooks.items()
        if state.status != "done"
    ]


def _machine(manifest: runs.Manifest | None) -> str | None:
    if manifest is None:
        return None
    here = manifest.machine
    accelerator = here.get("accelerator")
    name = accelerator["name"] if accelerator else "no accelerator"
    return f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, {name}"


def _sentence(text: str) -> str:
    """Starts with a capital, unless with the name of a codec."""
    return text if text.startswith("gaac") else text[:1].upper() + text[1:]


def _first_note(receipts: dict[str, runs.Receipt], key: str) -> Any:
    return next((r.notes[key] for r in receipts.values() if key in r.notes), None)


def _tiles(decision: Decision) -> list[Tile]:
    """The four numbers behind the verdict, of the row that its reason speaks of."""
    row = decision.subject
    if row is None:
        return []
    baseline = next(
        r for r in decision.rows if r.is_baseline and (r.tokens, r.batch) == (row.tokens, row.batch)
    )
    fast_enough = row.ratio_low is not None and row.ratio_low >= decision.min_throughput
    rounds = f"N = {row.ratio_n} in {row.ratio_rounds} rounds"
    return [
        Tile(
            "KV memory",
            f"{tables.mib(baseline.kv_stored_bytes)} → {tables.mib(row.kv_stored_bytes)} MiB",
            f"{tables.saved(row)} saved at {row.tokens:,} tokens",
            (row.saved_bytes or 0) > 0,
        ),
        Tile(
            "peak memory of a request",
            f"{tables.mib(baseline.peak_bytes)} → {tables.mib(row.peak_bytes)} MiB",
            f"over the loaded model; in decoding alone {tables.mib(baseline.decode_peak_bytes)} → "
            f"{tables.mib(row.decode_peak_bytes)}",
            _lower(row.peak_bytes, baseline.peak_bytes),
        ),
        Tile(
            "decode throughput",
            f"{tables.number(baseline.decode_tok_s, 1)} → {tables.number(row.decode_tok_s, 1)}"
            " tok/s",
            f"{tables.ratio(row)} × uncompressed; {decision.min_throughput:g} asked for; {rounds}",
            fast_enough,
        ),
        Tile(
            "lossless",
            "bit for bit" if row.tensor_equal else "NOT lossless",
            _consistency(row),
            row.tensor_equal,
        ),
    ]


def _consistency(row: Row) -> str:
    """What the logits say, and beside which kernel they say it."""
    differ = f"logits differ by {tables.difference(row.logit_max_abs_diff)}"
    ids = f"ids equal: {tables.yes_no(row.tokens_equal)}"
    if row.eager_logit_max_abs_diff is None:
        return f"{differ}, {ids}"
    eager = tables.difference(row.eager_logit_max_abs_diff)
    return (
        "K, V and logits, beside the same kernel on raw KV; beside the model's own kernel "
        f"{differ} (transformers' eager kernel: {eager}), {ids}"
    )


def _lower(value: int | None, other: int | None) -> bool | None:
    return None if value is None or other is None else value < other


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
