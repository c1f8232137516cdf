"""Log-probabilities of the next token at every place of some texts: by a decoder as it serves, and by transformers.

The decoder's own worker computes them, from a plan as a scheduler makes it, with blocks, in steps of several pieces: so
whatever `--quantization`, a checkpoint's codes or the cache's type change is in them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.worker import Worker
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import model_class
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult

Text = Sequence[int]  # token ids

_CACHE = 64 << 20  # bytes


def of_decoder(settings: dict[str, Any], texts: Sequence[Text]) -> Iterator[Tensor]:
    """For each text float32 [tokens - 1, vocabulary]: the distributions of all tokens but the first.

    Raises ServingError for a model or settings that a decoder refuses.
    """
    longest = max(map(len, texts))
    fixed = {"device": "cpu", "max_num_seqs": 1, "kv_cache_memory_bytes": _CACHE}
    chosen = {**fixed, "max_model_len": longest + 1, **settings}
    loaded = load(DecoderSettings.model_validate(chosen))
    try:
        for text in texts:
            yield _of_worker(loaded.worker, text)
    finally:
        loaded.close()


def _of_worker(worker: Worker, text: Text) -> Tensor:
    limits, size = worker.limits, worker.model.config.vocab_size
    worker.reset()
    blocks = -(-len(text) // limits.block_size)
    sampling = SamplingParams(
        repetition_penalty=1, top_p=1, max_tokens=1, n=1, prompt_logprobs=size
    )
    found = []
    starts = range(0, len(text), limits.max_batched_tokens)
    for step, start in enumerate(starts, 1):
        plan = StepPlan(
            step=step,
            row_slot=_ints(0),
            row_start=_ints(start),
            row_count=_ints(min(limits.max_batched_tokens, len(text) - start)),
        )
        if step == 1:
            plan.new.append(
                NewSequence(slot=0, prompt_len=len(text), tokens=_ints(*text), sampling=sampling)
            )
            plan.edit_slot, plan.edit_index = _ints(0), _ints(0)
            plan.edit_len, plan.edit_blocks = _ints(blocks), _ints(*range(1, blocks + 1))
        results: list[StepResult] = []
        worker.step(worker.accept(plan), results.append)
        for result in results:
            for failed in result.failed:
                raise RuntimeError(f"the decoder failed: {failed.failure.message}")
            found += [_scattered(report, size) for report in result.prompt_logprobs]
    return torch.cat(found)


def _scattered(report: Any, size: int) -> Tensor:
    """[rows, size] of pairs of ids and values that are sorted by value."""
    ids = torch.from_numpy(np.frombuffer(report.top_ids, "<i4").astype(np.int64)).view(-1, size)
    values = torch.from_numpy(np.frombuffer(report.top_logprobs, "<f4").copy()).view(-1, size)
    return torch.empty_like(values).scatter_(1, ids, values)


def of_transformers(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    change: Callable[[Any], None] = lambda model: None,
) -> Iterator[Tensor]:
    """The same in float32 by the model's class in transformers: the reference, unless `change` changes the model."""
    make: Any = model_class(checkpoint)
    model = make.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    change(model)
    for text in texts:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([list(text)])).logits[0, :-1]
        yield logits.float().log_softmax(-1)


def _ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()
