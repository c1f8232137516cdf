"""The first rank's worker: what it does, the other ranks are told to do."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.staging import Array
from services.decoder.media.embeddings import Embeddings
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.parallel import messages
from services.decoder.parallel.leader import Leader
from services.decoder.parallel.messages import Order
from services.decoder.sampling.logits_processors.token_masks import TokenMatcher
from services.decoder.speculation.proposer import Proposer
from services.decoder.worker.collecting import Deliver
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.planned_adapters import PlannedAdapters
from services.decoder.worker.plans.plan import Limits, Plan
from services.decoder.worker.worker import Worker
from shared.errors import ServingError
from tessera.decoder.v1.decoder_pb2 import StepPlan

T = TypeVar("T")


class LeadingWorker(Worker):
    """Ends the process where a step fails on this rank alone: the others wait for it for good."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        limits: Limits,
        embeddings: Embeddings,
        matcher: TokenMatcher | None = None,
        adapters: PlannedAdapters | None = None,
        proposer: Proposer | None = None,
        max_drafts: int = 0,
        *,
        leader: Leader,
    ) -> None:
        super().__init__(model, device, limits, embeddings, matcher, adapters, proposer, max_drafts)
        self._leader = leader

    def accept(self, message: StepPlan) -> Plan:
        """See `Worker.accept`."""
        plan = super().accept(message)
        self._leader.send(Order.PLAN, message.SerializeToString())
        return plan

    def launch(self, plan: Plan, queue_us: int = 0) -> LaunchedStep:
        """See `Worker.launch`."""
        return self._together(lambda: super(LeadingWorker, self).launch(plan, queue_us))

    def collect(self, step: LaunchedStep, deliver: Deliver) -> None:
        """See `Worker.collect`."""
        self._together(lambda: super(LeadingWorker, self).collect(step, deliver))

    def reset(self) -> None:
        """See `Worker.reset`; waits for the other ranks, so that none forgets what is fetched after it."""
        self._together(self._reset)

    # What a step finds depends on which steps before it are collected: the others hear of both in the order in which
    # they happen here, under the lock.

    def _apply(self, plan: Plan) -> None:
        self._leader.send(Order.LAUNCH, messages.launch(plan.lease, plan.step, plan.proposed))
        super()._apply(plan)

    def _finish(self, step: LaunchedStep, arrived: Sequence[Array], deliver: Deliver) -> None:
        self._leader.send(Order.COLLECT)
        super()._finish(step, arrived, deliver)

    def _reset(self) -> None:
        super().reset()
        self._leader.send(Order.RESET)
        assert self.ranks is not None
        self.ranks.wait()

    def _together(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except ServingError as error:
            if error.reason == "RANK_LOST":
                self._leader.fail(error)
            raise  # a plan that contradicts what all ranks know alike
        except Exception as error:
            self._leader.fail(error)
