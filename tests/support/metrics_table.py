"""`python -m tests.support.metrics_table`: writes the tables of docs/metrics.md from what the services' pages show.

Such a table stands between `<!-- metrics of SERVICE -->` and `<!-- end -->`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.decoder import measures as decoder
from services.gateway.telemetry.metrics import gateway_state
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.timeline import Timeline
from services.launcher.supervise import measures as launcher
from services.preprocess import measures as preprocess
from services.scheduler import measures as scheduler
from services.vision_encoder import measures as vision_encoder
from shared.net import metrics_page
from shared.telemetry.series import Series
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad, DraftTotals, Durations, TokenCounts

FILE = Path(__file__).parents[2] / "docs/metrics.md"
_TABLE = re.compile(
    r"(?P<begin><!-- metrics of (?P<service>\w+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_HEAD = "| series | type | unit | labels | meaning |\n|---|---|---|---|---|\n"
# The last words of names that are units, and those that say it otherwise.
_UNITS = ("seconds", "bytes", "tokens")
_UNIT_OF = {
    "vllm:kv_cache_usage_perc": "share",
    "vllm:prefix_cache_queries": "tokens",
    "vllm:prefix_cache_hits": "tokens",
    "vllm:prompt_tokens_cached": "tokens",
    "vllm:prompt_tokens_by_source": "tokens",
    "vllm:iteration_tokens_total": "tokens",
    "vllm:spec_decode_num_drafts": "rows",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "tokens",
    "vllm:mm_cache_queries": "items",
    "vllm:mm_cache_hits": "items",
}
_OF_BUCKETS = {"le"}


@dataclass(frozen=True, order=True)
class Row:
    """One series as the document has it."""

    name: str  # as queries name it: of a counter with `_total`, of a histogram without `_bucket`
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str


def rows() -> Mapping[str, list[Row]]:
    """Those of each table, by the name of its service."""
    own: Mapping[str, Sequence[Series]] = {
        "every": metrics_page.SERIES,
        "preprocess": preprocess.SERIES,
        "vision_encoder": vision_encoder.SERIES,
        "scheduler": scheduler.SERIES,
        "decoder": decoder.SERIES,
        "launcher": launcher.SERIES,
    }
    tables = {name: list(map(_row, series)) for name, series in own.items()}
    return {"gateway": gateway_rows(), **tables}


def written(text: str) -> str:
    """The document with all its tables as they should be."""
    tables = rows()
    return _TABLE.sub(
        lambda found: found["begin"] + _table(tables[found["service"]]) + found["end"], text
    )


def exported(page: str) -> list[Metric]:
    """The families on a page, without those of prometheus_client's own collectors, and times of creation."""
    own = ("process_", "python_")
    families = text_string_to_metric_families(page)
    return [f for f in families if not f.name.startswith(own) and not f.name.endswith("_created")]


def query_name(family: Metric) -> str:
    """What a family is called in the document."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def gateway_rows() -> list[Row]:
    """What a gateway shows once everything has happened that it counts."""
    shared = {series.name for series in metrics_page.SERIES}
    families = [f for f in exported(_busy_gateway().text().decode()) if f.name not in shared]
    rows = [Row(query_name(f), f.type, _unit(f), _labels(f), f.documentation) for f in families]
    return [*rows, *map(_row, gateway_state.SERIES)]


def _busy_gateway() -> Metrics:
    metrics = Metrics("model", 512)
    load = DecoderLoad(
        steps=1,
        max_adapters=1,
        drafts=DraftTotals(rows=1, tokens=1, accepted=[1]),
        step_tokens=TokenCounts(bounds=[1], counts=[1, 0], total=1),
        read_steps=Durations(bounds_s=[1], counts=[1, 0], total_s=1),
    )
    metrics.load.update({0: load}, (1, 1), (1, 1.0), 1, 1)
    metrics.http.ended("GET", "/", 200, request_bytes=0, response_bytes=0, seconds=0.1)
    metrics.batches.reached("completed")
    metrics.batches.line("completed")
    metrics.first_token(0.1, 1)
    metrics.stage("reserve", 0.1)
    metrics.media(1, 1)
    metrics.rejected("QUEUE_FULL")
    metrics.restored(1, 1)
    metrics.ended(
        None,
        Timeline(0.0, 0.0, 0.1, 0.2, 0.2, 0.0),
        prompt_tokens=1,
        cached_tokens=0,
        preemptions=0,
        answers=[2],
        max_tokens=2,
    )
    return metrics


def _row(series: Series) -> Row:
    name = f"{series.name}_total" if series.kind == "counter" else series.name
    return Row(name, series.kind, series.unit, series.labels, series.text)


def _unit(family: Metric) -> str:
    if family.name in _UNIT_OF:
        return _UNIT_OF[family.name]
    last = family.name.rpartition("_")[2]
    return last if last in _UNITS else ""


def _labels(family: Metric) -> tuple[str, ...]:
    found = {label for sample in family.samples for label in sample.labels}
    return tuple(sorted(found - _OF_BUCKETS))


def _table(rows: list[Row]) -> str:
    return _HEAD + "".join(map(_line, rows))


def _line(row: Row) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    meaning = row.meaning.replace("|", "\\|")
    return f"| `{row.name}` | {row.kind} | {row.unit} | {labels} | {meaning} |\n"


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text(encoding="utf-8")), encoding="utf-8")
