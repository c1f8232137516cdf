"""Adapters that are loaded while the system runs, over gRPC."""

from typing import Any

import grpc

from services.gateway.api.grpc_methods.generating import GrpcGenerating
from services.gateway.model.adapter_loading import AdapterLoading
from services.gateway.model.served_model import ServedModel
from tessera.gateway.v1 import adapters_pb2_grpc
from tessera.gateway.v1.adapters_pb2 import (
    AdapterEntry,
    ListAdaptersRequest,
    ListAdaptersResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
)

Context = grpc.aio.ServicerContext[Any, Any]


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """tessera.gateway.v1.AdapterService."""

    def __init__(
        self, model: ServedModel, loading: AdapterLoading, generating: GrpcGenerating
    ) -> None:
        self._model = model
        self._loading = loading
        self._generating = generating

    async def LoadAdapter(
        self, request: LoadAdapterRequest, context: Context
    ) -> LoadAdapterResponse:
        """Serves an adapter by a name."""
        self._generating.caller(context)
        not_known = await self._loading.load(
            request.lora_name, request.lora_path, in_place=request.load_inplace
        )
        return LoadAdapterResponse(not_known=not_known)

    async def UnloadAdapter(
        self, request: UnloadAdapterRequest, context: Context
    ) -> UnloadAdapterResponse:
        """Serves an adapter no longer."""
        self._generating.caller(context)
        return UnloadAdapterResponse(not_known=await self._loading.unload(request.lora_name))

    async def ListAdapters(
        self, request: ListAdaptersRequest, context: Context
    ) -> ListAdaptersResponse:
        """All that are served."""
        self._generating.caller(context)
        adapters = self._model.adapters
        return ListAdaptersResponse(
            adapters=[
                AdapterEntry(
                    lora_name=name,
                    lora_id=lora_id,
                    is_fixed=name in adapters.fixed,
                    is_default=name == adapters.default,
                )
                for name, lora_id in adapters.items()
            ]
        )
