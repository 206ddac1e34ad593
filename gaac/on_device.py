"""Level 1 coded where the tensor lies: on a CUDA device, by the kernels of `packed_triton`.

The blobs are those that the CPU writes. Frames that need more than level 1 (rows that repeat, on
encode; other levels, on decode) are left to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from gaac import repeats
from gaac.frame import Coded, pack, store
from gaac.header import BLOCK_ROWS, FLAG_FLAT, FLAG_STORED, Header, Segment, is_coded, plan
from gaac.inputs import check_tensor
from gaac.kernels.device import packed_on_device, to_device, to_host
from gaac.levels.registry import STORED

LEVEL = 1
_BITS = {1: torch.uint8, 2: torch.int16}


def encode(tensor: torch.Tensor) -> bytes | None:
    """The blob of a tensor at level 1; None if that is work for the CPU.

    Raises UnsupportedTensor as `gaac.encode` does.
    """
    dtype = check_tensor(tensor)
    kernels = packed_on_device(tensor.device)
    if kernels is None:
        return None
    return encode_with(kernels, tensor, plan(tuple(tensor.shape), dtype, LEVEL))


def encode_with(kernels: ModuleType, tensor: torch.Tensor, header: Header) -> bytes | None:
    """As `encode`, by kernels that run where the tensor lies."""
    if not _supported(kernels, header):
        return None
    words = tensor.detach().view(_BITS[header.value_bytes]).reshape(header.rows_shape)
    if _repeats(words):
        return None
    pieces = []
    for segment in header.segments:
        blocks = words[segment.matrices, segment.tokens].reshape(segment.shape)
        streams = to_host(kernels.encode(blocks, header.format))
        if sum(map(len, streams)) < blocks.nbytes:
            pieces.append(Coded(LEVEL, 0, streams))
        else:
            pieces.append(Coded(STORED.number, 0, [_to_bytes(blocks)]))
    return pack(header, pieces, np.zeros(0, np.uint8)) or store(header, _to_bytes(words))


def _to_bytes(words: torch.Tensor) -> np.ndarray:
    """Words on a device as uint8 on the host, in C order."""
    content: np.ndarray = words.contiguous().cpu().numpy().reshape(-1).view(np.uint8)
    return content


def _repeats(words: torch.Tensor) -> bool:
    """Whether the CPU would look for repeats in words, (matrices, tokens, width), on a device."""
    values = repeats.SAMPLE_BYTES // words.element_size()
    if words.shape[2] < values:
        return False
    samples = torch.cat([words[0, :, :values], words[-1, :, -values:]], dim=1)
    return repeats.likely(samples.cpu().numpy()[None], BLOCK_ROWS)


def _supported(kernels: ModuleType, header: Header) -> bool:
    """Whether the kernels do all that a frame holds."""
    if not is_coded(header) or header.flags & (FLAG_FLAT | FLAG_STORED):
        return False
    return all(kernels.supports(segment.shape, header.format) for segment in header.segments)


def decode(header: Header, pieces: Sequence[tuple[Segment, Coded]], out: torch.Tensor) -> bool:
    """Write a frame of level 1 into `out`, which has its shape and dtype, any strides.

    False, and nothing written, if that is work for the CPU. Raises CorruptFrame if the streams
    contradict each other.
    """
    kernels = packed_on_device(out.device)
    return kernels is not None and decode_with(kernels, header, pieces, out)


def decode_with(
    kernels: ModuleType, header: Header, pieces: Sequence[tuple[Segment, Coded]], out: torch.Tensor
) -> bool:
    """As `decode`, by kernels that run where `out` lies."""
    if not _supported(kernels, header):
        return False
    bits = out.detach().view(_BITS[header.value_bytes])
    words = bits.reshape(header.rows_shape)
    fault = kernels.no_fault(out.device)
    for segment, coded in pieces:
        cut = words[segment.matrices, segment.tokens]
        if coded.unique_rows:
            index, *streams = coded.streams
            repeats.check(index, coded.unique_rows)
            unique = cut.new_empty((len(cut), coded.unique_rows, cut.shape[2]))
            _decode_one(kernels, header, coded.level, streams, unique, fault)
            cut.copy_(unique[:, torch.from_numpy(index.astype(np.int64)).to(out.device)])
        else:
            blocks = cut.reshape(segment.shape)
            _decode_one(kernels, header, coded.level, coded.streams, blocks, fault)
            if not _shares(blocks, cut):
                cut.copy_(blocks.reshape(cut.shape))
    kernels.raise_fault(fault)
    if not _shares(words, bits):
        bits.copy_(words.reshape(bits.shape))
    return True


def _decode_one(
    kernels: ModuleType,
    header: Header,
    level: int,
    streams: Sequence[np.ndarray],
    blocks: torch.Tensor,
    fault: torch.Tensor,
) -> None:
    """Write one segment's (blocks, rows, width) words; `fault` takes what is wrong with it."""
    if level == LEVEL:
        kernels.queue_decode(to_device(streams, blocks.device), blocks, header.format, fault)
        return
    (content,) = to_device(streams, blocks.device)
    blocks.copy_(content.view(blocks.dtype).reshape(blocks.shape))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one is a view of the other: `reshape` copies where it cannot give one."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
