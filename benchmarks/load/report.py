"""The result as people and programs read it."""

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.load.errors import BenchError
from benchmarks.load.recording import Recording
from benchmarks.load.result import LATENCIES, PERCENTILES, Result
from benchmarks.load.settings import BenchSettings
from services.launcher.doctor import hardware

_MOST_ERRORS = 5  # different ones that are printed


def table(result: Result) -> str:
    """Lines for the terminal; latencies in milliseconds."""
    rows = [
        ("requests completed", f"{result.completed}"),
        ("requests failed", f"{result.failed}"),
        ("duration", f"{result.duration_s:.2f} s"),
        ("prompt tokens", _prompt_tokens(result)),
        ("output tokens", f"{result.output_tokens}"),
        ("requests/s", f"{result.requests_per_s:.2f}"),
        ("output tokens/s", f"{result.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{result.total_tokens_per_s:.1f}"),
    ]
    if result.goodput_per_s is not None:
        share = (result.good or 0) / max(1, result.completed + result.failed)
        rows.append(("goodput", f"{result.goodput_per_s:.2f} requests/s ({share:.1%} of all)"))
    rows.append(("this machine", hardware.processor()))
    rows.append(("this client", f"{result.client_us_per_token:.1f} us of processor a token"))
    lines = [f"{name:<20} {value}" for name, value in rows]
    titles = ["mean", "median", *(f"P{p}" for p in PERCENTILES)]
    lines += ["", f"{'ms':<20} " + "".join(f"{title:>11}" for title in titles)]
    for name, what in LATENCIES.items():
        summary = result.latencies[name]
        values = [summary.mean, summary.median, *summary.percentiles.values()]
        numbers = "".join(_cell(value) for value in values)
        lines.append(f"{name.upper():<20} {numbers}   {what}")
    lines += _error_lines(result)
    return "\n".join(lines)


def write(
    settings: BenchSettings, model: str, result: Result, recordings: list[Recording]
) -> list[Path]:
    """Writes the JSON where the settings want it. Returns the files. Raises BenchError."""
    moment = time.strftime("%Y%m%d-%H%M%S")
    content = {**_what_ran(settings, model, moment), **result.to_json()}
    if settings.save_detailed:
        content["requests"] = [_detail(recording) for recording in recordings]
    files = [settings.output] if settings.output else []
    if settings.save_result:
        name = (settings.label or "bench").replace("/", "-")
        files.append(settings.result_dir / f"{name}-{settings.backend}-{moment}.json")
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise BenchError(f"cannot write {file}: {error.strerror}") from None
    return files


def _what_ran(settings: BenchSettings, model: str, moment: str) -> dict[str, Any]:
    told = settings.model_dump(
        mode="json", exclude={"api_key", "model", "output", "save_result", "result_dir"}
    )
    for name in ("request_rate", "burstiness"):  # JSON knows no infinity
        if told[name] in (None, float("inf")):
            told[name] = "inf"
    return {"date": moment, "model_id": model, "processor": hardware.processor(), **told}


def _detail(recording: Recording) -> dict[str, Any]:
    start = recording.sent
    return {
        "sent_s": start,
        "prompt_tokens": recording.prompt_tokens,
        "output_tokens": recording.output_tokens,
        "cached_tokens": recording.cached_tokens,
        "events_ms": [round(1000 * (t - start), 3) for t in recording.times],
        "event_tokens": list(recording.counts),
        "ended_ms": 1000 * recording.e2el,
        "error": recording.error,
    }


def _prompt_tokens(result: Result) -> str:
    if not result.input_tokens:
        return "not told by the server"
    cached = f", {result.cached_tokens} of them cached" if result.cached_tokens else ""
    return f"{result.input_tokens}{cached}"


def _cell(seconds: float) -> str:
    return f"{'-':>11}" if seconds != seconds else f"{1000 * seconds:>11.2f}"


def _error_lines(result: Result) -> list[str]:
    if not result.errors:
        return []
    listed = list(result.errors.items())
    lines = ["", "failed:", *(f"  {count:>5} x {message}" for message, count in listed)]
    if len(listed) > _MOST_ERRORS:
        lines = [*lines[: 2 + _MOST_ERRORS], f"  and {len(listed) - _MOST_ERRORS} other reasons"]
    return lines
