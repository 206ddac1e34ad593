"""Pages say where their rows lie: what is read there by hand is the tensor that was encoded."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import gaac
from gaac.levels.base import FORMATS, WordFormat
from gaac.pages import (
    BASE,
    ESCAPES,
    FIELDS,
    KIND,
    LOW,
    OFFSETS,
    PACKED,
    PLANES,
    RAW,
    RAW_REPEATED,
    REPEATED,
    REPEATS,
    ROWS,
    STRIDE,
    Page,
    Pages,
    PageTable,
    raw_regions,
)
from tests.gaac.data import DTYPES, bits, gaussian, random_words, repeating, tensor
from tests.gaac.forging import TABLE, patched, reseal

Read = Callable[[int, int], np.ndarray]  # place, bytes -> uint8

TILE_ROWS, ESCAPE = 64, 7

MAKERS: dict[str, Callable[[tuple[int, ...], str], torch.Tensor]] = {
    "normal": gaussian,
    "random": lambda shape, dtype: tensor(random_words(shape), dtype),
    "repeating": repeating,
}
SHAPES = [
    *((1, 1, 256, 64), (1, 3, 256, 64), (1, 3, 100, 80), (1, 8, 100, 128), (1, 16, 100, 64)),
    *((1, 1, 512, 256), (1, 8, 512, 80), (1, 3, 1000, 64), (1, 8, 1000, 128), (1, 16, 256, 256)),
    *((1, 3, 512, 9), (1, 2, 1, 64), (1, 1, 7, 5)),
]


def from_payload(page: Page) -> Read:
    payload = page.payload.numpy()

    def read(place: int, count: int) -> np.ndarray:
        assert 0 <= place <= place + count <= payload.size, "a place outside the page"
        return payload[place : place + count]

    return read


def from_memory(address: int, count: int) -> np.ndarray:
    return np.frombuffer(bytes((ctypes.c_uint8 * count).from_address(address)), np.uint8)


def rows_at(region: np.ndarray, read: Read, width: int, dtype: str) -> np.ndarray:
    """The words of a region, uint16 [rows, width], by docs/format.md and the fields' names."""
    rows, low, stride = int(region[ROWS]), int(region[LOW]), int(region[STRIDE])
    if region[KIND] in (RAW, RAW_REPEATED):
        places = range(rows)
        if region[KIND] == RAW_REPEATED:
            places = read(int(region[REPEATS]), rows).tolist()
        found = [read(low + row * stride, 2 * width).view(np.uint16) for row in places]
        return np.stack(found)
    if region[KIND] == PACKED:
        return packed_rows(region, rows, read, width, FORMATS[dtype])
    assert region[KIND] == REPEATED
    index = read(int(region[REPEATS]), rows)
    coded = packed_rows(region, int(index.max()) + 1, read, width, FORMATS[dtype])
    return coded[index]


def packed_rows(
    region: np.ndarray, rows: int, read: Read, width: int, fmt: WordFormat
) -> np.ndarray:
    """Level 1, every tile found by its own offset."""
    values, tiles = rows * width, -(-rows // TILE_ROWS)
    planes = [
        np.unpackbits(
            read(int(region[PLANES] + plane * region[STRIDE]), int(region[STRIDE])),
            bitorder="little",
        )[:values].reshape(rows, width)
        for plane in range(3 + fmt.extra_bits)
    ]
    code = planes[0] + 2 * planes[1] + 4 * planes[2]
    exponent = read(int(region[BASE]), width).astype(np.uint16) + code
    offsets = np.frombuffer(read(int(region[OFFSETS]), 4 * tiles).tobytes(), "<u4")
    for tile, offset in enumerate(offsets):
        part = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        escaped = code[part] == ESCAPE
        exponent[part][escaped] = read(int(region[ESCAPES] + offset), int(escaped.sum()))
    low = read(int(region[LOW]), values).astype(np.uint16).reshape(rows, width)
    words = exponent << np.uint16(fmt.exponent_shift)
    words |= low if fmt.name == "float16" else low >> 1 | (low & 1) << 15
    for position, plane in zip(fmt.extra, planes[3:], strict=True):
        words |= plane.astype(np.uint16) << position
    return words


def read_by_hand(regions: np.ndarray, read: Read, width: int, dtype: str) -> np.ndarray:
    """uint16 [heads, tokens, width] of one row's regions, [heads, regions, fields]."""
    return np.stack(
        [
            np.concatenate([rows_at(region, read, width, dtype) for region in head])
            for head in regions
        ]
    )


def words_of(value: torch.Tensor) -> np.ndarray:
    return bits(value).numpy().view(np.uint16)


def found_regions(page: Page) -> np.ndarray:
    assert page.regions is not None
    return page.regions


# Pages.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_lie_where_the_regions_say(
    dtype: str, kind: str, level: int, shape: tuple[int, ...]
) -> None:
    value = MAKERS[kind](shape, dtype)
    page = Page.of(gaac.encode(value, level=level))
    assert (page.shape, page.dtype, page.tokens) == (shape, DTYPES[dtype], shape[2])
    regions = found_regions(page)
    assert regions.shape == (shape[1], regions.shape[1], len(FIELDS))
    found = read_by_hand(regions, from_payload(page), shape[3], dtype)
    assert np.array_equal(found, words_of(value)[0])


