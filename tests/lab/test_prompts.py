"""Prompts: exact lengths, the question at the end, the same every time, the user's own files."""

from __future__ import annotations

import hashlib
import shutil
import struct
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml

from gaac_lab import prompts
from gaac_lab.chat_text import conversation_so_far, message
from gaac_lab.paths import HOME_VARIABLE, data_dir
from gaac_lab.prompt_sources import CONVERSATIONS, SOURCES
from gaac_lab.prompts import PromptError
from tests.lab import tiny_models

RECIPES = sorted(path.stem for path in (data_dir() / "prompts").glob("*.yaml"))
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system message') }}{% elif message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TOKENIZERS = {
    "no template": tiny_models.tokenizer(),
    "start token": tiny_models.tokenizer(start_token=True),
    "chatml": tiny_models.tokenizer(tiny_models.CHATML),
    "llama2": tiny_models.tokenizer(LLAMA2),
}


@pytest.fixture(scope="module")
def real(default_model_path: Path) -> Any:
    """The default model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model_path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """data/prompts of a clone with the project's recipes, for files of the user's."""
    (tmp_path / "notebooks").mkdir()
    target = tmp_path / "data" / "prompts"
    shutil.copytree(data_dir() / "prompts", target)
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return target


def question(name: str) -> str:
    recipe = yaml.safe_load((data_dir() / "prompts" / f"{name}.yaml").read_text(encoding="utf-8"))
    return str(recipe["question"]).strip()


def test_the_eight_recipes_are_there() -> None:
    assert prompts.names()[:8] == RECIPES
    assert len(RECIPES) == 8
    assert {"code_question", "long_document", "log_hunt", "conversation", "chinese"} < set(RECIPES)


# ---- lengths, and what survives a cut


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("name", RECIPES)
def test_any_length_is_met_exactly(name: str, kind: str) -> None:
    for tokens in (1, 2, 63, 64, 1000, 5003):
        built = prompts.build(name, tokens, TOKENIZERS[kind])
        assert built.input_ids.shape == (1, tokens)
        assert built.input_ids.dtype == torch.int64
        assert built.input_ids.device.type == "cpu"
        assert built.tokens == tokens
        assert (built.name, bool(built.title)) == (name, True)


@pytest.mark.parametrize("tokens", [512, 3000, 33_000])
@pytest.mark.parametrize("name", RECIPES)
def test_the_question_survives_at_the_end(name: str, tokens: int, real: Any) -> None:
    built = prompts.build(name, tokens, real)
    assert built.tokens == tokens
    assert built.text.startswith("<|im_start|>system")
    assert built.text.endswith(f"{question(name)}<|im_end|>\n<|im_start|>assistant\n")
    assert built.repeated == (name == "chinese")  # the others have enough text for this


def test_where_the_question_does_not_fit_its_end_remains(real: Any) -> None:
    built = prompts.build("log_hunt", 12, real)
    assert built.text.endswith("before it?<|im_end|>\n<|im_start|>assistant\n")


def test_a_longer_prompt_begins_like_a_shorter_one(real: Any) -> None:
    short, long = (prompts.build("long_document", n, real).input_ids[0] for n in (600, 2000))
    assert torch.equal(short[:400], long[:400])


def test_a_conversation_has_turns_that_close(real: Any) -> None:
    text = prompts.build("conversation", 4000, real).text
    opened = text.count("<|im_start|>user"), text.count("<|im_start|>assistant")
    assert opened[0] == opened[1] > 4
    assert text.count("<|im_end|>") == text.count("<|im_start|>") - 1  # the answer is still open


def test_a_conversation_without_template_names_the_roles() -> None:
    text = prompts.build("conversation", 6000, TOKENIZERS["no template"]).text
    assert text.startswith("User: ")
    assert "\n\nAssistant: " in text
    assert text.endswith(f"User: {question('conversation')}\n\nAssistant:")


def test_a_conversation_under_a_strict_template() -> None:
    text = prompts.build("conversation", 6000, TOKENIZERS["llama2"]).text
    assert text.endswith(f"[INST] {question('conversation')} [/INST]")
    assert text.count("[INST]") == text.count("[/INST]") > 2


def test_an_answer_that_the_user_said_before_is_found_at_its_own_place() -> None:
    turns = [message("user", "say b, then stop"), message("assistant", "b")]
    before, seam, after = conversation_so_far(TOKENIZERS["chatml"], turns)
    assert before.endswith("<|im_start|>assistant\nb")
    assert (seam, after) == (
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )


def test_the_start_token_stands_once_and_first() -> None:
    ids = prompts.build("log_hunt", 900, TOKENIZERS["start token"]).input_ids[0].tolist()
    assert ids[0] == 1
    assert ids.count(1) == 1
    plain = prompts.build("log_hunt", 900, TOKENIZERS["no template"]).input_ids[0].tolist()
    assert 1 not in plain


# ---- the same every time


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_every_time_and_hashed(name: str, real: Any) -> None:
    first, second = (prompts.build(name, 777, real) for _ in range(2))
    assert torch.equal(first.input_ids, second.input_ids)
    ids = first.input_ids[0].tolist()
    assert first.sha256 == second.sha256 == hashlib.sha256(struct.pack("<777q", *ids)).hexdigest()


def test_no_two_prompts_are_alike(real: Any) -> None:
    assert len({prompts.build(name, 777, real).sha256 for name in RECIPES}) == len(RECIPES)


def test_the_log_has_an_early_error() -> None:
    lines = list(islice(SOURCES["service_log"](Random(13)), 400))
    errors = [number for number, line in enumerate(lines, 1) if " ERROR " in line]
    assert errors[0] == 3
    assert 4 < len(errors) < 12


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_sources_depend_on_the_seed_alone(name: str) -> None:
    def text(seed: int) -> str:
        return "".join(islice(SOURCES[name](Random(seed)), 30))

    assert text(1) == text(1) != text(2)


def test_conversations_depend_on_the_seed_alone() -> None:
    turns = CONVERSATIONS["documentation_questions"]
    one, again, other = (list(islice(turns(Random(seed)), 20)) for seed in (1, 1, 2))
    assert one == again != other


# ---- the user's own files


def test_text_files_join_the_set(folder: Path, real: Any) -> None:
    (folder / "my notes.txt").write_text("Grüße. " * 4000 + "What was said last?", encoding="utf-8")
    (folder / ".hidden.txt").write_text("no")
    (folder / "README.md").write_text("no")
    assert prompts.names() == [*RECIPES, "my_notes"]
    built = prompts.build("my_notes", 1024, real)
    assert (built.tokens, built.title, built.repeated) == (1024, "my notes.txt", False)
    assert "user\nGrüße. Grüße." in built.text
    assert built.text.endswith("What was said last?<|im_end|>\n<|im_start|>assistant\n")


def test_a_short_text_is_begun_again_and_says_so(folder: Path, real: Any) -> None:
    (folder / "short.txt").write_text("Ten words are not enough to fill a prompt.\n")
    built = prompts.build("short", 500, real)
    assert built.tokens == 500
    assert built.repeated
    assert built.text.count("Ten words") > 30
    assert built.text.endswith("prompt.\n<|im_end|>\n<|im_start|>assistant\n")


def test_a_text_of_the_very_length_is_left_as_it_is(folder: Path) -> None:
    (folder / "exact.txt").write_text("x" * 500)
    built = prompts.build("exact", 500, TOKENIZERS["no template"])
    assert (built.text, built.repeated) == ("x" * 500, False)
    assert not prompts.build("exact", 499, TOKENIZERS["no template"]).repeated
    assert prompts.build("exact", 501, TOKENIZERS["no template"]).repeated


def test_a_long_text_keeps_its_beginning_and_its_end(folder: Path) -> None:
    text = "".join(f"{number:05}" for number in range(2000))
    (folder / "numbers.txt").write_text(text)
    for tokens, kept in ((100, 25), (1000, 250), (4000, 256)):
        built = prompts.build("numbers", tokens, TOKENIZERS["no template"])
        assert built.text == text[: tokens - kept] + text[-kept:]


def test_lines_of_text_and_chats(folder: Path, real: Any) -> None:
    (folder / "set.jsonl").write_text(
        '{"text": "The first line.", "id": 7}\n'
        "\n"
        '{"name": "a chat", "messages": [{"role": "user", "content": "Hello"},'
        ' {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"}]}\n'
        '{"text": "The third.\u2028It goes on."}\n',
        encoding="utf-8",
    )
    assert prompts.names() == [*RECIPES, "set-1", "a_chat", "set-3"]
    assert "The first line." in prompts.build("set-1", 64, real).text
    chat = prompts.build("a_chat", 2000, real)
    assert chat.repeated
    assert "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>" in chat.text
    assert chat.text.endswith("And now?<|im_end|>\n<|im_start|>assistant\n")


BAD_FILES = [
    ("bad.jsonl", '{"text": "fine"}\n{"text": \n', r"bad.jsonl, line 2: this is not valid JSON"),
    ("bad.jsonl", "[1]\n", r"line 1: give an object with either"),
    ("bad.jsonl", '{"prompt": "x"}\n', r'line 1: .*"text" or "messages"'),
    ("bad.jsonl", '{"text": "x", "messages": []}\n', r"line 1: .*either"),
    ("bad.jsonl", '{"text": "  "}\n', r'line 1: "text" must be a text'),
    ("bad.jsonl", '{"text": 7}\n', r'line 1: "text" must be a text'),
    ("bad.jsonl", '{"messages": []}\n', r"line 1: .*at least one message"),
    (
        "bad.jsonl",
        '{"messages": [{"role": "me", "content": "x"}]}\n',
        r"line 1: each message needs",
    ),
    ("bad.jsonl", '{"messages": [{"role": "user"}]}\n', r"line 1: each message needs"),
    ("bad.jsonl", '{"text": "x", "name": 7}\n', r'line 1: "name" must be'),
    ("bad.jsonl", '{"text": "x", "name": "a"}\n{"text": "y", "name": "a"}\n', r"line 2: .*twice"),
    ("bad.jsonl", "\n \n", r"bad.jsonl: the file is empty"),
    ("bad.txt", "", r"bad.txt: the file is empty"),
    ("bad.txt", b"fine\nnot fine \xff\n", r"bad.txt, line 2: this is not UTF-8"),
    ("log_hunt.txt", "x", r"log_hunt.txt: the prompt name 'log_hunt' is taken \(log_hunt.yaml\)"),
    ("all.txt", "x", r"all.txt: the prompt name 'all' is taken"),
    ("bad.yaml", "title: [", r"bad.yaml, line \d: this is not valid YAML"),
    ("bad.yaml", "- a\n", r"bad.yaml: a recipe is a mapping"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_bad_file_is_named_with_its_line(
    folder: Path, name: str, content: str | bytes, message: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)
    with pytest.raises(PromptError, match=message) as caught:
        prompts.names()
    assert "\n" not in str(caught.value)


GOOD = {"title": "T", "about": "A.", "seed": 1, "source": "service_log", "question": "Q?"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sauce": "service_log"}, "sauce: Extra inputs are not permitted"),
        ({"source": "os.system"}, "source: .*there is no 'os.system'; choose from code_review"),
        ({"source": None, "conversation": "chat"}, "conversation: .*choose from documentation_q"),
        ({"filler": "again"}, "exactly one of source, conversation and filler"),
        ({"source": None}, "exactly one of source, conversation and filler"),
        ({"seed": "one"}, "seed: "),
        ({"question": ""}, "question: "),
    ],
)
def test_a_recipe_is_checked(folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert "mine" in prompts.names()
    path.write_text(yaml.safe_dump({**GOOD, **change}))
    with pytest.raises(PromptError, match=f"mine.yaml: .*{message}"):
        prompts.names()


def test_a_filler_is_repeated_only_where_it_must_be(folder: Path) -> None:
    recipe = {**GOOD, "source": None, "filler": "x" * 500}
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    built = {n: prompts.build("mine", n, TOKENIZERS["no template"]) for n in (400, 504, 505)}
    assert [built[n].repeated for n in (400, 504, 505)] == [False, False, True]
    assert built[504].text == "x" * 500 + "\n\nQ?"


# ---- what is asked for


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "9"])
def test_a_length_that_is_no_count(tokens: Any) -> None:
    with pytest.raises(PromptError, match="give a whole number of at least 1"):
        prompts.build("log_hunt", tokens, TOKENIZERS["chatml"])


def test_an_unknown_name() -> None:
    with pytest.raises(PromptError, match="no prompt 'poem': choose from chinese, code_question"):
        prompts.build("poem", 9, TOKENIZERS["chatml"])


def test_messages_that_a_template_refuses(folder: Path) -> None:
    (folder / "set.jsonl").write_text('{"messages": [{"role": "system", "content": "x"}]}\n')
    with pytest.raises(PromptError, match="chat template refuses the prompt's messages"):
        prompts.build("set-1", 9, TOKENIZERS["llama2"])
