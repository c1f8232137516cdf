"""The checkpoint folder that is made of a GGUF file: config.json from its keys, the tokenizer by transformers, and a
link to the file itself, whose codes stay where they are. A vision part in a file beside it is linked too, and what
prepares its pictures is made of its keys.

It lies among what can be made again (`cache_home`), under a digest of all that it is made of, and is made once. Without
torch: services that only want its tokenizer prepare it too.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from shared.bounded_file import OutOfBounds, bounds_of, read_value
from shared.checkpoint.files import GGUF, MMPROJ, find_weights
from shared.checkpoint.gguf.architecture import GgufModel
from shared.checkpoint.gguf.header import GgufHeader, is_gguf, read_header
from shared.checkpoint.gguf.vision import beside as vision_files
from shared.checkpoint.gguf.vision.kinds import open_projector
from shared.checkpoint.gguf.vision.projector import Projector
from shared.errors import InvalidRequest
from shared.settings import cache_home
from shared.text.templates.template_file import read_template

log = structlog.get_logger(__name__)

SUFFIX = ".gguf"
_FORMAT = 2  # of what is written; raised when the same file is to give other ones
_PROGRAM = (sys.executable, "-P", "-m", "shared.checkpoint.gguf.tokenizer_files")
_PROGRAM_S = (
    900.0  # where the machine is busy; of a processor's time it takes far less, or is ended
)
_LONGEST_REASON = 500
_TOKENIZER, _GENERATION = "tokenizer.json", "generation_config.json"
# As llama.cpp does it, of the texts of released models.
_ENDS_OF_TURNS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<end_of_utterance>",
        "<EOT>",
    )
)
# What a folder may have beside the file, which goes before what the file says.
_BESIDE = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    _GENERATION,
)
_OF_PICTURES = "preprocessor_config.json"
# Of config.json what does not move into its language part.
_OF_WHOLE = ("architectures", "quantization_config")


def prepared_folder(model: Path, mmproj: str = "") -> Path:
    """Of a GGUF file, or a folder whose weights are one, the checkpoint folder that is served; of everything else the
    path itself. mmproj: the file of its vision part, by a path or its name beside the model, or "none"; empty: the only
    one that lies beside it.

    Raises InvalidRequest, naming the key or the tensor, for files that cannot be served, or not together.
    """
    file = _find_file(model)
    if file is None:
        if mmproj not in ("", vision_files.NONE):
            raise InvalidRequest(
                "NO_MODEL", f"--mmproj: {model} is no GGUF file of a language model", field="mmproj"
            )
        return model
    header = read_header(file)
    made_of = GgufModel(header)
    made_of.require_tensors()
    config = made_of.config()
    kinds = Counter(tensor.kind.name for tensor in made_of.tensors.values())
    config["quantization_config"] = {"quant_method": "gguf", "tensors": dict(sorted(kinds.items()))}
    projector = _find_projector(file, model, mmproj)
    names = _BESIDE if projector is None else (*_BESIDE, _OF_PICTURES)
    headers = [header]
    if projector is not None:
        projector.require_pair(header, config["hidden_size"], config["head_dim"])
        headers.append(projector.header)
    beside = [model / name for name in names if model.is_dir() and (model / name).is_file()]
    folder = cache_home() / "tessera" / "gguf" / f"{file.stem}-{_digest(headers, beside)}"
    if all((folder / name).exists() for name, _ in zip((GGUF, MMPROJ), headers, strict=False)):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".", suffix=".part"))
    try:
        _write(part, file, made_of.end_ids(), beside)
        if projector is not None:
            config = _add_pictures(part, projector, config, header)
        _write_json(part / "config.json", config)
        _put(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    seen = {} if projector is None else {"mmproj": str(projector.header.path)}
    log.info("prepared", model=str(file), folder=str(folder), **seen)
    return folder


def _find_projector(file: Path, model: Path, given: str) -> Projector | None:
    found = vision_files.find_projector(file, model if model.is_dir() else None, given)
    return None if found is None else open_projector(found)


def _find_file(model: Path) -> Path | None:
    if not model.is_dir():
        if model.suffix == SUFFIX and not model.exists():
            raise InvalidRequest("NO_MODEL", f"no file {model}", field="model")
        if model.suffix == SUFFIX or is_gguf(model):
            return model
        if model.exists():
            raise InvalidRequest(
                "NO_MODEL",
                f"{model} is a file, and no GGUF: give the folder that has the model's config.json",
                field="model",
            )
        return None
    weights = find_weights(model)
    # A file that is called as that of a folder made here is one all the same.
    if weights is not None and (weights.name != GGUF or (model / "config.json").is_file()):
        return None
    found = [path for path in vision_files.files_of(model) if not vision_files.is_named_so(path)]
    if len(found) > 1:
        found = [path for path in found if not vision_files.says_so(path)] or found
    if len(found) > 1:
        raise InvalidRequest(
            "NO_MODEL",
            f"{model} has several GGUF files, {vision_files.shown(found)}: give the path of the one that is meant, of a"
            " model in several files after llama-gguf-split --merge",
            field="model",
        )
    return found[0] if found else None


def _digest(headers: list[GgufHeader], beside: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    try:
        by = version("transformers")
    except PackageNotFoundError:
        by = ""
    digest.update(f"{_FORMAT} {by}".encode())
    for header in headers:
        digest.update(f" {header.path.resolve()}".encode())
        with header.path.open("rb") as file:
            digest.update(file.read(header.nbytes))
    for path in beside:
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _write(folder: Path, file: Path, ends: list[int], beside: list[Path]) -> None:
    """All but config.json, and what pictures need."""
    if not any(path.name == _TOKENIZER for path in beside):
        _write_tokenizer(folder, file)
    for path in beside:
        shutil.copyfile(path, folder / path.name)
    if not any(path.name == _GENERATION for path in beside):
        ids = sorted({*ends, *_ends_of_turns(folder / _TOKENIZER)})
        _write_json(folder / _GENERATION, {"eos_token_id": ids} if ids else {})
    (folder / GGUF).symlink_to(file.resolve())


def _add_pictures(
    folder: Path, projector: Projector, config: dict[str, object], language: GgufHeader
) -> dict[str, object]:
    """Writes what pictures need. Returns the whole model's config.json, of that of its language model."""
    text = {key: value for key, value in config.items() if key not in _OF_WHOLE}
    whole = projector.config(text, language, folder)
    if not (folder / _OF_PICTURES).exists():
        _write_json(folder / _OF_PICTURES, projector.images())
    if (template := projector.template(read_template(folder))) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / MMPROJ).symlink_to(projector.header.path.resolve())
    return {**{key: config[key] for key in _OF_WHOLE}, **whole}


