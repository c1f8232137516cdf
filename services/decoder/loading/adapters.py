"""Reads adapters that are loaded while the decoder runs."""

from collections.abc import Callable
from pathlib import Path

from services.decoder.models.decoder_model import DecoderModel
from services.decoder.settings import DecoderSettings
from services.decoder.worker.planned_adapters import ReadAdapter
from shared.checkpoint.folder import Checkpoint
from shared.errors import Precondition
from shared.lora.adapter import LoraAdapter
from shared.lora.allowed_folder import allowed_folder


def adapter_reader(settings: DecoderSettings, model: DecoderModel) -> ReadAdapter | None:
    """What reads an adapter by its digest and folder; None where none may be loaded."""
    allowed = settings.allowed_adapter_dir
    if allowed is None:
        return None

    def read(lora_id: str, folder: str) -> Callable[[], None]:
        adapter = LoraAdapter.open(allowed_folder(folder, Path(allowed)), settings.max_lora_rank)
        if adapter.lora_id != lora_id:
            raise Precondition(
                "ADAPTER_CHANGED",
                f"{folder} has other weights than when it was loaded: load the adapter anew, from another folder or"
                " with load_inplace",
            )
        checkpoint = Checkpoint(settings.model, settings.family)
        try:
            return model.read_adapter(checkpoint, folder, adapter)
        finally:
            checkpoint.close()

    return read
