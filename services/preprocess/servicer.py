"""PreprocessService: from what a client sent to token ids and pixel values."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

import grpc.aio

from services.preprocess import conversation
from services.preprocess.media_intake import MediaIntake, TakenImage
from services.preprocess.models import MediaSpan
from services.preprocess.prompt_builder import Draft, Prompt, PromptBuilder
from services.preprocess.prompt_stream import prepare_many
from shared.errors import InvalidRequest, Precondition
from shared.telemetry import Stopwatch
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality
from tessera.preprocess.v1 import preprocess_pb2_grpc
from tessera.preprocess.v1.preprocess_pb2 import (
    GetPixelsRequest,
    GetPixelsResponse,
    Media,
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
    PrepareResponse,
    PrepareTimes,
    Video,
)

_Context = grpc.aio.ServicerContext[Any, Any]


class PreprocessServicer(preprocess_pb2_grpc.PreprocessServiceServicer):
    """`intake` is None for a text-only model. Tokenizing runs in `executor`, never on the event loop."""

    def __init__(
        self,
        builder: PromptBuilder,
        intake: MediaIntake | None,
        executor: Executor,
        *,
        model_name: str,
        max_images: int,
        max_frames: int,
    ) -> None:
        self._builder = builder
        self._intake = intake
        self._executor = executor
        self._model_name = model_name
        self._max_images = max_images
        self._max_frames = max_frames

    async def Prepare(self, request: PrepareRequest, context: _Context) -> PrepareResponse:
        """Template, tokenizer and images side by side, then the placeholders. Raises InvalidRequest."""
        media = self._media_of(request)
        (draft, tokenize_us), *images = await _together(
            self._draft(request), *(self._take(item) for item in media)
        )
        spans = [
            self._builder.span(i.pixels.size.width, i.pixels.size.height, i.frames) for i in images
        ]
        prompt = self._builder.expand(draft, spans)
        self._builder.check_length(len(prompt.ids), request.max_prompt_tokens, draft.field)
        return PrepareResponse(
            token_ids=prompt.ids.astype("<i4").tobytes(),
            media=_items(prompt, spans, images),
            text=draft.text,
            times=PrepareTimes(
                fetch_us=max((i.fetch_us for i in images), default=0),
                media_us=max((i.media_us for i in images), default=0),
                tokenize_us=tokenize_us,
            ),
        )

    async def PrepareMany(
        self, requests: AsyncIterator[PrepareManyRequest], context: _Context
    ) -> AsyncIterator[PrepareManyResponse]:
        """The same for short prompts without media, several in a message."""
        async for answer in prepare_many(self._builder, self._executor, requests):
            yield answer

    async def GetPixels(self, request: GetPixelsRequest, context: _Context) -> GetPixelsResponse:
        """From the cache, or made again from the raw bytes. Raises NotFound, Precondition."""
        if self._intake is None:
            raise Precondition("TEXT_ONLY_MODEL", f"{self._model_name} takes no images")
        pixels = await self._intake.pixels_again(request.media)
        return GetPixelsResponse(pixels=pixels.ref)

    def _media_of(self, request: PrepareRequest) -> list[Media | Video]:
        media = conversation.media(request.conversation)
        if media and self._intake is None:
            raise InvalidRequest(
                "TEXT_ONLY_MODEL",
                f"{media[0].field}: {self._model_name} takes no images",
                field=media[0].field,
            )
        if len(media) > self._max_images:
            field = media[self._max_images].field
            raise InvalidRequest(
                "TOO_MANY_IMAGES",
                f"{field}: the prompt has {len(media)} images, the limit is {self._max_images}"
                " (--limit-mm-per-prompt)",
                field=field,
            )
        for item in media:
            if isinstance(item, Video):
                self._check_video(item)
        return media

    def _check_video(self, video: Video) -> None:
        field = video.field or "video"
        if not self._builder.takes_videos:
            raise InvalidRequest(
                "NO_VIDEO_MODEL", f"{field}: {self._model_name} takes no videos", field=field
            )
        if not 1 <= len(video.frames) <= self._max_frames:
            raise InvalidRequest(
                "VIDEO_FRAMES",
                f"{field}: the video has {len(video.frames)} frames; 1 to {self._max_frames} are taken"
                " (--max-video-frames)",
                field=field,
            )

    async def _draft(self, request: PrepareRequest) -> tuple[Draft, int]:
        watch = Stopwatch()
        loop = asyncio.get_running_loop()
        draft = await loop.run_in_executor(self._executor, self._builder.draft, request)
        return draft, watch.lap_us()

    async def _take(self, media: Media | Video) -> TakenImage:
        assert self._intake is not None
        if isinstance(media, Video):
            return await self._intake.take_video(media)
        return await self._intake.take(media)


def _items(
    prompt: Prompt, spans: Sequence[MediaSpan], images: Sequence[TakenImage]
) -> list[MediaItem]:
    return [
        MediaItem(
            digest=image.digest,
            source_digest=image.source_digest,
            modality=Modality.MODALITY_VIDEO if image.frames else Modality.MODALITY_IMAGE,
            offset=offset,
            length=len(span.token_ids),
            embed_runs=[EmbedRun(start=start, length=length) for start, length in span.embed_runs],
            rows=span.rows,
            grid_t=span.grid[0],
            grid_h=span.grid[1],
            grid_w=span.grid[2],
            seconds_per_grid=span.frames_per_step * image.seconds_per_frame,
            pixels=image.pixels.ref,
            width=image.pixels.size.width,
            height=image.pixels.size.height,
        )
        for offset, span, image in zip(prompt.offsets, spans, images, strict=True)
    ]


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order; when one fails the others are stopped and its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
