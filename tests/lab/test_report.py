"""The report of constructed runs: the answer comes first, nothing is fetched, gaps are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gaac_lab import decision, figures, report, runs, tables
from tests.lab.test_decision import BASE, row, speed


def finished_run(folder: Path, rows: list[decision.Row]) -> runs.Run:
    run = runs.Run.open(folder, notebook="08_decision", parameters={})
    run.figure(figures.pareto(rows, min_throughput=0.95), "decision", "Everything, <at once>.")
    run.note("headline", "what was found")
    run.decide(decision.decide(rows))
    run.finish()
    return run


@pytest.mark.parametrize(
    ("middle", "verdict"), [(1.0, "Enable"), (0.5, "Do not enable"), (0.95, "Undecided")]
)
def test_the_verdict_stands_before_everything_else(
    tmp_path: Path, middle: float, verdict: str
) -> None:
    finished_run(tmp_path, [BASE, row(**speed(middle, 0.02))])
    html = report.write(tmp_path).read_text()
    body = re.sub(r"<[^>]+>", " ", html[html.index("<body>") :]).split()
    assert verdict in " ".join(body[:25])
    assert "30.0% saved" in html


def test_the_html_is_one_file_without_outside_references(tmp_path: Path) -> None:
    finished_run(tmp_path, [BASE, row()])
    html = report.write(tmp_path).read_text()
    assert "data:image/png;base64," in html
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert "&lt;at once&gt;" in html


def test_the_markdown_has_a_table_row_for_each_row(tmp_path: Path) -> None:
    rows = [BASE, row(), row("zstd", **speed(0.4))]
    finished_run(tmp_path, rows)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    header, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 1 + len(rows)
    assert all(line.count("|") == header.count("|") for line in lines)


def test_a_run_without_a_decision_says_so(tmp_path: Path) -> None:
    run = runs.Run.open(tmp_path, notebook="02_baseline", parameters={})
    run.note("headline", "a number")
    run.finish()
    html = report.write(tmp_path).read_text()
    assert "No verdict" in html
    assert "A number" in html


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(runs.RunError, match="nothing to report"):
        report.write(tmp_path)


def test_the_tiles_speak_of_the_row_that_the_reason_names(tmp_path: Path) -> None:
    nearest = row(block_tokens=512, kv_stored_bytes=600, **speed(0.8))
    finished_run(tmp_path, [BASE, row(**speed(0.5)), nearest])
    html = report.write(tmp_path).read_text()
    assert "The four numbers: gaac 512" in html
    assert "40.0% saved" in html


def test_what_another_kernel_does_to_logits_is_told_beside_eager_s(tmp_path: Path) -> None:
    in_place = row(
        integration="fused", logit_max_abs_diff=0.5, eager_logit_max_abs_diff=0.375,
        tokens_equal=False,
    )  # fmt: skip
    run = finished_run(tmp_path, [BASE, in_place])
    run.note("gain", "So much is kernel, and so much is compression.")
    run.finish()
    report.write(tmp_path)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "beside the same kernel on raw KV" in text
        assert (
            "differ by 0.5 (transformers&#39; eager kernel: 0.38), ids equal: NO"
            in text.replace("transformers'", "transformers&#39;")
        )
        assert "0.5 (eager: 0.38)" in text
        assert text.index("So much is kernel") < text.index("what was found".capitalize())


def test_a_dash_stands_for_what_was_not_measured() -> None:
    absent = row(
        status="out_of_memory", reason="out of memory", kv_stored_bytes=None, ratio_low=None,
        ratio_to_baseline=None, tensor_equal=None, peak_bytes=None, logit_max_abs_diff=None,
    )  # fmt: skip
    line = tables.decision_table([absent]).iloc[0]
    dashed = ["KV held (MiB)", "KV saved", "peak (MiB)", "× uncompressed", "bits equal"]
    assert all(line[name] == tables.DASH for name in dashed)
    assert "0" not in line["max |Δlogit|"]


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


FIGURES = {
    "entropy_floor": lambda: figures.entropy_floor(
        frame(name=["a"], sign_bits=[1.0], exponent_bits=[2.7], mantissa_bits=[7.0], ratio=[1.5])
    ),
    "baseline": lambda: figures.baseline(
        frame(
            tokens=[64, 128], status=["measured", "out_of_memory"], kv_raw_bytes=[1.0, None],
            peak_bytes=[2.0, None], ttft_s=[1.0, None], ttft_s_low=[0.9, None],
            ttft_s_high=[1.1, None], decode_tok_s=[5.0, None], decode_tok_s_low=[4.0, None],
            decode_tok_s_high=[6.0, None],
        )
    ),
    "layer_bytes": lambda: figures.layer_bytes(
        frame(layer=[0, 1], raw_bytes=[10, 10], stored_bytes=[7, 7])
    ),
    "layer_ratios": lambda: figures.layer_ratios(
        frame(layer=[0, 0], part=["k", "v"], ratio=[1.4, 1.5], floor_ratio=[1.5, 1.6])
    ),
    "offline": lambda: figures.offline(
        frame(name=["raw", "gaac"], load_s=[0.1, 0.2], stored_bytes=[10.0, 7.0]), 1.0
    ),
    "pareto": lambda: figures.pareto([BASE, row()], min_throughput=0.95),
    "heatmap": lambda: figures.heatmap([BASE, row()]),
    "time_split": lambda: figures.time_split(
        frame(label=["x"], rest_s=[1.0], attention_s=[1.0], cache_s=[1.0], unpack_s=[1.0])
    ),
    "batches": lambda: figures.batches(
        frame(label=["uncompressed", "x"], batch=[1, 1], ratio_to_baseline=[1.0, 0.5],
              ratio_low=[0.9, 0.4], ratio_high=[1.1, 0.6])
    ),
    "step_floors": lambda: figures.step_floors(
        frame(label=["x"], floor_ms=[1.0], step_ms=[4.0])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_labelled_axes_and_can_be_drawn(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    figure.savefig(tmp_path / "figure.png")
    for axes in figure.axes:
        assert axes.get_xlabel() or [t.get_text() for t in axes.get_xticklabels()]


def test_every_figure_function_is_tried() -> None:
    public = {
        name
        for name, value in vars(figures).items()
        if callable(value) and not name.startswith("_") and value.__module__ == figures.__name__
    }
    assert public == set(FIGURES)
