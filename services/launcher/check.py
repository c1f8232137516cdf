"""`tessera check FOLDER`: whether a model can be served and by whose code, from its files, without reading weights.

What the code of transformers runs is compared with its class in a small random model, which takes seconds."""

from collections.abc import Iterator
from pathlib import Path

from services.families import registry
from services.families.chat_format import find_template, stop_ids
from services.families.check import require_readable, require_servable, understood
from services.families.comparison import Comparison, compares_pictures, has_comparison
from services.families.family import load_part
from services.families.generic import require_length
from services.families.report import REFUSED, TRANSFORMERS, PartReport, parts_of
from services.launcher.settings import CheckSettings
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.checkpoint.hub import find_in_cache
from shared.errors import InvalidRequest, ServingError
from shared.prompts.modality import plural
from shared.settings import hub_name
from shared.text.tokenizer_file import read_tokenizer


def main(arguments: list[str]) -> int:
    """Prints the report. Returns 1 if the model cannot be served, else 0."""
    settings = CheckSettings.load(arguments, prog="tessera check")
    try:
        folder = _folder(settings)
        checkpoint = Checkpoint(folder, settings.family)
        require_readable(folder)
        with understood(folder):
            kind = checkpoint.kind
            parts = parts_of(checkpoint, settings.model_backend)
    except ServingError as error:
        print(f"refused  {error.message}")
        return 1
    print(f"{'model':<8} {kind} in {folder}")
    for part in parts:
        print(f"{part.part:<8} {part.code}: {part.detail}")
    if any(part.code == REFUSED for part in parts):
        return 1
    try:
        require_servable(folder, family=settings.family, **settings.computation)
        with understood(folder):
            known = registry.text_sizes(checkpoint, settings.model_backend).max_position_embeddings
            longest = require_length(settings.max_model_len or known)
            for what, said in _facts(checkpoint, parts, longest):
                print(f"{what:<8} {said}")
        if has_comparison(checkpoint, settings.model_backend):
            _compare(checkpoint, settings)
    except ServingError as error:
        print(f"{'refused':<8} {error.message}")
        return 1
    return 0


def _compare(checkpoint: Checkpoint, settings: CheckSettings) -> None:
    """Raises InvalidRequest where `tessera serve` would at its start."""
    if settings.skip_model_check:
        print(f"{'compared':<8} not at all (--skip-model-check)")
        return
    trusted = settings.trust_remote_code
    with Comparison(checkpoint, settings.model_backend, trusted) as comparison:
        comparison.require_equal()
    with_pictures = compares_pictures(checkpoint, settings.model_backend)
    what = "prompts with pictures" if with_pictures else "text"
    known = ", as was found before" if comparison.was_known else ""
    print(f"{'compared':<8} {what}: as the class's own forward, in a small random model{known}")


def _folder(settings: CheckSettings) -> Path:
    name = hub_name(settings.model)
    if not name:
        return prepared_folder(settings.model, settings.mmproj)
    cached = find_in_cache(name, settings.revision)
    if cached is None:
        raise InvalidRequest(
            "NO_MODEL", f"{name} is not on this machine: `tessera serve {name}` downloads it"
        )
    return cached


def _ends(checkpoint: Checkpoint) -> str:
    """The tokens that end an answer."""
    words = read_tokenizer(checkpoint.folder / "tokenizer.json")
    texts = {index: text for text, index in words.ids().items()}
    found = stop_ids(checkpoint, words, find_template(checkpoint))
    ends = ", ".join(
        f"{texts[index]} ({index})" if index in texts else str(index) for index in found
    )
    return f"at {ends}" if ends else "at no token: the length alone ends an answer"


def _facts(
    checkpoint: Checkpoint, parts: list[PartReport], longest: int
) -> Iterator[tuple[str, str]]:
    """What is taken, how long it may be, and what is off."""
    family = registry.find(checkpoint)
    for modality in family.modalities:
        size = family.largest(checkpoint, modality)
        taken = (
            f", as {size.width} x {size.height} pixels {size.tokens} tokens" if size.tokens else ""
        )
        yield plural(modality), f"taken{taken} (--limit-mm-per-prompt)"
    yield "ends", _ends(checkpoint)
    own = parts[-1]
    yield "length", f"{longest} tokens"
    if own.code == TRANSFORMERS:
        yield (
            "tensors",
            f"{len(checkpoint.names())}, matched with the class's own when they are loaded",
        )
        yield "off", "what the comparison with the class's own forward says at start"
        return
    model = load_part(own.detail)
    count = model.check_names(checkpoint)
    yield "tensors", f"{count} of the decoder, {len(checkpoint.names()) - count} of others"
    yield "off", ", ".join(model.needs.off) or "nothing"
