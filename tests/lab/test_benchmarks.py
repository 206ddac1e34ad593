"""The benchmark of codecs runs as a command, counts what it says it counts, and trusts nobody."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gaac

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS = 48
PEERS = {"zipnn", "pcodec u16", "blosc2 zstd-1 shuffle", "zstd-1", "lz4 frame", "memcpy"}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "codec.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def plot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark") / "codec.png"


@pytest.fixture(scope="module")
def output(default_model_path: Path, plot: Path) -> list[str]:
    """The lines of one small run."""
    chosen = ["--dtype", "bfloat16", "--text", "code", "--model", str(default_model_path)]
    done = run("--tokens", str(TOKENS), "--repeats", "2", "--plot", str(plot), *chosen)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def result(output: list[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(output[-1])
    return document


def test_every_level_and_peer_is_there(result: dict[str, Any]) -> None:
    ours = {f"gaac {level} {name}" for level, name in gaac.LEVELS.items()}
    for granularity in ("block", "layer"):
        for part in ("k", "v", "kv"):
            found = {
                row["codec"]
                for row in result["rows"]
                if (row["granularity"], row["part"], row["threads"]) == (granularity, part, 1)
            }
            assert found == ours | PEERS


def test_the_numbers_are_of_the_bytes_that_were_coded(result: dict[str, Any]) -> None:
    kv_heads, head_dim = 3, 64
    for row in result["rows"]:
        assert row["piece_bytes"] == 2 * kv_heads * TOKENS * head_dim
        assert row["n"] == 2
        assert row["encode_mb_s"] > 0
        assert row["decode_mb_s"] > 0
    ratios = {
        (row["codec"], row["part"]): row["ratio"]
        for row in result["rows"]
        if (row["granularity"], row["threads"]) == ("block", 1)
    }
    for codec in {codec for codec, _ in ratios}:
        k, v, kv = (ratios[codec, part] for part in ("k", "v", "kv"))
        assert kv == pytest.approx(2 / (1 / k + 1 / v), abs=2e-4), "K and V are equally long"
    assert ratios["gaac 0 stored", "kv"] < 1 < ratios["gaac 1 packed", "kv"]


def test_the_floors_are_there(result: dict[str, Any]) -> None:
    assert [row["part"] for row in result["floors"]] == ["k", "v", "kv"]
    assert all(1 < row["order0_ratio"] < 3 for row in result["floors"])


def test_table_and_plot(output: list[str], plot: Path) -> None:
    text = "\n".join(output[:-1])
    for words in ("gaac 1 packed", "zipnn", "one block of 18 KB a call", "threads: 1", "Floors"):
        assert words in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_one_repeat_is_refused() -> None:
    done = run("--repeats", "1")
    assert done.returncode == 2
    assert "spread" in done.stderr


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("codec", "contenders", "kv_pieces")
    codec, contenders, kv_pieces = (importlib.import_module(name) for name in names)
    return codec, contenders, kv_pieces


def test_a_codec_that_is_wrong_by_a_bit_ends_the_run(
    modules: tuple[ModuleType, ModuleType, ModuleType],
) -> None:
    codec, contenders, kv_pieces = modules
    pieces = [kv_pieces.Piece(torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16), "k", None)]
    honest = contenders.ours(1, threads=1)
    assert min(codec.one_round(honest, pieces, [b""])) > 0
    wrong = replace(honest, decode=lambda blob: -gaac.decode(blob))  # -0.0 equals 0.0
    with pytest.raises(SystemExit, match="did not give back"):
        codec.one_round(wrong, pieces, [b""])


def test_codecs_take_turns_and_the_first_round_does_not_count(
    modules: tuple[ModuleType, ModuleType, ModuleType],
) -> None:
    codec, contenders, kv_pieces = modules
    calls: list[str] = []

    def named(name: str) -> Any:
        def encode(piece: Any) -> bytes:
            calls.append(name)
            return bytes(piece.to_bytes())

        return contenders.Contender(name, 1, lambda piece: piece, encode, lambda blob: blob)

    value = torch.ones(1, 1, 4, 8, dtype=torch.float16)
    pieces = [kv_pieces.Piece(value, part, None) for part in ("k", "v")]
    rows = codec.measure([named("a"), named("b")], pieces, repeats=3)
    assert "".join(calls) == "abab" + "baba" + "abab" + "baba"
    assert {row["n"] for row in rows} == {3}
    assert {row["ratio"] for row in rows} == {1.0}
