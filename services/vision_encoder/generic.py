"""The encoder of models without one of their own: what their transformers class does with the tensors of an item."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import PIL.Image
import structlog
import torch
import transformers
from torch import Tensor
from transformers.utils import ModelOutput

from services.families import registry
from services.families.family import ItemSize, load_part
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.towers.encoder import BadPixels, Item, PixelArray
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import (
    decoder_paths,
    model_class,
    other_than_encoder,
    read_config,
    untied,
)
from shared.checkpoint.processor import (
    SPAN_IDS,
    build_processor,
    picture_tensors,
    placeholder_ids,
    run_processor,
)
from shared.checkpoint.refusal import unsupported
from shared.weights.class_weights import load_class

log = structlog.get_logger(__name__)

_SAMPLE = ItemSize(64, 48)
_PATCH_VALUES = 3 * 14 * 14


class NoRows(ValueError):
    """A class does not put the rows of a picture in the places of tokens."""


class GenericEncoder:
    """`get_image_features` of the checkpoint's class, for one item at a time.

    Rows are [n, (1 + levels) * H]: H is the width of the text model, and behind the embedding itself stand the rows
    that the decoder adds behind its first layers (deepstack), where the class has such.
    """

    stacked = False
    uses_ops = False

    def __init__(self, checkpoint: Checkpoint, device: Device) -> None:
        """Raises InvalidRequest for a class that gives no such rows, or not one for each placeholder."""
        kind, config = model_class(checkpoint), read_config(checkpoint)
        self.dtype = device.dtype
        self._device = device
        family = registry.find(checkpoint)
        self._processor = build_processor(checkpoint, family.processor_config(checkpoint))
        self._takes_all = family.takes_all_rows
        self._item_rows = family.item_rows(checkpoint)
        overrides = family.overrides
        features = overrides.get("features")
        self._features = load_part(features) if features else image_features
        inside = overrides.get("encoder_path")
        left_out = (
            other_than_encoder(kind, config, inside) if inside else decoder_paths(kind, config)
        )
        loaded = load_class(checkpoint, kind, untied(config), left_out, self.dtype)
        self._model = loaded.to(device.where)
        self.hidden_size = self._try(checkpoint, config.get_text_config(decoder=True).hidden_size)
        log.info(
            "pictures are encoded by the code of transformers",
            model=kind.__name__,
            device=device.name,
            transformers=transformers.__version__,
        )

    def cost(self, item: Item) -> int:
        """As many patches as its values would make at 14 pixels."""
        if not item.tensors:
            raise BadPixels("the item has no tensors")
        return 1 + sum(values.size for values in item.tensors.values()) // _PATCH_VALUES

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[Tensor]:
        """Rows [rows, hidden_size] of each item by itself: its bits depend on nothing else."""
        return self._device.download([self._rows(item.tensors) for item in items])

    def sample(self, size: ItemSize) -> Item:
        """A black image."""
        return Item(self._make(size)[1], height=size.height, width=size.width)

    def _try(self, checkpoint: Checkpoint, width: int) -> int:
        """The width of rows, from those of a sample. Raises InvalidRequest unless there is one for each placeholder, as
        wide as the text model or a multiple."""
        try:
            ids, tensors = self._make(_SAMPLE)
            rows = self._rows(tensors)
        except NoRows as error:
            raise unsupported(checkpoint, str(error)) from error
        except Exception as error:  # whatever the code of some model raises
            raise unsupported(checkpoint, f"its encoder fails on a picture: {error!r}") from error
        known = ids if self._takes_all else placeholder_ids(checkpoint)
        count = self._item_rows or int(np.isin(ids, known).sum())
        if rows.shape[1] % width or len(rows) != count:
            raise unsupported(
                checkpoint,
                f"its encoder gives rows of {list(rows.shape)} for a picture with {count} placeholders"
                f" in a text of width {width}",
            )
        return rows.shape[1]

    def _make(self, size: ItemSize) -> tuple[PixelArray, Mapping[str, PixelArray]]:
        """The ids and tensors of a black image."""
        picture = PIL.Image.new("RGB", (size.width, size.height))
        made = run_processor(self._processor, [picture], self._processor.image_token)
        ids, tensors = np.asarray(made["input_ids"])[0], picture_tensors(made)
        return ids, {**tensors, SPAN_IDS: ids} if self._takes_all else tensors

    @torch.inference_mode()
    def _rows(self, tensors: Mapping[str, PixelArray]) -> Tensor:
        given = [torch.from_numpy(np.array(values)) for values in tensors.values()]
        there = zip(tensors, self._device.upload(*given), strict=True)
        return self._compute(dict(there))

    def _compute(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The class's rows for tensors on the device."""
        rows: Tensor = self._features(
            self._model,
            {
                name: value.to(self.dtype) if value.is_floating_point() else value
                for name, value in tensors.items()
            },
        )
        return rows.to(self.dtype)


def image_features(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Rows by `get_image_features` of the model or of what it wraps, called with the tensors that it has arguments
    for."""
    owner = model if hasattr(model, "get_image_features") else model.model
    known = inspect.signature(owner.get_image_features).parameters
    made = owner.get_image_features(**{name: tensors[name] for name in tensors if name in known})
    levels = getattr(made, "deepstack_features", None) or ()
    first = made.get("pooler_output") if isinstance(made, ModelOutput) else made
    if first is None:
        raise NoRows("it gives no embedding rows for a picture, only rows for layers of its choice")
    return torch.cat([_flat(part) for part in (first, *levels)], -1)


def _flat(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """[n, width] of rows that are one tensor, or one for each picture."""
    if isinstance(rows, Tensor):
        return rows.reshape(-1, rows.shape[-1])
    return torch.cat([_flat(part) for part in rows])
