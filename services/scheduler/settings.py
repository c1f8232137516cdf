"""Settings of the scheduler."""

from typing import ClassVar, Literal

from pydantic import Field

from shared.settings import ServiceSettings, Settings


class SchedulerOptions(Settings):
    """Settings of the scheduler that `tessera serve` has too."""

    GROUP: ClassVar[str] = "scheduler"

    step_target_ms: float = Field(
        250.0,
        ge=0,
        description="Milliseconds that a step may take while streams generate: prompts get what these leave of it, and"
        " at least as much time as these take, so that half of a step is theirs; 0 is any.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="Order in which requests are admitted, and the reverse order of preemption: by arrival, or by"
        " priority (interactive before batch) and then arrival.",
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="What is done with computed tokens when blocks run out: discarded and computed again, saved in the"
        " decoder's host blocks, or whichever is expected to cost less.",
    )
    first_token_goal: float = Field(
        10.0,
        ge=0,
        description="Seconds within which first tokens are to come. When more is asked than can be done, a request that"
        " has waited 0.4 of it comes behind those that have not, but for every 20th turn. 0: strictly in order of"
        " arrival. Batch work, and requests with a queue or first token timeout, keep their order.",
    )
    changed_model_timeout: float = Field(
        120.0,
        ge=0,
        description="Seconds that an answer which has begun waits for a decoder with the same weights while there are"
        " only decoders with others; then it ends with model_changed.",
    )


class SchedulerSettings(SchedulerOptions, ServiceSettings):
    """Flags, and `TESSERA_SCHEDULER_*` in the environment."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_SCHEDULER_", "TESSERA_")

    encoder_budget: int = Field(
        0,
        ge=0,
        description="Embedding rows on their way to one decoder; 0 is four steps' worth of tokens.",
    )
    lead_ms: float = Field(
        2.0,
        ge=0,
        description="A plan is sent this long before the running step is predicted to end.",
    )
