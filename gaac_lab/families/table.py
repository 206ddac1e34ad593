"""Which layers of a model hold KV, and how much: one function per family, in one table.

A new family is a function from Fields to Geometry and a line in FAMILIES; most are `standard` with
rules from layer_rules. Class defaults are those of transformers' config classes (5.24); a family
that transformers has no class of is `remote`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from gaac_lab.families import layer_patterns as patterns
from gaac_lab.families import layer_rules as rules
from gaac_lab.families import recurrent, states
from gaac_lab.families.config_fields import Fields, overridden, text_part
from gaac_lab.families.family_names import NOT_COUNTED, TEXT_TYPES
from gaac_lab.families.geometry import Geometry
from gaac_lab.families.latent import Latent, indexed, latent
from gaac_lab.families.layer_rules import common, every_head, every_layer, first_of, last_of
from gaac_lab.families.plain_layers import (
    Family,
    decoder,
    falcon,
    full_by_list,
    half_local,
    local_by_types,
    moe_heads,
    mpt,
    remote,
    standard,
)
from gaac_lab.families.recurrent import hybrid
from gaac_lab.families.two_lengths import bart, t5, with_cross_attention, with_cross_layers
from gaac_lab.families.uneven_layers import (
    chunked,
    every_nth_holds,
    gemma3n,
    gemma4,
    mimo_v2,
    nemotron_nas,
)

SCHEDULE = ("layer_types", "use_sliding_window", "part_of")
UNDERSTOOD: Final = frozenset(
    chain(rules.LAYERS, rules.HEADS, rules.KV_HEADS, rules.WIDTH, rules.HEAD_DIM, rules.CONTEXT,
          rules.WINDOW, SCHEDULE)
)  # fmt: skip


def geometry(config: dict[str, Any], overrides: Mapping[str, Any] | None = None) -> Geometry:
    """The KV geometry behind a config's fields, of which `overrides` replace some.

    A model_type that is not in FAMILIES is counted from its fields if every field that touches the
    cache is understood. Raises UnsupportedConfig, naming the field, for anything else.
    """
    fields = Fields(overridden(text_part(config), overrides))
    fields.notes += [f"{name} was given by hand: {value!r}" for name, value in
                     (overrides or {}).items()]  # fmt: skip
    fields.model_type = model_type = _model_type(fields)
    for name in (fields.config.get("part_of"), model_type):
        if name in NOT_COUNTED:
            raise fields.refuse("model_type", f"{name!r} is not counted: {NOT_COUNTED[str(name)]}")
    family = FAMILIES.get(str(model_type))
    if family is None:
        fields.refuse_unknown(UNDERSTOOD)
        if model_type is not None:
            fields.notes.append(
                f"model_type {model_type!r} is not known here: counted from its fields alone"
            )
        family = BY_FIELDS
    found = family(fields)
    fields.refuse_other_caches()
    return replace(found, notes=tuple(fields.notes))


def _model_type(fields: Fields) -> str | None:
    """The type of the language model; a nested part that does not say takes that of the whole."""
    whole = fields.config.get("part_of")
    if fields.model_type is not None or whole is None:
        return fields.model_type
    for name in (TEXT_TYPES.get(whole, f"{whole}_text"), whole):
        if name in FAMILIES or name in NOT_COUNTED:
            return str(name)
    raise fields.refuse("model_type", f"is not in the language model's part of {whole!r}")


BY_FIELDS: Final = remote(standard(kv_heads=rules.by_fields_kv_heads))

_PLAIN = standard()
_MULTI_HEAD = standard(kv_heads=every_head)
_WINDOW_IF_SET = standard(every_layer)
_QWEN2_SLIDES = rules.after_max_window_layers(28)
_QWEN2 = standard(_QWEN2_SLIDES, common(32), window=4096)
_QWEN2_VL = standard(rules.after_max_window_layers(80), common(8), window=4096)
_EVERY_2ND_FULL = standard(last_of(2), common(4, null=False), window=4096, head_dim=256)
_EXAONE4 = standard(rules.last_of_if_window(4), common(32, null=False), window=4096)
_DEEPSEEK_V2 = latent(Latent())
_ENCODER = with_cross_attention(decoder(_MULTI_HEAD))
_MAMBA = recurrent.recurrent_only(states.mamba)
_BIGCODE = with_cross_attention(standard(kv_heads=rules.bigcode_kv_heads))
_GPT2 = with_cross_attention(_MULTI_HEAD)


def _gated_delta(kv_heads: rules.KVHeads) -> Family:
    return hybrid(patterns.every_nth_full(4), states.gated_delta(), kv_heads, head_dim=256)


FAMILIES: Final[Mapping[str, Family]] = {
    # every layer alike, every token kept
    **dict.fromkeys(("apertus", "apertus1p5_text", "arcee", "aria_text", "cohere"), _PLAIN),
    **dict.fromkeys(("deepseek_ocr2_text", "diffllama", "flex_olmo", "granite"), _PLAIN),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "hunyuan_v1_dense"), _PLAIN),
    **dict.fromkeys(("hunyuan_vl_text", "llama"), _PLAIN),
    **dict.fromkeys(("hunyuan_v1_moe", "hyperclovax", "jais2", "nanochat", "olmo"), _PLAIN),
    **dict.fromkeys(("olmo2", "olmoe", "phi"), _PLAIN),
    **dict.fromkeys(("bloom", "biogpt", "codegen", "ctrl", "gpt_neox", "gptj", "opt"), _MULTI_HEAD),
    **dict.fromkeys(("git", "gpt_neox_japanese", "persimmon"), _MULTI_HEAD),
    **dict.fromkeys(("gpt2", "gpt-sw3", "xglm", "musicgen_decoder"), _GPT2),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "electra"), _ENCODER),
    **dict.fromkeys(("data2vec-text", "ernie", "megatron-bert", "rembert", "roberta"), _ENCODER),
    **dict.fromkeys(("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"), _ENCODER),
    **dict.fromkeys(("xlm-roberta-xl", "xmod"), _ENCODER),
    "bitnet": standard(kv_heads=common(5)),
    "cpmant": standard(kv_heads=every_head, head_dim=128),
    "dbrx": standard(kv_heads=rules.dbrx_kv_heads),
    "emu3_text_model": standard(kv_heads=common(8)),
    "ernie4_5": standard(kv_heads=common(2), head_dim=128),
    "ernie4_5_moe": standard(kv_heads=common(4)),
    "ernie4_5_vl_moe_text": standard(kv_heads=common(4)),
    "exaone": standard(kv_heads=common(8)),
    "gemma": standard(kv_heads=common(16, null=False), head_dim=256),
    "glm": standard(kv_heads=common(2, null=False), head_dim=128),
    "glm4": standard(kv_heads=common(2, null=False), head_dim=128),
    "glm4v_text": standard(kv_heads=common(2)),
    "glm4_moe": standard(kv_heads=common(8, null=False)),
    "glm4v_moe_text": standard(kv_heads=common(8, null=False)),
    "gpt_bigcode": _BIGCODE,
    "gpt_neo": local_by_types,
    "helium": standard(kv_heads=common(20, null=False), head_dim=128),
    "hy_v3": standard(kv_heads=common(8, null=False), head_dim=128),
    "internlm3": standard(kv_heads=common(2), head_dim=128),
    "iquestcoder": standard(kv_heads=common(8), head_dim=128),
    "jetmoe": moe_heads,
    "minimax_m2": full_by_list(standard(kv_heads=common(8, null=False), head_dim=128)),
    "mpt": mpt(rules.mpt_kv_heads),
    "nemotron": standard(kv_heads=rules.stated),
    "qwen3_vl_text": standard(kv_heads=common(32), head_dim=128),
    "qwen3_vl_moe_text": standard(kv_heads=common(16, null=False)),
    "sarvam_moe": standard(kv_heads=common(4, null=False), head_dim=64),
    "seed_oss": standard(kv_heads=common(8), head_dim=128),
    "solar_open": standard(kv_heads=common(8, null=False), head_dim=128),
    "stablelm": standard(kv_heads=common(32, null=False)),
    # windows in every layer, or in some, if the fields say so
    **dict.fromkeys(("doge", "phi3"), _WINDOW_IF_SET),
    "dots1": standard(rules.after_max_window_layers(62, switch=False), common(32), window=4096),
    "laguna": standard(rules.as_listed, common(8, null=False), window=512, head_dim=128),
    "mellum": standard(rules.as_listed, common(4, null=False), window=1024, head_dim=128),
    "ministral": standard(every_layer, common(8, null=False), window=4096),
    "ministral3": standard(every_layer, common(8, null=False), head_dim=128),
    "mistral": standard(every_layer, common(8, null=False), window=4096),
    "mixtral": standard(every_layer, common(8, null=False)),
    "moshi": standard(every_layer, window=3000),
    "phi4_multimodal": standard(every_layer, common(8)),
    "phimoe": standard(every_layer, common(8, null=False)),
    "qwen2": _QWEN2,
    "qwen2_moe": standard(rules.qwen2_moe_slides, common(16), window=4096),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2_VL),
    "qwen2_5_omni_text": standard(_QWEN2_SLIDES, common(4), window=32768),
    "qwen3": standard(_QWEN2_SLIDES, common(32), window=4096, head_dim=128),
    "qwen3_moe": standard(rules.every_layer_if_used, common(4, null=False), window=4096),
    "qwen3_omni_moe_text": standard(every_layer, common(4, null=False)),
    "smollm3": standard(rules.without_rope_slides, common(4)),
    "starcoder2": standard(every_layer, common(2, null=False)),
    # sliding layers take turns with full ones
    "afmoe": standard(last_of(4, "global_attn_every_n_layers"), window=1024, head_dim=128),
    "beam": standard(
        rules.last_of_and_the_last(6), common(8, null=False), window=512, head_dim=128
    ),
    "cohere2": standard(last_of(4, "sliding_window_pattern"), window=4096),
    "cohere_compass_text": standard(rules.as_listed, window=4096),
    "cohere2_moe": standard(rules.cohere2_moe_slides, window=4096, head_dim=128),
    "cwm": standard(first_of(4), common(8, null=False), window=8192, head_dim=128),
    "exaone4": _EXAONE4,
    "exaone_moe": _EXAONE4,
    "flint": standard(rules.flint_slides, common(4, null=False), window=513, head_dim=128),
    "gemma2": _EVERY_2ND_FULL,
    "gemma3_text": standard(
        last_of(6, "sliding_window_pattern", "_sliding_window_pattern"),
        common(4, null=False),
        window=4096,
        layers=26,
        heads=8,
        head_dim=256,
    ),
    "gpt_oss": standard(last_of(2), common(8, null=False), window=128, head_dim=64),
    "granite_swa": standard(first_of(4), common(4), window=128),
    "granitemoe_swa": standard(first_of(4), window=128),
    "kolibri1": standard(last_of(5), common(4, null=False), window=513, head_dim=128),
    "llama4_text": chunked,
    "modernbert-decoder": half_local,
    "olmo3": standard(last_of(4), window=4096),
    "vaultgemma": _EVERY_2ND_FULL,
    # layers of several geometries, or that share KV
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4(512),
    "gemma4_unified_text": gemma4(1024),
    "hunyuan": every_nth_holds(remote(_PLAIN)),
    "mimo_v2_flash": mimo_v2,
    "nemotron-nas": remote(nemotron_nas),
    # one KV head, or a few, under names of their own
    "chatglm": remote(standard(kv_heads=rules.chatglm_kv_heads)),
    "falcon": falcon(multi_query_default=True),
    "RefinedWeb": falcon(multi_query_default=False),
    "RefinedWebModel": falcon(multi_query_default=False),
    # remote code only
    "baichuan": remote(_MULTI_HEAD),
    "internlm": remote(_MULTI_HEAD),
    "internlm2": remote(_PLAIN),
    # one latent a token
    "axk1": _DEEPSEEK_V2,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V2,
    "glm4_moe_lite": latent(Latent(nope=192, v=256)),
    "kimi_k2": remote(_DEEPSEEK_V2),
    "longcat_flash": latent(Latent(), layers=("num_layers",), per_layer=2),
    "minicpm3": latent(Latent(rank=256, rope=32, nope=64, v=None)),
    "sarvam_mla": _DEEPSEEK_V2,
    "youtu": _DEEPSEEK_V2,
    "axk2": indexed(Latent(rank=128, rope=32, nope=64, v=64)),
    "deepseek_v32": indexed(Latent()),
    "glm_moe_dsa": indexed(Latent(nope=192, v=256), all_layers=False),
    "hy_v4": indexed(Latent(nope=192, v=256), all_layers=False),
    # attention beside layers with a fixed state
    "bailing_hybrid": recurrent.latent_hybrid(
        patterns.every_nth_full(6, "layer_group_size"), states.bailing_delta
    ),
    "bamba": hybrid(
        patterns.by_indices("attn_layer_indices", absent=patterns.LINEAR),
        states.mamba2_in_hybrid,
        common(8),
        list_name="layers_block_type",
    ),
    "falcon_h1": hybrid(
        patterns.falcon_h1_kinds,
        states.falcon_h1,
        common(8),
        list_name="layers_block_type",
        counted=recurrent.in_cache_type,
    ),
    "granitemoehybrid": hybrid(patterns.all_of(patterns.LINEAR), states.mamba2_in_hybrid),
    "jamba": hybrid(
        patterns.by_period,
        states.mamba_in_hybrid,
        common(8, null=False),
        list_name="layers_block_type",
        counted=recurrent.one_column_less,
    ),
    "kimi_linear": recurrent.latent_hybrid(patterns.kimi_linear_kinds, states.kimi_delta),
    "lara_mini": hybrid(
        patterns.lara_mini_kinds,
        states.gated_delta(8, 16),
        common(4, null=False),
        window=512,
        head_dim=128,
    ),
    "lfm2": hybrid(
        patterns.by_indices("full_attn_idxs", absent=patterns.FULL, other=patterns.CONV),
        states.short_conv(3),
        common(8, null=False),
    ),
    "lfm2_moe": hybrid(patterns.must_be_listed, states.short_conv(3), common(8, null=False)),
    "lfm3": hybrid(
        patterns.lfm3_kinds, states.short_conv(7), common(4, null=False), window=256, head_dim=128
    ),
    "minimax": recurrent.minimax(patterns.minimax_kinds),
    "minimax_text_01": remote(recurrent.minimax(patterns.minimax_text_kinds)),
    "minimax_m1": remote(recurrent.minimax(patterns.minimax_text_kinds)),
    "nemotron_h": recurrent.nemotron_h,
    "olmo_hybrid": hybrid(patterns.olmo_hybrid_kinds, states.olmo_hybrid),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"),
        hybrid(
            patterns.every_nth_full(4), states.gated_delta(), common(2, null=False), head_dim=256
        ),
    ),
    "qwen3_5_text": hybrid(
        patterns.every_nth_full(4), states.gated_delta(), common(4, null=False), head_dim=256
    ),
    "recurrent_gemma": recurrent.recurrent_gemma,
    "zamba": recurrent.zamba(patterns.zamba_kinds, states.mamba_in_hybrid, common(16, null=False)),
    "zamba2": recurrent.zamba(patterns.zamba2_kinds, states.zamba2, common()),
    # no attention at all
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA),
    "mamba2": recurrent.recurrent_only(states.mamba2),
    # another sequence's K and V beside the model's own
    "mllama_text_model": with_cross_layers,
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), t5),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small"), bart),
    **dict.fromkeys(("m2m_100", "marian", "mbart", "mvp", "nllb-moe", "pegasus"), bart),
    **dict.fromkeys(("plbart", "prophetnet", "trocr", "whisper"), bart),
}
