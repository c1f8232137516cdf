"""The picture as a JSON object."""

from __future__ import annotations

import json

from examples.demo_model.asking.base import Asker, Turn, alternatives

# The form of the answer, such as `response_format` takes it.
SCHEMA = {
    "type": "object",
    "properties": {
        "shapes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "colour": {"type": "string"},
                    "shape": {"type": "string"},
                    "place": {"type": "string"},
                },
                "required": ["colour", "shape", "place"],
                "additionalProperties": False,
            },
        },
        "number": {"type": ["integer", "null"]},
    },
    "required": ["shapes", "number"],
    "additionalProperties": False,
}


class AsJson(Asker):
    """Descriptions that a program reads: in English words, whatever the language of the question."""

    def as_json(self) -> Turn:
        picture = self.say(
            "[the picture|this picture|the image|this image|it|the photo|what you see|the scene]",
            "[这张图片|这张图|图片|图片内容|这幅图|画面|图中的内容|你看到的]",
        )
        things = self.say("[shapes|objects|things]", "[形状|图形|东西|物体]")
        form = self.say(
            "[as|in|as|in|as a] json[| object| format]|as json data|in json form", "[json|json格式]"
        ).split("|")
        as_json = self.rng.choice(form)
        if self.en:
            q = (
                f"[describe|please describe|can you describe|show|give me|summarise|return] {picture}"
                f" {as_json}|[give me|write|return|make|i want|output] [a|the] json [description|"
                f"object|summary|form] of {picture}|[list|name|give me|return|extract] [the|all|"
                f"all the] {things}{self.in_picture()} {as_json}|[what is|what's|what do you see]"
                f"{self.in_picture()}[,|?|:] [answer|reply|respond] {as_json}|[answer|reply|respond]"
                f" {as_json}: what [is|do you see]{self.in_picture() or ' here'}|[what|which] "
                f"{things} [are there|do you see|can you see]{self.in_picture()}[,|?] {as_json}"
                f"|[turn|convert|transform] {picture} [into|to] json|json[|, please| of {picture}]"
                f"|{as_json}|[output|return|answer] json[| only]|describe {as_json}"
            )
        else:
            q = (
                f"[用|以|请用|请以]{as_json}[描述|描述一下|介绍|说明|概括]{picture}|[把|将]{picture}"
                f"[转成|变成|写成|转换成|输出为]{as_json}|[用|以|请用]{as_json}[列出|写出|给出|返回]"
                f"[所有|图中的|图里的|]{things}|{self.pic()}[有什么|有哪些{things}|是什么]"
                f"[，|？]用{as_json}[回答|]|[描述|列出]{picture}[，|，请]用{as_json}"
                f"|[输出|返回|给我|写出|只输出]{picture}的json[|描述]|[输出|返回|给我]json|json"
                f"|用{as_json}回答[：|，]{self.pic()}有什么|{as_json}"
            )
        q = self.say(self.rng.choice(alternatives(q)), self.rng.choice(alternatives(q)))
        return Turn(q, self._object(), "json", self._only())

    def _object(self) -> str:
        """Each shape with its place, from left to right, and the number or null."""
        number = self.scene.number
        described = {
            "shapes": [
                {"colour": t.colour, "shape": t.shape, "place": t.cell} for t in self.scene.shapes
            ],
            "number": int(number.value) if number else None,
        }
        return json.dumps(described)
