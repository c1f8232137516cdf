"""PreprocessService: from what a client sent to token ids and pixel values."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import grpc.aio
import structlog

from services.preprocess.items.intake import USUAL, Handling, MediaIntake, TakenMedia
from services.preprocess.measures import PreprocessMeasures
from services.preprocess.media.fitted_picture import Square
from services.preprocess.mindie.pictures import SharedPictures
from services.preprocess.prompt import conversation, item_options
from services.preprocess.prompt.builder import Draft, Prompt, PromptBuilder
from services.preprocess.prompt.history import History
from services.preprocess.prompt.item_limits import ItemLimits
from services.preprocess.prompt.window import Window
from services.preprocess.prompt_stream import prepare_many
from services.preprocess.windowed_prompt import windowed_prompt
from shared.artifacts.mindie_shm import NAMES_FIELD
from shared.artifacts.small_tensor import small_tensor
from shared.errors import InvalidRequest, Precondition
from shared.net import tasks
from shared.prompts.modality import IMAGE, NAMES, VIDEO, require_taken
from shared.telemetry import request_names
from shared.telemetry.logs import Stopwatch
from tessera.common.v1.media_pb2 import (
    EmbedRun,
    MediaItem,
    Modality,
    PixelFormat,
    PixelScaling,
)
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

log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class PreprocessServicer(preprocess_pb2_grpc.PreprocessServiceServicer):
    """`intake` is None for a text-only model, `shared_pictures` without --mindie-shm. Tokenizing runs in `executor`,
    never on the event loop.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        intake: MediaIntake | None,
        executor: Executor,
        *,
        model_name: str,
        limits: ItemLimits,
        max_frames: int,
        window: Window,
        shared_pictures: SharedPictures | None = None,
        measures: PreprocessMeasures | None = None,
    ) -> None:
        self._measures = measures or PreprocessMeasures()
        self._builder = builder
        self._intake = intake
        self._executor = executor
        self._model_name = model_name
        self._limits = limits
        self._max_frames = max_frames
        self._window = window
        self._shared_pictures = shared_pictures

    async def Prepare(self, request: PrepareRequest, context: _Context) -> PrepareResponse:
        """Template, tokenizer and images side by side, then the placeholders. Raises InvalidRequest."""
        request_names.bind(request.request_id, request.client_request_id, request.traceparent)
        with self._measures.preparing():
            return await self._prepare(request)

    async def PrepareMany(
        self, requests: AsyncIterator[PrepareManyRequest], context: _Context
    ) -> AsyncIterator[PrepareManyResponse]:
        """The same for short prompts without media, several in a message."""
        async for answer in prepare_many(
            self._builder, self._window, self._executor, requests, self._measures
        ):
            yield answer

    async def GetPixels(self, request: GetPixelsRequest, context: _Context) -> GetPixelsResponse:
        """From the cache, or made again from the raw bytes. Raises NotFound, Precondition."""
        if self._intake is None:
            raise Precondition("TEXT_ONLY_MODEL", f"{self._model_name} takes no images")
        pixels = await self._intake.pixels_again(request.media)
        log.debug("pixels sent", digest=request.media.digest.hex())
        return GetPixelsResponse(pixels=pixels.ref)

    async def _prepare(self, request: PrepareRequest) -> PrepareResponse:
        history = self._window.history(self._builder, request)
        if history is None:
            draft, images, tokenize_us = await self._whole(request)
        else:
            draft, images, tokenize_us = await self._windowed(request, history)
        images += await self._take_shared(draft, request.tenant)
        prompt = self._builder.expand(draft, [image.pixels.item for image in images])
        fetch_us = max((i.fetch_us for i in images), default=0)
        media_us = max((i.media_us for i in images), default=0)
        cached = sum(image.cached for image in images)
        log.debug(
            "prepared",
            tokens=len(prompt.ids),
            media=len(images),
            cached_media=cached,
            fetch_us=fetch_us,
            media_us=media_us,
            tokenize_us=tokenize_us,
        )
        self._builder.check_length(len(prompt.ids), request.max_prompt_tokens, draft.field)
        self._window.check(request, len(prompt.ids))
        self._measures.prepared(len(prompt.ids), tokenize_us, has_media=bool(images))
        return PrepareResponse(
            token_ids=prompt.ids.astype("<i4").tobytes(),
            media=_items(prompt, images, self._intake) if self._intake else (),
            text=draft.text,
            times=PrepareTimes(fetch_us=fetch_us, media_us=media_us, tokenize_us=tokenize_us),
            cached_media=cached,
            mindie_ids=await self._share(request, prompt, images),
        )

    async def _whole(self, request: PrepareRequest) -> tuple[Draft, list[TakenMedia], int]:
        """The draft of all that was sent, its media, and the microseconds that tokenizing took."""
        media = self._media_of(request)
        ways = self._ways(request, media)
        work: list[Coroutine[Any, Any, Any]] = [self._draft(request)]
        square = self._square(media)
        work += [
            self._take(modality, item, request.tenant, square, how)
            for (modality, item), how in zip(media, ways, strict=True)
        ]
        (draft, tokenize_us), *images = await tasks.together(work)
        return draft, images, tokenize_us

    async def _windowed(
        self, request: PrepareRequest, history: History
    ) -> tuple[Draft, list[TakenMedia], int]:
        """The same of the turns that fit into the window. The time is that of media too."""
        self._check_shared(request)
        watch = Stopwatch()
        media = conversation.media(request.conversation)
        # Without an intake `_checked` refuses the first item.
        everything = [(conversation.modality_of(item), item) for item in media]
        ways = self._ways(request, everything) if self._intake else ()
        taken: dict[tuple[int, Square | None], TakenMedia] = {}

        async def take(numbers: Sequence[int]) -> list[TakenMedia]:
            found = self._checked([media[number] for number in numbers], request)
            square = self._square(found)
            missing = [
                (number, one)
                for number, one in zip(numbers, found, strict=True)
                if (number, square) not in taken
            ]
            work = [
                self._take(*one, request.tenant, square, ways[number]) for number, one in missing
            ]
            for (number, _), image in zip(missing, await tasks.together(work), strict=True):
                taken[number, square] = image
            return [taken[number, square] for number in numbers]

        run = partial(asyncio.get_running_loop().run_in_executor, self._executor)
        draft, images = await windowed_prompt(history, take, run)
        return draft, images, watch.lap_us()

    def _square(self, media: Sequence[tuple[Modality.ValueType, Media | Video]]) -> Square | None:
        return self._builder.square(sum(modality == IMAGE for modality, _ in media))

    def _media_of(self, request: PrepareRequest) -> list[tuple[Modality.ValueType, Media | Video]]:
        self._check_shared(request)
        return self._checked(conversation.media(request.conversation), request)

    def _checked(
        self, media: Sequence[Media | Video], request: PrepareRequest
    ) -> list[tuple[Modality.ValueType, Media | Video]]:
        """The items of a prompt with their modalities. Raises InvalidRequest for what is not taken, or too many."""
        if media and self._intake is None:
            raise InvalidRequest(
                "TEXT_ONLY_MODEL",
                f"{media[0].field}: {self._model_name} takes no images",
                field=media[0].field,
            )
        if media and request.keep_last_tokens:
            raise _no_truncation("media")
        found = [(conversation.modality_of(item), item) for item in media]
        for modality, item in found:
            field = item.field or NAMES[modality]
            require_taken(modality, self._builder.limits, self._model_name, field)
            if isinstance(item, Video) and (
                _has_source(item) or not request.conversation.item_names
            ):
                self._check_video(item, field)
        self._limits.check((modality, item.field) for modality, item in found)
        return found

    def _check_shared(self, request: PrepareRequest) -> None:
        coded = request.WhichOneof("input") == "mindie_ids"
        if not coded and not request.shm_name_save_path:
            return
        field = "prompt" if coded else NAMES_FIELD
        if self._shared_pictures is None:
            raise InvalidRequest(
                "SHARED_MEMORY_OFF",
                f"{field}: pictures in shared memory are not taken here (--mindie-shm)",
                field=field,
            )
        if request.keep_last_tokens:
            raise _no_truncation("pictures in shared memory")
        if request.shm_name_save_path:
            self._shared_pictures.check_list(request.shm_name_save_path)

    def _ways(
        self, request: PrepareRequest, media: Sequence[tuple[Modality.ValueType, Media | Video]]
    ) -> list[Handling]:
        """How each item is to be handled. Raises InvalidRequest."""
        if not media:
            return []
        names = list(request.conversation.item_names) or [""] * len(media)
        if len(names) != len(media):
            raise InvalidRequest(
                "BAD_NAMES",
                f"{len(names)} names are given for {len(media)} media",
                field="messages",
            )
        if not request.HasField("media_options"):
            return [Handling(name=name) if name else USUAL for name in names]
        given = item_options.processor_options(request.media_options)
        frames = item_options.frame_options(request.media_options)
        options = {
            modality: self._builder.options(given, modality) if given else {}
            for modality, _ in media
        }
        assert self._intake is not None
        usual = self._intake.frame_selection
        selection = item_options.selection(usual, frames, self._max_frames) if frames else None
        return [
            Handling(options[modality], selection if modality == VIDEO else None, name)
            for (modality, _), name in zip(media, names, strict=True)
        ]

    async def _take_shared(self, draft: Draft, tenant: str) -> list[TakenMedia]:
        shared = self._shared_pictures
        if shared is None or not draft.pictures:
            return []
        self._limits.check((IMAGE, picture.field) for picture in draft.pictures)
        return await tasks.together(shared.take(picture, tenant) for picture in draft.pictures)

    async def _share(
        self, request: PrepareRequest, prompt: Prompt, images: Sequence[TakenMedia]
    ) -> bytes:
        """The prompt's ids with its pictures written to shared memory, or what it was made of removed from there."""
        shared, names = self._shared_pictures, request.shm_name_save_path
        if shared is None or not names:
            return b""
        if request.WhichOneof("input") == "mindie_ids":
            await shared.release(names)
            return b""
        return (await shared.write(prompt, images, names)).astype("<i8").tobytes()

    def _check_video(self, video: Video, field: str) -> None:
        if video.HasField("file"):
            if video.frames or video.seconds_per_frame:
                raise InvalidRequest(
                    "BAD_VIDEO",
                    f"{field}: a video is a file with its own pace, or frames with theirs, not both",
                    field=field,
                )
        elif not 1 <= len(video.frames) <= self._max_frames:
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

    async def _take(
        self,
        modality: Modality.ValueType,
        media: Media | Video,
        tenant: str,
        square: Square | None,
        how: Handling,
    ) -> TakenMedia:
        assert self._intake is not None
        if isinstance(media, Video):
            return await self._intake.take_video(media, tenant, how)
        return await self._intake.take(media, modality, tenant, square, how)


