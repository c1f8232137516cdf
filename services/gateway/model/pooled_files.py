"""What a model is served for, by `--task`, `--pooling` and its own files.

The files are those of sentence-transformers: modules.json with the pooling's and the normalisation's folders, and
config_sentence_transformers.json with texts that go before others ("prompts").
"""

from collections.abc import Mapping

from services.families import registry
from services.families.vectors import MODULES, classifies
from services.gateway.model.pooled_model import MEANING, Activation, PooledModel, Task
from shared.bounded_file import SMALL, read_value
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.tokenizer_file import TokenizerFile
from tessera.common.v1.pooling_pb2 import PooledRows, PoolingHead, PoolingParams

_PROMPTS = "config_sentence_transformers.json"
# Those of the modules of sentence-transformers that are served, by the last part of their type.
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
_ROWS = {
    "last": PooledRows.POOLED_ROWS_LAST,
    "mean": PooledRows.POOLED_ROWS_MEAN,
}
# What pooling's config.json calls them: in one field, or as flags of which one is set.
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_FLAG = "pooling_mode_"
# Whose logits a reranker that generates is read from.
_ANSWERS = ("no", "yes")


def read_pooled(
    checkpoint: Checkpoint, words: TokenizerFile, hidden_size: int, task: str, pooling: str
) -> PooledModel | None:
    """By `--task` and `--pooling`; None where text is generated. Raises InvalidRequest for what the model's files
    do not have, or have and is not served, naming the file."""
    wanted = _task(checkpoint, task)
    if pooling != "auto" and wanted is not Task.EMBED:
        raise _refuse(
            f"--pooling {pooling} is for --task embed, and this server {MEANING[wanted]}",
            "pooling",
        )
    match wanted:
        case Task.GENERATE:
            return None
        case Task.EMBED:
            return _embedder(checkpoint, hidden_size, pooling)
        case Task.CLASSIFY:
            return _classifier(checkpoint)
        case Task.SCORE if classifies(checkpoint):
            found = _classifier(checkpoint)
            if not found.is_scorer:
                what = f"has {len(found.labels)} labels, and a score is one number"
                raise _refuse(f"--task score: {checkpoint.folder} {what}", "task")
            return found
        case Task.SCORE:
            return _answering(checkpoint, words)


def _task(checkpoint: Checkpoint, asked: str) -> Task:
    """`asked`, or what the model's files show."""
    if asked == "auto":
        if classifies(checkpoint):
            return Task.CLASSIFY
        return Task.EMBED if registry.is_for_vectors(checkpoint) else Task.GENERATE
    task = Task(asked)
    if task is Task.CLASSIFY and not classifies(checkpoint):
        raise _refuse(f"--task classify: {checkpoint.kind} has no classification head", "task")
    if task in (Task.GENERATE, Task.EMBED) and classifies(checkpoint):
        raise _refuse(
            f"--task {asked}: {checkpoint.kind} has a classification head alone; leave the flag away",
            "task",
        )
    return task


def _embedder(checkpoint: Checkpoint, hidden_size: int, pooling: str) -> PooledModel:
    modules = _modules(checkpoint)
    rows = _rows(checkpoint, modules) if pooling == "auto" else _ROWS[pooling]
    params = PoolingParams(rows=rows, head=PoolingHead.POOLING_HEAD_NONE, width=hidden_size)
    prompts, default = _prompts(checkpoint)
    return PooledModel(
        Task.EMBED,
        params,
        normalizes="Normalize" in modules if modules else True,
        matryoshka=_matryoshka(checkpoint, hidden_size),
        prompts=prompts,
        default_prompt=default,
    )


def _classifier(checkpoint: Checkpoint) -> PooledModel:
    config = checkpoint.config
    names = config.get("id2label")
    count = len(names) if isinstance(names, dict) and names else config.get("num_labels", 2)
    if not isinstance(count, int) or count < 1:
        raise _refuse(f"{checkpoint.folder / 'config.json'}: num_labels is {count!r:.40}")
    listed = names if isinstance(names, dict) else {}
    labels = tuple(str(listed.get(str(index), f"LABEL_{index}")) for index in range(count))
    # As the pipelines of transformers choose.
    kind = config.get("problem_type")
    activation = Activation.SIGMOID if count == 1 else Activation.SOFTMAX
    if kind == "regression":
        activation = Activation.NONE
    elif kind == "multi_label_classification":
        activation = Activation.SIGMOID
    return PooledModel(
        Task.CLASSIFY,
        PoolingParams(rows=_ROWS["last"], head=PoolingHead.POOLING_HEAD_SCORE, width=count),
        labels=labels,
        activation=activation,
    )


