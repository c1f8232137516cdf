"""How many placeholders an image takes, in every spelling of the configuration; template shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.families import registry
from services.families.family import ItemSize, load_part
from services.preprocess.content_format import ContentFormat
from services.preprocess.prompt.prompt_rule import ImageProcessing
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.templates.processes import TemplateRefusal
from shared.text.templates.template_file import read_template
from tests.support.chat_templates import chat_template

CLIP = {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336}
SIGLIP = {"model_type": "siglip_vision_model", "patch_size": 16, "image_size": 144}


def rule(folder: Path, config: dict[str, Any], side: int) -> Any:
    config = {"architectures": ["LlavaForConditionalGeneration"], **config}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder)
    rule_class = load_part(registry.find(checkpoint).prompt)
    processing = ImageProcessing({}, (3, side, side))
    return rule_class(checkpoint, processing)


@pytest.mark.parametrize(
    ("config", "side", "rows", "marker"),
    [
        ({"vision_config": CLIP}, 336, 576, 32000),
        ({}, 336, 576, 32000),
        ({"vision_config": CLIP, "vision_feature_select_strategy": "full"}, 336, 577, 32000),
        ({"vision_config": CLIP, "image_token_index": 7}, 336, 576, 7),
        ({"vision_config": CLIP, "image_token_id": 8}, 336, 576, 8),
        ({"vision_config": SIGLIP, "vision_feature_select_strategy": "full"}, 144, 81, 32000),
        ({"vision_config": SIGLIP}, 144, 80, 32000),
        ({"vision_config": {"model_type": "clip_vision_model"}}, 224, 49, 32000),
    ],
)
def test_llava_counts(
    config: dict[str, Any], side: int, rows: int, marker: int, tmp_path: Path
) -> None:
    span = rule(tmp_path, config, side).span(ItemSize(640, 480))
    assert (span.rows, len(span.token_ids), set(span.token_ids)) == (rows, rows, {marker})


def test_a_processor_of_another_size_is_found_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="224"):
        rule(tmp_path, {"vision_config": CLIP}, 224)


def test_an_unknown_family_with_images_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["NovelForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="NovelForConditionalGeneration"):
        registry.find(Checkpoint(tmp_path))


PARTS = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
STRINGS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
PRINTED = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
SYSTEM_AS_STRING = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}" + BOTH
)


NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
SET_FIRST = (
    "{% for m in messages %}{% set words = m['content'] %}"
    "{% for c in words | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "user", "system", "string", "images"),
    [
        (PARTS, True, True, False, False),
        (STRINGS, False, False, True, False),
        (PRINTED, False, False, True, False),
        (BOTH, True, True, True, True),
        (SYSTEM_AS_STRING, True, False, True, True),
        (SET_FIRST, True, True, False, False),
        # What refuses a question alone is known by its loops.
        (NEEDS_SYSTEM + PARTS, True, True, False, False),
        (NEEDS_SYSTEM + SET_FIRST, True, True, False, False),
        (NEEDS_SYSTEM + STRINGS, False, False, True, False),
    ],
)
def test_the_shape_that_a_template_expects_is_found(
    source: str, user: bool, system: bool, string: bool, images: bool
) -> None:
    template = chat_template(source, {})
    assert template.takes_parts["user"] is user
    assert template.takes_parts["system"] is system
    assert template.takes_text["user"] is string
    assert template.renders_media("image", "<image>") is images


def test_the_shape_can_be_said() -> None:
    as_parts = chat_template(STRINGS, {}, ContentFormat.OPENAI)
    assert all(as_parts.takes_parts.values()) and not any(as_parts.takes_text.values())
    as_text = chat_template(BOTH, {}, ContentFormat.STRING)
    assert all(as_text.takes_text.values()) and not any(as_text.takes_parts.values())
    assert not as_text.renders_media("image", "<image>")


def test_templates_are_sandboxed() -> None:
    template = chat_template("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(TemplateRefusal):
        template.render([{"role": "user", "content": "x"}], True)
    with pytest.raises(TemplateRefusal, match="compile"):
        chat_template("{% for %}", {})


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "config"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert read_template(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_template(tmp_path) == "jinja"
