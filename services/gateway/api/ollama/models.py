"""What is served, as Ollama's clients ask for it."""

import hashlib
import json
from functools import partial
from typing import Any

from services.gateway.admission.caller import Caller
from services.gateway.api.ollama.options import read_name
from services.gateway.api.ollama.replies import timestamp
from services.gateway.api.ollama.schema import (
    Details,
    ModelDescription,
    ModelEntries,
    ModelEntry,
    ShowBody,
    Version,
)
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.model.pooled_model import Task
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.release import release

# The model stays loaded as long as the server runs.
_NEVER = "9999-12-31T23:59:59Z"
_OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}


class Models:
    """The handlers about the one model there is, and its adapters."""

    def __init__(self, model: ServedModel, body_limits: BodyLimits) -> None:
        self._model = model
        self._body_limits = body_limits
        self._details = Details(family=model.kind, families=[model.kind])
        self._since = timestamp(model.created_unix_s)
        self._version = Version(version=release())

    async def tags(self, exchange: Exchange, caller: Caller) -> None:
        """GET /api/tags: the one model, and its adapters."""
        entries = [self._entry(name, modified_at=self._since) for name in self._model.names]
        await exchange.reply(ModelEntries(models=entries))

    async def ps(self, exchange: Exchange, caller: Caller) -> None:
        """GET /api/ps: the one model, which is always loaded."""
        length = self._model.max_model_len
        entry = self._entry(self._model.name, expires_at=_NEVER, context_length=length)
        await exchange.reply(ModelEntries(models=[entry]))

    async def show(self, exchange: Exchange, caller: Caller) -> None:
        """POST /api/show: what the model is. Raises InvalidRequest or NotFound."""
        content = await exchange.json_body(self._body_limits)
        body = await off_loop(partial(decode, kind=ShowBody), content)
        exchange.release_body()
        name = body.model or body.name
        if not name:
            raise wrong("model", "is required")
        for field in ("system", "template", "options"):
            if not is_off(getattr(body, field), "", {}):
                raise unsupported(field, "changes nothing of a model that is served: leave it out")
        read_name(name, self._model)
        await exchange.reply(self._description())

    async def version(self, exchange: Exchange, caller: Caller) -> None:
        """GET /api/version: which release the server is."""
        await exchange.reply(self._version)

    def _entry(self, name: str, **more: Any) -> ModelEntry:
        model = self._model
        _, adapter = model.adapter_of(name)
        known = [name, model.kind, model.max_model_len, model.vocab_size, [*model.files], adapter]
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return ModelEntry(
            name=name,
            model=name,
            digest=digest,
            size=sum(size for _, size in model.files),
            details=self._details,
            **more,
        )

    def _description(self) -> ModelDescription:
        model = self._model
        template = model.tokenizer_info.get("chat_template")
        return ModelDescription(
            modified_at=self._since,
            details=self._details,
            model_info={
                "general.architecture": model.kind,
                f"{model.kind}.context_length": model.max_model_len,
                f"{model.kind}.vocab_size": model.vocab_size,
            },
            capabilities=self._capabilities(),
            parameters=self._parameters(),
            template=template if isinstance(template, str) else "",
        )

    def _capabilities(self) -> list[str]:
        tasks = self._model.tasks
        served = {"completion": Task.GENERATE in tasks, "embedding": Task.EMBED in tasks}
        if served["completion"]:
            forms = self._model.forms
            served |= {"tools": forms.calls is not None, "thinking": forms.reasoning is not None}
        served["vision"] = self._model.has_vision
        return [name for name, is_served in served.items() if is_served]

    def _parameters(self) -> str:
        defaults = self._model.defaults
        lines = [
            f"{_OPTION_NAMES.get(name, name)} {value}" for name, value in defaults.numbers.items()
        ]
        lines += [f"stop {json.dumps(stop, ensure_ascii=False)}" for stop in defaults.stop]
        return "\n".join(lines)