def _answering(checkpoint: Checkpoint, words: TokenizerFile) -> PooledModel:
    """A reranker that generates: its score is how likely "yes" is beside "no" (Qwen3-Reranker, Zhang et al., 2025)."""
    ids = words.ids()
    missing = [answer for answer in _ANSWERS if answer not in ids]
    if missing:
        raise _refuse(
            f"--task score: the tokenizer of {checkpoint.folder} has no token {missing[0]!r}, by which a model that"
            " generates says how well a text answers a query",
            "task",
        )
    return PooledModel(
        Task.SCORE,
        PoolingParams(
            rows=_ROWS["last"],
            head=PoolingHead.POOLING_HEAD_TOKENS,
            token_ids=[ids[answer] for answer in _ANSWERS],
            width=len(_ANSWERS),
        ),
        activation=Activation.SOFTMAX,
    )


def _modules(checkpoint: Checkpoint) -> Mapping[str, str]:
    """The folder of each module of sentence-transformers by the last part of its type; nothing without modules.json.
    Raises InvalidRequest for one that is not served."""
    path = checkpoint.folder / MODULES
    if not path.is_file():
        return {}
    try:
        listed = read_value(path, SMALL)
        found = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refuse(f"{path} cannot be read: {error}") from None
    others = [name for name in found if name not in _SERVED_MODULES]
    if others:
        raise _refuse(
            f"{path}: {', '.join(others)} is not served; {', '.join(_SERVED_MODULES)} are"
        )
    return found


def _rows(checkpoint: Checkpoint, modules: Mapping[str, str]) -> PooledRows.ValueType:
    """Those that the files name; the last token's where they name none. Raises InvalidRequest for others."""
    if "Pooling" not in modules:
        return _ROWS["last"]
    path = checkpoint.folder / modules["Pooling"] / "config.json"
    config = checkpoint.file(f"{modules['Pooling']}/config.json")
    named = config.get("pooling_mode")
    if named is None:
        named = [key.removeprefix(_FLAG) for key, on in config.items() if _FLAG in key and on]
    modes = [_MODES.get(str(one), "") for one in ([named] if isinstance(named, str) else named)]
    if len(modes) != 1 or modes[0] not in _ROWS:
        raise _refuse(
            f"{path}: of the ways to pool, those of the last token and of the mean of all are served, one at a time;"
            " give --pooling last or --pooling mean for one of them"
        )
    if config.get("include_prompt") is False:
        raise _refuse(f"{path}: include_prompt false is not served, all tokens of a prompt count")
    return _ROWS[modes[0]]


def _prompts(checkpoint: Checkpoint) -> tuple[Mapping[str, str], str]:
    """Texts by name, and the one that goes before a text that names none."""
    if not (checkpoint.folder / _PROMPTS).is_file():
        return {}, ""
    config = checkpoint.file(_PROMPTS)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise _refuse(f"{checkpoint.folder / _PROMPTS}: prompts is no object of texts")
    if default is not None and default not in prompts:
        raise _refuse(f"{checkpoint.folder / _PROMPTS}: default_prompt_name is not among prompts")
    return prompts, "" if default is None else prompts[default]


def _matryoshka(checkpoint: Checkpoint, width: int) -> tuple[int, ...] | None:
    """By `matryoshka_dimensions` and `is_matryoshka` of config.json, which vLLM reads too."""
    listed = checkpoint.config.get("matryoshka_dimensions")
    if listed is None:
        return () if checkpoint.config.get("is_matryoshka") is True else None
    if not isinstance(listed, list) or not all(
        type(one) is int and 0 < one <= width for one in listed
    ):
        path = checkpoint.folder / "config.json"
        raise _refuse(f"{path}: matryoshka_dimensions is no list of numbers from 1 to {width}")
    return tuple(listed)


def _refuse(message: str, field: str = "model") -> InvalidRequest:
    return InvalidRequest("UNSUPPORTED_POOLING", message, field=field)