def _has_source(video: Video) -> bool:
    return bool(video.frames) or video.HasField("file")


def _no_truncation(what: str) -> InvalidRequest:
    field = "truncate_prompt_tokens"
    return InvalidRequest("BAD_TRUNCATION", f"{field} cannot be combined with {what}", field=field)


def _items(prompt: Prompt, images: Sequence[TakenMedia], intake: MediaIntake) -> list[MediaItem]:
    scaling = None
    if (given := intake.scaling) is not None:
        scaling = PixelScaling(factor=given.factor, mean=given.mean, std=given.deviation)
    bundles = intake.bundles
    return [
        MediaItem(
            digest=image.digest,
            source_digest=image.source_digest,
            modality=image.pixels.item.modality,
            offset=offset,
            length=len(span.token_ids),
            embed_runs=[EmbedRun(start=start, length=length) for start, length in span.embed_runs],
            rows=span.rows,
            grid_t=span.grid[0],
            grid_h=span.grid[1],
            grid_w=span.grid[2],
            seconds_per_grid=span.frames_per_step * image.seconds_per_frame,
            pixels=image.pixels.ref,
            width=image.pixels.item.width,
            height=image.pixels.item.height,
            scaling=scaling,
            fields={name: small_tensor(value) for name, value in span.fields.items()},
            format=PixelFormat.PIXEL_FORMAT_BUNDLE if bundles else PixelFormat.PIXEL_FORMAT_PLAIN,
        )
        for offset, span, image in zip(prompt.offsets, prompt.spans, images, strict=True)
    ]
