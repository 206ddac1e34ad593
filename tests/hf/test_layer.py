"""A compressed layer against the library's DynamicLayer, under any sequence of operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer

import gaac
from gaac.hf import BlockCompressedCache
from gaac.hf.blocks import Packer
from gaac.hf.layer import BlockCompressedLayer

from .codecs import FailingCodec, ShapelessCodec, ZlibCodec

HEADS, WIDTH = 2, 6


def states(batch: int, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Any 16-bit pattern at all: NaN payloads, infinities, denormals and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, HEADS, WIDTH)
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator).transpose(1, 2)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    return bits.view(dtype).transpose(1, 2)  # not contiguous, as models give them


def layer(**options: Any) -> BlockCompressedLayer:
    packer = Packer(**({"level": 1, "block_tokens": 4, "window": 0} | options))
    return BlockCompressedLayer(packer, packer)


def assert_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    view = torch.int16 if ours.element_size() == 2 else torch.int32
    assert torch.equal(ours.view(view), theirs.view(view))


def assert_equal_layers(ours: BlockCompressedLayer, theirs: DynamicLayer) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_seq_length() == sum(lane.tokens for lane in ours.lanes) // 2
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    assert ours.is_initialized == theirs.is_initialized
    if theirs.get_seq_length():
        assert_bits(ours.keys, theirs.keys)
        assert_bits(ours.values, theirs.values)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 11)),
        st.tuples(st.just("crop"), st.integers(-13, 0)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("mask"), st.integers(0, 5)),
        st.tuples(
            st.sampled_from(["fork", "deepcopy", "offload", "prefetch", "reset"]), st.just(0)
        ),
    ),
    max_size=14,
)


def apply(name: str, number: int, target: Any, batch: int, seed: int) -> Any:
    """Do one operation to a layer of either kind; the layer to go on with."""
    if name == "update":
        new = states(batch, number, seed), states(batch, number, seed + 1)
        for got, held in zip(target.update(*new), (target.keys, target.values), strict=True):
            assert got.is_contiguous()  # laid out alike, so that attention computes the same bits
            assert_bits(got, held)
    elif name == "crop" and target.is_initialized:  # not every version asks
        target.crop(number)
    elif name == "reorder":
        target.reorder_cache(torch.tensor([(number + row) % batch for row in range(batch)]))
    elif name == "repeat":
        target.batch_repeat_interleave(number)
    elif name == "select":
        target.batch_select_indices(torch.tensor([number % batch, -1]))
    elif name == "mask":
        target.batch_select_indices(torch.arange(batch) != (number % batch if batch > 1 else -1))
    elif name in ("fork", "deepcopy"):
        ours = name == "fork" and isinstance(target, BlockCompressedLayer)
        twin = target.fork() if ours else copy.deepcopy(target)
        if target.get_seq_length():  # what happens to the one left behind must not reach the twin
            target.update(states(batch, 7, seed), states(batch, 7, seed))
            target.crop(-5)
        return twin
    elif name in ("offload", "prefetch"):
        getattr(target, name)()
    elif name == "reset":
        if type(target) is DynamicLayer:  # some versions only write zeros and keep the length
            return DynamicLayer()
        target.reset()
    return target


@settings(max_examples=120, deadline=None)
@given(
    OPERATIONS,
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from(["kv", "k", "v"]),
    st.sampled_from([0, 1, 3, "foreign"]),
)
def test_any_sequence_of_operations(
    operations: list[tuple[str, int]],
    batch: int,
    block_tokens: int,
    window: int,
    scope: str,
    level: Any,
) -> None:
    codec = ZlibCodec() if level == "foreign" else None
    packer = Packer(1 if codec else level, block_tokens, window, codec)
    ours: Any = BlockCompressedLayer(
        packer if "k" in scope else None, packer if "v" in scope else None
    )
    theirs: Any = DynamicLayer()
    for seed, (name, number) in enumerate([("update", 9), *operations]):
        ours = apply(name, number, ours, batch, seed)
        theirs = apply(name, number, theirs, batch, seed)
        assert_equal_layers(ours, theirs)
        if theirs.get_seq_length():
            batch = theirs.keys.shape[0]
            # never more raw tokens than a block and the window
            for lane in ours.lanes:
                if lane.packer:
                    assert lane.tail.shape[-2] < block_tokens + window


@pytest.mark.parametrize("window", [0, 3, 256])
def test_a_prefill_in_one_go_keeps_the_window_raw(window: int) -> None:
    ours = layer(block_tokens=16, window=window)
    ours.update(states(1, 2000, 0), states(1, 2000, 1))
    packed = (2000 - window) // 16 * 16
    assert [lane.packed_tokens for lane in ours.lanes] == [packed, packed]
    assert min(lane.tail.shape[-2] for lane in ours.lanes) >= window


def test_a_block_is_packed_when_block_and_window_are_full() -> None:
    ours = layer(block_tokens=4, window=3)
    for token in range(1, 16):
        ours.update(states(1, 1, token), states(1, 1, token))
        assert ours.lanes[0].packed_tokens == max(0, token - 3) // 4 * 4


@pytest.mark.parametrize("tokens", [3, 10])
def test_input_is_neither_changed_nor_kept(tokens: int) -> None:
    given, ours = states(2, tokens, 0).contiguous(), layer()
    before = given.clone()
    ours.update(given, given)
    assert_bits(given, before)
    given.zero_()
    assert_bits(ours.keys, before)
    assert_bits(ours.values, before)


def test_returned_tensors_are_not_held_once_blocks_exist() -> None:
    ours = layer(block_tokens=4)
    keys, values = ours.update(states(1, 10, 0), states(1, 10, 1))
    before = keys.clone()
    keys.zero_()
    values.zero_()
    assert_bits(ours.keys, before)


def test_a_failing_codec_leaves_the_layer_as_it_was() -> None:
    ours = layer(codec=FailingCodec(at=5))
    ours.update(states(2, 4, 0), states(2, 4, 1))  # four blocks: two rows, keys and values
    keys = ours.keys.clone()
    with pytest.raises(RuntimeError, match="no memory left"):
        ours.update(states(2, 4, 2), states(2, 4, 3))
    assert ours.get_seq_length() == 4
    assert_bits(ours.keys, keys)
    ours.update(states(2, 4, 2), states(2, 4, 3))
    assert_bits(ours.keys[:, :, 4:], states(2, 4, 2))


def test_a_damaged_payload_raises_and_is_not_repaired() -> None:
    ours = layer()
    ours.update(states(1, 8, 0), states(1, 8, 1))
    ours.lanes[0].rows[0][1].payload[-1] ^= 1
    with pytest.raises(gaac.CorruptFrame):
        _ = ours.keys
    with pytest.raises(gaac.CorruptFrame):
        ours.update(states(1, 1, 2), states(1, 1, 3))
    assert ours.get_seq_length() == 8


def test_a_codec_that_changes_the_shape_is_refused() -> None:
    ours = layer(codec=ShapelessCodec())
    ours.update(states(1, 8, 0), states(1, 8, 1))
    with pytest.raises(ValueError, match="must restore both"):
        _ = ours.keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_half_precisions(dtype: torch.dtype) -> None:
    ours, theirs = layer(), DynamicLayer()
    for seed in range(3):
        new = states(2, 5, seed, dtype), states(2, 5, seed + 9, dtype)
        for got, want in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert_bits(got, want)


def test_float32_is_refused_before_anything_is_lost() -> None:
    new, ours = states(1, 3, 0, torch.float32), layer()
    message = "KV is float32; load the model in bfloat16 or float16, or pass codec="
    with pytest.raises(gaac.UnsupportedTensor, match=message):
        ours.update(new, new)
    assert ours.get_seq_length() == 0
    assert not ours.is_initialized
    ours.update(states(1, 9, 0), states(1, 9, 0))
    assert ours.get_seq_length() == 9


def test_float32_with_a_foreign_codec() -> None:
    ours, theirs = layer(codec=ZlibCodec()), DynamicLayer()
    for seed in range(3):
        new = states(2, 5, seed, torch.float32), states(2, 5, seed + 9, torch.float32)
        for got, want in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert_bits(got, want)


@pytest.mark.parametrize(
    "new",
    [states(1, 2, 0), states(2, 2, 0)[:, :1], states(2, 2, 0)[..., :4], states(2, 2, 0).half()],
)
def test_states_that_do_not_fit_are_refused(new: torch.Tensor) -> None:
    """Copying would broadcast or convert them in silence."""
    ours = layer()
    ours.update(states(2, 9, 0), states(2, 9, 1))
    with pytest.raises(ValueError, match="cannot take"):
        ours.update(new, new)
    assert ours.get_seq_length() == 9


def test_keys_and_values_of_different_width() -> None:
    ours, theirs = layer(), DynamicLayer()
    for seed in range(3):
        new = states(2, 5, seed)[:, :1], states(2, 5, seed)[..., :3]
        for got, want in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert_bits(got, want)


def test_gradients_reach_the_new_states() -> None:
    """Attention outside no_grad works; what earlier calls stored is constant."""
    ours = layer()
    for seed in range(3):
        new = torch.nan_to_num(states(1, 6, seed)).float().clamp(-9, 9).bfloat16()
        new.requires_grad_(True)
        keys, _ = ours.update(new, new)
        keys.sum().backward()
        assert torch.equal(new.grad, torch.ones_like(new))
    assert not ours.keys.requires_grad


def test_inference_mode_and_after() -> None:
    ours = layer()
    with torch.inference_mode():
        ours.update(states(1, 9, 0), states(1, 9, 1))
    keys, _ = ours.update(states(1, 4, 2), states(1, 4, 3))
    assert_bits(keys[:, :, :9], states(1, 9, 0))


def test_crop_takes_a_negative_number_only() -> None:
    ours = layer()
    ours.crop(-3)  # nothing held yet
    ours.update(states(1, 9, 0), states(1, 9, 1))
    with pytest.raises(ValueError, match="pass a negative number"):
        ours.crop(5)
    ours.crop(0)
    assert ours.get_seq_length() == 9
    ours.crop(torch.tensor(-2))
    assert ours.get_seq_length() == 7
    ours.crop(-100)
    assert ours.get_seq_length() == 0


def test_no_row_selected_is_refused() -> None:
    ours = layer()
    ours.update(states(2, 9, 0), states(2, 9, 1))
    with pytest.raises(ValueError, match="no batch row"):
        ours.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert ours.get_seq_length() == 9


def test_keys_cannot_be_assigned() -> None:
    ours = layer()
    ours.update(states(1, 9, 0), states(1, 9, 1))
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match="use update"):
            setattr(ours, name, states(1, 9, 0))
        with pytest.raises(AttributeError, match="use update"):
            setattr(ours, name, None)
    assert ours.keys.shape[-2] == 9


def test_the_library_finds_all_that_it_asks_for() -> None:
    """Every public name of the library's layer and cache is there, and answers alike."""
    config = LlamaConfig(num_hidden_layers=2)
    ours, theirs = BlockCompressedCache(config, block_tokens=4), DynamicCache(config=config)
    for cache in (ours, theirs):
        for index in range(2):
            cache.update(states(2, 9, index), states(2, 9, index), index)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert {name for name in dir(other) if not name.startswith("_")} <= set(dir(mine))
        assert mine.get_max_length() == mine.get_max_cache_shape() == -1
        assert (mine.is_compileable, mine.is_croppable, mine.is_sliding) == (False, True, False)
        assert (mine.device, mine.dtype) == (other.device, torch.bfloat16)
    names = ("is_compileable", "is_croppable", "is_sliding", "is_initialized", "batch_size")
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_max_length() == -1
    assert len(ours) == len(list(ours)) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert_bits(mine[0], other[0])
        assert_bits(mine[1], other[1])
        assert mine[2] is other[2] is None


def test_early_initialization_holds_nothing() -> None:
    cache = BlockCompressedCache(LlamaConfig(num_hidden_layers=2), block_tokens=4)
    cache.early_initialization(2, HEADS, WIDTH, torch.bfloat16, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == cache.raw_bytes == cache.stored_bytes == 0
    cache.update(states(3, 9, 0), states(3, 9, 1), 0)
    assert cache.get_seq_length() == 9
