"""Chat templates: how one is rendered for a conversation, within bounds, and what it takes."""

from collections.abc import Mapping
from typing import Any

from services.preprocess.content_format import ContentFormat
from shared.errors import InvalidRequest
from shared.prompts.roles import ROLES, SERVED
from shared.text.templates.processes import TemplateLimit, TemplateProcesses, TemplateRefusal

_PROBE = "t3ss3ra probe"


class ChatTemplate:
    """One template with the variables of its tokenizer (`bos_token`, `eos_token`, ...).

    `source` is its text. `takes_parts[role]` says whether a turn of that role may be a list of parts,
    `takes_text[role]` whether it may be a string. Both are what `content_format` says; `AUTO` finds out by trying, and
    where the template refuses the trial by vLLM's rule.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        processes: TemplateProcesses,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> None:
        """Rendered in `processes`. Raises TemplateRefusal for one that does not compile, or is not tried out within
        their bounds.
        """
        self.source, self._processes = source, processes
        loops = processes.loops_over_content(source)  # compiles it, too
        self._variables = dict(variables)
        self._renders_media: dict[tuple[str, str], bool] = {}
        self._media_texts: dict[tuple[str, str], str] = {}
        if content_format is ContentFormat.AUTO:
            self._loops = loops
            self.takes_parts = self._find_takes_parts()
            self.takes_text = self._find_takes_text()
        else:
            as_parts = content_format is ContentFormat.OPENAI
            self.takes_parts = dict.fromkeys(SERVED, as_parts)
            self.takes_text = dict.fromkeys(SERVED, not as_parts)

    def knows(self, role: str) -> bool:
        """Whether the template has a role by the newer of its names; one with a single name is known."""
        return not ROLES[role].older or role in self.source

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text; `variables` may hold `tools` and `documents`. Raises TemplateRefusal with the
        template's message, or TemplateLimit when it takes too long or too much memory.
        """
        # As transformers does: a template asks whether there are any tools or documents.
        given = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **(variables or {}),
        }
        return self._processes.render(self.source, given)

    def renders_media(self, kind: str, marker: str) -> bool:
        """Whether an "image" or "video" part of a user turn becomes exactly one `marker`."""
        if (kind, marker) not in self._renders_media:
            self._renders_media[kind, marker] = self._try_media(kind, marker)
        return self._renders_media[kind, marker]

    def media_text(self, kind: str, marker: str) -> str:
        """What a part of a user turn becomes between two texts: `marker`, and what the template writes around it. The
        marker alone where the template cannot render the kind, or puts it elsewhere.
        """
        if (kind, marker) not in self._media_texts:
            self._media_texts[kind, marker] = self._find_media_text(kind, marker)
        return self._media_texts[kind, marker]

    def _find_media_text(self, kind: str, marker: str) -> str:
        if not self.renders_media(kind, marker):
            return marker
        text = {"type": "text", "text": _PROBE}
        try:
            written = self.render(
                [{"role": "user", "content": [text, {"type": kind}, text]}],
                add_generation_prompt=False,
            )
        except TemplateLimit:
            raise
        except TemplateRefusal:
            return marker
        parts = written.split(_PROBE)
        return parts[1] if len(parts) == 3 and parts[1].count(marker) == 1 else marker

    def _try_media(self, kind: str, marker: str) -> bool:
        if not self.takes_parts["user"]:
            return False
        parts = [{"type": kind}, {"type": "text", "text": _PROBE}]
        try:
            text = self.render([{"role": "user", "content": parts}], add_generation_prompt=True)
        except TemplateLimit:
            raise
        except TemplateRefusal:
            return False
        return text.count(marker) == 1

    def _find_takes_parts(self) -> dict[str, bool]:
        # A template that takes strings for the user role takes them for every role.
        part = [{"type": "text", "text": _PROBE}]
        if not self._renders("user", part, "?", self._loops):
            return dict.fromkeys(SERVED, False)
        question = [{"type": "text", "text": "?"}]
        others = {role: self._renders(role, part, question) for role in SERVED if role != "user"}
        return {"user": True, **others}

    def _find_takes_text(self) -> dict[str, bool]:
        question = [{"type": "text", "text": "?"}] if self.takes_parts["user"] else "?"
        return {
            role: self._renders(role, _PROBE, question, not self.takes_parts[role])
            for role in SERVED
        }

    def _renders(
        self,
        role: str,
        content: str | list[dict[str, str]],
        question: str | list[dict[str, str]],
        where_refused: bool = False,
    ) -> bool:
        """Whether the text of a content comes out as text, not as Python writes a list."""
        user = {"role": "user", "content": question}
        before = [user] if role in ("assistant", "tool") else []
        after = [] if role == "user" else [user]
        try:
            turns = [*before, {"role": role, "content": content}, *after]
            text = self.render(turns, add_generation_prompt=False)
        except TemplateLimit:  # a trial has next to nothing to render: the template is at fault
            raise
        except TemplateRefusal:
            return where_refused
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def refused(error: TemplateRefusal) -> InvalidRequest:
    """What a refusal means to the client."""
    return InvalidRequest("CHAT_TEMPLATE", str(error), field="messages")