def test_each_kind_of_region_is_met() -> None:
    """Else the test above would prove less than it seems to."""
    expected = {"normal": PACKED, "random": RAW, "repeating": REPEATED}
    for dtype in DTYPES:
        for kind, number in expected.items():
            page = Page.of(gaac.encode(MAKERS[kind]((1, 3, 256, 64), dtype), level=1))
            assert set(found_regions(page)[..., KIND].reshape(-1)) == {number}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [256, 600])
def test_kinds_may_differ_within_a_page(dtype: str, tokens: int) -> None:
    """A segment that does not shrink is raw beside others that do."""
    value = gaussian((1, 8, tokens, 256), dtype)
    value[:, 4:] = tensor(random_words((1, 4, tokens, 256)), dtype)
    page = Page.of(gaac.encode(value, level=1))
    regions = found_regions(page)
    assert set(regions[..., KIND].reshape(-1)) == {RAW, PACKED}
    found = read_by_hand(regions, from_payload(page), 256, dtype)
    assert np.array_equal(found, words_of(value)[0])


@pytest.mark.parametrize("level", [2, 3, 5])
def test_other_levels_have_no_regions(level: int) -> None:
    page = Page.of(gaac.encode(gaussian((1, 3, 256, 64), "bfloat16"), level=level))
    assert page.regions is None
    assert PageTable(((page,),)).regions is None
    assert PageTable(((page,),)).device_regions is None


def test_raw_rows_that_repeat() -> None:
    """What repeats and does not shrink otherwise."""
    few = tensor(random_words((1, 3, 60, 64)), "bfloat16")
    value = few[:, :, np.arange(256) % 60]
    page = Page.of(gaac.encode(value, level=1))
    assert (found_regions(page)[..., KIND] == RAW_REPEATED).all()
    found = read_by_hand(found_regions(page), from_payload(page), 64, "bfloat16")
    assert np.array_equal(found, words_of(value)[0])


def test_what_any_level_stored_has_regions() -> None:
    value = tensor(random_words((1, 3, 256, 64)), "bfloat16")
    page = Page.of(gaac.encode(value, level=3))
    found = read_by_hand(found_regions(page), from_payload(page), 64, "bfloat16")
    assert np.array_equal(found, words_of(value)[0])


def test_another_codecs_blob_has_no_regions() -> None:
    payload = torch.arange(200, dtype=torch.uint8)
    assert Page(payload, (1, 3, 256, 64), torch.bfloat16).regions is None


def test_a_blob_of_another_shape_than_its_page_has_no_regions() -> None:
    blob = bytearray(gaac.encode(gaussian((1, 3, 256, 64), "bfloat16"), level=1))
    payload = torch.frombuffer(blob, dtype=torch.uint8)
    assert Page(payload, (1, 6, 128, 64), torch.bfloat16).regions is None


def test_a_tensor_is_kept_and_bytes_are_copied() -> None:
    blob = bytearray(gaac.encode(gaussian((1, 1, 64, 64), "bfloat16"), level=1))
    given = torch.frombuffer(blob, dtype=torch.uint8)
    assert Page.of(given).payload.data_ptr() == given.data_ptr()
    page = Page.of(blob)
    blob[:] = bytes(len(blob))
    assert page.regions is not None
    assert page.payload.untyped_storage().nbytes() == len(blob)


