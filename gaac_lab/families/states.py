"""The fixed state of one recurrent layer, by its kind.

A convolution keeps the last columns of its input, a recurrence a matrix per head. The installed
transformers (5.24) keeps as many columns as the kernel is wide, and recurrent states in float32
whatever the model's type; engines differ in both, so each family below may say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from gaac_lab.families.config_fields import ABSENT, Fields
from gaac_lab.families.geometry import State
from gaac_lab.families.layer_rules import HEADS, WIDTH

FLOAT32 = 4


def mamba(fields: Fields) -> State:
    """Mamba 1 (Mamba, Falcon Mamba): expand x hidden channels of state_size each."""
    channels = fields.count("expand", 2) * fields.count(WIDTH)
    kernel, size = fields.count("conv_kernel", 4), fields.count("state_size", 16)
    return State(channels, kernel, channels * size, FLOAT32)


def mamba_in_hybrid(fields: Fields) -> State:
    """The same under the names of Jamba and Zamba."""
    channels = fields.count("mamba_expand", 2) * fields.count(WIDTH)
    kernel, size = fields.count("mamba_d_conv", 4), fields.count("mamba_d_state", 16)
    return State(channels, kernel, channels * size, FLOAT32)


def mamba2(fields: Fields) -> State:
    """Mamba 2: heads x head_dim channels; the convolution runs over B and C as well."""
    inner = fields.count("expand", 2) * fields.count(WIDTH)
    heads, dim = fields.count("num_heads", 128), fields.count("head_dim", 64)
    _divided(fields, "num_heads", inner, heads, dim)
    return _mamba2(fields, inner, heads, dim, ("n_groups", 8), ("state_size", 128), "conv_kernel")


def mamba2_in_hybrid(fields: Fields, inner: int | None = None) -> State:
    """The same under the names of Bamba, Granite 4 and Falcon-H1; a head_dim "auto" divides."""
    if inner is None:
        inner = fields.count("mamba_expand", 2) * fields.count(WIDTH)
    heads = fields.count("mamba_n_heads", 128)
    dim = fields.get("mamba_d_head")
    if dim in (ABSENT, None, "auto"):
        dim = inner // heads
    dim = fields.checked("mamba_d_head", dim)
    _divided(fields, "mamba_n_heads", inner, heads, dim)
    return _mamba2(
        fields, inner, heads, dim, ("mamba_n_groups", 1), ("mamba_d_state", 256), "mamba_d_conv"
    )


def falcon_h1(fields: Fields) -> State:
    """Falcon-H1: the channels are mamba_d_ssm (null: expand x hidden)."""
    given = fields.get("mamba_d_ssm")
    return mamba2_in_hybrid(fields, None if given is None else fields.count("mamba_d_ssm", 1024))


def nemotron_h(fields: Fields) -> State:
    """Nemotron-H: the channels are mamba_num_heads x mamba_head_dim."""
    heads, dim = fields.count("mamba_num_heads", 128), fields.count("mamba_head_dim", 64)
    return _mamba2(
        fields, heads * dim, heads, dim, ("n_groups", 8), ("ssm_state_size", 128), "conv_kernel"
    )


def zamba2(fields: Fields) -> State:
    """Zamba 2: as many heads as n_mamba_heads over expand x hidden channels."""
    inner = fields.count("mamba_expand", 2) * fields.count(WIDTH)
    heads = fields.count("n_mamba_heads", 8)
    return _mamba2(
        fields,
        inner,
        heads,
        inner // heads,
        ("mamba_ngroups", 1),
        ("mamba_d_state", 64),
        "mamba_d_conv",
    )


def gated_delta(
    k_heads: int | None = 16, v_heads: int | None = 32, k_dim: int = 128, v_dim: int = 128
) -> Callable[[Fields], State]:
    """Gated delta rule (Qwen3-Next, Qwen3.5): a matrix of K width x V width per value head."""

    def state(fields: Fields) -> State:
        keys = fields.count("linear_num_key_heads", k_heads)
        values = fields.count("linear_num_value_heads", v_heads)
        return _delta(
            fields,
            keys,
            fields.count("linear_key_head_dim", k_dim),
            values,
            fields.count("linear_value_head_dim", v_dim),
        )

    return state


def olmo_hybrid(fields: Fields) -> State:
    """OLMo hybrid: the same, where an absent or null field follows from the attention heads."""

    def given(name: str, otherwise: int) -> int:
        value = fields.get(name)
        return otherwise if value is ABSENT or value is None else fields.checked(name, value)

    heads, width = fields.count(HEADS), fields.count(WIDTH)
    keys = given("linear_num_key_heads", heads)
    k_dim = given("linear_key_head_dim", int(0.75 * width / keys))
    values = given("linear_num_value_heads", heads)
    return _delta(fields, keys, k_dim, values, given("linear_value_head_dim", 2 * k_dim))


def kimi_delta(fields: Fields) -> State:
    """Kimi delta attention: Q, K and V pass a convolution; a square matrix per head."""
    nested = fields.part("linear_attn_config")
    heads = _either(nested, "num_heads", fields, "linear_num_heads", 32)
    dim = _either(nested, "head_dim", fields, "linear_head_dim", 128)
    kernel = _either(nested, "short_conv_kernel_size", fields, "linear_conv_kernel_dim", 4)
    return State(3 * heads * dim, kernel, heads * dim * dim, FLOAT32)


def bailing_delta(fields: Fields) -> State:
    """Ling 2.5 and its like: as Kimi's, with the attention's own heads."""
    name = "head_dim" if fields.get("linear_head_dim") is ABSENT else "linear_head_dim"
    heads, dim = fields.count(HEADS), fields.count(name, 128)
    kernel = fields.count("short_conv_kernel_size", 4)
    return State(3 * heads * dim, kernel, heads * dim * dim, FLOAT32)


def lightning(dim: int, heads: int) -> State:
    """Lightning attention (MiniMax): a square matrix per head in the model's type."""
    return State(0, 0, heads * dim * dim)


