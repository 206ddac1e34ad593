"""The budget of a model as a person reads it in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from gaac_lab.budget import KVBudget
from gaac_lab.budget_text import format_bytes, number

if TYPE_CHECKING:
    from rich.console import Console


def show(console: Console, found: KVBudget) -> None:
    """Print the sizes, the kinds of layers, the formula with the numbers in it, and the notes."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows(found):
        table.add_row(name, text)
    console.print(table)
    if found.kinds:
        console.print(_kinds(found))
    console.print(found.explanation, markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)


def rows(found: KVBudget) -> list[tuple[str, str]]:
    """(what, how much), the total first; a line that would say nothing is left out."""
    lines = [
        (
            "KV cache",
            f"{format_bytes(found.total_bytes)} for {found.batch_sequences} x "
            f"{found.seq_len_tokens:,} tokens in {found.dtype}",
        )
    ]
    if found.k_bytes is not None and found.v_bytes is not None and found.k_bytes != found.v_bytes:
        lines.append(
            ("of it K, V", f"{format_bytes(found.k_bytes)}, {format_bytes(found.v_bytes)}")
        )
    if found.fixed_state_bytes:
        lines.append(("fixed state", format_bytes(found.fixed_state_bytes)))
    if found.cross_attention_bytes != 0:
        tokens = "" if found.encoder_tokens is None else f" for {found.encoder_tokens:,} tokens"
        lines.append(("cross cache", format_bytes(found.cross_attention_bytes) + tokens))
    if found.stored_bytes != found.total_bytes:
        lines.append(("together", format_bytes(found.stored_bytes)))
    lines.append(("layers", _layers(found)))
    lines.append(("each further token", f"{found.bytes_per_token:,} bytes a sequence"))
    if found.window_cap_bytes is not None:
        lines.append(
            (
                "below the windows",
                f"{found.bytes_per_token_below_window:,} bytes a token; the "
                f"{number(found.layers_with_window, 'layer')} with a window stop at "
                f"{format_bytes(found.window_cap_bytes)}",
            )
        )
    lines.append(("read in one step", format_bytes(found.read_bytes_per_step)))
    if found.expanded_total_bytes is not None:
        lines.append(
            (
                "if K and V per head",
                f"{format_bytes(found.expanded_total_bytes)}, which is what code that does not "
                "keep latents takes",
            )
        )
    latent = found.expanded_total_bytes is not None
    if latent or found.total_bytes_transformers != found.total_bytes:
        lines.append(("transformers keeps", format_bytes(found.total_bytes_transformers)))
    held = found.fixed_state_bytes_transformers
    if held is not None and held != found.fixed_state_bytes:
        lines.append(("transformers' state", format_bytes(held)))
    return lines


def fitting(memory_bytes: int, tokens: int | None, sequences: int) -> str:
    """How many tokens fit, as a sentence."""
    room = f"{format_bytes(memory_bytes)} for the cache alone"
    each = "" if sequences == 1 else f" in each of {sequences} sequences"
    if tokens is None:
        return f"{room}: any length fits{each}"
    return f"{room}: {tokens:,} tokens fit{each}"


def _layers(found: KVBudget) -> str:
    text = f"{found.layers_with_kv} of {found.layers} layers hold KV"
    if found.layers_that_share:
        text += f", {found.layers_that_share} read another's"
    if found.layers_with_state:
        text += f", {found.layers_with_state} keep a fixed state"
    return text


def _kinds(found: KVBudget) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    latent = any(kind.latent_dim or kind.index_dim for kind in found.kinds)
    names = ("layers", "KV heads", "K width", "V width", "window", "bytes a token")
    for name in (*names[:4], *(("latent", "index key") if latent else ()), *names[4:]):
        table.add_column(name, justify="right")
    for kind in found.kinds:
        window = "all tokens" if kind.window_tokens is None else f"{kind.window_tokens:,}"
        more = (str(kind.latent_dim), str(kind.index_dim)) if latent else ()
        widths = (kind.kv_heads, kind.k_head_dim, kind.v_head_dim)
        heads = ("–",) * 3 if kind.latent_dim else tuple(map(str, widths))
        each = f"{kind.bytes_per_token:,}"
        table.add_row(str(kind.layers), *heads, *more, window, each)
    return table
