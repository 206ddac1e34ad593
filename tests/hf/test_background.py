"""Blocks packed beside decoding: what is held, and when, never depends on the thread's speed."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from gaac.hf import BlockCompressedCache
from gaac.hf.background import Pending
from gaac.hf.blocks import Packer
from gaac.hf.layer import BlockCompressedLayer

from .codecs import FailingCodec, ZlibCodec
from .scenarios import assert_little_room

BLOCK = 4


def states(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, tokens, 8, generator=generator).bfloat16()


def cache(**options: Any) -> BlockCompressedCache:
    config = LlamaConfig(num_hidden_layers=1)
    return BlockCompressedCache(config, **({"block_tokens": BLOCK} | options))


def step(target: BlockCompressedCache, seed: int) -> None:
    target.update(states(1, seed), states(1, seed + 1000), 0)


def content(seeds: Any) -> torch.Tensor:
    return torch.cat([states(1, seed) for seed in seeds], 2)


def due(**options: Any) -> BlockCompressedCache:
    """A cache to which the token has just come that made a block due."""
    made = cache(**options)
    for seed in range(BLOCK):
        step(made, seed)
    return made


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Packing waits for the event, which is set at the end in any case."""
    event, pack = threading.Event(), Packer.pack

    def waiting(*args: Any) -> Any:
        assert event.wait(30)
        return pack(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packer, "pack", waiting)
        try:
            yield event
        finally:
            event.set()


def packing_thread(make: Callable[[], Any]) -> set[str]:
    """Names of the threads that pack while something is done."""
    names, pack = set(), Packer.pack

    def noting(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        return pack(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packer, "pack", noting)
        made = make()
        made.flush()
    return names


@pytest.mark.parametrize("options", [{}, {"codec": ZlibCodec()}], ids=str)
def test_single_tokens_are_packed_by_another_thread(options: dict[str, Any]) -> None:
    (name,) = packing_thread(lambda: due(**options))
    assert name.startswith("gaac-pack")


def test_a_prefill_is_packed_at_once() -> None:
    def fill() -> BlockCompressedCache:
        made = cache()
        made.update(states(9, 0), states(9, 1), 0)
        return made

    assert packing_thread(fill) == {threading.current_thread().name}


def test_a_step_does_not_wait_for_its_block() -> None:
    with held_up():
        due()  # would wait for ever


USES: dict[str, Callable[[BlockCompressedCache], Any]] = {
    "stored_bytes": lambda c: c.stored_bytes,
    "raw_bytes": lambda c: c.raw_bytes,
    "layer_bytes": lambda c: c.layer_bytes(),
    "lanes": lambda c: [len(lane.rows[0]) for lane in c.layers[0].lanes],
    "keys": lambda c: c.layers[0].keys.tolist(),
    "flush": lambda c: c.flush(),
    "crop": lambda c: c.crop(-1),
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
    "fork": lambda c: c.fork().layers[0].keys.tolist(),
    "deepcopy": lambda c: copy.deepcopy(c).layers[0].keys.tolist(),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)).layers[0].keys.tolist(),
    "offload": lambda c: c.layers[0].offload(),
    "prefetch": lambda c: c.layers[0].prefetch(),
    "step": lambda c: step(c, 50),
    "prefill": lambda c: c.update(states(9, 50), states(9, 51), 0)[0].tolist(),
    "reset": lambda c: c.reset(),
}


@pytest.mark.parametrize("name", USES)
def test_whatever_is_asked_is_answered_as_if_packed_at_once(name: str) -> None:
    use = USES[name]
    early = due()
    early.flush()
    with held_up() as event:
        late = due()
        timer = threading.Timer(0.05, event.set)
        timer.start()
        ours = use(late)
        timer.join()
    assert repr(ours) == repr(use(early))
    assert late.get_seq_length() == early.get_seq_length()
    assert late.layer_bytes() == early.layer_bytes()
    assert repr(late.layers[0].keys) == repr(early.layers[0].keys)


