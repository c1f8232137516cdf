"""The checkpoint's own processor, from transformers: tokenizer and image processor, without torch and torchvision."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shared.checkpoint.files import read_json
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    import PIL.Image

OFFSETS = "text_replacement_offsets"
# Beside the tensors of a picture whose tokens all take rows: their ids [n].
SPAN_IDS = "span_ids"
# What a processor makes of the text, and not of the pictures; token types of any kind are too.
_TEXT = ("input_ids", "attention_mask", "cross_attention_mask", OFFSETS)
_TYPES = "token_type_ids"
_PLACEHOLDERS = ("image_token_id", "image_token_index")
# Names in released checkpoints that transformers no longer has.
_RENAMED = {"Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor"}
_MADE_HERE = ("image_processor", "tokenizer", "video_processor")


def build_processor(checkpoint: Checkpoint, image_config: dict[str, Any]) -> Any:
    """An instance of the processor class that the checkpoint names, for texts and images.

    image_config: settings of its image processor, which is the class that they name (a family's own, or that of
    transformers in its Pillow form). A video processor would need torchvision and is left out (None).
    Raises InvalidRequest: UNSUPPORTED_MODEL for a class that is not transformers' or takes other parts, MISSING_PACKAGE
    where its module needs a package that is not installed, BAD_CHECKPOINT for settings that it does not take.
    """
    from transformers import AutoTokenizer

    name = _processor_name(checkpoint)
    kind = _processor_class(checkpoint, name)
    unknown = [part for part in kind.get_attributes() if part not in _MADE_HERE]
    if unknown:
        raise _unsupported(checkpoint, f"{name} needs {', '.join(unknown)}")
    images = image_processor_class(image_processor_name(image_config))
    try:
        made = {
            "image_processor": images.from_dict(image_config),
            "tokenizer": AutoTokenizer.from_pretrained(checkpoint.folder),
            "video_processor": None,
        }
        parts = [made[part] for part in kind.get_attributes()]
        return kind.from_args_and_dict(parts, _settings(checkpoint.folder))
    except ImportError as error:
        raise _missing(name, error) from error
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"{checkpoint.folder}: {name} cannot be made of its files: {error}"
        ) from error


def run_processor(
    processor: Any, pictures: "Sequence[PIL.Image.Image]", text: str, **options: Any
) -> Any:
    """What a processor makes of a prompt whose text has its image token for each picture, as numpy arrays; under
    OFFSETS what it has put in the places of these tokens."""
    return processor(
        images=list(pictures),
        text=[text],
        return_tensors="np",
        return_text_replacement_offsets=True,
        **{"add_special_tokens": False, **options},
    )


def picture_tensors(made: Any) -> dict[str, npt.NDArray[Any]]:
    """Those of a processor's tensors that are made of pictures, float64 as float32."""
    found = {
        name: np.asarray(made[name])
        for name in made
        if name not in _TEXT and not name.endswith(_TYPES)
    }
    wide = {name for name, values in found.items() if values.dtype == np.float64}
    return {name: v.astype(np.float32) if name in wide else v for name, v in found.items()}


def placeholder_ids(checkpoint: Checkpoint) -> list[int]:
    """The ids whose embeddings the model replaces by those of pictures, by its configuration with its defaults."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.folder)
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return sorted({int(number) for number in found if number is not None})


def image_processor_name(config: dict[str, Any]) -> str:
    """The image processor's name without the suffix of its implementation ("CLIPImageProcessor")."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    if not name:
        raise InvalidRequest(
            "BAD_CHECKPOINT", "preprocessor_config.json has no image_processor_type"
        )
    name = name.removesuffix("Fast").removesuffix("Pil")
    name = name.replace("FeatureExtractor", "ImageProcessor")
    return _RENAMED.get(name, name)


def image_processor_class(name: str) -> Any:
    """The class of an image processor of transformers, in its form for Pillow, or of a family ("package.module:name").

    Raises InvalidRequest if there is none.
    """
    import transformers

    if ":" in name:
        module, _, own = name.partition(":")
        return getattr(importlib.import_module(module), own)
    found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    if found is None:
        raise InvalidRequest(
            "UNSUPPORTED_MODEL", f"transformers has no image processor {name}", field="model"
        )
    needs = getattr(
        found, "_backends", ()
    )  # of a class that stands in for one that cannot be imported
    if needs:
        raise InvalidRequest(
            "UNSUPPORTED_MODEL",
            f"transformers has the image processor {name} for {' and '.join(sorted(needs))} alone, not for Pillow:"
            " pictures are processed without them here, whether they are installed or not",
            field="model",
        )
    return found


def _processor_name(checkpoint: Checkpoint) -> str:
    """The name that a file of the checkpoint gives, else what transformers takes for the model's type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = (_settings(checkpoint.folder), checkpoint.image_processor_config)
    for found in (*files, checkpoint.tokenizer_config):
        if found.get("processor_class"):
            return str(found["processor_class"])
    kind = str(checkpoint.config.get("model_type"))
    if kind not in PROCESSOR_MAPPING_NAMES:
        raise _unsupported(checkpoint, f"transformers has no processor for model type {kind!r}")
    return str(PROCESSOR_MAPPING_NAMES[kind])


def _processor_class(checkpoint: Checkpoint, name: str) -> Any:
    """From its own module: the public name of one that takes videos asks for torchvision."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kinds = [kind for kind, named in PROCESSOR_MAPPING_NAMES.items() if named == name]
    if not kinds:
        raise _unsupported(checkpoint, f"transformers has no processor {name}")
    module = model_type_to_module_name(kinds[0])
    try:
        found = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    except ImportError as error:
        raise _missing(name, error) from error
    # It would not take a Pillow image processor, or none for videos, where it knows of others.
    unchecked = {"check_argument_for_proper_class": lambda self, name, part: type(part)}
    return type(name, (getattr(found, name),), unchecked)


def _settings(folder: Path) -> dict[str, Any]:
    """The processor's own settings: those of processor_config.json that are no part's, and no chat template."""
    path = folder / "processor_config.json"
    found = read_json(path) if path.is_file() else {}
    return {key: value for key, value in found.items() if key != "chat_template"}


def _unsupported(checkpoint: Checkpoint, what: str) -> InvalidRequest:
    return InvalidRequest("UNSUPPORTED_MODEL", f"{checkpoint.folder}: {what}", field="model")


def _missing(name: str, error: ImportError) -> InvalidRequest:
    return InvalidRequest(
        "MISSING_PACKAGE", f"the processor {name} cannot run here: {error}", field="model"
    )
