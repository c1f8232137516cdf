"""Chat templates rendered in confined processes of their own, which hold no more than so much memory and time."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from shared.confinement.processes import ConfinedProcesses
from shared.confinement.work import JobLimit, Work

_MEMORY_BYTES = 512 << 20
_PROCESSOR_S = 5
# What a template may write (`worker.MOST_CHARACTERS`), of up to four bytes each, and the values with it.
_ANSWER_BYTES = 129 << 20


class TemplateRefusal(Exception):
    """The template refused the conversation (`raise_exception`), or could not render it."""


class TemplateLimit(TemplateRefusal):
    """The template took too much memory or time, whatever it was given."""


class TemplateProcesses:
    """As many processes as templates are rendered at a time. Safe for several threads. Enter it, to end them."""

    def __init__(self, memory_bytes: int = _MEMORY_BYTES, processor_s: int = _PROCESSOR_S) -> None:
        """`memory_bytes`: what a template may take beside the process's own; `processor_s` of each rendering."""
        self._processes = ConfinedProcesses(
            Work(
                "shared.text.templates.worker",
                "chat templates",
                "TEMPLATE_PROCESS",
                memory_bytes,
                processor_s,
                _ANSWER_BYTES,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; who waits for one gets Unavailable."""
        self._processes.close()

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return self._processes.pids

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a template. The variables must be what JSON has.

        Raises TemplateRefusal with what the template said, TemplateLimit where it took too much, and Unavailable where
        no process can be had.
        """
        return self._ask({"template": source, "variables": variables})[1]

    def loops_over_content(self, source: str) -> bool:
        """Whether a template goes through the parts of a message (`loops`). Raises as `render` does."""
        answer, _ = self._ask({"template": source, "variables": None})
        return bool(answer.get("loops"))

    def _ask(self, job: dict[str, Any]) -> tuple[dict[str, Any], str]:
        try:
            answer, text = self._processes.ask(job)
        except JobLimit as limit:
            more = (
                " to render: send less, or shorter lists in chat_template_kwargs"
                if limit.is_time
                else ""
            )
            raise TemplateLimit(f"the chat template {limit}{more}") from None
        if "refused" in answer:
            raise TemplateRefusal(str(answer["refused"]))
        return answer, text