def test_a_block_is_taken_over_at_the_next_token_and_not_before() -> None:
    """However long it has been ready."""
    made = due()
    layer = made.layers[0]
    pending = layer._pending
    assert pending is not None
    pending.result()
    assert layer._lanes["keys"].packed_tokens == 0
    step(made, 9)
    assert layer._lanes["keys"].packed_tokens == BLOCK
    assert layer._pending is None


@pytest.mark.parametrize("again", ["step", "prefill"])
def test_a_failure_shows_at_the_next_use_and_loses_nothing(again: str) -> None:
    made = due(codec=FailingCodec(at=3))
    with pytest.raises(RuntimeError, match="no memory left"):
        step(made, 7)
    assert made.get_seq_length() == BLOCK
    assert torch.equal(made.layers[0].keys, content(range(BLOCK)))
    if again == "step":
        step(made, 7)
    else:
        made.update(content([7, 8]), content([7, 8]), 0)
    expected = content([*range(BLOCK), *([7] if again == "step" else [7, 8])])
    assert torch.equal(made.layers[0].keys, expected)
    assert made.layers[0].lanes[0].packed_tokens == BLOCK
    for lane in made.layers[0].lanes:
        assert_little_room(lane)


def test_a_reset_forgets_a_failure() -> None:
    made = due(codec=FailingCodec(at=3))
    made.reset()
    for seed in range(BLOCK + 1):
        step(made, seed)
    assert torch.equal(made.layers[0].keys, content(range(BLOCK + 1)))


def test_a_foreign_codec_is_never_called_twice_at_once() -> None:
    class Alone(ZlibCodec):
        def __init__(self) -> None:
            self.inside = threading.Lock()
            self.threads: set[str] = set()

        def encode(self, tensor: torch.Tensor) -> bytes:
            return self.alone(lambda: super(Alone, self).encode(tensor))

        def decode(self, blob: bytes) -> torch.Tensor:
            return self.alone(lambda: super(Alone, self).decode(blob))

        def alone(self, call: Callable[[], Any]) -> Any:
            assert self.inside.acquire(blocking=False)
            try:
                self.threads.add(threading.current_thread().name)
                threading.Event().wait(0.002)
                return call()
            finally:
                self.inside.release()

    codec = Alone()
    packer = Packer(1, BLOCK, 0, codec)
    layers = [BlockCompressedLayer(packer, packer) for _ in range(3)]
    for seed in range(3 * BLOCK):
        for layer in layers:  # one layer is unpacked while another's block is packed
            layer.update(states(1, seed), states(1, seed))
    assert len(codec.threads) == 2
    for layer in layers:
        assert torch.equal(layer.keys, content(range(3 * BLOCK)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are for POSIX")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_the_work_itself() -> None:
    """In a child there is no thread that would ever finish it."""
    with held_up() as event:
        pending = Pending(lambda: event.wait(30) and 7, torch.device("cpu"))
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # the end of a child that waits for its parent's thread
            event.set()
            again = Pending(lambda: 8, torch.device("cpu"))
            os._exit(0 if (pending.result(), again.result()) == (7, 8) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pending.result() == 7


def test_bytes_and_order_do_not_depend_on_the_threads_speed() -> None:
    sizes = []
    for delay in (0.0, 0.004):
        made, trace = cache(window=3), []
        for seed in range(25):
            step(made, seed)
            threading.Event().wait(delay)
            lane = made.layers[0]._lanes["values"]
            trace.append(
                (lane.packed_tokens, lane.raw.tokens, lane.tail.untyped_storage().nbytes())
            )
        sizes.append(trace)
    assert sizes[0] == sizes[1]


def test_a_pickled_cache_has_no_addresses_of_the_old_process() -> None:
    made = due()
    made.flush()
    table = made.layers[0].lanes[0].table
    assert table.regions is not None
    twin = pickle.loads(pickle.dumps(made))
    other = twin.layers[0].lanes[0].table
    assert "regions" not in other.__dict__
    assert (other.regions != table.regions).any()
    step(twin, 9)
    assert torch.equal(twin.layers[0].keys, content([*range(BLOCK), 9]))
