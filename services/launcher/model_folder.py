"""The folder of the model to serve, and whether it can be served."""

from services.families import registry
from services.families.check import require_servable
from services.families.prepare import find_servable, with_prepared
from services.launcher.ranks import require_divisible
from services.launcher.settings import ServeSettings
from shared.errors import InvalidRequest
from shared.hardware.devices import require_computable
from shared.lora.modules import open_modules
from shared.settings import hub_name


def with_model_folder(settings: ServeSettings) -> ServeSettings:
    """The settings with the folder of a model that can be served; one from the hub is downloaded if need be.

    Raises ServingError with the first reason why it cannot.
    """
    if name := hub_name(settings.model):
        require_computable(settings.device, settings.dtype)  # before gigabytes are fetched
        folder = find_servable(
            name,
            settings.revision,
            settings.model_backend,
            settings.trust_remote_code,
            settings.family,
        )
        changes = {"model": folder, "served_model_name": settings.model_name}
        settings = settings.model_copy(update=changes)
    settings = with_prepared(settings)
    checkpoint = require_servable(settings.model, family=settings.family, **settings.computation)
    require_divisible(settings, checkpoint)
    open_modules(
        settings.lora_modules,
        settings.model_name,
        settings.max_lora_rank,
        settings.model,
        settings.lora_adapter_id,
    )
    template = settings.chat_template
    if template is not None and not template.is_file():
        raise InvalidRequest(
            "NO_CHAT_TEMPLATE", f"--chat-template: no file {template}", field="chat_template"
        )
    has_no_encoder = settings.vision_encoders == 0 and not settings.redis_url
    if (
        has_no_encoder
        and registry.find(checkpoint).takes_media
        and not settings.language_model_only
    ):
        raise InvalidRequest(
            "NO_VISION_ENCODER",
            "--vision-encoders 0 leaves nobody to look at pictures, which this model takes: give"
            " --language-model-only too, to refuse them, or leave --vision-encoders away",
            field="vision_encoders",
        )
    return settings