def _ends_of_turns(path: Path) -> list[int]:
    """Of control tokens that end an answer by their texts: keys of files name one of them, if any."""
    if not path.is_file():
        return []
    try:
        said = read_value(path, bounds_of(path.name))
    except (OutOfBounds, OSError, ValueError) as error:
        raise InvalidRequest("BAD_CHECKPOINT", f"{path.name}: {error}", field="model") from None
    added = said.get("added_tokens") if isinstance(said, dict) else None
    return [
        token["id"]
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
        and token.get("content") in _ENDS_OF_TURNS
        and type(token.get("id")) is int
    ]


def _write_tokenizer(folder: Path, file: Path) -> None:
    try:
        done = subprocess.run(
            [*_PROGRAM, str(file), str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROGRAM_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _no_tokenizer(file, f"transformers takes more than {_PROGRAM_S:.0f} s") from None
    if done.returncode:
        said = (done.stdout if done.returncode == 1 else "") or done.stderr
        last = (said.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise _no_tokenizer(file, last[:_LONGEST_REASON])


def _no_tokenizer(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(
        "BAD_CHECKPOINT",
        f"{file}: its tokenizer cannot be used: {why}; a tokenizer.json beside it, in a folder that is given in its"
        " place, goes before it",
        field="model",
    )


def _put(part: Path, folder: Path) -> None:
    """Whole or not at all; another process may have been first."""
    try:
        part.chmod(0o755)
        part.rename(folder)
    except OSError:
        if not (folder / GGUF).exists():
            raise


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
