"""Tokens are appended in place while there is room, and nobody sees another's tokens."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from gaac.hf.tail import Tail


def states(tokens: int, start: int = 0) -> torch.Tensor:
    """Token number n holds n, up to 250 and again from 0."""
    numbers = torch.arange(start, start + tokens) % 251
    return numbers.bfloat16()[:, None].expand(2, 3, tokens, 4).clone()


def grown(tail: Tail, tokens: int, most: int | None = None) -> Tail:
    for _ in range(tokens):
        tail = tail.append(states(1, tail.tokens), most)
    return tail


def room_tokens(tail: Tail) -> int:
    return tail.states.untyped_storage().nbytes() // (2 * 3 * 4 * 2)


@pytest.mark.parametrize(("tokens", "room"), [(0, 17), (100, 117), (1600, 1701)])
def test_room_is_a_16th_or_16_tokens(tokens: int, room: int) -> None:
    tail = Tail(states(tokens))
    assert room_tokens(tail) == tokens
    assert room_tokens(grown(tail, 1)) == room


def test_no_room_beyond_what_will_be_cut() -> None:
    tail = Tail(states(0))
    for _ in range(40):
        tail = grown(tail, 1, most=40)
        assert room_tokens(tail) <= 40
    assert room_tokens(grown(tail, 1, most=40)) == 41  # more than foreseen, and still right
    assert torch.equal(grown(tail, 3, most=40).states, states(43))


def test_a_token_is_appended_in_place() -> None:
    tail, moves = Tail(states(1000)), 0
    for _ in range(500):
        longer = grown(tail, 1)
        moves += longer.states.data_ptr() != tail.states.data_ptr()
        tail = longer
    assert moves == 7  # each to 1.0625 times the length
    assert torch.equal(tail.states, states(1500))


def test_given_states_are_never_written_to() -> None:
    given = states(20)
    room = given[:, :, :5]  # the storage has room, which is not ours
    assert torch.equal(Tail(room).append(states(3, 90), None).states[:, :, 5:], states(3, 90))
    assert torch.equal(given, states(20))


def test_the_first_of_two_owns_the_end() -> None:
    base = grown(Tail(states(4)), 2)
    first, second = (base.append(states(1, start), None) for start in (50, 60))
    assert first.states.data_ptr() == base.states.data_ptr()
    assert second.states.data_ptr() != base.states.data_ptr()
    assert first.states[0, 0, -1, 0] == 50
    assert second.states[0, 0, -1, 0] == 60
    assert torch.equal(base.states, states(6))
    third = base.append(states(2, 70), None)  # after both
    assert torch.equal(third.states[:, :, 6:], states(2, 70))
    assert torch.equal(first.states[:, :, :6], states(6))


def test_threads_never_own_the_same_end() -> None:
    base = grown(Tail(states(4)), 2)
    barrier, made = threading.Barrier(8), []

    def work(number: int) -> None:
        barrier.wait()
        made.append((number, grown(base.append(states(1, number), None), 3)))

    threads = [threading.Thread(target=work, args=(100 + n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    for number, tail in made:
        assert tail.states[1, 2, :, 3].tolist() == [*range(6), number, 7, 8, 9]


def test_inference_mode_and_after() -> None:
    with torch.inference_mode():
        tail = grown(Tail(states(4)), 2)
    assert torch.equal(grown(tail, 3).states, states(9))


def test_copies_are_exact() -> None:
    tail = grown(Tail(states(20)), 3)
    twin = copy.deepcopy(tail)
    assert room_tokens(tail) > 23
    assert room_tokens(twin) == 23
    assert torch.equal(twin.states, tail.states)


def test_gradients_end_here() -> None:
    new = states(1).requires_grad_()
    assert not Tail(states(3)).append(new, None).states.requires_grad
