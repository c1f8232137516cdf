"""The requests that are sent, made before the clock runs."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.load.dataset import Entry, read_dataset
from benchmarks.load.errors import BenchError
from benchmarks.load.pictures import PictureMaker
from benchmarks.load.settings import BenchSettings
from benchmarks.load.words import WordPrompts

_LOWEST_ID = 10  # below it many vocabularies have their special tokens


class Workload:
    """Makes request bodies from the settings. Equal seeds make equal bodies."""

    def __init__(self, settings: BenchSettings, model: str, *, return_token_ids: bool) -> None:
        """Raises BenchError for a dataset or tokenizer that cannot be read."""
        self._settings = settings
        self._fixed = _fixed_fields(settings, model)
        if return_token_ids:
            self._fixed["return_token_ids"] = True
        self._entries = read_dataset(settings.dataset_path) if settings.dataset_path else []
        self._pictures = PictureMaker(*settings.image_width_height, settings.image_format)
        as_ids = settings.prompts == "ids" or (
            settings.prompts == "auto" and settings.backend == "openai"
        )
        self._text: Callable[[random.Random, int], Any] = self._ids
        if not as_ids:
            self._text = WordPrompts(settings.tokenizer).draw

    def bodies(self, count: int, stream: str = "measured") -> list[bytes]:
        """JSON bodies. Another `stream` has other prompts: warming up must not fill the caches for what is measured."""
        entries = self._random(count, random.Random(f"{self._settings.seed}/{stream}"))
        if self._entries:
            entries = itertools.islice(itertools.cycle(self._entries), count)
        return [json.dumps(self._fields(entry)).encode() for entry in entries]

    def probe(self) -> bytes:
        """A short request with every field that the others have."""
        return json.dumps({**json.loads(self.bodies(1, "probe")[0]), "max_tokens": 2}).encode()

    def _random(self, count: int, draw: random.Random) -> Iterator[Entry]:
        chosen = self._settings
        # Prefixes and repeated pictures are what a server may have cached from the warm-up: that is their point.
        common = random.Random(f"{chosen.seed}/common")
        prefixes = [
            self._text(common, chosen.random_prefix_len) for _ in range(chosen.num_prefixes)
        ]
        repeated = [self._pictures.draw(common) for _ in range(chosen.images)]
        for number in range(count):
            text = self._text(draw, self._length(draw, chosen.random_input_len))
            if chosen.random_prefix_len:
                prefix = prefixes[number % len(prefixes)]
                text = f"{prefix} {text}" if isinstance(text, str) else prefix + text
            pictures = repeated
            if not chosen.repeat_images:
                pictures = [self._pictures.draw(draw) for _ in range(chosen.images)]
            output = self._length(draw, chosen.random_output_len)
            if chosen.backend == "openai":
                yield Entry(prompt=text, output_tokens=output)
            else:
                yield Entry(messages=[_message(text, pictures)], output_tokens=output)

    def _fields(self, entry: Entry) -> dict[str, Any]:
        fields = {
            **self._fixed,
            "max_tokens": entry.output_tokens or self._settings.random_output_len,
        }
        if self._settings.backend == "openai":
            if entry.prompt is None:
                raise BenchError("the dataset has messages: they need --backend openai-chat")
            return {**fields, "prompt": entry.prompt}
        if entry.messages is not None:
            return {**fields, "messages": entry.messages}
        if not isinstance(entry.prompt, str):
            raise BenchError("the dataset has token ids: they need --backend openai")
        return {**fields, "messages": [_message(entry.prompt, [])]}

    def _length(self, draw: random.Random, mean: int) -> int:
        ratio = self._settings.random_range_ratio
        return draw.randint(max(1, round(mean * (1 - ratio))), round(mean * (1 + ratio)))

    def _ids(self, draw: random.Random, count: int) -> list[int]:
        return draw.choices(range(_LOWEST_ID, self._settings.vocab_size), k=count)


def _fixed_fields(settings: BenchSettings, model: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": model,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.goes_on_past_eos:
        fields["ignore_eos"] = True
    if settings.extra_body:
        try:
            fields.update(json.loads(settings.extra_body))
        except (ValueError, TypeError):
            raise BenchError("--extra-body is not a JSON object") from None
    return fields


def _message(text: str, pictures: list[str]) -> dict[str, Any]:
    if not pictures:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in pictures
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
