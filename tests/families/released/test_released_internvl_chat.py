"""InternVL in its own layout as its repositories are: prompted, answered and stopped as the released code does it.

Facts: config.json, of the class at OpenGVLab/InternVL @ 2410d1d, with the values of InternVL2-8B and InternVL3-1B
(quoted in lmdeploy pull request 1911, vLLM issues, a module print of InternVL3-1B); InternLM2's tokenizer with the
marks of pictures and others behind its pieces (PaddleMIX, vLLM issue 7349); the tokenizer's chat template with a line
break behind each turn (vLLM issue 7349); system messages and stops of conversation.py and `chat` (@ 2410d1d, 0dc48a2,
a08ba33); `eos_token_id` 2 in llm_config, while `chat` ends at the template's `sep`. Names of bare parameters: memory.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from services.families import registry
from services.gateway.model.served_model import ServedModel
from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tests.reference_models import internlm2_words
from tests.reference_models.common import IMAGE
from tests.reference_models.internvl_chat import SYSTEMS, InternVLChat, write_checkpoint
from tests.support.chat_templates import chat_template
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import edited, message

MARKS = (
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
)
FILES_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' +"
    " message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PICTURE, SIZE = png(5, (120, 50)), (120, 50)
TALKS: list[list[tuple[str, str]]] = [
    [("user", f"{IMAGE}\nWhat is red?")],
    [("system", "Be brief."), ("user", f"{IMAGE}\nWhat is red?"), ("assistant", "A circle."),
     ("user", "And then?")],
]  # fmt: skip
AUTO_MAP = {
    "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
    "AutoModel": "modeling_internvl_chat.InternVLChatModel",
    "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel",
}


def second(path: Path) -> Path:
    """InternVL2-8B."""
    folder = path / "under-test"
    pieces = internlm2_words.write_words(folder, chat_template=FILES_TEMPLATE, add_bos_token=True)
    internlm2_words.add_marks(folder, {text: pieces + i for i, text in enumerate(MARKS)})
    text = {"vocab_size": pieces + len(MARKS), "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 2}  # fmt: skip
    made = write_checkpoint(path / "made", language="InternLM2", text=text, auto_map=AUTO_MAP)
    for name in ("config.json", "model.safetensors"):
        (made / name).rename(folder / name)
    return folder


def third(path: Path) -> Path:
    """InternVL3-1B: a byte-level tokenizer whose end is that of a turn, with the text's end in llm_config."""
    folder = write_checkpoint(path / "under-test", auto_map=AUTO_MAP, text={"eos_token_id": 0})
    edited(
        folder / "tokenizer_config.json",
        tokenizer_class="Qwen2Tokenizer",
        add_prefix_space=False,
        chat_template=FILES_TEMPLATE.replace("{{ bos_token }}", ""),
        pad_token="<|endoftext|>",
    )
    return folder


@pytest.fixture(scope="module", params=[second, third], ids=["2-8B", "3-1B"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp("internvl"))
    file = made / "model.safetensors"
    tensors = load_file(file)
    row = PromptTokenizer(made).token_id("<IMG_CONTEXT>")
    name = next(n for n in tensors if n.endswith(("lm_head.weight", "output.weight")))
    tensors[name][row] = 0  # no picture's row in an answer
    save_file(tensors, file, {"format": "pt"})
    return made


def test_prompts_and_answers(folder: Path, redis_url: str) -> None:
    """The format of the model's own code, whatever the tokenizer's files have."""
    reference = InternVLChat(folder)
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, [message(talk, PICTURE) for talk in TALKS], 8)
    picture = Image.open(io.BytesIO(PICTURE)).convert("RGB")
    for talk, (prompt, tokens) in zip(TALKS, answers, strict=True):
        assert prompt == reference.prompt_ids(talk, [SIZE])
        made = reference.generate(prompt, [picture], 8)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


