"""Which points a sweep has, and what the bandwidth arithmetic says; numbers by hand."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gaac_lab import bandwidth, codec_speed, sweep
from gaac_lab.configuration import BASELINE, EAGER, GROUPED, Configuration

REFERENCE = Configuration(level=1, block_tokens=256, integration="fused")
WINDOW = {"window": 16}
MATERIALISED = Configuration(level=1, block_tokens=256)


def test_one_variable_changes_at_a_time() -> None:
    points = sweep.points(
        REFERENCE,
        integrations=["fused", "materialise"],
        block_sizes=[128, 256],
        levels=[1, 3],
        scopes=["kv", "k"],
        windows=[0, 64],
        peers=["zstd"],
    )
    assert [variable for variable, _ in points] == [
        "baseline", "reference", "integration", "block_tokens", "level", "scope", "window", "codec",
    ]  # fmt: skip
    assert points[0][1] == BASELINE
    reference = REFERENCE.model_dump()
    for variable, configuration in points[2:7]:
        changed = {k for k, v in configuration.model_dump().items() if v != reference[k]}
        assert changed == {variable}
    assert points[2][1] == MATERIALISED
    # A peer cannot be read in place: one more change, the materialised point is its neighbour.
    peer = {"codec": "zstd", "level": None, "integration": "materialise"}
    assert points[7][1].model_dump() == {**reference, **peer}


def test_labels_are_unique() -> None:
    points = sweep.points(
        REFERENCE,
        integrations=["materialise"],
        block_sizes=[64],
        levels=[0, 3],
        scopes=["k", "v"],
        windows=[8],
        peers=["lz4"],
    )
    labels = [configuration.label for _, configuration in points]
    labels += [EAGER.label, GROUPED.label, REFERENCE.raw_twin.model_copy(update=WINDOW).label]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": "none"},
        {"codec": "zstd", "level": 3},
        {"level": None},
        {"scope": "q"},
        {"window": -1},
        {"block_tokens": 0},
        {"integration": "none"},
        {"integration": "grouped"},
        {"integration": "paged"},
        {"codec": "none", "level": None, "integration": "fused"},
        {"codec": "none", "level": None, "integration": "materialise"},
        {"codec": "zstd", "level": None, "integration": "fused"},
    ],
)
def test_a_configuration_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Configuration(**wrong)  # type: ignore[arg-type]


def test_a_peer_cannot_be_read_in_place_and_the_sentence_says_so() -> None:
    with pytest.raises(ValidationError, match=r"'zstd'.*gaac's pages only; choose materialise"):
        Configuration(codec="zstd", level=None, integration="fused")


@pytest.mark.parametrize(
    ("configuration", "twin"),
    [
        (BASELINE, BASELINE),
        (MATERIALISED, BASELINE),
        (Configuration(codec="zstd", level=None), BASELINE),
        (REFERENCE, Configuration(level=0, integration="fused")),
        (EAGER, EAGER),
        (GROUPED, GROUPED),
    ],
    ids=lambda one: one.label,
)
def test_bits_are_compared_under_the_same_attention(
    configuration: Configuration, twin: Configuration
) -> None:
    assert configuration.raw_twin == twin
    assert configuration.keeps_attention == (twin == BASELINE)


def test_traffic_counts_what_each_way_moves() -> None:
    plain = bandwidth.traffic(BASELINE, 100, 100)
    packed = bandwidth.traffic(MATERIALISED, 100, 70)
    assert (plain.read_bytes, plain.written_bytes) == (200, 100)
    assert (packed.read_bytes, packed.written_bytes) == (170, 100)
    assert bandwidth.ideal(70).floor_s(7e-9) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([0.5, 0.9, 1.1], 3.0), ([0.5, 0.6, 0.7], None), ([1.2, 1.3, 1.4], 1.0)],
)
def test_the_crossing_is_interpolated(ratios: list[float], expected: float | None) -> None:
    assert bandwidth.crossing([1.0, 2.0, 4.0], ratios) == (
        None if expected is None else pytest.approx(expected)
    )


def test_break_even_link_speed_solves_its_equation() -> None:
    ratio, encode, decode = 1.5, 0.4, 0.8
    link = codec_speed.break_even_link_gb_s(ratio, encode, decode)
    assert link is not None
    assert 1 / link == pytest.approx(1 / encode + 1 / (ratio * link) + 1 / decode)
    assert codec_speed.break_even_link_gb_s(1.0, encode, decode) is None
