"""InternLM2-chat in the form that it is released in.

Quoted (a listing of its files): InternLM2ForCausalLM, internlm2, auto_map; bias false, bos 1, eos and pad 2,
eps 1e-5, rope_theta 1,000,000, rope_scaling dynamic with factor 2, untied; tokenizer.model and
tokenizer_config.json, no tokenizer.json; the template: bos, then a line for each turn. Read (InternLM's tools
and web demo): names of tensors, how wqkv is packed, stops 2 and 92542. From memory: later revisions name both
ends in generation_config.json, earlier ones the first alone.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.families.released.served import Released, assert_served, write_json
from tests.reference_models import internlm2_words
from tests.reference_models.common import Draw, Turn, greedy, read_tensors, write_folder
from tests.reference_models.internlm2_words import END, START
from tests.reference_models.text_models import internlm2

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATS: list[list[Turn]] = [
    [("user", "What is  red?")],
    [
        ("system", "Be brief."),
        ("user", "图中"),
        ("assistant", "A circle."),
        ("user", "\nAnd then?"),
    ],
]


@pytest.mark.parametrize("revision", ["earlier", "later"])
def test_served_as_released(tmp_path: Path, redis_url: str, revision: str) -> None:
    folder = tmp_path / "under-test"
    size = internlm2_words.write_words(folder, chat_template=TEMPLATE)
    internlm2_words.add_marks(folder)
    remote = "configuration_internlm2.InternLM2Config", "modeling_internlm2.InternLM2ForCausalLM"
    config = internlm2.text_config(size, rope_scaling={"type": "dynamic", "factor": 2.0}) | {
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoConfig": remote[0], "AutoModelForCausalLM": remote[1]},
        "model_type": "internlm2",
    }
    write_folder(folder, config, internlm2.draw(config, Draw(0), {}), None)
    end = size + internlm2_words.MARKS[END]
    ends = [2, end] if revision == "later" else 2
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": ends})
    words = internlm2_words.InternLM2Words(folder)
    language = internlm2.InternLM2(
        config, read_tensors(folder), dict.fromkeys(internlm2.LINEARS, 1.0)
    )

    def prompt_ids(turns: Sequence[Turn]) -> list[int]:
        parts = [f"{START}{role}\n{text}{END}\n" for role, text in turns]
        return words.encode("".join(parts) + f"{START}assistant\n", special=True)

    def logits(ids: list[int]) -> torch.Tensor:
        return language.logits(
            language.table[torch.tensor(ids)], torch.zeros(len(ids), dtype=torch.bool)
        )

    model = Released(
        folder,
        prompt_ids,
        lambda ids, count: greedy(logits, ids, count),
        [2, end],
        words.encode("The red, 图中\n "),
    )
    assert_served(model, CHATS, redis_url)
