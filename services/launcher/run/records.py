"""What is kept of a run: answers by file, and the lengths and times of batches."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.launcher.offline.outputs import RequestOutput
from services.launcher.run.inputs import InputError

_COLUMNS = (
    "batch", "input_len", "output_len", "embedding_len", "first_token_time(ms)", "non_first_token_time(ms)",
    "ResponseTime(ms)", "E2E Throughput(tok/s)",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """One batch, copies that fill it up counted. Times are milliseconds."""

    batch: int
    input_len: int  # the longest prompt without its picture, in tokens
    output_len: int  # the longest answer
    embedding_len: int  # the longest prompt with its picture
    first_token_ms: float  # until every answer has its first token
    non_first_token_ms: float  # the mean from one token of an answer to the next
    response_ms: float  # until all have ended
    tokens_per_s: float  # of all answers, over the whole time

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], input_len: int) -> "BatchTimes":
        """Of the outputs of one batch."""
        began = min(output.metrics.arrival_time for output in outputs)
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        firsts = [output.metrics.first_token_time or began for output in outputs]
        lasts = [output.metrics.last_token_time or began for output in outputs]
        ended = max(output.metrics.finished_time or began for output in outputs)
        later = sum(count - 1 for count in counts if count > 1)
        between = sum(last - first for first, last in zip(firsts, lasts, strict=True))
        whole = max(ended - began, 1e-9)
        return cls(
            batch=len(outputs),
            input_len=input_len,
            output_len=max(counts),
            embedding_len=max(len(output.prompt_token_ids) for output in outputs),
            first_token_ms=1000 * (max(firsts) - began),
            non_first_token_ms=1000 * between / later if later else 0.0,
            response_ms=1000 * whole,
            tokens_per_s=sum(counts) / whole,
        )


def save_answers(path: Path, answers: Mapping[str, str]) -> None:
    """Merges answers by file name into the JSON object at `path`, sorted by name. Raises InputError."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(kept, dict):
        raise InputError(f"{path} holds no JSON object")
    merged = dict(sorted({**kept, **answers}.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(merged, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    written.replace(path)


def append_times(path: Path, batches: Sequence[BatchTimes]) -> None:
    """Appends a row for each batch, below the names of the columns where the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(_COLUMNS)
        for one in batches:
            times = (
                one.first_token_ms,
                one.non_first_token_ms,
                one.response_ms,
                one.tokens_per_s,
            )
            lengths = (one.batch, one.input_len, one.output_len, one.embedding_len)
            writer.writerow([*lengths, *(f"{time:.2f}" for time in times)])
