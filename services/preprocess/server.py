"""The preprocess service from start to end: bind, load, serve, drain."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import structlog

from services.families import registry
from services.families.chat_format import find_template, find_tool_template
from services.families.family import GENERIC_PROMPT, load_part
from services.families.generic import require_length
from services.families.report import code_of
from services.preprocess.download.fetcher import FetchPolicy, MediaFetcher
from services.preprocess.items.intake import IntakeLimits, MediaIntake
from services.preprocess.items.local_files import LocalFiles
from services.preprocess.items.pixel_cache import PixelCache
from services.preprocess.limit_setting import parse_limits
from services.preprocess.measures import PreprocessMeasures
from services.preprocess.media.image_limits import ImageLimits
from services.preprocess.media.processor_config import read_frame_selection
from services.preprocess.mindie.name_lists import NameLists
from services.preprocess.mindie.pictures import SharedPictures
from services.preprocess.prompt.builder import PromptBuilder
from services.preprocess.prompt.chat_template import ChatTemplate
from services.preprocess.prompt.item_limits import ItemLimits
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from services.preprocess.prompt.tokenizer import PromptTokenizer
from services.preprocess.prompt.window import Window
from services.preprocess.servicer import PreprocessServicer
from services.preprocess.settings import PreprocessSettings
from services.preprocess.worker.pool import ImageWorkerPool, StartWorker
from services.preprocess.worker.process import WorkerProcess
from shared import service_process
from shared.artifacts.producer import open_producer
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.net import tasks
from shared.net.metrics_page import page, serve_metrics
from shared.prompts.modality import IMAGE
from shared.queue.stores.media_store import MediaStore
from shared.served_part import ServedPart
from shared.telemetry.logs import Stopwatch
from shared.text.templates.processes import TemplateProcesses, TemplateRefusal
from tessera.preprocess.v1 import preprocess_pb2_grpc

log = structlog.get_logger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
_SERVICE_NAME = "tessera.preprocess.v1.PreprocessService"


async def serve(
    settings: PreprocessSettings,
    stop: asyncio.Event,
    *,
    settle: Callable[[], None] = service_process.settle,
    start_worker: StartWorker = WorkerProcess.start,
) -> None:
    """Runs until `stop` is set. `settle` is called when all is loaded, before it serves; `start_worker` starts the
    processes that decode images. Raises ServingError when the service cannot start.
    """
    watch = Stopwatch()
    async with open_producer(settings, _MAX_MESSAGE_BYTES) as producer:
        resources = producer.resources
        executor = ThreadPoolExecutor(4, "tokenize")
        resources.callback(executor.shutdown, cancel_futures=True)
        templates = resources.enter_context(TemplateProcesses())

        checkpoint = Checkpoint(settings.model, settings.family)
        # The tokenizer loads while the first image worker starts.
        loading = asyncio.ensure_future(asyncio.to_thread(PromptTokenizer, settings.model))
        pool = await _image_pool(settings, checkpoint, resources, start_worker)
        # Trying out the template waits for its process.
        builder = await asyncio.to_thread(
            _build, settings, checkpoint, await loading, pool, templates
        )
        intake, measures = None, PreprocessMeasures()
        if pool is not None:
            wanted = settings.pixel_cache_bytes
            producer.store.space.warn_if_small("--pixel-cache-bytes", wanted)
            cache = PixelCache(pool, producer.store, wanted)
            resources.push_async_callback(cache.close)
            measures.cache_bytes = lambda: cache.nbytes
            measures.workers = lambda: pool.load
            intake = MediaIntake(
                await resources.enter_async_context(MediaFetcher(_policy(settings))),
                LocalFiles(settings.allowed_local_media_path),
                cache,
                MediaStore(producer.redis, settings.media_store_bytes),
                IntakeLimits(
                    settings.max_image_bytes,
                    settings.max_video_bytes,
                    read_frame_selection(settings.model, settings.max_video_frames),
                ),
                measures,
            )
        shared_pictures = await _shared_pictures(settings, builder, intake, resources)
        servicer = PreprocessServicer(
            builder,
            intake,
            executor,
            model_name=settings.model_name,
            limits=ItemLimits(
                parse_limits(settings.limit_mm_per_prompt), builder.limits, settings.model_name
            ),
            max_frames=settings.max_video_frames,
            window=Window(_window(settings, checkpoint)),
            shared_pictures=shared_pictures,
            measures=measures,
        )
        producer.server.add(
            _SERVICE_NAME,
            preprocess_pb2_grpc.add_PreprocessServiceServicer_to_server,
            servicer,
        )
        part = ServedPart(code_of(registry.find(checkpoint).prompt))
        settle()
        metrics = serve_metrics(
            settings.metrics_listen, lambda: page("preprocess", settings.model_name, measures)
        )
        async with metrics, producer.serving("preprocess", part, measures.load):
            log.info(
                "ready",
                model=settings.model_name,
                address=producer.server.address,
                images=IMAGE in builder.limits,
                **part.log_fields,
                start_ms=watch.lap_us() // 1000,
            )
            await stop.wait()


async def _image_pool(
    settings: PreprocessSettings,
    checkpoint: Checkpoint,
    resources: AsyncExitStack,
    start_worker: StartWorker,
) -> ImageWorkerPool | None:
    """The image workers, for models with images."""
    if not registry.find(checkpoint).takes_media or settings.language_model_only:
        return None
    limits = ImageLimits(
        max_pixels=settings.max_image_pixels,
        max_video_pixels=settings.max_video_pixels,
        memory_bytes=settings.image_memory_bytes,
        max_rows=_max_model_len(settings, checkpoint),
    )
    pool = ImageWorkerPool(
        settings.model,
        limits,
        settings.worker_count,
        settings.image_timeout_s,
        settings.media_budget_s,
        family=settings.family,
        bundles=registry.find(checkpoint).prompt == GENERIC_PROMPT,
        start=start_worker,
    )
    return await resources.enter_async_context(pool)


async def _shared_pictures(
    settings: PreprocessSettings,
    builder: PromptBuilder,
    intake: MediaIntake | None,
    resources: AsyncExitStack,
) -> SharedPictures | None:
    """For --mindie-shm. Raises InvalidRequest for a model whose ids are not known."""
    if settings.mindie_shm is None:
        return None
    if builder.mindie is None or intake is None:
        raise InvalidRequest(
            "UNSUPPORTED_MODEL",
            "--mindie-shm: MindIE-LLM's ids of pictures are known of Qwen-VL and WeMM alone",
        )
    shared = SharedPictures(builder.mindie, NameLists(settings.mindie_shm), intake)
    resources.push_async_callback(shared.close)
    resources.push_async_callback(tasks.end, tasks.begin(shared.release_old()))
    return shared


def _build(
    settings: PreprocessSettings,
    checkpoint: Checkpoint,
    tokenizer: PromptTokenizer,
    pool: ImageWorkerPool | None,
    templates: TemplateProcesses,
) -> PromptBuilder:
    family = registry.find(checkpoint)
    rule = PromptRule()
    if pool is not None:
        processing = ImageProcessing(pool.info.settings, pool.info.shape)
        rule = load_part(family.prompt)(checkpoint, processing)
    template = find_template(checkpoint, settings.chat_template)
    if template is None:
        log.warning("the model has no chat template; only prompts are taken")
    with_tools = find_tool_template(checkpoint, settings.chat_template)
    return PromptBuilder(
        tokenizer,
        _load_template(template, settings, tokenizer, templates),
        rule,
        templates,
        vocab_size=max(tokenizer.vocab_size, registry.text_sizes(checkpoint).vocab_size),
        max_model_len=_max_model_len(settings, checkpoint),
        processor_adds_special_tokens=family.takes_media,
        trust_request_template=settings.trust_request_chat_template,
        content_format=settings.chat_template_content_format,
        tool_template=_load_template(with_tools, settings, tokenizer, templates),
    )


def _load_template(
    source: str | None,
    settings: PreprocessSettings,
    tokenizer: PromptTokenizer,
    templates: TemplateProcesses,
) -> ChatTemplate | None:
    if source is None:
        return None
    try:
        return ChatTemplate(
            source, tokenizer.special_tokens, templates, settings.chat_template_content_format
        )
    except TemplateRefusal as error:
        raise InvalidRequest("BAD_CHECKPOINT", f"{settings.model}: {error}") from error


def _max_model_len(settings: PreprocessSettings, checkpoint: Checkpoint) -> int:
    return require_length(
        settings.max_model_len or registry.text_sizes(checkpoint).max_position_embeddings
    )


def _window(settings: PreprocessSettings, checkpoint: Checkpoint) -> int:
    """The window of conversations whose requests name none; 0 is none. Raises InvalidRequest."""
    if settings.max_window_size is not None:
        return settings.max_window_size
    found = checkpoint.generation_config.get("max_window_size")
    if found is None:
        return 0
    if not isinstance(found, int) or found < 0:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{checkpoint.folder / 'generation_config.json'}: max_window_size is {found!r}, which is no number of"
            " tokens",
        )
    return found


def _policy(settings: PreprocessSettings) -> FetchPolicy:
    return FetchPolicy(
        timeout_s=settings.media_timeout_s,
        allowed_domains=settings.media_domains,
        allow_private=settings.allow_private_media,
    )
