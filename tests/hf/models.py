"""Tiny random-weight models, one per way in which a model keeps its KV."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

VOCAB = 101
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _llama(layers: int = 3) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=layers))


def _llama_assistant() -> PreTrainedModel:
    return _llama(layers=1)


def _llama64() -> PreTrainedModel:
    """Heads as wide as the fast kernels want them."""
    config = LlamaConfig(**(_SIZES | {"head_dim": 64}), num_hidden_layers=2)
    return LlamaForCausalLM(config)


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_SIZES, num_hidden_layers=2, sliding_window=12))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **_SIZES,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=12,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
    )
    return Gemma2ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    """Its sinks are parameters, and large enough to matter."""
    config = GptOssConfig(
        **(_SIZES | {"head_dim": 64}),
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=12,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(1, 1)
    return model


def _gemma3() -> PreTrainedModel:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **_SIZES,
        num_hidden_layers=3,
        layer_types=types,
        sliding_window=12,
        query_pre_attn_scalar=16,
    )
    return Gemma3ForCausalLM(config)


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_hidden_layers=2))


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _lfm2() -> PreTrainedModel:
    types = ["conv", "full_attention", "conv"]
    return Lfm2ForCausalLM(Lfm2Config(**_SIZES, num_hidden_layers=3, layer_types=types))


def _qwen3_next() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **_SIZES,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return Qwen3NextForCausalLM(config)


def _deepseek_v3() -> PreTrainedModel:
    sizes = {key: value for key, value in _SIZES.items() if key != "head_dim"}
    config = DeepseekV3Config(
        **(sizes | {"num_key_value_heads": 4}),
        num_hidden_layers=2,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
    )
    return DeepseekV3ForCausalLM(config)


def _gemma3n() -> PreTrainedModel:
    config = Gemma3nTextConfig(
        **_SIZES,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=12,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return Gemma3nForCausalLM(config)


def _bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=256,
        decoder_start_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config)


def _t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCAB,
        d_model=48,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


BUILDERS = {
    "llama": _llama,
    "llama_assistant": _llama_assistant,
    "llama64": _llama64,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek_v3,
    "gemma3n": _gemma3n,
    "bart": _bart,
    "t5": _t5,
}


def build(name: str) -> PreTrainedModel:
    """A bf16 model on the CPU, the same weights every time."""
    torch.manual_seed(11)
    model = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # wide enough that logits differ from token to token
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(torch.bfloat16).eval()
