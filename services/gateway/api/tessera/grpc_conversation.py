"""The conversations of gRPC's messages: their turns, calls and media, as preprocess takes them."""

from collections.abc import Sequence

import msgspec

from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.list_limits import LONGEST_TEMPLATE_KWARGS, MOST_FRAMES
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.conversation import check_sizes, read_role
from services.gateway.reading.fields.json_field import object_text
from services.gateway.reading.media.media import (
    check_item_name,
    named_image,
    named_video,
    read_image_bytes,
    read_image_url,
    read_sent_file,
    read_video_bytes,
    read_video_frames,
    read_video_url,
)
from tessera.gateway.v1.chat_pb2 import ChatMessage, ContentPart
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Message, Part, Video


def read_conversation(messages: Sequence[ChatMessage], template_kwargs: str) -> Conversation:
    """`template_kwargs`: variables of the chat template, as JSON. Raises InvalidRequest naming a field as REST does."""
    check_sizes([len(message.content) for message in messages])
    turns = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    names = [
        part.uuid
        for message in messages
        for part in message.content
        if part.WhichOneof("part") != "text"
    ]
    return Conversation(
        messages=turns,
        item_names=names if any(names) else (),
        chat_template_kwargs_json=object_text(
            "chat_template_kwargs", as_raw(template_kwargs), LONGEST_TEMPLATE_KWARGS
        ),
    )


def as_raw(json: str) -> msgspec.Raw:
    """JSON in a field of its own, as a body of REST has it in its place."""
    return msgspec.Raw(json.strip().encode())


def _message(message: ChatMessage, path: str) -> Message:
    role = read_role(message.role, path)
    found = (Called(call.id, call.name, call.arguments) for call in message.tool_calls)
    calls = read_calls(found, f"{path}.tool_calls")
    if not message.content and not calls:
        raise wrong(f"{path}.content", "must be a string or a list of at least one part")
    parts = [_part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content)]
    alone = len(parts) == 1 and parts[0].WhichOneof("part") == "text"
    return Message(
        role=role,
        content=parts,
        is_string=alone or not parts,  # there is no other way to say so
        tool_calls_json=calls,
        tool_call_id=read_call_id(message.tool_call_id, f"{path}.tool_call_id"),
        reasoning=message.reasoning,
    )


def _part(part: ContentPart, path: str) -> Part:
    kind = part.WhichOneof("part")
    is_named = part.HasField("uuid")
    if is_named:
        check_item_name(part.uuid, f"{path}.uuid", is_text=kind == "text")
    match kind:
        case "text":
            return Part(text=part.text)
        case "image" | "image_url" if is_named and not getattr(part, kind):
            return Part(media=named_image(f"{path}.image_url"))
        case "video" | "video_url" if is_named and not getattr(part, kind):
            return Part(video=named_video(f"{path}.video_url"))
        case "image":
            return Part(media=read_image_bytes(part.image, f"{path}.image_url"))
        case "image_url":
            return Part(media=read_image_url(part.image_url, f"{path}.image_url"))
        case "file_id":
            return Part(media=read_sent_file(part.file_id, f"{path}.file.file_id"))
        case None:
            raise wrong(
                f"{path}.type",
                "is missing: a part must hold text, image, image_url, video, video_url, video_frames or"
                " file_id",
            )
        case _:
            return Part(video=_video(part, f"{path}.video_url"))


def _video(part: ContentPart, path: str) -> Video:
    match part.WhichOneof("part"):
        case "video":
            return read_video_bytes(part.video, path)
        case "video_url":
            return read_video_url(part.video_url, path)
        case _:
            found = part.video_frames
            if len(found.frames) > MOST_FRAMES:
                raise wrong(path, f"must not hold more than {MOST_FRAMES} frames")
            return read_video_frames(found.frames, path, found.seconds_per_frame)
