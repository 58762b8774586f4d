"""Chat templates against transformers' own rendering; which files say what; clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from starsd.edge.text import Text
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.template import ChatTemplate

SPECIAL = ["<s>", "</s>", "<|role|>", "<|end|>"]
CHAT = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": "Is 1 < 2? 'quote' \"double\" ü 你"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "Thanks<|end|>"},
]
TOOLS = [{"type": "function", "function": {"name": "grüß", "parameters": {"b": 1, "a": [True, None, "<x>"]}}}]

PLAIN = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'system' %}
<|role|>rules
    {% else %}
<|role|>{{ m['role'] }}
    {% endif %}
{{ m.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|role|>assistant
{% endif %}"""

RICH = """{%- set ns = namespace(system='none', seen=0) -%}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turn: ' + m.role) }}{% endif %}
    {{- '<|role|>' ~ m.role ~ '|' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
    {%- else %}{{ m.content | tojson }}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}|{{ tools | tojson(sort_keys=True, separators=(',', ':')) }}{% endif %}
{{- ns.system.upper() ~ ns.seen ~ (strftime_now('%Y') | length) ~ (mood is defined) ~ unk_token }}"""

INTERNAL = """{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{% endfor %}"""


def tiny() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Is this so? Yes, it is.", "rules user assistant"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<s>"})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )


@pytest.mark.parametrize("template", [PLAIN, RICH, INTERNAL])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"mood": "calm"}])
def test_prompts_equal_those_of_transformers(folder: Path, template: str, options: dict[str, Any]) -> None:
    write(folder, "chat_template.jinja", template)
    text, peer = Text.open(folder), reference(folder)
    given = {"add_generation_prompt": True, **options}
    expected = peer.apply_chat_template(CHAT, chat_template=template, tokenize=False, **given)
    assert text.render(CHAT, **options) == expected
    ids = peer.apply_chat_template(CHAT, chat_template=template, return_dict=False, **given)
    assert text.encode_chat(CHAT, **options) == ids
    assert text.tokenizer.token_to_id("<|end|>") in ids or template is RICH  # a special token in a message is one


def test_plain_texts_are_encoded_and_decoded_as_transformers_does(folder: Path) -> None:
    text, peer = Text.open(folder), reference(folder)
    sample = "Is it? Grüße 你 👋</s>"
    assert text.encode(sample) == peer(sample)["input_ids"]
    assert text.encode(sample)[0] == text.bos == 0
    assert text.encode("Yes", add_special_tokens=False) == text.encode("Yes")[1:]
    assert text.decode(text.encode(sample)) == sample.removesuffix("</s>")


def test_the_jinja_file_comes_before_the_configuration(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", {**config, "chat_template": "configured {{ eos_token }}"})
    assert Text.open(folder).render(CHAT) == "configured </s>"
    write(folder, "chat_template.jinja", "from the file")
    assert Text.open(folder).render(CHAT) == "from the file"


def test_named_templates_are_chosen_by_whether_there_are_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "talk"}, {"name": "tool_use", "template": "use"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    text = Text.open(folder)
    assert (text.render(CHAT), text.render(CHAT, TOOLS), text.render(CHAT, [])) == ("talk", "use", "use")
    (folder / "additional_chat_templates").mkdir()
    write(folder / "additional_chat_templates", "tool_use.jinja", "use the file")
    assert Text.open(folder).render(CHAT, TOOLS) == "use the file"


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, {1}),
        ({"config.json": {"eos_token_id": 3}}, {1, 3}),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [2, 5]}}, {1, 2, 5}),
        ({"config.json": {"text_config": {"eos_token_id": [3]}}, "generation_config.json": {}}, {1, 3}),
    ],
)
def test_end_tokens_come_from_every_file_that_names_them(folder: Path, files: dict[str, Any], eos: set[int]) -> None:
    for name, value in files.items():
        write(folder, name, value)
    text = Text.open(folder)
    assert text.eos == eos
    assert text.special_ids == {0, 1, 2, 3}


def test_a_model_without_template_says_how_to_supply_one(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"model has no chat template: put one in .*chat_template\.jinja"):
        Text.open(folder).render(CHAT)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('no system role') }}", UsageError, "chat template refuses these messages: no system role"),
        (
            "{{ messages[9].content + 'x' }}",
            UsageError,
            "chat template cannot render these messages: list object has no",
        ),
        ("{{ messages[0].content + 1 }}", UsageError, "chat template cannot render these messages: .*str"),
        ("\n{% for %}", ModelError, "chat template has a syntax error in line 2: .*"),
        ("{{ messages.__class__.__mro__ }}", ModelError, "chat template tried what a template must not: .*__class__"),
        ("{{ messages.append(1) }}", ModelError, "chat template tried what a template must not: .*append"),
    ],
)
def test_template_errors_are_one_line_of_ours(template: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        ChatTemplate(template).render(CHAT)


def test_messages_must_be_plain_data() -> None:
    with pytest.raises(UsageError, match="messages hold a bytes, expected JSON values"):
        ChatTemplate("x").render([{"role": "user", "content": b"raw"}])
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ModelError, match="chat template asks for more than there is: RecursionError"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", '{"a":' * 100_000, r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is a int, expected a string or a list"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "chat_template is a list, expected objects with name"),
        ("generation_config.json", {"eos_token_id": "x"}, "has eos_token_id x, expected an integer or a list"),
    ],
)
def test_files_that_are_not_what_they_should_be_are_named(folder: Path, name: str, value: Any, message: str) -> None:
    write(folder, name, value)
    with pytest.raises(ModelError, match=message):
        Text.open(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing, expected a fast tokenizer"):
        Text.open(tmp_path)
