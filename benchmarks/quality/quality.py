"""What quantization costs: distributions of next tokens beside those of float32: `quality [MODEL]`.

MODEL is a checkpoint folder; unless given the small text model that this project has trained. transformers computes the
reference in float32 in the same run, the decoder everything else.
"""

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
from torch import Tensor

from benchmarks.quality.distributions import of_decoder, of_transformers
from benchmarks.quality.divergence import Divergence, divergence
from benchmarks.quality.text_model.export import CHECKPOINT
from benchmarks.quality.texts import texts_for
from benchmarks.quality.ways import WAYS, Way
from services.decoder.loading.quality import Quality, write_quality
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint


def measure(
    model: Path,
    ways: Mapping[str, Way],
    texts: Sequence[Sequence[int]],
    reference: Sequence[Tensor] | None = None,
) -> dict[str, Divergence]:
    """Of each way the divergence from `reference`, which is computed unless given. One model is held at a time, beside
    the reference's distributions: four bytes for each token and word of the vocabulary."""
    if reference is None:
        reference = list(of_transformers(Checkpoint(model), texts))
    found = {}
    for name, way in ways.items():
        settings = {"model": way.model or model, **way.settings}
        found[name] = divergence(texts, reference, list(of_decoder(settings, texts)))
    return found


def main(arguments: list[str]) -> None:
    """Prints a table, and writes `quality.json` into the folder if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--tokens", type=int, default=4096, help="places that are compared")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the same model with weights that are stored as codes",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="quality.json into the folder: the decoder's log has it",
    )
    told = parser.parse_args(arguments)
    ways = {name: WAYS[name] for name in told.ways}
    for named in told.also:
        name, _, path = named.partition("=")
        ways[name] = Way(model=Path(path))
    what, texts = texts_for(told.model, told.tokens)
    with _few_logs():
        found = measure(told.model, ways, texts)
    print(f"{told.model}: {sum(len(text) - 1 for text in texts)} tokens of {what}")
    print("| | KL | of 99 % below | same first | nats a token |\n|---|---|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {one.kl:.2g} | {one.kl_p99:.2g} | {one.same_top:.1%} | {one.loss:.4f} |")
    if told.write:
        kl = {name: one.kl for name, one in found.items() if not ways[name].model}
        content = content_digest(Checkpoint(told.model))
        places = next(iter(found.values())).places
        print(write_quality(told.model, Quality(content, what, places, kl)))


@contextmanager
def _few_logs() -> Iterator[None]:
    """Of decoders that start one after the other; not even that four bits cost something, which is what is asked."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)
