"""What a server gives that was started for vectors or scores, and how it is made of what decoders give."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest
from tessera.common.v1.pooling_pb2 import PoolingParams

Floats = npt.NDArray[np.float32]

_LARGEST = 700.0  # logit whose exponential is a number
_SHORTEST = 1e-12  # length that a vector is divided by


class Task(Enum):
    """What a server does, as `--task` names it."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"


MEANING: Mapping[Task, str] = {
    Task.GENERATE: "generates text",
    Task.EMBED: "gives vectors of texts",
    Task.CLASSIFY: "classifies texts",
    Task.SCORE: "scores how well texts answer a query",
}


class Activation(Enum):
    """What becomes of a classification head's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"

    def __call__(self, logits: Floats) -> Floats:
        """Of [labels]: the same number of values."""
        wide = logits.astype(np.float64)
        if self is Activation.NONE:
            return logits
        if self is Activation.SIGMOID:
            likely = 1 / (1 + np.exp(-wide.clip(-_LARGEST, _LARGEST)))
        else:
            shifted = np.exp(wide - wide.max())
            likely = shifted / shifted.sum()
        found: Floats = likely.astype(np.float32)
        return found


@dataclass(frozen=True, slots=True)
class PooledModel:
    """How prompts become vectors, and vectors what a reply shows."""

    task: Task
    params: PoolingParams
    normalizes: bool = True  # vectors, to length 1
    # Dimensions to which vectors may be cut: those listed, all below the width where none are; None is none at all.
    matryoshka: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    activation: Activation = Activation.NONE
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name
    default_prompt: str = ""

    @property
    def width(self) -> int:
        """Numbers of a vector as decoders give it."""
        return self.params.width

    @property
    def is_scorer(self) -> bool:
        """Whether it reads a query and a text together and gives one score."""
        return self.task is Task.SCORE or len(self.labels) == 1

    def finished(self, vector: Floats, dimensions: int, activates: bool | None = None) -> Floats:
        """What a reply shows of a vector: `dimensions` numbers of it, of length 1 or as probabilities where `activates`
        or, where that is None, as the model's files say."""
        shown = vector[:dimensions]
        if self.task is not Task.EMBED:
            return shown if activates is False else self.activation(shown)
        if not (self.normalizes if activates is None else activates):
            return shown
        wide = shown.astype(np.float64)
        unit: Floats = (wide / max(float(np.linalg.norm(wide)), _SHORTEST)).astype(np.float32)
        return unit

    def score(self, vector: Floats, activates: bool | None = None) -> float:
        """How well a text answers a query, by the vector of both; without activation the logit, or the difference."""
        if activates is False:
            return float(vector[-1] - (vector[0] if len(vector) > 1 else 0.0))
        return float(self.activation(vector)[-1])

    def prompt_of(self, *names: str) -> str:
        """The text that goes before others, by the first of these names that there is; the default one for none."""
        found = (self.prompts[name] for name in names if name in self.prompts)
        return next(found, self.default_prompt)


def tasks_of(pooled: PooledModel | None) -> tuple[Task, ...]:
    """All that a server does."""
    if pooled is None:
        return (Task.GENERATE,)
    if pooled.task is Task.EMBED:  # by how alike vectors are
        return (Task.EMBED, Task.SCORE)
    return (pooled.task, Task.SCORE) if pooled.is_scorer else (pooled.task,)


def not_served(task: Task | None, pooled: PooledModel | None) -> InvalidRequest:
    """The error for a route of another task than those of the server; None is all but generating."""
    asked = MEANING[task] if task is not None else "gives vectors or scores"
    does = " and ".join(MEANING[one] for one in dict.fromkeys(tasks_of(pooled)))
    return InvalidRequest(
        "TASK_NOT_SERVED",
        f"this server {does}: for one that {asked}, start it with another model or --task (docs/api.md)",
        field="model",
    )
