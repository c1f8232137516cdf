"""Small pictures, and the parts of messages that hold them."""

import base64
import random
from typing import Any

from tests.fuzz import values
from tests.fuzz.damage import damaged
from tests.support.pictures import animation, png

PICTURES = [
    png(1, (56, 56)),
    png(2, (28, 84)),
    animation([png(1, (56, 56)), png(2, (56, 56))], 500),
]


def picture_part(draw: random.Random) -> dict[str, Any]:
    """A part of a message: a picture or a video, which may be none."""
    if draw.random() < 0.5:
        return {"type": "image_url", "image_url": {"url": values.url(draw)}}
    kind = draw.choice(["image", "image", "video"])
    picture = picture_file(draw)
    if draw.random() < 0.2:
        data = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        return {
            "type": "file",
            "file": draw.choice([{"file_data": data}, {"file_id": file_id(draw)}]),
        }
    return {
        "type": f"{kind}_url",
        f"{kind}_url": {"url": f"data:{kind}/png;base64,{base64.b64encode(picture).decode()}"},
    }


def file_id(draw: random.Random) -> str:
    """The id of a file that may be one."""
    return draw.choice([f"file-{draw.getrandbits(128):032x}", "file-", "x", ""])


def picture_file(draw: random.Random) -> bytes:
    """A small picture, half of them damaged."""
    picture = draw.choice(PICTURES)
    return picture if draw.random() < 0.5 else damaged(draw, picture)
