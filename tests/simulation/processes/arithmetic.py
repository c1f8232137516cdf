"""The arithmetic decoder in virtual time, with embeddings from real artifacts."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from services.decoder.loading.profile_run import Profile
from services.decoder.media.embeddings import Embeddings
from services.decoder.media.media_spans import MediaSpan
from services.decoder.steps.needs import AttentionKind, Needs
from services.decoder.worker.planned_adapters import PlannedAdapters
from services.decoder.worker.plans.plan import Ints, Limits, Plan, read_plan
from shared.artifacts.store import ArtifactReader
from shared.served_part import ServedPart
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult, StepTimes
from tests.support.arithmetic.model import MODEL, Model
from tests.support.arithmetic.worker import ArithmeticWorker

# Of the models in the worlds, as often as they stand here.
ALL_NEEDS = (
    *[Needs()] * 5,
    *[Needs(attention) for attention in AttentionKind],
    Needs(whole_prompt=True),
    Needs(state=True),
    Needs(whole_prompt=True, state=True),
)
CONTENT = b"the only weights"  # of the decoders, unless a world has others
NUMERICS = "arithmetic-0"  # of decoders and encoders, unless a world has others
HIDDEN = 2  # width of an embedding row; the first number says whose it is

Deliver = Callable[[StepResult], None]


class VirtualWorker(ArithmeticWorker):
    """Stands for `services.decoder.worker.worker.Worker`: a step of so many tokens takes `seconds(tokens)`."""

    def __init__(
        self,
        limits: Limits,
        executor: "VirtualExecutor",
        seconds: Callable[[int], float],
        broken: Callable[[str], None],
        needs: Needs | None = None,
        model: Model = MODEL,
        accuracy: float = 0.0,
    ) -> None:
        super().__init__(limits, broken, needs, model, accuracy)
        self.embeddings = Embeddings(ArtifactReader(), lambda tensor: tensor.float(), 64)
        self.adapters = PlannedAdapters(lambda lora_id: None)
        self._executor = executor
        self._seconds = seconds

    def reset(self) -> None:
        """Forgets all sequences and which embeddings they use."""
        super().reset()
        self.embeddings.forget_sequences()

    def accept(self, message: StepPlan) -> Plan:
        """Checks a plan's form, and pulls what it fetches from now on."""
        plan = read_plan(message, self.limits)
        for ref in plan.fetch:
            self.embeddings.start(ref)
        return plan

    def step(self, plan: Plan, deliver: Deliver, queue_us: int = 0) -> None:
        """Applies a plan now; the result leaves when the step's time is over."""
        result = self.run(plan)
        ready, lost = self.embeddings.report()
        result.artifacts_ready.extend(ready)
        result.artifacts_lost.extend(lost)
        count = int(plan.row_count.sum())  # with drafts
        seconds = self._seconds(count) if count else 0.0002
        result.times.CopyFrom(StepTimes(queue_us=queue_us, forward_us=int(seconds * 1e6)))
        self._executor.busy(seconds, lambda: deliver(result))

    def apply(self, plan: Plan) -> None:
        """Also what a plan says of embeddings."""
        self.embeddings.hold([bytes(ref.digest) for ref in plan.fetch])
        super().apply(plan)
        self.embeddings.release(bytes(digest) for digest in plan.release)

    def use(self, slot: int) -> None:
        """Counts a new sequence among the users of its embeddings."""
        self.embeddings.use(span.digest for span in self.slots.media.get(slot, ()))

    def drop(self, slots: Ints) -> None:
        """Forgets sequences, which no longer use their embeddings."""
        for slot in slots.tolist():
            self.embeddings.unuse(span.digest for span in self.slots.media.get(slot, ()))
        super().drop(slots)

    def embedding_rows(self, span: MediaSpan, first: int, last: int) -> list[int]:
        """Those of the artifact. Raises a ServingError if it cannot be read."""
        rows = self.embeddings.rows(span.digest, first, last, len(span.positions), HIDDEN)
        return [int(value) for value in rows[:, 0].tolist()]


class VirtualExecutor:
    """The compute thread: jobs one after the other, each as long as it says by `busy`."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False
        self._rest: tuple[float, Callable[[], None]] | None = None

    def busy(self, seconds: float, then: Callable[[], None]) -> None:
        """Called by a job: it takes so long, and ends with `then`."""
        self._rest = (seconds, then)

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job after those before it."""
        self._jobs.append(job)
        if not self._running:
            self._running = True
            self._loop.call_soon(self._next)

    async def run(self, job: Callable[[], Any]) -> Any:
        """The same, and waits for it."""
        done = self._loop.create_future()

        def work() -> None:
            try:
                value = job()
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(value)

        self.submit(work)
        return await done

    def stop(self) -> None:
        """Does nothing: there is no thread."""

    def _next(self) -> None:
        if not self._jobs:
            self._running = False
            return
        self._rest = None
        self._jobs.popleft()()
        if self._rest is None:
            self._loop.call_soon(self._next)
        else:
            seconds, then = self._rest
            self._loop.call_later(seconds, self._finish, then)

    def _finish(self, then: Callable[[], None]) -> None:
        then()
        self._next()


def loaded(
    worker: VirtualWorker,
    step_us: float,
    token_us: float,
    content: bytes = CONTENT,
    numerics: str = NUMERICS,
) -> Any:
    """What `services.decoder.loading.load.load` returns, without the parts that need a real model."""
    return SimpleNamespace(
        worker=worker,
        device=SimpleNamespace(asynchronous=False),
        fingerprint=b"arithmetic-model",
        content=content,
        numerics=numerics,
        row_invariant=True,
        profile=Profile(step_bytes=0, step_us=step_us, token_us=token_us),
        needs=worker.needs,
        adapters=(),
        kv_cache="",
        part=ServedPart("arithmetic", tuple(worker.needs.off)),
        close=lambda: None,
    )
