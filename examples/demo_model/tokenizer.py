"""The tokenizer: byte-level BPE, so that no text is unknown, trained on the questions and answers of this example.

Chinese characters and digits are not merged (one token each where they are common), so that new
phrasings are made of known tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.demo_model import chat
from examples.demo_model.model import SPECIAL_TOKENS
from examples.demo_model.pictures.drawing import draw
from examples.demo_model.questions import KINDS, ask
from examples.demo_model.words import LANGUAGES

VOCAB_SIZE = 2048

# Pictures of a message come before its words, as LLaVA's own templates do, so "before" and "after"
# are one to the model; what the user says is read in lower case. Tools are
# named in a system turn of their own; calls and results are written in the form of Hermes.
CHAT_TEMPLATE = """\
{{- '<s>' }}
{%- if tools %}
  {{- '<|system|>tools: ' }}
  {%- for tool in tools %}
    {%- set function = tool['function'] or tool %}
    {%- set schema = function['parameters'] or {} %}
    {{- function['name'] + '(' + (schema['properties'] or {}) | join(', ') + ')' }}
    {{- '' if loop.last else ', ' }}
  {%- endfor %}
  {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message['role'] in ('user', 'tool') %}
    {{- '<|user|>' }}
  {%- elif message['role'] == 'assistant' %}
    {{- '<|assistant|>' }}
  {%- else %}
    {{- '<|system|>' }}
  {%- endif %}
  {%- if message['content'] is string %}
    {%- set text = message['content'] %}
  {%- else %}
    {%- set parts = namespace(text='') %}
    {%- for part in message['content'] or [] %}
      {%- if part['type'] in ('image', 'image_url') %}
        {{- '<image>' }}
      {%- elif part['type'] == 'text' %}
        {%- set parts.text = (parts.text + ' ' + part['text']) | trim %}
      {%- endif %}
    {%- endfor %}
    {%- set text = parts.text %}
  {%- endif %}
  {%- if message['role'] == 'assistant' %}
    {{- text | trim }}
    {%- for call in message['tool_calls'] or [] %}
      {%- set function = call['function'] or call %}
      {{- '\\n' if text or not loop.first }}
      {{- '<tool_call>\\n{"name": ' + function['name'] | tojson + ', "arguments": ' }}
      {%- if function['arguments'] is string %}
        {{- function['arguments'] }}
      {%- else %}
        {{- function['arguments'] | tojson }}
      {%- endif %}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
  {%- elif message['role'] == 'tool' %}
    {{- '<tool_response>\\n' + text | trim | lower + '\\n</tool_response><|end|>' }}
  {%- else %}
    {{- text | trim | lower + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|assistant|>' }}
{%- endif %}
"""


def corpus(pictures: int = 1500, seed: int = 7) -> list[str]:
    """Questions and answers of every kind in both languages."""
    rng = random.Random(seed)
    lines: list[str] = []
    for _ in range(pictures):
        _, scene = draw(2 * rng.getrandbits(40))
        for language in LANGUAGES:
            for kind in KINDS:
                turn = ask(scene, kind, language, rng)
                if turn is not None:
                    lines += [chat.dress(turn.question, language, rng), turn.answer]
            for make in (chat.small_talk, chat.off_topic):
                turn = make(language, rng)
                lines += [chat.dress(turn.question, language, rng), turn.answer]
    lines += [line.lower() for line in chat.SYSTEM_PROMPTS] * 20
    lines += [" " + noun for noun in (*chat.NOUNS_EN, *chat.TOPICS_EN)] * 8
    lines += [*chat.NOUNS_ZH, *chat.TOPICS_ZH] * 8
    return lines


def train_tokenizer(lines: list[str]) -> PreTrainedTokenizerFast:
    """A fast tokenizer of `VOCAB_SIZE` tokens, the special ones first."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{Han}|[0-9]|[，。？！：、]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(lines, trainer)
    assert [core.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)
    make: Any = PreTrainedTokenizerFast  # untyped there
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder."""
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded
