"""Models by the names of the Hugging Face hub: from the cache on this machine, else downloaded into it.

All is done by huggingface_hub, imported when the first name has to be found: HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE mean what they mean everywhere.
"""

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from shared.checkpoint.files import (
    INDEXES,
    SINGLES,
    indexed_files,
    require_weights,
)
from shared.errors import NotFound, ServingError, Unavailable
from shared.text.tokenizer_formats.other_files import OTHER_TOKENIZERS

log = structlog.get_logger(__name__)

# All that any service reads beside weights. Those come by the names that the index gives: a repository may hold the
# same model in other formats too.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    *OTHER_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "quality.json",
    "quant_model_description.json",
    "conversation.py",  # of InternVL: read as data
    *INDEXES,
)
_SAY_EVERY_S = 10.0


def find_in_cache(name: str, revision: str = "") -> Path | None:
    """The folder of a model that is complete in the cache, without asking the hub; None if it is not.

    An interrupted download does not count.
    """
    try:
        get = _getter(name, revision)
        folder = get(_SMALL_FILES, local_files_only=True)
        _get_weights(get, folder, local_files_only=True)
        require_weights(folder)
    except Exception:  # of the library's many kinds: whatever it is, a download may help
        return None
    return folder


def find_on_hub(name: str, check: Callable[[Path], object], revision: str = "") -> Path:
    """The folder of a model with every file that is read of it.

    One that is complete in the cache is taken without asking the hub. `revision` is a branch, a tag or a commit, the
    main branch unless given. `check` gets the folder, and may refuse it, before weights are fetched.
    Raises NotFound or Unavailable, saying what to do, if the model cannot be had.
    """
    cached = find_in_cache(name, revision)
    if cached is not None:
        return cached
    if importlib.util.find_spec("huggingface_hub") is None:
        raise NotFound(
            "NO_HUB_CLIENT",
            f"--model: there is no folder {name}, and to download the model of that name the Python"
            " package huggingface_hub is needed: pip install huggingface_hub",
            field="model",
        )
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP client's

    log.info("downloading", model=name, revision=revision or "main")
    try:
        folder = _getter(name, revision)(_SMALL_FILES)
        if not (folder / "config.json").exists():
            raise _no_config(name, revision)
        check(folder)
        with _progress(folder):
            _get_weights(_getter(name, folder.name), folder)  # of the same commit
    except (HTTPError, OSError, ValueError) as error:
        raise _explained(error, name, revision) from error
    log.info("downloaded", model=name, folder=str(folder))
    return folder


def _getter(name: str, revision: str) -> Callable[..., Path]:
    """Gets the files of a model that fit one of some patterns, and returns its folder."""
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    theirs = logging.getLogger("huggingface_hub")
    theirs.handlers.clear()  # its lines go where all others go
    theirs.propagate = True
    if not sys.stderr.isatty():
        disable_progress_bars()

    def get(patterns: Sequence[str], **options: Any) -> Path:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=list(patterns), **options
        )
        return Path(found)

    return get


def _get_weights(get: Callable[..., Path], folder: Path, **options: Any) -> None:
    """Gets the files of weights that an index names, else the one file, in the preferred format that is there."""
    for single, index in zip(SINGLES, INDEXES, strict=True):
        indexed = (folder / index).exists()
        get(indexed_files(folder / index) if indexed else [single], **options)
        if indexed or (folder / single).exists():
            return


@contextmanager
def _progress(folder: Path) -> Iterator[None]:
    """The library draws bars in a terminal; elsewhere the progress is logged now and then."""
    if sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def say() -> None:
        while not done.wait(_SAY_EVERY_S):
            blobs = [path.stat().st_size for path in (folder.parents[1] / "blobs").glob("*")]
            log.info("downloading", gigabytes=round(sum(blobs) / 1e9, 2))

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _no_config(name: str, revision: str) -> NotFound:
    """Of a repository of another format."""
    pinned = f" --revision {revision}" if revision else ""
    return NotFound(
        "NO_MODEL",
        f"--model: {name} has no config.json. Of a repository of GGUF files download the one that is meant,"
        f" `hf download {name} FILE.gguf{pinned} --local-dir FOLDER`, and give FOLDER/FILE.gguf as the model",
        field="model",
    )


def _explained(error: Exception, name: str, revision: str) -> ServingError:
    """What went wrong, and what helps."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, errors.GatedRepoError):
        return NotFound(
            "MODEL_GATED",
            f"{name} is only for those who have agreed to its terms: agree at {page}, then set HF_TOKEN to a token"
            " of your account, or run `hf auth login`",
            field="model",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFound(
            "MODEL_NOT_FOUND",
            f"--model: there is no folder {name}, and no model of that name at {constants.ENDPOINT}, or it is private:"
            " then set HF_TOKEN to a token that may read it, or run `hf auth login`",
            field="model",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(
            "NO_SUCH_REVISION",
            f"{name} has no --revision {revision}: {page} lists its branches and commits",
            field="revision",
        )
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403):
        return NotFound(
            "MODEL_FORBIDDEN",
            f"{constants.ENDPOINT} does not let you read {name} (HTTP {status}): set HF_TOKEN to a token that may,"
            " or run `hf auth login`",
            field="model",
        )
    why = (
        "HF_HUB_OFFLINE forbids downloads, and the cache on this machine does not have all of it"
        if constants.HF_HUB_OFFLINE
        else f"{constants.ENDPOINT}: {_first_cause(error)}"
    )
    pinned = f" --revision {revision}" if revision else ""
    return Unavailable(
        "HUB_UNREACHABLE",
        f"--model: there is no folder {name}, and the model cannot be downloaded ({why}). Run it again to go on where"
        f" it stopped, or run `hf download {name}{pinned} --local-dir FOLDER` where there is network, copy the folder"
        " here and give it as the model",
    )


def _first_cause(error: BaseException) -> str:
    """The message of the innermost exception, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
