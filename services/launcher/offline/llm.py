"""`LLM`: a model in a Python program, without a server to start or a client to write."""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from services.launcher.offline.engine.engine_process import EngineProcess
from services.launcher.offline.errors import RequestRefused
from services.launcher.offline.loop_thread import LoopThread
from services.launcher.offline.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledOutput,
    RequestOutput,
    ScoringOutput,
)
from services.launcher.offline.progress import progress
from services.launcher.offline.prompts.adapters import Adapter, adapted
from services.launcher.offline.prompts.prompts import Prompt, is_ids, read_conversation, read_prompt
from services.launcher.offline.requests.pooled import (
    CLASSES,
    EMBEDDINGS,
    SCORES,
    PooledRequest,
    read_pairs,
    read_pooled,
    vector_of,
)
from services.launcher.offline.sampling_params import SamplingParams
from shared.net import tasks

_O = TypeVar("_O")
_Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and all that serves it, as child processes of this one. They end with `close`, with the block of a `with`
    statement, and with the program.
    """

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        """`model`: a checkpoint folder or a name on the hub; the demo model unless given. `flags` are those of
        `tessera serve`, such as `max_model_len=4096`; `enable_lora=True` lets prompts name folders of adapters.
        Returns when the model is ready.

        Raises TypeError or ValueError for wrong flags, EngineFailed where the model cannot be served.
        """
        self._engine = EngineProcess(model, flags)
        self._close = weakref.finalize(self, self._engine.stop)
        self._loop = LoopThread()
        self._requests = self._engine.requests()
        self._numbers = itertools.count()
        try:
            self._engine.wait_ready()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Any,
        sampling_params: _Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapter | Sequence[Adapter] = None,
    ) -> list[RequestOutput]:
        """The answers to one prompt or several, in their order. A prompt is a text, a list of token ids, or a dict of
        `prompt` (or `prompt_token_ids`) and `multi_modal_data`: `{"image": ...}`, one or a list of paths, URLs, bytes
        of files or PIL images; `video` likewise. `sampling_params`: for all, or one for each; None takes the model's
        own defaults and 16 tokens. `use_tqdm` shows on a terminal how many are answered. `lora_request`: an adapter's
        name, or a `LoRARequest` whose folder is loaded if need be, for all or one for each; None is the model.

        Raises RequestRefused for the first prompt that cannot be answered, naming it; the others are then cancelled.
        """
        is_one = isinstance(prompts, (str, Mapping)) or is_ids(prompts)
        listed = [prompts] if is_one else list(prompts)
        read = adapted([read_prompt(prompt) for prompt in listed], lora_request)
        return self._run(read, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: _Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapter | Sequence[Adapter] = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_window_size: int | None = None,
    ) -> list[RequestOutput]:
        """The answers to a conversation, or to each of a list of conversations. Messages are OpenAI's; a part may also
        be `{"image": ...}` or `{"video": ...}`, with what `generate` takes for one, and `{"text": ...}`. `tools` are
        shown to the model, and its calls are text. `max_window_size`: the newest turns are kept that fit.
        `lora_request`: as of `generate`.

        Raises as `generate` does.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        options = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tools": list(tools) if tools else None,
            "tool_choice": "none" if tools else None,
            "chat_template_kwargs": chat_template_kwargs,
            "max_window_size": max_window_size,
        }
        prompts = [read_conversation(conversation, **options) for conversation in conversations]
        return self._run(adapted(prompts, lora_request), sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Any,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[PooledOutput[EmbeddingOutput]]:
        """The vectors of one prompt or several, in their order: texts, lists of token ids, or conversations, in which
        pictures may be shown as in `chat`. Of a model that is served for vectors: `LLM(..., task="embed")`, unless its
        files say it. `dimensions`, `normalize`: as of `/v1/embeddings`.

        Raises as `generate` does.
        """
        asked = {"encoding_format": "base64", "dimensions": dimensions, "normalize": normalize}
        return self._pool(
            EMBEDDINGS, read_pooled(prompts), asked, lambda one: EmbeddingOutput(vector_of(one)), use_tqdm
        )  # fmt: skip

    def classify(
        self, prompts: Any, *, use_activation: bool | None = None, use_tqdm: bool = True
    ) -> list[PooledOutput[ClassificationOutput]]:
        """The classes of one prompt or several, as of `embed`, where a classifier is served. `use_activation` False
        gives logits. Raises as `generate` does.
        """
        asked = {"use_activation": use_activation}
        return self._pool(
            CLASSES, read_pooled(prompts), asked, lambda one: ClassificationOutput(one["probs"], one["label"]), use_tqdm
        )  # fmt: skip

    def score(
        self, data_1: Any, data_2: Any, *, use_tqdm: bool = True
    ) -> list[PooledOutput[ScoringOutput]]:
        """How well each text of `data_2` answers the one of `data_1`, or that at its place, named as in vLLM. Raises
        as `generate` does.
        """
        return self._pool(
            SCORES, read_pairs(data_1, data_2), {}, lambda one: ScoringOutput(one["score"]), use_tqdm
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process id of the launcher, whose children the services are."""
        return self._engine.pid

    def close(self) -> None:
        """Ends all processes. Nothing can be asked any more."""
        self._loop.close(self._requests.close)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pool(
        self,
        path: str,
        asked: Sequence[PooledRequest],
        options: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], _O],
        use_tqdm: bool,
    ) -> list[PooledOutput[_O]]:
        self._check_open()
        fields = {name: value for name, value in options.items() if value is not None}

        async def answer(one: PooledRequest) -> list[PooledOutput[_O]]:
            try:
                reply = await self._requests.reply(path, {**one.body, **fields})
            except RequestRefused as error:
                raise RequestRefused(one.renamed(str(error))) from None
            outputs = []
            for item in reply["data"]:
                outputs.append(PooledOutput(str(next(self._numbers)), read(item)))
                answered()
            return outputs

        async def answer_all() -> list[list[PooledOutput[_O]]]:
            return await tasks.together(map(answer, asked))

        with progress(sum(one.count for one in asked), wanted=use_tqdm) as answered:
            return list(itertools.chain.from_iterable(self._loop.run(answer_all())))

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError("this LLM is closed")

    def _run(
        self, prompts: Sequence[Prompt], params: _Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        self._check_open()
        if params is None or isinstance(params, SamplingParams):
            listed: Sequence[SamplingParams | None] = [params] * len(prompts)
        else:
            listed = params
        if len(listed) != len(prompts):
            raise ValueError(
                f"sampling_params must be one for all, or one for each of {len(prompts)} prompts, not {len(listed)}"
            )

        async def answer(index: int, prompt: Prompt, one: SamplingParams | None) -> RequestOutput:
            try:
                output = await self._requests.whole(str(next(self._numbers)), prompt, one)
            except RequestRefused as error:
                if len(prompts) == 1:
                    raise
                raise RequestRefused(f"prompts[{index}]: {error}") from None
            answered()
            return output

        async def answer_all() -> list[RequestOutput]:
            return await tasks.together(map(answer, range(len(prompts)), prompts, listed))

        with progress(len(prompts), wanted=use_tqdm) as answered:
            return self._loop.run(answer_all())
