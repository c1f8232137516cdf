"""The served model as the gateway knows it: its name, length, vocabulary and defaults. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from services.families import registry
from services.families.chat_format import find_template, find_tool_template, stop_ids
from services.families.family import load_part
from services.families.generic import require_length
from services.gateway.model.generation_defaults import GenerationDefaults, read_defaults
from services.gateway.model.output_forms import OutputForms
from services.gateway.model.pooled_files import read_pooled
from services.gateway.model.pooled_model import PooledModel, Task, not_served, tasks_of
from services.gateway.model.served_adapters import ServedAdapters
from shared.checkpoint.files import find_weights, indexed_files
from shared.checkpoint.folder import Checkpoint
from shared.environment import unix_time
from shared.errors import NotFound, Precondition
from shared.lora.modules import BASE
from shared.output_format.detect import AUTO
from shared.prompts.modality import NAMES
from shared.text.templates.template_file import read_template_file
from shared.text.text_fold import TokenBytes
from shared.text.tokenizer_file import TokenizerFile, read_tokenizer
from shared.text.tokenizer_library import open_tokenizer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against, and what turns their tokens into text."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # Of those the one that the tokenizer names: an answer that ends with it has no `stop_reason`.
    own_eos_ids: frozenset[int]
    defaults: GenerationDefaults
    table: TokenBytes
    tokenizer: Tokenizer
    created_unix_s: int
    # tokenizer_config.json with the chat template, for clients that count tokens themselves.
    tokenizer_info: Mapping[str, Any]
    kind: str = ""  # what the model is: the name of its architecture
    max_choices: int = 128
    max_logprobs: int = 20
    max_prompts: int = 128
    has_vision: bool = False  # it takes pictures
    takes: tuple[str, ...] = ()  # the kinds of media that it takes: "image", "video"
    clean_up: tuple[str, ...] = ()  # steps that the text of a chat's reply goes through
    # How it gives vectors or scores; None where it generates text.
    pooled: PooledModel | None = None
    # How it writes calls and reasoning.
    forms: OutputForms = field(default_factory=lambda: OutputForms({}))
    # LoRA adapters by the names that requests give.
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    # The files of its weights, with their bytes.
    files: tuple[tuple[str, int], ...] = ()

    @classmethod
    def load(
        cls,
        folder: Path,
        name: str,
        max_model_len: int | None = None,
        *,
        family: str = "",
        chat_template: Path | None = None,
        max_choices: int = 128,
        max_logprobs: int = 20,
        max_prompts: int = 128,
        calls: str = AUTO,
        reasoning: str = AUTO,
        adapters: ServedAdapters | None = None,
        task: str = AUTO,
        pooling: str = AUTO,
    ) -> "ServedModel":
        """Reads config, generation config, tokenizer and chat template of a checkpoint folder.

        `chat_template`: the file of another template than the model's own. `calls`, `reasoning`: how it writes them, by
        name. `task`, `pooling`: what it is served for, see `read_pooled`.

        Raises NotFound, InvalidRequest or Precondition, naming the file.
        """
        checkpoint = Checkpoint(folder, family)
        record = registry.find(checkpoint)
        config = registry.text_sizes(checkpoint)
        table = _table(folder / "tokenizer.json")
        words = read_tokenizer(folder / "tokenizer.json")
        tokenizer = open_tokenizer(words)
        template = find_template(checkpoint, chat_template)
        eos_token_ids = stop_ids(checkpoint, words, template)
        with_tools = find_tool_template(checkpoint, chat_template) or template
        vocab_size = config.vocab_size or len(table)
        longest = require_length(max_model_len or config.max_position_embeddings)
        defaults = _defaults(checkpoint, vocab_size, longest)
        return cls(
            name=name,
            max_model_len=longest,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            own_eos_ids=_own_eos_ids(checkpoint, words),
            defaults=defaults,
            table=table,
            tokenizer=tokenizer,
            created_unix_s=int(unix_time()),
            tokenizer_info=_tokenizer_info(checkpoint),
            kind=checkpoint.kind,
            max_choices=max_choices,
            max_logprobs=max_logprobs,
            max_prompts=max_prompts,
            has_vision=record.takes_media,
            takes=tuple(NAMES[modality] for modality in record.modalities),
            pooled=read_pooled(checkpoint, words, config.hidden_size, task, pooling),
            clean_up=load_part(record.clean_up)(checkpoint) if record.clean_up else (),
            forms=OutputForms.find(words, with_tools, calls, reasoning),
            adapters=adapters or ServedAdapters(),
            files=_files(folder),
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All that it is served for."""
        return tasks_of(self.pooled)

    def require(self, task: Task) -> None:
        """Raises InvalidRequest unless it is served for this."""
        if task not in self.tasks:
            raise not_served(task, self.pooled)

    def default_max_tokens(self, left: int) -> int:
        """`max_tokens` of a request that has none, where the model's length leaves `left` tokens."""
        return min(left, self.defaults.max_new_tokens or left)

    def check_name(self, name: str) -> None:
        """Raises NotFound unless `name` is this model's or that of an adapter."""
        self.adapter_of(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may name, as it is listed: the model, what it is called without an adapter where it has one
        by default, and its adapters."""
        return (self.name, *((BASE,) if self.adapters.default else ()), *self.adapters)

    def adapter_of(self, name: str) -> tuple[str, str]:
        """Name and digest of the adapter that answers a request for `name`; both empty for the model itself. Raises
        NotFound."""
        if name == self.name:
            default = self.adapters.default
            return (default, self.adapters[default]) if default else ("", "")
        if name == BASE:
            return "", ""
        lora_id = self.adapters.get(name)
        if lora_id is None:
            names = ", ".join(map(repr, self.names))
            raise NotFound(
                "MODEL_NOT_FOUND",
                f"the model {name!r} does not exist; this server has {names}",
                field="model",
            )
        return (name, lora_id) if lora_id else ("", "")


def _defaults(checkpoint: Checkpoint, vocab_size: int, max_model_len: int) -> GenerationDefaults:
    config, ends = checkpoint.generation_config, checkpoint.eos_token_ids()
    try:
        defaults = read_defaults(config, vocab_size, ends, max_model_len)
    except (TypeError, ValueError) as error:
        path = checkpoint.folder / "generation_config.json"
        raise Precondition(
            "BAD_CHECKPOINT", f"{path} has a value of a wrong type: {error}"
        ) from None
    if defaults.unheeded:
        log.warning(
            "fields of generation_config.json that have no effect here",
            fields=list(defaults.unheeded),
        )
    return defaults


def _tokenizer_info(checkpoint: Checkpoint) -> dict[str, Any]:
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.tokenizer_config}
    template = checkpoint.folder / "chat_template.jinja"  # goes before all other places
    if template.exists():
        info["chat_template"] = read_template_file(template)
    return info


def _own_eos_ids(checkpoint: Checkpoint, words: TokenizerFile) -> frozenset[int]:
    """The id of the tokenizer's `eos_token`; where it names none, the ids that the model's files name."""
    own = words.special_id("eos_token")
    return frozenset(checkpoint.eos_token_ids() if own is None else (own,))


def _files(folder: Path) -> tuple[tuple[str, int], ...]:
    weights = find_weights(folder)
    if weights is None:
        return ()
    names = indexed_files(folder / weights.name) if weights.is_index else [weights.name]
    return tuple(
        (name, (folder / name).stat().st_size) for name in names if (folder / name).is_file()
    )


def _table(path: Path) -> TokenBytes:
    try:
        return TokenBytes.from_tokenizer_json(path)
    except FileNotFoundError:
        raise NotFound("NO_TOKENIZER", f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Precondition("UNSUPPORTED_TOKENIZER", f"cannot use {path}: {error}") from error
