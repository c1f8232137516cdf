"""Triton's clients, over HTTP and gRPC."""

import base64
import queue

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from asked import ASKED, PICTURE, TOO_HOT, error_of, found, tell


def headers(key=ASKED.key):
    """New ones each time: the client adds its own to them."""
    return {"authorization": f"Bearer {key}"}


def inputs(library, *, stream=False, temperature=0.0, pictures=()):
    """The prompt, its pictures and its parameters as tensors."""
    given = [
        ("text_input", "BYTES", [ASKED.question.encode()], object),
        ("max_tokens", "INT32", [ASKED.tokens], np.int32),
        ("temperature", "FP32", [temperature], np.float32),
        ("stream", "BOOL", [stream], bool),
    ]
    if pictures:
        given.append(("image", "BYTES", list(pictures), object))
    tensors = []
    for name, datatype, values, kind in given:
        tensors.append(library.InferInput(name, [len(values)], datatype))
        tensors[-1].set_data_from_numpy(np.array(values, dtype=kind))
    return tensors


def text_of(result):
    return result.as_numpy("text_output")[0].decode()


def streamed(client, temperature=0.0):
    """The text of a stream over gRPC, or its error."""
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=headers())
    asked = inputs(triton_grpc, stream=True, temperature=temperature)
    client.async_stream_infer(ASKED.model, asked, request_id="a")
    text = b""
    while True:
        result, error = answers.get(timeout=120)
        if error is not None:
            client.stop_stream()
            raise error
        text += result.as_numpy("text_output")[0]
        if result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return text.decode()


CLIENTS = {
    "http": (triton_http, ASKED.url.removeprefix("http://")),
    "grpc": (triton_grpc, ASKED.grpc_address),
}
for name, (library, address) in CLIENTS.items():
    client = library.InferenceServerClient(address)
    assert client.is_server_live(headers=headers()) and client.is_server_ready(headers=headers())
    assert client.is_model_ready(ASKED.model, headers=headers())
    about = client.get_model_metadata(ASKED.model, headers=headers())
    found("models", name, [about["name"] if name == "http" else about.name])
    found("text", name, text_of(client.infer(ASKED.model, inputs(library), headers=headers())))
    seen = inputs(library, pictures=[base64.b64decode(PICTURE)])
    found("text_with_picture", name, text_of(client.infer(ASKED.model, seen, headers=headers())))
    asked = inputs(library, temperature=TOO_HOT)
    found("refused", name, error_of(client.infer, ASKED.model, asked, headers=headers()))
    asked = inputs(library)
    found("unknown", name, error_of(client.infer, "another", asked, headers=headers()))
    found("denied", name, error_of(client.infer, ASKED.model, asked, headers=headers("wrong")))
    if name == "grpc":
        found("text", "grpc stream", streamed(client))
        found("refused", "grpc stream", error_of(streamed, client, temperature=TOO_HOT))
    client.close()
tell()