def test_answers_end_where_a_turn_does(folder: Path) -> None:
    model = ServedModel.load(folder, "m")
    ends = {model.tokenizer.id_to_token(number) for number in model.eos_token_ids}
    assert "<|im_end|>" in ends and len(ends) == 2


def first_turn(folder: Path, **changes: Any) -> str:
    """What a conversation without a system message begins with."""
    edited(folder / "config.json", **changes)
    checkpoint = Checkpoint(folder)
    source = registry.find(checkpoint).chat_template(checkpoint)
    assert source is not None
    return chat_template(source, {}).render([{"role": "user", "content": "Q"}], True)


def test_system_messages(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, language="InternLM2")
    rest = "<|im_end|><|im_start|>user\nQ<|im_end|><|im_start|>assistant\n"
    assert first_turn(folder) == f"<|im_start|>system\n{SYSTEMS['internlm2-chat']}{rest}"
    phi = first_turn(folder, template="phi3-chat")
    assert phi == (
        f"<|system|>\n{SYSTEMS['internlm2-chat']}<|end|><|user|>\nQ<|end|><|assistant|>\n"
    )
    (folder / "conversation.py").write_text(CONVERSATION)
    older = first_turn(folder, template="internlm2-chat")
    assert older == f"<|im_start|>system\n{V1_5}{rest}"
    named = first_turn(folder, system_message="It's {{ not }} a\ntemplate.")
    assert named == f"<|im_start|>system\nIt's {{{{ not }}}} a\ntemplate.{rest}"
    for broken in ("(", "raise SystemExit"):
        (folder / "conversation.py").write_text(broken)
        assert SYSTEMS["internlm2-chat"] in first_turn(folder, system_message=None)


V1_5 = "You are an AI assistant whose name is InternLM (书生·浦语)."
# As in InternVL-Chat-V1.5's (OpenGVLab/InternVL @ a08ba33), which has the same `template` as InternVL2.
CONVERSATION = f"""
raise SystemExit('this file is not run')
register_conv_template(
    Conversation(
        name='Hermes-2',
        system_message='Answer the questions.',
        roles=('user', 'assistant'),
    )
)
register_conv_template(Conversation(name='internlm2-chat', system_message={V1_5!r}, sep='<|im_end|>'))
"""


def test_keys_that_are_left_out_have_the_values_of_the_class(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    family = registry.find(Checkpoint(folder))
    seen = family.largest(Checkpoint(folder), Modality.MODALITY_IMAGE)
    assert seen.tokens == 7 * 4 + 2
    edited(folder / "config.json", without=("max_dynamic_patch", "min_dynamic_patch"))
    assert family.largest(Checkpoint(folder), Modality.MODALITY_IMAGE) == seen
    path = edited(folder / "config.json", without=("use_thumbnail",))
    with pytest.raises(InvalidRequest, match="without use_thumbnail"):
        family.largest(Checkpoint(folder), Modality.MODALITY_IMAGE)
    edited(path, without=("dynamic_image_size",))
    assert family.largest(Checkpoint(folder), Modality.MODALITY_IMAGE).tokens == 4 + 2
    edited(path, pad2square=True)
    with pytest.raises(InvalidRequest, match="pad2square"):
        family.largest(Checkpoint(folder), Modality.MODALITY_IMAGE)


def test_a_text_model_that_nobody_has_in_this_layout_is_named(tmp_path: Path) -> None:
    """InternVL2-4B's Phi-3."""
    folder = write_checkpoint(tmp_path, text={"architectures": ["Phi3ForCausalLM"]})
    llm = json.loads((folder / "config.json").read_text())["llm_config"]
    edited(folder / "config.json", llm_config={**llm, "model_type": "phi3"}, auto_map=AUTO_MAP)
    with pytest.raises(InvalidRequest, match="no decoder here for its text model 'phi3'"):
        registry.text_sizes(Checkpoint(folder))
