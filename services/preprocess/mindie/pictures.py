"""Pictures that come from shared memory and go there."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog

from services.preprocess.items.intake import MediaIntake, TakenMedia
from services.preprocess.media import packed_pixels
from services.preprocess.mindie.name_lists import NameLists
from services.preprocess.prompt.builder import Prompt
from services.preprocess.prompt.mindie_layout import CodedPicture, Ids, MindieLayout, write_ids
from shared.artifacts.mindie_shm import (
    Array,
    decode_shape,
    encode_name,
    encode_shape,
    read_block,
    release_blocks,
    write_block,
)
from shared.artifacts.store import ArtifactReader
from shared.errors import InvalidRequest

log = structlog.get_logger(__name__)

_LOOK_S = 60.0


class SharedPictures:
    """Reads and writes the tensors of one model's pictures. Blocks that a request has been prepared from are not needed
    any more: their pixel values are in the media store.
    """

    def __init__(self, layout: MindieLayout, lists: NameLists, intake: MediaIntake) -> None:
        self._layout = layout
        self._lists = lists
        self._intake = intake
        self._reader = ArtifactReader()

    async def take(self, picture: CodedPicture, tenant: str) -> TakenMedia:
        """Pixel values of a picture of a prompt. Raises InvalidRequest naming its place in the prompt, and what
        `MediaIntake.take` raises."""
        try:
            data = await asyncio.to_thread(self._read, picture)
        except InvalidRequest as error:
            message = f"{picture.field}: {error.message}"
            raise InvalidRequest(error.reason, message, field=picture.field) from error
        return await self._intake.take_packed(data, tenant, picture.field)

    def check_list(self, name: str) -> None:
        """Raises InvalidRequest for a name that no list can have."""
        self._lists.path(name)

    async def write(self, prompt: Prompt, images: Sequence[TakenMedia], list_name: str) -> Ids:
        """Writes the pictures of a prompt; returns its ids with the codes in them.

        Raises InvalidRequest for a list that cannot be, Overloaded when shared memory is full.
        """
        names = self._lists.path(list_name)
        ids = prompt.ids.astype(np.int64)
        for offset, span, image in zip(prompt.offsets, prompt.spans, images, strict=True):
            pixels = await self._reader.open(image.pixels.ref)
            tokens = len(span.token_ids)
            written = await asyncio.to_thread(self._write, pixels, tokens, names)
            ids[offset : offset + tokens] = written
        return ids

    async def release(self, list_name: str) -> None:
        """Removes the blocks of a list, and the list. Raises InvalidRequest if the file is none."""
        await asyncio.to_thread(release_blocks, self._lists.path(list_name))

    async def release_old(self) -> None:
        """Now and then removes the lists that nobody has asked to release. Runs until it is cancelled."""
        while True:
            try:
                if count := await asyncio.to_thread(self._lists.release_old):
                    log.info("old lists of shared memory released", lists=count)
            except OSError as error:
                log.warning("lists of shared memory cannot be read", error=str(error))
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Ends what it holds open."""
        await self._reader.close()

    def _read(self, picture: CodedPicture) -> bytes:
        layout, codes = self._layout, picture.codes
        shapes = [decode_shape(code) for code in codes[1::2]]
        layout.check(shapes, picture.tokens)
        pairs = zip(codes[::2], codes[1::2], layout.dtypes, strict=True)
        tensors = [read_block(name, shape, dtype) for name, shape, dtype in pairs]
        pixels = layout.picture(tensors, picture.tokens)
        if not np.isfinite(pixels).all():
            raise InvalidRequest("IMAGE_UNUSABLE", "its pixel values are not all finite")
        return packed_pixels.pack(pixels, picture.tokens)

    def _write(self, pixels: Array, tokens: int, names: Any) -> Ids:
        tensors = self._layout.tensors(self._as_float(pixels))
        codes: list[int] = [0] * (2 * len(tensors))
        write_ids(tokens, codes, self._layout)  # before blocks are made
        for index, tensor in enumerate(tensors):
            codes[2 * index] = encode_name(write_block(tensor, names))
            codes[2 * index + 1] = encode_shape(tensor.shape)
        return write_ids(tokens, codes, self._layout)

    def _as_float(self, pixels: Array) -> Array:
        """[channels, height, width]: some processors put a one before it."""
        pixels, scaling = pixels.reshape(pixels.shape[-3:]), self._intake.scaling
        if pixels.dtype != np.uint8 or scaling is None:
            return pixels
        table = scaling.table()
        return np.stack([table[channel][values] for channel, values in enumerate(pixels)])
