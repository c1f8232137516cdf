"""From a request's input to token ids: template, tokenizer, placeholders, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.families.family import ItemSize
from services.preprocess.content_format import ContentFormat
from services.preprocess.media.fitted_picture import Square
from services.preprocess.media.item_options import Options
from services.preprocess.prompt import conversation as conversations
from services.preprocess.prompt.chat_template import ChatTemplate, refused
from services.preprocess.prompt.mindie_layout import PLACE, CodedPicture, MindieLayout, read_ids
from services.preprocess.prompt.open_message import cut_at_end, mark_end
from services.preprocess.prompt.prompt_rule import (
    Example,
    MediaSpan,
    Mode,
    Place,
    PromptRule,
    Update,
)
from services.preprocess.prompt.tokenizer import Ids, PromptTokenizer
from shared.errors import InvalidRequest
from shared.prompts.length import require_prompt_fits
from shared.prompts.modality import NAMES
from shared.text.guard import GUARD
from shared.text.templates.processes import TemplateProcesses, TemplateRefusal
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import Conversation, PrepareRequest

AnyIds = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

# How many times the model's length a text may have that is cut.
_CUT_AT_MOST = 16
# In the place of a marker's id: of items that stand before the prompt, where nothing marks them.
_AT_START = -1


@dataclass(frozen=True)
class Draft:
    """A prompt with one marker for each image. `field` is what the client calls it.

    `pictures`: those that are named among a client's ids.
    """

    ids: Ids
    text: str
    field: str
    pictures: tuple[CodedPicture, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt with its placeholders: ids, each item's span, and the offset of each span."""

    ids: Ids
    spans: tuple[MediaSpan, ...] = ()
    offsets: tuple[int, ...] = ()


