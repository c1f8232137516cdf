"""The record of a model family: which checkpoints it serves and where its parts are. Nothing heavy is imported here."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

# Parts that run the code of transformers for the checkpoint's own classes.
GENERIC_PROMPT = "services.preprocess.prompt.generic:GenericRule"
GENERIC_ENCODER = "services.vision_encoder.generic:GenericEncoder"


@dataclass(frozen=True)
class ItemSize:
    """Size of a media item before it is processed: `width`, `height` in pixels; `frames` of a video."""

    width: int
    height: int
    frames: int = 0
    tokens: int = 0  # prompt tokens that stand for it, where known; else 0
    modality: Modality.ValueType = Modality.MODALITY_IMAGE


@dataclass(frozen=True)
class Family:
    """Parts are written "package.module:name" and imported by the service that runs them, with `load_part`.

    A checkpoint's prompt rule and encoder are those of the family of its architecture, its decoder and configuration
    those of the family of its text model: the two may be different families.
    """

    # `architectures` of config.json that have this prompt and encoder; none: `config_keys` alone tell.
    architectures: tuple[str, ...]
    text_types: tuple[str, ...] = ()  # `model_type` of the text models that the decoder runs
    # Keys that config.json must have for this family, where several share the names above; the most keys win.
    config_keys: tuple[str, ...] = ()
    prompt: str = ""  # a `PromptRule`; empty: the model takes no media
    encoder: str = ""  # an `Encoder`; empty: the same
    decoder: str = ""  # a `DecoderModel`
    # How the names of the encoder's tensors begin, without a leading "model.".
    encoder_tensors: tuple[str, ...] = ()
    config: str = ""  # a function of a Checkpoint that reads the decoder's shape (DecoderConfig), without torch
    processor: str = ""  # a function of a Checkpoint: its image processor's settings, where not those of its files
    template: str = ""  # a function of a Checkpoint: the chat template where its files have none
    # Whether that comes before the files' own, which does not say all that the model's code writes.
    template_first: bool = False
    # A function of a Checkpoint: the texts of tokens at which the model's own code ends an answer, beside those of its
    # files (`chat_format.py`).
    stops: str = ""
    # A function of a Checkpoint: what the model's own code does to the text of a chat's reply, as the names of steps
    # (`shared/text/reply_cleaning.py`).
    clean_up: str = ""
    sizes: str = ""  # a function of a Checkpoint and a Modality, for `largest`, without torch
    # Kinds of media that its prompts may have, where it has an encoder; see `modalities`.
    takes: tuple[Modality.ValueType, ...] = (Modality.MODALITY_IMAGE,)
    # Of generic parts: "finish" and "features" name functions, "merge" may be "add" and "rows" "all", "most_images" is
    # a number, "item_rows" names a function of a Checkpoint that gives the rows of any item where layers attend to
    # them, "decoder_path" is where the text model hangs in the class, "encoder_path" where the encoder of one inside
    # its decoder does (docs/add-a-model.md).
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_media(self) -> bool:
        """Whether it has an encoder."""
        return bool(self.encoder)

    @property
    def takes_all_rows(self) -> bool:
        """Whether each of a picture's tokens takes an embedding row, separators too."""
        return self.overrides.get("rows") == "all"

    def item_rows(self, checkpoint: Checkpoint) -> int:
        """Rows of a media item that layers attend to; 0 where tokens take rows."""
        named = self.overrides.get("item_rows")
        rows: int = load_part(named)(checkpoint) if named else 0
        return rows

    @property
    def is_known_by_keys(self) -> bool:
        """Whether checkpoints are recognised whatever the name of their architecture."""
        return not self.architectures and bool(self.config_keys)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint has what `config_keys` names."""
        return all(checkpoint.config.get(key) is not None for key in self.config_keys)

    def processor_config(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Settings of the image processor, `image_processor_type` among them; nothing where none are known."""
        if not self.processor:
            return checkpoint.image_processor_config
        config: dict[str, Any] = load_part(self.processor)(checkpoint)
        return config

    def chat_template(self, checkpoint: Checkpoint) -> str | None:
        """The family's own chat template, or None."""
        if not self.template:
            return None
        template: str | None = load_part(self.template)(checkpoint)
        return template

    @property
    def modalities(self) -> tuple[Modality.ValueType, ...]:
        """Kinds of media that its prompts may have."""
        return self.takes if self.takes_media else ()

    def largest(self, checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
        """The size of an item that takes most tokens. Raises InvalidRequest for media options that are not served."""
        size: ItemSize = load_part(self.sizes)(checkpoint, modality)
        return size


def load_part(name: str) -> Any:
    """The object that "package.module:name" names. Raises ImportError or AttributeError if there is none."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def is_generic(name: str) -> bool:
    """Whether a part "package.module:name" runs the code of transformers."""
    return "generic" in name.partition(":")[0].split(".")
