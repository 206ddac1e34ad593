"""Model types without a family of their own: parts of others, and those that are not counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# The language model of a config of several parts, where that part does not say (class defaults).
TEXT_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("llava", "deepseek_vl", "idefics3", "smolvlm", "voxtral"), "llama"),
    **dict.fromkeys(("got_ocr2", "internvl", "qwen2_audio"), "qwen2"),
    "emu3": "emu3_text_model",
    "fuyu": "persimmon",
    "granite_speech": "granite",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
}

# Counting these from their fields would be wrong.
NOT_COUNTED: Final[Mapping[str, str]] = {
    "blt": "four transformers over bytes and patches keep caches of their own",
    "deepseek_v4": "its layers keep tokens that are compressed by different rates",
    "dory": "some of its layers run in loops, each with a cache of its own",
    "gemma4_assistant": "it reads another model's KV and keeps none",
    "gemma4_unified_assistant": "it reads another model's KV and keeps none",
    "hrm_text": "its layers run in cycles, each with a cache of its own",
    "openai-gpt": "its class in transformers keeps no cache",
    "reformer": "it keeps hidden states and hash buckets instead of K and V",
    "xlm": "its class in transformers keeps no cache",
    "xlnet": "it keeps hidden states of earlier segments instead of K and V",
    "xlstm": "its states are not understood here",
    "rwkv": "its states are not understood here",
    "zaya": "its convolutions on K and V are not understood here",
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "its layers mix latents of two widths"),
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"), "its layers are not understood"
    ),
    **dict.fromkeys(("minimax_m3_vl_text", "qwen4_exp_text", "qwen4_exp"),
                    "its sparse attention's own keys are not understood here"),
}  # fmt: skip
