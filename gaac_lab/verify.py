"""Is it lossless? Three layers, strongest first, and two controls that must fail.

Tensors: the bits of every layer's K and V after a round trip. Logits: the last position, on the
same path, with and without compression. Token ids: what a user sees; they can agree by luck, so
they prove nothing on their own. The controls show that the checks can fail: a codec with one wrong
bit is caught, and random data does not shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gaac_lab import entropy, kv, prompts
from gaac_lab.compare import max_abs_diff
from gaac_lab.configuration import BASELINE, Configuration
from gaac_lab.request import Request

Record = dict[str, Any]


def read(model: Any, input_ids: torch.Tensor) -> Any:
    """The uncompressed cache after reading [batch, tokens] ids: what a codec is tried on."""
    request = Request.of(model, input_ids, BASELINE)
    request.prefill()
    return request.cache


def tensors(cache: Any, codec: Any) -> list[Record]:
    """One record for K and one for V of each layer.

    Keys: layer, part, equal, raw_bytes, stored_bytes, ratio, and floor_ratio: what the entropy of
    sign, exponent and mantissa, each on its own, would allow.
    """
    records = []
    for layer in kv.layers(cache):
        for part, tensor in layer.parts():
            blob = codec.encode(tensor)
            back = codec.decode(blob)
            raw = tensor.numel() * tensor.element_size()
            records.append(
                {
                    "layer": layer.layer,
                    "part": part,
                    "equal": kv.same_bits(tensor.cpu(), back.cpu()),
                    "raw_bytes": raw,
                    "stored_bytes": len(blob),
                    "ratio": raw / len(blob),
                    "floor_ratio": entropy.floors(tensor).ratio,
                }
            )
    return records


def outputs(
    model: Any,
    tokenizer: Any,
    configuration: Configuration,
    *,
    prompt_names: Sequence[str],
    tokens: int,
    new_tokens: int,
) -> list[Record]:
    """One record a prompt: the same request with and without compression, compared.

    Both run under the attention that `configuration` names, since nothing else may differ.
    """
    records = []
    for name in prompt_names:
        prompt = prompts.build(name, tokens, tokenizer)
        record = _compare_outputs(model, configuration, prompt.input_ids, None, new_tokens)
        records.append({"prompt": name, "prompt_sha256": prompt.sha256, **record})
    return records


def padded_batch(
    model: Any,
    tokenizer: Any,
    configuration: Configuration,
    *,
    prompt_names: Sequence[str],
    tokens: int,
    new_tokens: int,
) -> Record:
    """The same for a left-padded batch: row i holds a prompt of tokens * (i + 1) / rows."""
    rows = len(prompt_names)
    lengths = [max(1, tokens * (index + 1) // rows) for index in range(rows)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.full((rows, tokens), pad, dtype=torch.int64)
    mask = torch.zeros((rows, tokens), dtype=torch.int64)
    for row, (name, length) in enumerate(zip(prompt_names, lengths, strict=True)):
        ids[row, tokens - length :] = prompts.build(name, length, tokenizer).input_ids[0]
        mask[row, tokens - length :] = 1
    return _compare_outputs(model, configuration, ids, mask, new_tokens)


def _compare_outputs(
    model: Any,
    configuration: Configuration,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    new_tokens: int,
) -> Record:
    """Both requests side by side, compared after the prefill and after each step."""
    plain = Request.of(model, input_ids, configuration.raw_twin, mask)
    packed = Request.of(model, input_ids, configuration, mask)
    plain.prefill()
    packed.prefill()
    diffs = [max_abs_diff(plain.logits, packed.logits)]
    bits_equal = _same_logits(plain, packed)
    for _ in range(new_tokens):
        plain.step()
        packed.step()
        diffs.append(max_abs_diff(plain.logits, packed.logits))
        bits_equal &= _same_logits(plain, packed)
    packed.settle()
    return {
        "batch": int(input_ids.shape[0]),
        "tokens": int(input_ids.shape[1]),
        "new_tokens": new_tokens,
        "tensor_equal": kv.same_cache(plain.cache, packed.cache),
        "logit_bits_equal": bits_equal,
        "logit_max_abs_diff": max(diffs),
        "tokens_equal": torch.equal(plain.new_tokens, packed.new_tokens),
        "kv_raw_bytes": kv.raw_bytes(packed.cache),
        "kv_stored_bytes": kv.stored_bytes(packed.cache),
    }


def _same_logits(a: Request, b: Request) -> bool:
    assert a.logits is not None
    assert b.logits is not None
    return kv.same_bits(a.logits, b.logits)


class OneWrongBit:
    """A codec that flips the lowest bit of one value in the `call`-th tensor that it decodes.

    The smallest error there is: if a check misses it, the check is worth nothing.
    """

    def __init__(self, codec: Any, *, call: int = 0) -> None:
        self._codec, self._call, self._calls = codec, call, 0

    def encode(self, tensor: torch.Tensor) -> Any:
        return self._codec.encode(tensor)

    def decode(self, blob: Any) -> torch.Tensor:
        tensor = self._codec.decode(blob).clone()
        if self._calls == self._call:
            words = tensor.view(torch.int16).reshape(-1)
            words[words.numel() // 2] ^= 1
        self._calls += 1
        return tensor


def controls(cache: Any, codec: Any, *, seed: int = 0) -> list[Record]:
    """The two controls: name, expected, found, and whether they came out as they must."""
    caught = sum(not record["equal"] for record in tensors(cache, OneWrongBit(codec, call=1)))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(2**15), 2**15, (1, 2, 512, 64), generator=generator).to(torch.int16)
    blob = codec.encode(noise.view(torch.bfloat16))
    growth = len(blob) - noise.numel() * 2
    return [
        {
            "control": "a codec with one wrong bit",
            "expected": "1 unequal tensor",
            "found": f"{caught} unequal tensor{'' if caught == 1 else 's'}",
            "as_expected": caught == 1,
        },
        {
            "control": "random 16-bit words",
            "expected": "do not shrink",
            "found": f"{growth:+,} bytes on {noise.numel() * 2:,}",
            "as_expected": growth >= 0,
        },
    ]
