"""How the media of a request are processed, under vLLM's names. What each option may be is known to preprocess, which
has the model's processor.
"""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import about
from services.gateway.decoding.list_limits import LONGEST_MEDIA_OPTIONS
from services.gateway.reading.fields.json_field import object_text
from services.gateway.reading.fields.unsupported import UnsupportedFields
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

_NONE = msgspec.Raw()


class MediaFields(UnsupportedFields, kw_only=True):
    """The fields, as unread JSON, which is empty where a body does not have them."""

    mm_processor_kwargs: Annotated[
        msgspec.Raw,
        about(
            "options of the model's image processor for the media of this request: an object, such as"
            ' {"max_pixels": 401408}',
            "the checkpoint's settings",
        ),
    ] = _NONE
    media_io_kwargs: Annotated[
        msgspec.Raw,
        about(
            'how files are read, by kind: an object, such as {"video": {"num_frames": 16}}',
            "the checkpoint's settings",
        ),
    ] = _NONE


def read_media_options(body: MediaFields, prepare: PrepareRequest) -> None:
    """Hands the options on with a prompt that has media. Raises InvalidRequest naming the field."""
    processor = object_text("mm_processor_kwargs", body.mm_processor_kwargs, LONGEST_MEDIA_OPTIONS)
    reading = object_text("media_io_kwargs", body.media_io_kwargs, LONGEST_MEDIA_OPTIONS)
    if (processor or reading) and _has_media(prepare):
        prepare.media_options.mm_processor_kwargs_json = processor
        prepare.media_options.media_io_kwargs_json = reading


def _has_media(prepare: PrepareRequest) -> bool:
    messages = prepare.conversation.messages
    return any(part.WhichOneof("part") != "text" for one in messages for part in one.content)
