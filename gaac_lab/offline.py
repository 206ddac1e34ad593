"""KV of a document, computed once, kept on disk, loaded by another process.

A folder holds one file for K and one for V of each layer, and index.json with shapes, sizes and
checksums of the raw bits. It shows what the third place to plug in is worth; a store for many
documents with shared prefixes is a larger thing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash

import gaac
from gaac.hf import rope_of_layer
from gaac_lab import kv
from gaac_lab.measure import Stopwatch

Record = dict[str, Any]
_CPU = torch.device("cpu")


class OfflineError(RuntimeError):
    """A folder that cannot be read back as it was written."""


def save(cache: Any, folder: Path, model_config: Any, *, level: int | None) -> Record:
    """Write every layer's K and V into `folder` at a level of gaac, or raw for None.

    Returns raw_bytes, stored_bytes (what lies on disk, the index included), encode_s. Files are
    written first and the index last, so a folder with an index is complete. Raises OfflineError for
    a cache with layers that hold something else than K and V (recurrent states).
    """
    if len(list(kv.layers(cache))) != len(cache.layers):
        raise OfflineError("this model has layers that keep a state instead of K and V: not saved")
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[Record] = []
    with Stopwatch(_CPU) as watch:
        for layer in kv.layers(cache):
            for part, tensor in layer.parts():
                name = f"layer{layer.layer:03d}.{part}"
                raw = _bits(tensor)
                rope = rope_of_layer(model_config, layer.layer)
                blob = raw
                if level is not None:
                    blob = gaac.encode(tensor, level=level, kind=part, rope=rope)
                (folder / name).write_bytes(blob)
                entries.append(
                    {
                        "file": name,
                        "layer": layer.layer,
                        "tokens_seen": cache.layers[layer.layer].get_seq_length(),
                        "part": part,
                        "shape": list(tensor.shape),
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "raw_bytes": len(raw),
                        "stored_bytes": len(blob),
                        "xxh64": xxhash.xxh64_hexdigest(raw),
                    }
                )
    index = folder / "index.json"
    index.write_text(json.dumps({"level": level, "entries": entries}))
    stored = sum(entry["stored_bytes"] for entry in entries) + index.stat().st_size
    return {
        "level": level,
        "raw_bytes": sum(entry["raw_bytes"] for entry in entries),
        "stored_bytes": stored,
        "encode_s": watch.seconds,
    }


def load(folder: Path, model_config: Any, *, device: torch.device = _CPU) -> Any:
    """A DynamicCache on `device` with what `save` wrote, ready to go on from.

    Raises OfflineError when the folder is incomplete.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model_config)
    level, entries = _index(folder)
    for keys, values in zip(entries[0::2], entries[1::2], strict=True):
        k, v = (_read(folder, entry, level).to(device) for entry in (keys, values))
        cache.update(k, v, keys["layer"])
        layer = cache.layers[keys["layer"]]
        if layer.get_seq_length() != keys["tokens_seen"]:
            # A sliding layer keeps the window and counts everything that it has seen.
            layer.cumulative_length = keys["tokens_seen"]
    return cache


def load_in_another_process(folder: Path, *, repeats: int = 5) -> Record:
    """A fresh process reads `folder` `repeats` times: load_s (median), load_n, equal.

    `equal` is by checksum of the raw bits against those taken when they were written. The files are
    in the page cache by then, so this is the cost of decoding into CPU memory, not of a cold disk;
    starting the process does not count.
    """
    command = [sys.executable, "-m", "gaac_lab.offline", str(folder), str(repeats)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise OfflineError(f"reading {folder} in another process failed: {last[0]}")
    record: Record = json.loads(child.stdout)
    return record


def _index(folder: Path) -> tuple[int | None, list[Record]]:
    try:
        index = json.loads((folder / "index.json").read_text())
    except FileNotFoundError as error:
        raise OfflineError(f"{folder} has no index.json: save() did not finish there") from error
    return index["level"], index["entries"]


def _read(folder: Path, entry: Record, level: int | None) -> torch.Tensor:
    data = (folder / entry["file"]).read_bytes()
    if level is not None:
        return gaac.decode(data)
    dtype = getattr(torch, entry["dtype"])
    return torch.frombuffer(bytearray(data), dtype=dtype).view(entry["shape"])


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.int16).cpu().numpy().tobytes()


def _child(folder: Path, repeats: int) -> Record:
    level, entries = _index(folder)
    seconds, equal = [], True
    for _ in range(repeats):
        with Stopwatch(_CPU) as watch:
            tensors = [_read(folder, entry, level) for entry in entries]
        assert watch.seconds is not None
        seconds.append(watch.seconds)
        for tensor, entry in zip(tensors, entries, strict=True):
            equal &= xxhash.xxh64_hexdigest(_bits(tensor)) == entry["xxh64"]
    return {"load_s": statistics.median(seconds), "load_n": repeats, "equal": equal}


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))
