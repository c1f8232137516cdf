"""A program for an environment with the `tritonclient` and `text-generation` libraries: prints the text that each way
to ask gives, and errors, as JSON. Run by `test_other_apis.py` with the addresses of REST and gRPC, model and prompt.
"""

import json
import queue
import sys
from typing import Any

import numpy as np
import text_generation
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

http_address, grpc_address, model, prompt = sys.argv[1:]
TOKENS = 12


def inputs(library: Any, *, stream: bool = False) -> list[Any]:
    """The prompt and its parameters as tensors."""
    given: list[tuple[str, str, Any]] = [
        ("text_input", "BYTES", np.array([prompt.encode()], dtype=object)),
        ("max_tokens", "INT32", np.array([TOKENS], np.int32)),
        ("temperature", "FP32", np.array([0], np.float32)),
        ("ignore_eos", "BOOL", np.array([True])),
        ("stream", "BOOL", np.array([stream])),
    ]
    tensors = []
    for name, datatype, values in given:
        tensors.append(library.InferInput(name, [1], datatype))
        tensors[-1].set_data_from_numpy(values)
    return tensors


def error_of(call: Any, *args: Any) -> str:
    """The class and the message of the error that a call raises."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def over_grpc(client: Any) -> str:
    """The text of a stream."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, inputs(triton_grpc, stream=True), request_id="a")
    text = b""
    while True:
        result, error = answers.get(timeout=120)
        assert error is None, error
        text += result.as_numpy("text_output")[0]
        if result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return str(text, "utf-8")


tgi = text_generation.Client(f"http://{http_address}", timeout=120)
http = triton_http.InferenceServerClient(http_address)
grpc = triton_grpc.InferenceServerClient(grpc_address)
assert http.is_server_live() and http.is_server_ready() and http.is_model_ready(model)
assert grpc.is_server_live() and grpc.is_server_ready() and grpc.is_model_ready(model)
assert http.get_model_metadata(model)["name"] == grpc.get_model_metadata(model).name == model
events = list(tgi.generate_stream(prompt, max_new_tokens=TOKENS))
print(
    json.dumps(
        {
            "tgi": tgi.generate(prompt, max_new_tokens=TOKENS).generated_text,
            "tgi stream": events[-1].generated_text,
            "triton http": http.infer(model, inputs(triton_http))
            .as_numpy("text_output")[0]
            .decode(),
            "triton grpc": grpc.infer(model, inputs(triton_grpc))
            .as_numpy("text_output")[0]
            .decode(),
            "triton stream": over_grpc(grpc),
            "errors": [
                error_of(tgi.generate, prompt, False, 10**9),
                error_of(http.infer, "another", inputs(triton_http)),
                error_of(grpc.infer, "another", inputs(triton_grpc)),
            ],
        }
    )
)
