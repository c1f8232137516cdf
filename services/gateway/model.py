"""The served model as the gateway knows it: its name, length, vocabulary and defaults. No torch."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.checkpoint import Checkpoint
from shared.errors import InvalidRequest, NotFound, Precondition
from shared.text import TokenBytes
from shared.tokenizer_file import read_tokenizer

# The fields of generation_config.json that are defaults here, under the same names.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against, and what turns their tokens into text."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]
    table: TokenBytes
    tokenizer: Tokenizer
    created_unix_s: int
    max_choices: int = 128
    max_logprobs: int = 20
    max_prompts: int = 128

    @classmethod
    def load(
        cls,
        folder: Path,
        name: str,
        max_model_len: int | None = None,
        *,
        max_choices: int = 128,
        max_logprobs: int = 20,
        max_prompts: int = 128,
    ) -> "ServedModel":
        """Reads config, generation config and tokenizer of a checkpoint folder.

        Raises NotFound, InvalidRequest or Precondition, naming the file.
        """
        checkpoint = Checkpoint(folder)
        text_config = checkpoint.text_config
        length = text_config.get("max_position_embeddings")
        if max_model_len is None and not isinstance(length, int):
            raise InvalidRequest(
                "NO_MODEL_LENGTH",
                f"{folder}/config.json has no max_position_embeddings; give --max-model-len",
                field="max_model_len",
            )
        table = _table(folder / "tokenizer.json")
        return cls(
            name=name,
            max_model_len=max_model_len or int(length or 0),
            vocab_size=int(text_config.get("vocab_size") or len(table)),
            eos_token_ids=tuple(checkpoint.eos_token_ids()),
            sampling_defaults=_sampling_defaults(checkpoint.generation_config),
            table=table,
            tokenizer=Tokenizer.from_str(read_tokenizer(folder / "tokenizer.json").text),
            created_unix_s=int(time.time()),
            max_choices=max_choices,
            max_logprobs=max_logprobs,
            max_prompts=max_prompts,
        )

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


def _table(path: Path) -> TokenBytes:
    try:
        return TokenBytes.from_tokenizer_json(path)
    except FileNotFoundError:
        raise NotFound("NO_TOKENIZER", f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Precondition("UNSUPPORTED_TOKENIZER", f"cannot use {path}: {error}") from error