def test_a_page_is_never_copied() -> None:
    page = Page.of(gaac.encode(gaussian((1, 1, 64, 64), "bfloat16"), level=1))
    assert copy.deepcopy([page])[0] is page
    assert page.to(torch.device("cpu")) is page


def test_a_page_that_moves_keeps_what_is_known() -> None:
    page = Page.of(gaac.encode(gaussian((1, 1, 64, 64), "bfloat16"), level=1))
    known = page.regions
    moved = page.to(torch.device("meta"))  # where nothing could be read anew
    assert moved.regions is known
    assert (moved.shape, moved.dtype, moved.payload.device.type) == (page.shape, page.dtype, "meta")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 256, 64, dtype=torch.bfloat16),
        torch.zeros(2, 3, 256, 64, dtype=torch.bfloat16),
        torch.zeros(1, 3, 256, 64, dtype=torch.int8),
        torch.zeros(1, 3, 256, 64).to(torch.float8_e4m3fn),
    ],
    ids=["no batch axis", "two rows", "int8", "float8"],
)
def test_what_is_no_page_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(gaac.UnsupportedTensor, match=r"\[1, kv_heads, tokens, head_dim\]"):
        Page.of(gaac.encode(value, level=1))


def test_bytes_are_no_page() -> None:
    with pytest.raises(gaac.UnsupportedTensor, match="a page is"):
        Page.of(gaac.compress(bytes(1000), dtype="bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_damaged_blob_is_no_page(dtype: str) -> None:
    blob = gaac.encode(gaussian((1, 3, 256, 64), dtype), level=1)
    for wrong in (blob[:-1], blob + b"\0", b"", blob[:20], bytes(len(blob))):
        with pytest.raises(gaac.CorruptFrame):
            Page.of(wrong)
    for at in (9, 40, 100, len(blob) // 2, len(blob) - 1):
        wrong = bytearray(blob)
        wrong[at] ^= 4
        with pytest.raises(gaac.CorruptFrame):
            Page.of(bytes(wrong))


def streams_at(blob: bytes) -> list[int]:
    """Where the streams of the one segment of a blob begin, and where they end."""
    lengths = struct.unpack_from("<5I", blob, TABLE + 4)
    start = TABLE + 4 * 6
    return list(np.cumsum([start + -start % 64, *lengths]))


@pytest.mark.parametrize("stream", ["base", "offsets", "escapes"])
def test_a_kernel_is_never_sent_along_wrong_streams(stream: str) -> None:
    """The checksum is right and the lengths are; what they hold would lead outside the page."""
    blob = gaac.encode(gaussian((1, 3, 256, 64), "bfloat16"), level=1)
    base, offsets, escapes, planes, _, _ = streams_at(blob)
    at = {"base": base, "offsets": offsets + 8, "escapes": planes - 1}[stream]
    assert escapes < planes
    wrong = patched(blob, at, "<B", 255)
    assert reseal(blob) == blob
    with pytest.raises(gaac.CorruptFrame):
        _ = Page.of(wrong).regions


# Tables.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_has_the_addresses_of_its_pages(dtype: str) -> None:
    """Rows of several pages, of every kind, one of them in both rows."""
    first, second, shared = (
        MAKERS[kind]((1, 3, tokens, 64), dtype)
        for kind, tokens in (("normal", 256), ("random", 256), ("repeating", 100))
    )
    pages = [Page.of(gaac.encode(value, level=1)) for value in (first, second, shared)]
    table = PageTable(((pages[0], pages[2]), (pages[1], pages[2])))
    assert table.tokens == 356
    regions = table.regions
    assert regions is not None
    assert regions.shape == (2, 3, 2, len(FIELDS))
    assert np.array_equal(regions[0, :, 1], regions[1, :, 1])
    assert np.array_equal(regions[0, :, :1] == -1, found_regions(pages[0]) == -1)
    for row, own in enumerate((first, second)):
        found = read_by_hand(regions[row], from_memory, 64, dtype)
        assert np.array_equal(found, words_of(torch.cat([own, shared], 2))[0])
    assert table.device_regions is not None
    assert np.array_equal(table.device_regions.numpy(), regions)
    shown = found_regions(pages[0])
    assert np.array_equal(
        read_by_hand(shown, from_payload(pages[0]), 64, dtype), words_of(first)[0]
    )


def test_tables_share_pages() -> None:
    page, other = (
        Page.of(gaac.encode(gaussian((1, 3, 256, 64), "bfloat16", seed), level=1))
        for seed in (0, 1)
    )
    short, long = PageTable(((page,),)), PageTable(((page, other),))
    assert short.regions is not None
    assert long.regions is not None
    assert np.array_equal(long.regions[:, :, :1], short.regions)


def test_a_table_without_pages() -> None:
    for rows in ((), ((),), ((), ())):
        table = PageTable(rows)
        assert table.tokens == 0
        assert table.regions is None
        assert table.device_regions is None


def test_one_page_of_another_level_and_a_table_has_no_regions() -> None:
    value = gaussian((1, 3, 256, 64), "bfloat16")
    pages = tuple(Page.of(gaac.encode(value, level=level)) for level in (1, 3))
    assert PageTable((pages,)).regions is None


# Tails.


def tails(dtype: str) -> Iterator[torch.Tensor]:
    """[2, 3, 300, 64] in every way that a tail may lie."""
    value = gaussian((2, 3, 400, 64), dtype)
    yield value[:, :, :300].contiguous()
    yield value[:, :, 50:350]
    yield value.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 100:]
    yield gaussian((2, 5, 300, 80), dtype)[:, 1:4, :, 8:72]
    yield gaussian((1, 3, 300, 64), dtype).expand(2, 3, 300, 64)
    yield value[:, :, :300].transpose(0, 1).contiguous().transpose(0, 1)
    yield value[:, :, ::2][:, :, :1].expand(2, 3, 300, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(300,), (256, 44), (1, 99, 100, 100)])
def test_raw_regions(dtype: str, lengths: tuple[int, ...]) -> None:
    for tail in tails(dtype):
        regions = raw_regions(tail, lengths)
        assert regions.shape == (2, 3, len(lengths), len(FIELDS))
        assert (regions[..., KIND] == RAW).all()
        assert (regions[..., ROWS] == lengths).all()
        for row in range(2):
            found = read_by_hand(regions[row], from_memory, 64, dtype)
            assert np.array_equal(found, words_of(tail)[row])


# Pages and a tail together.


def test_pages_of_blobs_and_a_tail() -> None:
    value = gaussian((2, 3, 612, 64), "bfloat16")
    blobs = [
        [gaac.encode(value[row : row + 1, :, a:b], level=1) for a, b in ((0, 256), (256, 512))]
        for row in range(2)
    ]
    pages = Pages.of(blobs, value[:, :, 512:])
    assert pages.shape == (2, 3, 612, 64)
    assert (pages.tokens, pages.table.tokens) == (612, 512)
    assert (pages.dtype, pages.device) == (torch.bfloat16, torch.device("cpu"))
    assert Pages.of([], value).shape == Pages.of([[], []], value).shape == (2, 3, 612, 64)


def blob(shape: tuple[int, ...] = (1, 3, 256, 64), dtype: str = "bfloat16") -> bytes:
    return gaac.encode(gaussian(shape, dtype), level=1)


TAIL = torch.zeros(2, 3, 10, 64, dtype=torch.bfloat16)
MISFITS = {
    "a tail of three axes": ([], TAIL[0], "The tail is"),
    "a row of pages too few": ([[blob()]], TAIL, "as many pages"),
    "a row of pages too many": ([[blob()]] * 3, TAIL, "as many pages"),
    "unequal numbers of pages": ([[blob()], [blob()] * 2], TAIL, "as many pages"),
    "other heads": ([[blob((1, 2, 256, 64))]] * 2, TAIL, "the same heads"),
    "another head_dim": ([[blob((1, 3, 256, 80))]] * 2, TAIL, "head_dim"),
    "another dtype": ([[blob(dtype="float16")]] * 2, TAIL, "dtype"),
    "a second page of another dtype": ([[blob(), blob(dtype="float16")]] * 2, TAIL, "dtype"),
    "pages of unequal tokens": ([[blob()], [blob((1, 3, 100, 64))]], TAIL, "as many tokens"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    rows, tail, message = MISFITS[name]
    with pytest.raises(gaac.UnsupportedTensor, match=message):
        Pages.of(rows, tail)
