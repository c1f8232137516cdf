"""A model's chat template, and the tokens that end its answers."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from services.families import registry
from services.families.family import load_part
from shared.bounded_file import read_text
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.templates.processes import TemplateLimit, TemplateProcesses, TemplateRefusal
from shared.text.templates.template_file import TEMPLATE, read_template, read_tool_template
from shared.text.tokenizer_file import TokenizerFile

_QUESTION, _ANSWER = "t3ss3ra question", "t3ss3ra answer"


def find_template(checkpoint: Checkpoint, chosen: Path | None = None) -> str | None:
    """The chat template in the file `chosen`, else the checkpoint's, else the family's, which may come before the
    checkpoint's; None for a model without one. Raises InvalidRequest if a file cannot be read.
    """
    if chosen is not None:
        try:
            return read_text(chosen, TEMPLATE)
        except (OSError, ValueError) as error:
            raise InvalidRequest("CHAT_TEMPLATE", f"--chat-template {chosen}: {error}") from error
    family = registry.find(checkpoint)
    source = read_template(checkpoint.folder)
    if family.template_first or source is None:
        own = family.chat_template(checkpoint)
        return source if own is None else own
    return source


def find_tool_template(checkpoint: Checkpoint, chosen: Path | None = None) -> str | None:
    """The template of a checkpoint's tokenizer for conversations with tools; None where the one of `find_template`
    serves them too. As in transformers, a model's processor has none.
    """
    family = registry.find(checkpoint)
    if chosen is not None or family.takes_media or family.template_first:
        return None
    return read_tool_template(checkpoint.folder)


def stop_ids(
    checkpoint: Checkpoint, tokenizer: TokenizerFile, template: str | None
) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, ascending: those that the checkpoint's files name, where they name none the
    tokenizer's `eos_token`; those of the family's own code; and where none of these is in what the chat template writes
    behind an answer, the first special token that it writes there. Raises InvalidRequest for files that cannot be used.
    """
    ids = set(checkpoint.eos_token_ids())
    eos = tokenizer.special_id("eos_token")
    if not ids and eos is not None:
        ids.add(eos)
    known = tokenizer.ids()
    family = registry.find(checkpoint)
    texts = load_part(family.stops)(checkpoint) if family.stops else ()
    ids |= {known[text] for text in texts if text in known}
    if template is not None:
        written = _special_behind_an_answer(template, tokenizer)
        if written and not ids.intersection(written):
            ids.add(written[0])
    return tuple(sorted(ids))


def _special_behind_an_answer(template: str, tokenizer: TokenizerFile) -> list[int]:
    """The special tokens behind the last turn of a conversation that ends with an answer, up to the first text among
    them; none where a template ends an answer with text, or takes no such conversation."""
    rest = _behind_an_answer(template, tuple(tokenizer.special_tokens.items())).strip()
    special = sorted(
        (
            (token["content"], token["id"])
            for token in tokenizer.content["added_tokens"]
            if token["special"]
        ),
        key=lambda token: -len(token[0]),
    )
    found: list[int] = []
    while rest:
        first = next((token for token in special if rest.startswith(token[0])), None)
        if first is None:
            break
        found.append(first[1])
        rest = rest.removeprefix(first[0]).lstrip()
    return found


@lru_cache(8)
def _behind_an_answer(template: str, variables: tuple[tuple[str, str], ...]) -> str:
    """What a template writes behind an answer's text; it may take texts as strings or as lists of parts. Nothing where
    it takes no such conversation. Raises InvalidRequest for one that takes too much memory or time.
    """
    given = {**dict(variables), "tools": None, "documents": None, "add_generation_prompt": False}
    with TemplateProcesses() as processes:
        for as_parts in (False, True):

            def content(text: str, as_parts: bool = as_parts) -> Any:
                return [{"type": "text", "text": text}] if as_parts else text

            turns = [
                {"role": "user", "content": content(_QUESTION)},
                {"role": "assistant", "content": content(_ANSWER)},
            ]
            try:
                text = processes.render(template, {**given, "messages": turns})
            except TemplateLimit as error:
                raise InvalidRequest("CHAT_TEMPLATE", str(error), field="model") from error
            except TemplateRefusal:
                continue
            before, answer, rest = text.rpartition(_ANSWER)
            if answer and _QUESTION in before and "'type'" not in text:
                return rest
    return ""
