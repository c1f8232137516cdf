"""Token ids and placeholders are those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from transformers import AutoProcessor, AutoTokenizer

from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Message,
    Part,
    PrepareRequest,
    PrepareResponse,
)
from tests.support.preprocess.pixels import pixel_values
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)
from tests.support.vision_checkpoints import (
    MAX_LEN,
    STRING_TEMPLATE,
    like_older_versions,
    llava_checkpoint,
)

A, B = picture(80, 60, 1), picture(40, 90, 2)

CONVERSATIONS: dict[str, list[tuple[str, list[str | PIL.Image.Image]]]] = {
    "text": [("user", ["What is this?"])],
    "one image": [("user", [A, "What is this?"])],
    "text first": [("user", ["Look: ", A])],
    "two images": [("user", [A, B, "Compare."])],
    "system and turns": [
        ("system", ["You are kind. 请描述"]),
        ("user", [A, "The red circle?"]),
        ("assistant", ["A dog 😀."]),
        ("user", [B, "And this one?", " Both?"]),
    ],
}


def to_messages(conversation: Any) -> list[Message]:
    return [
        turn(role, *(text(p) if isinstance(p, str) else image(file_of(p)) for p in parts))
        for role, parts in conversation
    ]


def to_transformers(conversation: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
                for p in parts
            ],
        }
        for role, parts in conversation
    ]


def oracle(folder: Path, conversation: Any) -> tuple[list[int], np.ndarray[Any, Any] | None]:
    processor = AutoProcessor.from_pretrained(folder)
    out = processor.apply_chat_template(
        to_transformers(conversation),
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
        processor_kwargs={"return_tensors": "np"},
    )
    return out["input_ids"][0].tolist(), out.get("pixel_values")


@pytest.mark.parametrize("tower", ["clip", "siglip", "clip saved by an older version"])
async def test_chat_equals_transformers(
    tower: str, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = llava_checkpoint(tmp_path, tower.split()[0])
    expected = {name: oracle(folder, c) for name, c in CONVERSATIONS.items()}
    if "older" in tower:
        like_older_versions(folder)
    async with make_preprocess(folder) as service:
        for name, conversation in CONVERSATIONS.items():
            response = await service.chat(*to_messages(conversation))
            ids, pixels = expected[name]
            assert ids_of(response) == ids, name
            marker = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<image>")
            covered = [i for m in response.media for i in range(m.offset, m.offset + m.length)]
            assert covered == [i for i, token in enumerate(ids) if token == marker]
            for index, item in enumerate(response.media):
                assert item.rows == item.length
                assert pixels is not None
                np.testing.assert_array_equal(await pixel_values(item), pixels[index])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_with_pictures_is_taken_as_it_stands(
    clip_folder: Path, clip_service: RunningPreprocess
) -> None:
    processor = AutoProcessor.from_pretrained(clip_folder)
    written = "USER: <image> and <image>?<|im_end|>"
    expected = processor(text=written, images=[A, B], return_tensors="np")["input_ids"][0].tolist()
    parts = [
        text("USER: "), image(file_of(A)), text(" and "), image(file_of(B)), text("?<|im_end|>"),
    ]  # fmt: skip
    response = await clip_service.chat(turn("user", *parts), as_prompt=True)
    assert ids_of(response) == expected
    assert [item.length for item in response.media] == [16, 16]
    spelled = await clip_service.chat(
        turn("user", text("<image>"), image(file_of(A))), as_prompt=True
    )
    assert len(spelled.media) == 1, "a placeholder among the words is none"
    with pytest.raises(InvalidRequest):
        await clip_service.chat(turn("user", text("a")), turn("user", text("b")), as_prompt=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_may_mark_the_places_of_its_pictures(
    clip_folder: Path, clip_service: RunningPreprocess
) -> None:
    processor = AutoProcessor.from_pretrained(clip_folder)
    written = "USER: <image> and <image>?<|im_end|>"
    expected = processor(text=written, images=[A, B], return_tensors="np")["input_ids"][0].tolist()
    pictures = [image(file_of(A)), image(file_of(B))]

    async def asked(words: str) -> PrepareResponse:
        turns = turn("user", *pictures, text(words))
        return await clip_service.chat(turns, as_prompt=True, marks_media=True)

    response = await asked(written)
    assert ids_of(response) == expected
    assert [item.length for item in response.media] == [16, 16]
    assert (await asked("Look!")).text == "<image><image>Look!"
    with pytest.raises(InvalidRequest, match="1 places are written for 2 images"):
        await asked("only <image>")


async def test_a_picture_in_a_prompt_has_what_the_template_writes_around_it(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    template = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}[<image>]"
        "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    folder = llava_checkpoint(tmp_path, template=template)
    async with make_preprocess(folder) as service:
        turns = turn("user", text("Look: "), image(file_of(A)), text("?"))
        response = await service.chat(turns, as_prompt=True)
    assert response.text == "Look: [<image>]?"


async def test_template_without_images_gets_markers_in_the_text(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = llava_checkpoint(tmp_path, template=STRING_TEMPLATE)
    async with make_preprocess(folder) as service:
        response = await service.chat(turn("user", text("Look"), image(file_of(A)), text("here")))
    assert "Look\n<image>\nhere" in response.text
    assert [m.length for m in response.media] == [16]


@pytest.mark.asyncio(loop_scope="module")
async def test_what_users_write_is_never_a_control_token(
    clip_folder: Path, clip_service: RunningPreprocess
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(clip_folder)
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids("<image>")}
    plain = await clip_service.chat(turn("user", text("hello")))
    expected = [i for i in ids_of(plain) if i in special]
    for words in (
        "<image>",
        "a <image><image> b",
        "<IMAGE>",
        "<<image>image>",
        "x <|im_end|> y",
    ):
        response = await clip_service.chat(turn("user", text(words)))
        assert [i for i in ids_of(response) if i in special] == expected, words
        assert words in response.text
        assert words in tokenizer.decode(ids_of(response))
        with_image = await clip_service.chat(turn("user", text(words), image(file_of(A))))
        assert [m.length for m in with_image.media] == [16]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_control_token_split_over_two_parts_is_text(
    clip_service: RunningPreprocess,
) -> None:
    response = await clip_service.chat(
        turn("user", text("a <ima"), text("ge> b"), image(file_of(A)))
    )
    assert len(response.media) == 1


KINDS_TOLD_APART = (
    "{{ bos_token }}{% for m in messages %}{{ start_of_turn }}{{ m.role }}{{ audio_token }}"
    "{% if m.content is string %}:{{ m.content }}{% else %}"
    "{% for c in m.content %}[{{ c.text | trim }}]{% endfor %}{% endif %}{% endfor %}"
)


async def test_templates_get_named_tokens_and_texts_as_the_client_gave_them(
    llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    (folder / "chat_template.jinja").write_text(KINDS_TOLD_APART)
    path = folder / "tokenizer_config.json"
    named = {"start_of_turn": "<|im_start|>", "end_of_turn": "<|im_end|>"}
    more = {"extra_special_tokens": named, "audio_token": "<|audio|>"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = " What is there? "
    for is_string in (True, False):
        content = words if is_string else [{"type": "text", "text": words}]
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], return_dict=False
        )
        async with make_preprocess(folder) as service:
            response = await service.chat(
                Message(role="user", content=[text(words)], is_string=is_string)
            )
        assert ids_of(response) == expected
        assert tokenizer.convert_tokens_to_ids("<|im_start|>") in expected
    for kind, shown in (("string", ": What is there? "), ("openai", "[What is there?]")):
        async with make_preprocess(folder, chat_template_content_format=kind) as service:
            for is_string in (True, False):
                response = await service.chat(
                    Message(role="user", content=[text(words)], is_string=is_string)
                )
                assert response.text.endswith(shown)


@pytest.mark.asyncio(loop_scope="module")
async def test_plain_text_and_token_ids(
    llama_folder: Path, llama_service: RunningPreprocess
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    chat = [{"role": "user", "content": "What is in the picture?"}]
    response = await llama_service.chat(turn("user", text("What is in the picture?")))
    assert ids_of(response) == tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    words = "Once <|im_start|> upon"
    response = await llama_service.prepare(PrepareRequest(text=words))
    assert ids_of(response) == tokenizer(words)["input_ids"]
    given = np.array([1, 2, 300], "<i4").tobytes()
    assert (await llama_service.prepare(PrepareRequest(token_ids=given))).token_ids == given


async def test_text_of_a_model_that_adds_bos(
    llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama_folder / name)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    async with make_preprocess(tmp_path) as service:
        response = await service.prepare(PrepareRequest(text="The red circle"))
        assert ids_of(response) == oracle("The red circle")["input_ids"]
        assert ids_of(response)[0] == oracle.bos_token_id
        chat = await service.chat(turn("user", text("hi")))
        assert ids_of(chat).count(oracle.bos_token_id) == 1


def conversation(*messages: Message, **fields: Any) -> PrepareRequest:
    return PrepareRequest(conversation=Conversation(messages=messages, **fields))


HI = turn("user", text("hi"))
REFUSED = {
    "role": ("BAD_ROLE", "messages[0].role", conversation(turn("wizard", text("hi")))),
    "image": (
        "TEXT_ONLY_MODEL",
        "messages[0].content[0].image_url",
        conversation(turn("user", image(file_of(A)))),
    ),
    "empty": ("NO_MESSAGES", "messages", conversation()),
    "empty part": ("EMPTY_PART", "messages[0].content[0]", conversation(turn("user", Part()))),
    "long": (
        "CONTEXT_LENGTH_EXCEEDED",
        "messages",
        conversation(turn("user", text("picture " * 400))),
    ),
    "very long": ("CONTEXT_LENGTH_EXCEEDED", "prompt", PrepareRequest(text="a b" * 2_000_000)),
    "id": (
        "BAD_TOKEN_ID",
        "prompt",
        PrepareRequest(token_ids=np.array([70000], "<i4").tobytes()),
    ),
    "template": ("CHAT_TEMPLATE", "chat_template", conversation(HI, chat_template="{{ 1 }}")),
    "kwargs": (
        "BAD_JSON",
        "chat_template_kwargs",
        conversation(HI, chat_template_kwargs_json="[1]"),
    ),
    "deep kwargs": (
        "BAD_JSON",
        "chat_template_kwargs",
        conversation(HI, chat_template_kwargs_json='{"a":' * 900 + "1" + "}" * 900),
    ),
    "deep lists": (
        "BAD_JSON",
        "chat_template_kwargs",
        conversation(HI, chat_template_kwargs_json='{"a":' + "[" * 60_000 + "}"),
    ),
    "large kwargs": (
        "BAD_JSON",
        "chat_template_kwargs",
        conversation(HI, chat_template_kwargs_json=json.dumps({"a": "b" * 70_000})),
    ),
    "no text": ("EMPTY_PROMPT", "prompt", PrepareRequest(text="")),
    "nothing": ("NO_PROMPT", "prompt", PrepareRequest()),
}


@pytest.mark.asyncio(loop_scope="module")
async def test_refusals_name_the_field(llama_service: RunningPreprocess) -> None:
    for case, (reason, field, request) in REFUSED.items():
        with pytest.raises(InvalidRequest) as caught:
            await llama_service.prepare(request)
        assert (caught.value.reason, caught.value.metadata["field"]) == (reason, field), case
        if "long" in case:
            said = f"This model's maximum context length is {MAX_LEN} tokens. However, "
            assert caught.value.message.startswith(said)
    await llama_service.prepare(conversation(HI))


async def test_template_variables_and_trusted_templates(
    llama_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(llama_folder, trust_request_chat_template=True) as service:
        response = await service.chat(
            turn("user", text("hi")),
            chat_template="{{ mood }}: {{ messages[0].content }}",
            chat_template_kwargs_json=json.dumps({"mood": "calm"}),
        )
        assert response.text == "calm: hi"
        response = await service.chat(turn("user", text("hi")), add_generation_prompt=False)
        assert not response.text.endswith("assistant\n")
        with pytest.raises(InvalidRequest, match="no tools here"):
            await service.chat(
                turn("user", text("hi")), chat_template="{{ raise_exception('no tools here') }}"
            )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'x' | center(10**10) }}", "took more than 512 MB of memory"),
        # Its trials are fine.
        (
            "{{ messages[0].content }}{% if messages[0].content == 'hi' %}{{ 'a' * 10**10 }}{% endif %}",
            "took more than 512 MB of memory",
        ),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "took over 5 s of processor time",
            marks=pytest.mark.full,
        ),
    ],
)
async def test_a_template_that_takes_too_much_costs_its_request(
    llama_folder: Path, make_preprocess: PreprocessMaker, source: str, said: str
) -> None:
    async with make_preprocess(llama_folder, trust_request_chat_template=True) as service:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=said) as caught:
                await service.chat(turn("user", text("hi")), chat_template=source)
            assert caught.value.reason == "CHAT_TEMPLATE"
        assert (await service.chat(turn("user", text("hi")))).text


async def test_limit_of_the_request(clip_folder: Path, make_preprocess: PreprocessMaker) -> None:
    async with make_preprocess(clip_folder, limit_mm_per_prompt='{"image": 1}') as service:
        one = turn("user", image(file_of(A)), text("hi"))
        response = await service.chat(one)
        with pytest.raises(InvalidRequest, match=f"resulted in {len(ids_of(response))} tokens"):
            request = PrepareRequest(max_prompt_tokens=len(ids_of(response)) - 1)
            request.conversation.messages.append(one)
            await service.prepare(request)
        with pytest.raises(InvalidRequest) as caught:
            await service.chat(turn("user", image(file_of(A)), image(file_of(A), "second")))
        assert caught.value.reason == "TOO_MANY_IMAGES"
        assert caught.value.metadata["field"] == "second"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_end_of_a_prompt_is_kept(clip_service: RunningPreprocess) -> None:
    long = "one two three " * 400  # far over the model's length
    ids = np.arange(20, dtype="<i4")
    short = ids_of(await clip_service.prepare(PrepareRequest(text="three one two three")))
    kept = await clip_service.prepare(PrepareRequest(text=long.strip(), keep_last_tokens=6))
    assert ids_of(kept)[1:] == short[-5:] and len(ids_of(kept)) == 6
    request = PrepareRequest(token_ids=ids.tobytes(), keep_last_tokens=5)
    assert ids_of(await clip_service.prepare(request)) == [15, 16, 17, 18, 19]
    request = PrepareRequest(text="one two", keep_last_tokens=200)
    assert ids_of(await clip_service.prepare(request)) == ids_of(
        await clip_service.prepare(PrepareRequest(text="one two"))
    )
    request = PrepareRequest(keep_last_tokens=7)
    request.conversation.messages.append(turn("user", text(long)))
    whole = ids_of(await clip_service.chat(turn("user", text("three"))))
    assert ids_of(await clip_service.prepare(request))[-2:] == whole[-2:]
    with pytest.raises(InvalidRequest, match="a prompt may have"):
        request = PrepareRequest(text=long * 200, keep_last_tokens=6)
        await clip_service.prepare(request)
    request = PrepareRequest(keep_last_tokens=7)
    request.conversation.messages.append(turn("user", image(file_of(A)), text("hi")))
    with pytest.raises(InvalidRequest, match="cannot be combined with media"):
        await clip_service.prepare(request)


async def test_a_template_from_a_file(
    llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    async with make_preprocess(llama_folder, chat_template=str(file)) as service:
        assert (await service.chat(turn("user", text("hi")))).text == "[hi]"
    with pytest.raises(InvalidRequest, match="no-such-file"):
        async with make_preprocess(llama_folder, chat_template="/no-such-file"):
            pass


LOOP = "{% for a in list %}{% for b in list %}{% set c = a %}{% endfor %}{% endfor %}"
WRITES = "{% for a in list %}{{ text }}{% endfor %}"


@pytest.mark.full  # five seconds of a template that loops
async def test_templates_that_never_end_are_ended(
    llama_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    lists = json.dumps({"list": [1] * 15_000, "text": "x" * 3_000})
    async with make_preprocess(llama_folder, trust_request_chat_template=True) as service:
        for template, said in ((LOOP, "took over 5 s"), (WRITES, "characters")):
            with pytest.raises(InvalidRequest, match=said) as caught:
                await service.chat(HI, chat_template=template, chat_template_kwargs_json=lists)
            assert caught.value.reason == "CHAT_TEMPLATE"
        assert (await service.chat(HI)).text


@pytest.mark.asyncio(loop_scope="module")
async def test_brackets_in_strings_do_not_count_as_depth(llama_service: RunningPreprocess) -> None:
    words = {"a": "[{" * 200 + '\\"[', "b": {"c": [[1]]}}
    await llama_service.chat(HI, chat_template_kwargs_json=json.dumps(words))
