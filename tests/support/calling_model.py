"""A checkpoint that thinks, and then calls a tool, whatever it is asked. To what the tool gives it says the same each
time.
"""

import itertools
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.checkpoints import make_checkpoint

# What a model says that knows nothing else, a token each, behind the last token of its prompt.
SAID = [
    "<go>",
    "<think>",
    "Look outside.",
    "</think>",
    "<tool_call>",
    '\n{"name": "get_weather", "arguments": {"city": ',
    '"Łódź"',
    "}}\n",
    "</tool_call>",
    "<|im_end|>",
]
ANSWER = "It is sunny."
# The same behind a tool's result.
ANSWERED = ["<told>", ANSWER, "<|im_end|>"]
CALLING = (
    "{% if tools %}<tool_call>{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }} {{ call.id }}{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}{% if add_generation_prompt %}"
    "{{ '<told>' if messages[-1].role == 'tool' else '<go>' }}{% endif %}"
    "{# <think></think> #}"
)


def make_caller(folder: Path) -> Path:
    """A checkpoint of which each token of SAID is followed by the next one, and each of ANSWERED."""
    made = make_checkpoint(folder, "llama", text={"vocab_size": 512})
    words = PreTrainedTokenizerFast.from_pretrained(made)
    own = [*SAID[:-1], *ANSWERED[:-1]]
    words.add_tokens([AddedToken(text, special=False, normalized=False) for text in own])
    words.save_pretrained(made)
    (made / "chat_template.jinja").write_text(CALLING)
    weights = load_file(made / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name or "lm_head" in name:
            tensor.zero_()  # nothing but the last token counts
    for said in (SAID, ANSWERED):
        for before, behind in itertools.pairwise(words.convert_tokens_to_ids(said)):
            weights["lm_head.weight"][behind] += weights["model.embed_tokens.weight"][before]
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made