def short_conv(columns: int) -> Callable[[Fields], State]:
    """LFM 2, LFM 3: a convolution over the hidden size and nothing else."""
    return lambda fields: State(fields.count(WIDTH), fields.count("conv_L_cache", columns), 0)


def rg_lru(fields: Fields) -> State:
    """RecurrentGemma: a vector in float32 and the columns before the newest of a convolution."""
    width = fields.count(WIDTH)
    given = fields.get("lru_width")
    units = width if given is ABSENT or given is None else fields.checked("lru_width", given)
    return State(width, fields.count("conv1d_width", 4) - 1, units, FLOAT32)


def _mamba2(
    fields: Fields,
    inner: int,
    heads: int,
    dim: int,
    groups: tuple[str, int],
    size: tuple[str, int],
    kernel: str,
) -> State:
    size_values = fields.count(*size)
    channels = inner + 2 * fields.count(*groups) * size_values
    return State(channels, fields.count(kernel, 4), heads * dim * size_values, FLOAT32)


def _delta(fields: Fields, keys: int, k_dim: int, values: int, v_dim: int) -> State:
    channels = 2 * keys * k_dim + values * v_dim
    kernel = fields.count("linear_conv_kernel_dim", 4)
    return State(channels, kernel, values * k_dim * v_dim, FLOAT32)


def _divided(fields: Fields, name: str, inner: int, heads: int, dim: int) -> None:
    if heads * dim != inner:
        raise fields.refuse(name, f"is {heads}, and {heads} heads x {dim} are not {inner} channels")


def _either(nested: Fields, inner: str, fields: Fields, outer: str, default: int) -> int:
    """A field of a nested object, else of the config itself, else the class default."""
    if nested.get(inner) is not ABSENT:
        return nested.count(inner)
    return fields.count(outer, default)
