"""What the gateway gives to its APIs, and what it mounts of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.gateway.admission.admission import Admission
from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.held_requests import HeldRequests
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.request_options import Timeouts
from services.gateway.admission.resume import Resumption
from services.gateway.admission.sent_files import SentFiles
from services.gateway.api.batch_forms import BatchForms
from services.gateway.api.generating import Generating
from services.gateway.api.grpc_methods.generating import GrpcGenerating
from services.gateway.api.grpc_methods.pooling import GrpcPooling
from services.gateway.api.pooling import Pooling
from services.gateway.api.reply_forms import ReplyForms
from services.gateway.following.follower import Follower
from services.gateway.health import Health
from services.gateway.http.endpoint import Endpoint, ReplyForm
from services.gateway.http.exchange import BodyLimits
from services.gateway.http.inner_calls import InnerCalls
from services.gateway.lasting_work import LastingWork
from services.gateway.model.adapter_loading import AdapterLoading
from services.gateway.model.served_model import ServedModel
from services.gateway.slices import Slices
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.metrics.reporter import Reporter
from services.gateway.telemetry.refusals import Refusals
from services.gateway.telemetry.served_parts import ServedParts
from services.gateway.telemetry.system_state import SystemState
from services.gateway.telemetry.traces.request_timelines import RequestTimelines
from services.gateway.timings import Timings
from shared.net.rpc.server import RpcServer
from shared.queue.stores.batch_store import BatchStore
from shared.queue.stores.file_store import FileStore
from shared.queue.stores.response_store import ResponseStore


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of files that clients send, and for how long files and batches are kept."""

    most_bytes: int
    silence_s: float  # longest time without a byte
    keep_ms: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running gateway that its APIs share."""

    model: ServedModel
    reply_forms: ReplyForms
    api_keys: ApiKeys
    timeouts: Timeouts  # the server's own
    timings: Timings
    body_limits: BodyLimits
    slices: Slices
    health: Health
    metrics: Metrics
    reporter: Reporter
    served_parts: ServedParts
    system_state: SystemState
    follower: Follower
    pool: PreprocessPool
    held_requests: HeldRequests
    resumption: Resumption
    timelines: RequestTimelines
    refusals: Refusals
    admission: Admission
    adapters: AdapterLoading
    responses: ResponseStore
    files: FileStore
    sent_files: SentFiles
    file_limits: FileLimits
    batches: BatchStore
    batch_forms: BatchForms
    work: LastingWork
    inner_calls: InnerCalls
    generating: Generating
    pooling: Pooling
    grpc_generating: GrpcGenerating
    grpc_pooling: GrpcPooling


@dataclass(frozen=True, slots=True)
class Api:
    """One API: its endpoint, the forms of its replies by `ReplyKind`, and what it has over gRPC."""

    make_endpoint: Callable[[Parts], Endpoint]
    reply_forms: Mapping[int, ReplyForm] = field(default_factory=dict)
    # Adds its methods to the gateway's gRPC server.
    add_grpc: Callable[[RpcServer, Parts], None] | None = None