class PromptBuilder:
    """Builds a model's prompts. Its methods are pure; they may run in any thread."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate | None,
        rule: PromptRule,
        processes: TemplateProcesses,
        *,
        vocab_size: int,
        max_model_len: int,
        processor_adds_special_tokens: bool,
        trust_request_template: bool,
        content_format: ContentFormat = ContentFormat.AUTO,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """`tool_template`: in place of `template` for conversations with tools."""
        self._tokenizer = tokenizer
        updates = rule.updates()
        self._marker_ids = {update.modality: _marker(update, tokenizer) for update in updates}
        texts = {
            kind: "" if token == _AT_START else tokenizer.token_text(token)
            for kind, token in self._marker_ids.items()
        }
        self._markers = {NAMES[modality]: text for modality, text in texts.items()}
        self._around = {texts[u.modality]: u.around for u in updates if any(u.around)}
        if self._markers:
            tokenizer.protect(*self._markers.values(), *rule.protected)
        self._template = template
        self._tool_template = tool_template
        self._processes = processes  # of templates that come with requests
        self._rule = rule
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        # transformers: a tokenizer's apply_chat_template adds none, a processor's adds them to a
        # text without them.
        self._adds_special_tokens = processor_adds_special_tokens
        self._trusts = trust_request_template
        self._content_format = content_format  # of templates that come with requests
        for example in rule.examples:
            self.write(example)

    @property
    def limits(self) -> Mapping[Modality.ValueType, int | None]:
        """See `PromptRule.limits`."""
        return self._rule.limits

    @property
    def mindie(self) -> MindieLayout | None:
        """See `PromptRule.mindie`."""
        return self._rule.mindie

    def square(self, images: int) -> Square | None:
        """See `PromptRule.square`."""
        return self._rule.square(images)

    def options(self, given: Options, modality: Modality.ValueType) -> Options:
        """See `PromptRule.options`."""
        return self._rule.options(given, modality)

    def draft(self, request: PrepareRequest, kept: Sequence[int] | None = None) -> Draft:
        """Renders and tokenizes; `kept`: of a conversation these messages alone. Raises InvalidRequest naming the
        field.
        """
        keep = request.keep_last_tokens
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
        match request.WhichOneof("input"):
            case "conversation" if request.conversation.as_prompt:
                draft = self._parts(request.conversation, keep, adds)
            case "conversation":
                draft = self._chat(request.conversation, keep, adds, kept)
            case "text":
                draft = self._text(request, adds is not False)
            case "token_ids":
                draft = self._token_ids(request.token_ids)
            case "mindie_ids":
                draft = self._mindie_ids(request.mindie_ids)
            case _:
                raise InvalidRequest("NO_PROMPT", "the request has no prompt", field="prompt")
        return replace(draft, ids=draft.ids[-keep:]) if keep else draft

    def expand(self, draft: Draft, items: Sequence[ItemSize]) -> Prompt:
        """Puts each item's span in its marker's place. Raises InvalidRequest when markers and items do not match."""
        if not items:
            return Prompt(draft.ids)
        markers = [self._marker_ids[item.modality] for item in items]
        first = np.full(markers.count(_AT_START), _AT_START, np.int32)
        ids = np.concatenate([first, draft.ids])
        places = np.flatnonzero(np.isin(ids, list(self._marker_ids.values())))
        if ids[places].tolist() != markers:
            raise InvalidRequest(
                "IMAGE_MARKERS",
                f"{draft.field}: {len(places)} places are written for {len(items)} images and videos, or not in"
                " their order",
                field=draft.field,
            )
        spans = tuple(self._rule.span(item) for item in items)
        pieces: list[Ids] = []
        offsets: list[int] = []
        length = start = 0
        for place, span in zip(places.tolist(), spans, strict=True):
            text, image = self._part(ids, start, place), np.array(span.token_ids, np.int32)
            offsets.append(length + len(text))
            pieces += [text, image]
            length += len(text) + len(image)
            start = place + 1
        last = self._part(ids, start, len(ids))
        return Prompt(np.concatenate([*pieces, last]), spans, tuple(offsets))

    def _part(self, ids: Ids, start: int, end: int) -> Ids:
        """A part of a prompt's ids, behind an item with what begins it."""
        part = ids[start:end]
        if start == 0 or start == end or not self._rule.part_beginning:
            return part
        return np.concatenate([np.array(self._rule.part_beginning, np.int32), part])

    def check_length(self, tokens: int, limit: int, field: str, at_least: bool = False) -> None:
        """Raises InvalidRequest when a prompt is over the request's or the model's limit."""
        require_prompt_fits(tokens, self._max_model_len, field, limit, at_least)

    def _chat(
        self, conversation: Conversation, keep: int, adds: bool | None, kept: Sequence[int] | None
    ) -> Draft:
        """`adds`: the special tokens around it; None as the model's processor does."""
        template = self._template_for(conversation)
        messages = conversations.template_messages(
            conversation, template, self._tokenizer, self._markers, kept
        )
        variables = conversations.template_variables(conversation, self._tokenizer)
        opens = conversation.add_generation_prompt
        if not conversation.HasField("add_generation_prompt"):
            opens = not conversation.continue_final_message
        if conversation.continue_final_message:
            if opens:
                raise InvalidRequest(
                    "CONFLICTING_FIELDS",
                    "add_generation_prompt: not beside continue_final_message",
                    field="add_generation_prompt",
                )
            mark_end(messages)
        try:
            text = template.render(messages, opens, variables)
        except TemplateRefusal as error:
            raise refused(error) from error
        if conversation.continue_final_message:
            text = cut_at_end(text)
        has_media = bool(conversations.media(conversation, kept))
        return self._written(text, "messages", adds, keep, has_media)

    def _parts(self, conversation: Conversation, keep: int, adds: bool | None) -> Draft:
        """A prompt with media in it. `adds`: see `_chat`."""
        pieces = conversations.prompt_pieces(conversation, self._template, self._markers)
        marks = conversation.marks_media and any(
            marker in piece.text
            for piece in pieces
            if not piece.is_media
            for marker in self._markers.values()
            if marker
        )
        if marks:
            # The places are where the text has them.
            written = "".join(piece.text for piece in pieces if not piece.is_media)
        else:
            written = "".join(
                piece.text if piece.is_media else self._tokenizer.guard_marker(piece.text)
                for piece in pieces
            )
        return self._written(written, "prompt", adds, keep, any(piece.is_media for piece in pieces))

    def _written(self, text: str, field: str, adds: bool | None, keep: int, media: bool) -> Draft:
        """What a template has written; `media`: with places of items. `adds`: see `_chat`."""
        if self._rule.media_ending is not None and media:
            draft = self._encoded(text, field, adds is True, keep)
            ending = np.array(self._rule.media_ending, np.int32)
            return replace(draft, ids=np.concatenate([draft.ids, ending]))
        bos = self._tokenizer.special_tokens.get("bos_token")
        if adds is None:
            adds = self._adds_special_tokens and not (bos and text.startswith(bos))
        return self._encoded(text, field, adds, keep)

    def _template_for(self, conversation: Conversation) -> ChatTemplate:
        if conversation.chat_template:
            field = "chat_template"
            if not self._trusts:
                raise InvalidRequest(
                    "CHAT_TEMPLATE",
                    f"{field}: requests may bring none here (--trust-request-chat-template)",
                    field=field,
                )
            try:
                return ChatTemplate(
                    conversation.chat_template,
                    self._tokenizer.special_tokens,
                    self._processes,
                    self._content_format,
                )
            except TemplateRefusal as error:
                raise InvalidRequest("CHAT_TEMPLATE", str(error), field=field) from error
        if self._template is None:
            raise InvalidRequest(
                "CHAT_TEMPLATE",
                "messages: this model has no chat template; send a prompt, or start the service"
                " with --chat-template",
                field="messages",
            )
        if self._tool_template is not None and conversation.tools_json not in ("", "[]"):
            return self._tool_template
        return self._template

    def _text(self, request: PrepareRequest, adds: bool) -> Draft:
        text, pair = self._tokenizer.guard_marker(request.text), None
        if request.HasField("text_pair"):
            pair = self._tokenizer.guard_marker(request.text_pair)
        most = request.keep_first_tokens
        return self._encoded(text, "prompt", adds, request.keep_last_tokens or most, pair, most)

    def _encoded(
        self,
        text: str,
        field: str,
        add_special_tokens: bool,
        keep: int,
        pair: str | None = None,
        most: int = 0,
    ) -> Draft:
        """`keep`: of how many tokens are left in the end, 0 for all; `pair`, `most`: see `PromptTokenizer.encode`."""
        # Hopeless lengths are refused before they are tokenized; of what is cut, those beyond reason.
        least = (len(text) + len(pair or "")) // self._tokenizer.longest_token
        self.check_length(least // _CUT_AT_MOST if keep else least, 0, field, at_least=True)
        written = text
        for marker, (before, behind) in self._around.items():
            written = written.replace(marker, before + marker + behind)
        ids = self._tokenizer.encode(written, add_special_tokens, field, pair, most)
        if len(ids) == 0:
            raise InvalidRequest("EMPTY_PROMPT", f"{field}: the prompt has no tokens", field=field)
        return Draft(self._rule.finish(ids), text.replace(GUARD, ""), field)

    def write_chat(self, text: str, images: Sequence[ItemSize]) -> Prompt:
        """The prompt of a text that a template might have written, with a {} in the place of each image."""
        marker = self._markers[NAMES[Modality.MODALITY_IMAGE]]
        written = text.format(*[marker] * len(images))
        return self.expand(self._written(written, "prompt", None, 0, bool(images)), images)

    def write(self, example: Example) -> Prompt:
        """The example's prompt. Raises InvalidRequest if it does not come out as the checkpoint's own processor writes
        it."""
        draft = self._encoded(example.text, "prompt", True, 0)
        prompt = self.expand(draft, example.items)
        if prompt.ids.tolist() != list(example.ids):
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                "the model's processor does more to a prompt than to put tokens in the places of images:"
                " it needs a prompt rule of its own",
                field="model",
            )
        return prompt

    def _token_ids(self, data: bytes) -> Draft:
        field = "prompt"
        if not data or len(data) % 4:
            raise InvalidRequest("EMPTY_PROMPT", f"{field}: no whole token ids", field=field)
        ids: Ids = np.frombuffer(data, "<i4").astype(np.int32)
        self._check_vocabulary(ids, field)
        return Draft(ids, "", field)

    def _mindie_ids(self, data: bytes) -> Draft:
        layout, field = self._rule.mindie, "prompt"
        if layout is None:
            raise InvalidRequest(
                "NO_MINDIE_IDS", f"{field}: MindIE-LLM's ids are not known of this model"
            )
        if not data or len(data) % 8:
            raise InvalidRequest("EMPTY_PROMPT", f"{field}: no whole token ids", field=field)
        self.check_length(len(data) // 8, 0, field)
        coded = read_ids(np.frombuffer(data, "<i8").astype(np.int64), layout, field)
        marked, marker = coded.ids == PLACE, self._marker_ids[Modality.MODALITY_IMAGE]
        self._check_vocabulary(coded.ids[~marked], field)
        if (coded.ids == marker).any():
            raise InvalidRequest(
                "BAD_SHARED_MEMORY_ID",
                f"{field}: {marker} begins a picture, and no ids of its tensors follow",
                field=field,
            )
        ids = coded.ids.astype(np.int32)
        ids[marked] = marker
        return Draft(ids, "", field, coded.pictures)

    def _check_vocabulary(self, ids: AnyIds, field: str) -> None:
        wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(wrong):
            raise InvalidRequest(
                "BAD_TOKEN_ID",
                f"{field}: token id {wrong[0]} is outside the vocabulary of {self._vocab_size}",
                field=field,
            )


def _marker(update: Update, tokenizer: PromptTokenizer) -> int:
    """The token that an update's spans replace. Raises InvalidRequest for updates of other kinds."""
    if isinstance(update.target, str) and update.mode is Mode.REPLACE:
        return tokenizer.add_marker(update.target)
    if update.target is Place.START and update.mode is Mode.INSERT:
        return _AT_START
    if (
        update.mode is not Mode.REPLACE
        or not isinstance(update.target, tuple)
        or len(update.target) != 1
    ):
        raise InvalidRequest(
            "UNSUPPORTED_MODEL",
            f"{update}: media can only take the place of one token, or stand before the prompt",
            field="model",
        )
    return update.target[0]
