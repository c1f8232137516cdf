"""The served model as the gateway knows it: its name, length, vocabulary and defaults. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.families import registry
from services.families.generic import require_length
from shared.checkpoint.folder import Checkpoint
from shared.environment import unix_time
from shared.errors import NotFound, Precondition
from shared.text.text_fold import TokenBytes
from shared.text.tokenizer_file import read_tokenizer

# The fields of generation_config.json that are defaults here, under the same names.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against, and what turns their tokens into text."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # Of those the one that the tokenizer names: an answer that ends with it has no `stop_reason`.
    own_eos_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]
    table: TokenBytes
    tokenizer: Tokenizer
    created_unix_s: int
    # tokenizer_config.json with the chat template, for clients that count tokens themselves.
    tokenizer_info: Mapping[str, Any]
    # The checkpoint's default of max_tokens; 0 is what the model's length leaves.
    max_new_tokens: int = 0
    max_choices: int = 128
    max_logprobs: int = 20
    max_prompts: int = 128
    has_vision: bool = False  # it takes pictures

    @classmethod
    def load(
        cls,
        folder: Path,
        name: str,
        max_model_len: int | None = None,
        *,
        family: str = "",
        max_choices: int = 128,
        max_logprobs: int = 20,
        max_prompts: int = 128,
    ) -> "ServedModel":
        """Reads config, generation config and tokenizer of a checkpoint folder.

        Raises NotFound, InvalidRequest or Precondition, naming the file.
        """
        checkpoint = Checkpoint(folder, family)
        config = registry.text_sizes(checkpoint)
        table = _table(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_str(read_tokenizer(folder / "tokenizer.json").text)
        eos_token_ids = checkpoint.eos_token_ids()
        return cls(
            name=name,
            max_model_len=require_length(max_model_len or config.max_position_embeddings),
            vocab_size=config.vocab_size or len(table),
            eos_token_ids=eos_token_ids,
            own_eos_ids=_own_eos_ids(checkpoint, tokenizer) or frozenset(eos_token_ids),
            sampling_defaults=_sampling_defaults(checkpoint.generation_config),
            table=table,
            tokenizer=tokenizer,
            created_unix_s=int(unix_time()),
            tokenizer_info=_tokenizer_info(checkpoint),
            max_new_tokens=_max_new_tokens(checkpoint.generation_config),
            max_choices=max_choices,
            max_logprobs=max_logprobs,
            max_prompts=max_prompts,
            has_vision=registry.find(checkpoint).takes_media,
        )

    def default_max_tokens(self, left: int) -> int:
        """`max_tokens` of a request that has none, where the model's length leaves `left` tokens."""
        return min(left, self.max_new_tokens or left)

    def check_name(self, name: str) -> None:
        """Raises NotFound unless `name` is this model's."""
        if name != self.name:
            raise NotFound(
                "MODEL_NOT_FOUND",
                f"the model {name!r} does not exist; this server has {self.name!r}",
                field="model",
            )


def _sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    defaults: dict[str, float] = {
        key: config[key] for key in _SAMPLING_DEFAULTS if config.get(key) is not None
    }
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _max_new_tokens(config: Mapping[str, Any]) -> int:
    value = config.get("max_new_tokens")
    return value if isinstance(value, int) and value > 0 else 0


def _tokenizer_info(checkpoint: Checkpoint) -> dict[str, Any]:
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.tokenizer_config}
    template = checkpoint.folder / "chat_template.jinja"  # goes before all other places
    if template.exists():
        info["chat_template"] = template.read_text(encoding="utf-8")
    return info


def _own_eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """The id of `eos_token` in tokenizer_config.json; nothing where it names none."""
    token = checkpoint.tokenizer_config.get("eos_token")
    if isinstance(token, dict):  # with how it is matched beside its text
        token = token.get("content")
    number = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return frozenset() if number is None else frozenset({number})


def _table(path: Path) -> TokenBytes:
    try:
        return TokenBytes.from_tokenizer_json(path)
    except FileNotFoundError:
        raise NotFound("NO_TOKENIZER", f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Precondition("UNSUPPORTED_TOKENIZER", f"cannot use {path}: {error}") from error
