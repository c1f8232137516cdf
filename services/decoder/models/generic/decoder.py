"""A decoder of any transformers class whose layers attend through its attention interface."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import structlog
import torch
import transformers
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.generic import attention, experts
from services.decoder.models.generic.attention import (
    FirstLayersOnly,
    LayerRecord,
    NotServed,
    PagedAttention,
    answering,
)
from services.decoder.models.generic.attention_kind import attention_kind, run_marked
from services.decoder.models.generic.comparison import Verdict, compare, run_eagerly
from services.decoder.models.generic.experts import pack_experts
from services.decoder.models.generic.head import in_vocabulary, make_head
from services.decoder.models.generic.linears.division import divide, divides_experts, undivided
from services.decoder.models.generic.linears.stacked_linear import Calls, stack_linears
from services.decoder.models.generic.loading import (
    find_class,
    language_layers,
    load_model,
    path_of,
    require_served,
)
from services.decoder.models.generic.norm import replace_norms
from services.decoder.models.generic.parameters import guard_parameters
from services.decoder.models.generic.prompt_marks import PromptMarks
from services.decoder.models.generic.rope_index import Ids, Positions, RopeIndex
from services.decoder.models.generic.rotation import fix_rotations
from services.decoder.models.generic.routers import replace_routers
from services.decoder.models.layer_spec import Paged
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.steps.needs import Needs
from services.decoder.steps.step import Step
from services.families import registry
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import read_config
from shared.checkpoint.refusal import unsupported
from shared.model_config.decoder import TextSizes
from tessera.common.v1.media_pb2 import MediaItem

log = structlog.get_logger(__name__)

_TRIAL = 4  # tokens


class GenericDecoder(DecoderModel):
    """Embedding, layers and head are the class's own; attention, linear layers, experts and cache are ours."""

    code: ClassVar[str] = f"transformers {transformers.__version__}"
    equal_rows = False  # until they have been compared

    def __init__(self, model: Any, ops: BaseOps) -> None:
        """model: as `load_model` gives it, on the device of the ops or, of several ranks, on the host: this one's part
        of it goes to the device. Its weights are packed, and dropped.

        Raises NotServed for a model whose attention cannot be ours.
        """
        self._ops = ops
        self._counts_cache = False
        self._adds_rows = False  # of media, to the embeddings of their placeholders
        self._marks: PromptMarks | None = None
        self._base = language_layers(model)
        self._embedding = model.get_input_embeddings()
        _require_interface(model, self._base)
        if ops.ranks is not None:
            self.sums = divide(self._base, model.config, ops.ranks)
            if not self.sums:
                raise NotServed("its layers are not where its base_model_tp_plan says")
            model.to(ops.device)
            ops.ranks.settle()
        self._rope = RopeIndex.find(model)
        self.rotary_axes = self._rope.axes if self._rope else 0
        self.levels = _levels(model, self._base)
        text = model.config.get_text_config(decoder=True)
        self._pad_id = getattr(text, "pad_token_id", None) or 0
        # Beside the embedding of a token, each layer adds one of its own (Gemma 3n, Gemma 4).
        self._has_layer_inputs = bool(getattr(text, "hidden_size_per_layer_input", None))
        self.config = _sizes(model, self._embedding)
        model.set_attn_implementation(attention.NAME)
        model.set_experts_implementation(experts.NAME)
        self.sums += pack_experts(
            self._base, ops, ops.ranks is not None and divides_experts(model.config)
        )
        replace_norms(self._base, ops)
        replace_routers(self._base, ops)
        calls = Calls()
        with calls.of(self._base):
            self.layers = self._record()
        if not self.layers:
            raise NotServed("its layers do not attend through the attention interface")
        path = path_of(model, self._base)
        self._head = make_head(model, path, ops)
        stack_linears(self._base, ops, calls)
        guard_parameters(self._base, ops)
        if ops.ranks is not None:
            ops.ranks.settle()

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        ops: BaseOps,
        max_model_len: int,
        trust_remote_code: bool = False,
        check: bool = True,
    ) -> "GenericDecoder":
        """With `check` the model is compared with its class's own forward first.

        Raises InvalidRequest for one that differs, and for what cannot be loaded.
        """
        kind = find_class(checkpoint, trust_remote_code)
        config = read_config(checkpoint, trust_remote_code)
        require_served(checkpoint, kind, config)
        loaded = load_model(checkpoint, kind, config, ops.dtype)
        if ops.ranks is None:
            loaded = loaded.to(ops.device)
        path = registry.find(checkpoint).overrides.get("decoder_path", "")
        return cls.of_class(checkpoint, loaded.get_submodule(path), ops, max_model_len, check)

    @classmethod
    def undivided(cls, checkpoint: Checkpoint, ranks: int, trust_remote_code: bool) -> str:
        """Why a model cannot be divided among so many ranks; empty where it can."""
        return undivided(read_config(checkpoint, trust_remote_code), ranks)

    @classmethod
    def of_class(
        cls, checkpoint: Checkpoint, model: Any, ops: BaseOps, max_model_len: int, check: bool
    ) -> "GenericDecoder":
        """Of a model with its weights, where the constructor wants it. Raises InvalidRequest as `load` does."""
        fix_rotations(checkpoint, model, max_model_len)
        overrides = registry.find(checkpoint).overrides
        most = int(overrides.get("most_images", 2))  # that matter
        try:
            with torch.inference_mode():
                rope = RopeIndex.find(model)
                marked = run_marked(model, rope.axes if rope else 0, most)
                decoder = cls.checked(model, ops) if check else cls(model, ops)
                seen = attention_kind(decoder, decoder._base, ops, marked, most)
                decoder.needs = replace(decoder.needs, attention=seen)
                decoder._adds_rows = overrides.get("merge") == "add"
                if name := overrides.get("prompt_marks"):
                    decoder._set_marks(PromptMarks(partial(load_part(name), model.config)))
                return decoder
        except NotServed as error:
            raise unsupported(checkpoint, str(error)) from None

    @classmethod
    def checked(cls, model: Any, ops: BaseOps) -> "GenericDecoder":
        """As the constructor. Raises NotServed for a model that does not compute here what its class computes."""
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        with _class_errors():
            expected = run_eagerly(model, vocabulary, ops.dtype)
            decoder = cls(model, ops)
        verdict = compare(decoder, decoder._base, ops, expected)
        if not verdict.accepted:
            decoder._counts_cache = True
            with _class_errors():
                again = compare(decoder, decoder._base, ops, expected)
            verdict = again if again.accepted else verdict
        _require(verdict)
        decoder.needs = Needs(whole_prompt=verdict.whole_prompt)
        decoder.equal_rows = verdict.equal_rows
        decoder.largest_difference = verdict.difference
        log.info(
            "compared with the model's own forward",
            largest_difference=f"{verdict.difference:.1e} standard deviations",
            whole_prompts_only=verdict.whole_prompt,
            equal_rows=verdict.equal_rows,
        )
        return decoder

    def _record(self) -> list[Paged]:
        """What each call of attention keeps: from a forward that attends to nothing."""
        record = LayerRecord(self._ops.dtype, self._ops.codes_cache)
        ids = torch.zeros(_TRIAL, dtype=torch.int64, device=self._ops.device)
        with answering(record):
            positions = torch.arange(_TRIAL, device=self._ops.device)[None]
            self._run(self._embedding(ids), ids, positions)
        return record.layers

    def embed(
        self, ids: Tensor, embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """See `DecoderModel.embed`."""
        hidden: Tensor = self._embedding(ids)
        for rows, (first, count) in zip(embeds, runs, strict=True):
            if not self._adds_rows:
                hidden[first : first + count] = 0
            hidden[first : first + count] += rows
        return hidden

    def _set_marks(self, marks: PromptMarks) -> None:
        self._marks = marks
        self.rotary_axes = max(1, self.rotary_axes) + len(marks.names)

    def positions(self, prompt: Ids, media: Sequence[MediaItem]) -> tuple[Positions, int]:
        """See `DecoderModel.positions`. Raises InvalidRequest for media whose fields do not fit the prompt."""
        found, delta = self._rope(prompt, media) if self._rope else super().positions(prompt, media)
        return self._marks.beside(found, prompt) if self._marks else found, delta

    def forward(self, hidden: Tensor, step: Step, caches: Sequence[PagedKV]) -> Tensor:
        """See `DecoderModel.forward`."""
        with answering(PagedAttention(self._ops, step.meta, caches)):
            try:
                return self._run(hidden, step.ids, step.positions, step.media, step.levels)
            except FirstLayersOnly:
                return hidden

    def _run(
        self,
        hidden: Tensor,
        ids: Tensor,
        positions: Tensor,
        media: Tensor | None = None,
        levels: Sequence[Tensor] = (),
    ) -> Tensor:
        """Last hidden rows [T, H] of [T, H] at positions [axes, T]; the others as in `Step`."""
        marks: dict[str, Tensor] = {}
        if self._marks:
            positions, marks = self._marks.split(positions)
        inputs: dict[str, Any] = {
            **marks,
            "inputs_embeds": hidden[None],
            "position_ids": positions if len(positions) == 1 else positions[:, None],
            "use_cache": False,
        }
        takes_row = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        if media is not None:
            takes_row[media] = True
        if media is not None and levels:
            inputs["visual_pos_masks"] = takes_row[None]
            inputs["deepstack_visual_embeds"] = [rows[media] for rows in levels]
        if self._has_layer_inputs:
            known = ids.masked_fill(takes_row, self._pad_id)
            inputs["per_layer_inputs"] = self._base.get_per_layer_inputs(known[None])
        if self._counts_cache:
            inputs["past_key_values"] = _PositionsAsLength(positions[0])
        last: Tensor = self._base(**inputs).last_hidden_state
        return last[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel.logits`; those of tokens that have an embedding and no output are -inf."""
        return in_vocabulary(self._head.logits(hidden), self.config.vocab_size)

    @property
    def sketched_rows(self) -> int:
        """See `DecoderModel.sketched_rows`."""
        return self._head.sketched_rows

    def largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderModel.largest`."""
        return self._head.largest(hidden)


class _PositionsAsLength:
    """In the place of a cache, for layers that count positions by its length: each token has one of its own. Keys and
    values are not kept here."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """What is to be added to a token's place in the batch."""
        return self._before

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What came."""
        return keys, values


def _levels(model: Any, layers: Any) -> int:
    """After how many layers rows of media are added (deepstack)."""
    if "deepstack_visual_embeds" not in inspect.signature(layers.forward).parameters:
        return 0
    vision = getattr(model.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _require_interface(model: Any, layers: Any) -> None:
    if model.get_output_embeddings() is None:
        raise NotServed("it has no output matrix")
    takes = inspect.signature(layers.forward).parameters
    missing = {"inputs_embeds", "position_ids"} - set(takes)
    if missing:
        raise NotServed(f"its layers do not take {' and '.join(sorted(missing))}")


@contextmanager
def _class_errors() -> Iterator[None]:
    """Whatever a class raises at inputs that it does not have in mind says that it is not served."""
    try:
        yield
    except NotServed:
        raise
    except Exception as error:
        raise NotServed(f"its code says {type(error).__name__}: {error}") from error


def _require(verdict: Verdict) -> None:
    if verdict.accepted:
        return
    where = "its head" if verdict.layer is None else f"layer {verdict.layer}"
    raise NotServed(
        f"it differs from its own forward by {verdict.difference:.1e} standard deviations, from {where} on"
    )


def _sizes(model: Any, embedding: Any) -> TextSizes:
    text = model.config.get_text_config(decoder=True)
    return TextSizes(
        vocab_size=max(len(model.get_output_embeddings().weight), len(embedding.weight)),
        hidden_size=embedding.weight.shape[1],
        num_layers=text.num_hidden_layers,
        max_position_embeddings=getattr(text, "max_position_embeddings", 0),
    )
