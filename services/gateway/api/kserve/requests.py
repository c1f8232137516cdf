"""What is asked by text or by tensors, checked and turned into our own types."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.kserve.schema import GenerateRequest, InferParameters, Parameters
from services.gateway.api.kserve.tensors import BYTES, Tensor
from services.gateway.decoding.bounds import at_most, text, wrong
from services.gateway.decoding.decode import decode
from services.gateway.decoding.list_limits import MOST_PARTS
from services.gateway.decoding.typed import decoder_of
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.field_names import fields_named
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.generation import Prompt, ids_prompt, read_generation
from services.gateway.reading.media.media import read_image_bytes
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.prompt_parts import image_part, media_urls, parts_prompt, read_prompt
from services.gateway.reading.sampling.drawn import drawn
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Part
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_DEFAULT_TOKENS = 16
_LONGEST_ID = 256
_TEXT, _IMAGES, _SAMPLING = "text_input", "image", "sampling_parameters"
_URL_BEGINS = (b"http://", b"https://", b"file:", b"data:", b"/")
_PLAIN = (
    "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "ignore_eos", "priority", "timeout", "stream",
)  # fmt: skip
# Our fields that have several names, of which the first one that is given counts.
_SEVERAL = {
    "max_tokens": ("max_tokens", "max_new_tokens"),
    "seed": ("seed", "random_seed"),
    "stop": ("stop", "stop_words"),
}


class ReadRequest(NamedTuple):
    """A request, the options that it was made of, and whether its prompt was token ids."""

    request: ValidRequest
    options: GenerationOptions
    by_ids: bool


class GivenParameters:
    """Parameters of a request from several places, and what each is called where it stands."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def add(self, parameters: Parameters | None, prefix: str = "") -> None:
        """Those of one place; they go before those that were added already."""
        if parameters is None:
            return
        for name in Parameters.__struct_fields__:
            value = getattr(parameters, name)
            if value is not None:
                self._values[name] = value
                self._names[name] = f"{prefix}{name}"

    def add_json(self, written: str | None, field: str) -> None:
        """Those of a JSON object in a string. Raises InvalidRequest naming `field`, or what is wrong in it."""
        if not written:
            return
        names = {name: f"{field}.{name}" for name in Parameters.__struct_fields__}
        try:
            with fields_named(names):
                found = decode(written.encode(), Parameters)
        except InvalidRequest as error:
            if "field" in error.metadata:
                raise
            what = error.message.removeprefix("the body ")
            raise wrong(field, what, error.reason) from None
        self.add(found, f"{field}.")

    def value(self, name: str) -> Any:
        """One of them; None if it was not given."""
        return self._values.get(name)

    def options(
        self, model: str, stream: bool | None
    ) -> tuple[GenerationOptions, Mapping[str, str]]:
        """The options under our names, and what our fields are called. `stream` None is as the request has it. Raises
        InvalidRequest for what is not offered.
        """
        for name, off in (("typical_p", 1), ("watermark", False)):
            if self._values.get(name, off) != off:
                raise unsupported(self._names[name], "is not offered: leave it out")
        fields = {name: self._values[name] for name in _PLAIN if name in self._values}
        names = {name: self._names[name] for name in fields}
        for ours, theirs in _SEVERAL.items():
            found = [name for name in theirs if name in self._values]
            if found:
                fields[ours], names[ours] = self._values[found[0]], self._names[found[0]]
        fields.setdefault("max_tokens", _DEFAULT_TOKENS)
        if fields.get("stop") == "":
            del fields["stop"]
        if self._values.get("do_sample") is False:
            fields["temperature"] = 0.0
        if stream is not None:
            fields["stream"] = stream
        return GenerationOptions(model=model, **fields), names


def read_generate(
    body: GenerateRequest, name: str, stream: bool, model: ServedModel
) -> ReadRequest:
    """A request by text. Raises InvalidRequest naming the field, or NotFound."""
    given = GivenParameters()
    given.add(body)
    given.add_json(body.sampling_parameters, _SAMPLING)
    given.add(body.parameters, "parameters.")
    prompt = _seen_prompt(body, model)
    return _asked(given, prompt, name, body.id, stream, model, by_ids=False)


def urls(body: GenerateRequest) -> Iterator[str]:
    """The URLs that media are read from."""
    yield from media_urls(body.text_input)
    yield from _pictures(body)


def _seen_prompt(body: GenerateRequest, model: ServedModel) -> Prompt:
    pictures = _pictures(body)
    if not pictures:
        return read_prompt(body.text_input, _TEXT, model)
    if not isinstance(body.text_input, str):
        raise wrong(_TEXT, f"must be a text beside {_IMAGES}: parts have pictures of their own")
    at_most(_IMAGES, len(pictures), MOST_PARTS)
    parts = [_image(one.encode(), f"{_IMAGES}[{index}]") for index, one in enumerate(pictures)]
    return parts_prompt([*parts, Part(text=body.text_input)], model)


def _pictures(body: GenerateRequest) -> Sequence[str]:
    return [body.image] if isinstance(body.image, str) else body.image or ()


def read_infer(
    tensors: Sequence[Tensor],
    parameters: Sequence[Parameters | None],
    name: str,
    own_id: str | None,
    stream: bool | None,
    model: ServedModel,
) -> ReadRequest:
    """A request by tensors: the prompt as text or ids, pictures, and parameters, which may also stand in `parameters`.
    Raises InvalidRequest naming the field, or NotFound.
    """
    given = GivenParameters()
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise wrong("inputs", "must have different names")
    words, images = by_name.pop(_TEXT, None), by_name.pop(_IMAGES, None)
    sampling = by_name.pop(_SAMPLING, None)
    ids = None
    if words is None:
        unnamed = [one for one in by_name.values() if one.name not in Parameters.__struct_fields__]
        ids = next((one for one in unnamed if one.is_ids), None)
        if ids is not None:
            del by_name[ids.name]
    if sampling is not None:
        given.add_json(_text(_one(sampling), _SAMPLING), f"inputs.{_SAMPLING}")
    for tensor in by_name.values():
        _add_parameter(given, tensor)
    for some in parameters:
        if isinstance(some, InferParameters) and some.sequence_id not in (None, 0, ""):
            raise unsupported("parameters.sequence_id", "is not offered: leave it out")
        given.add(_in_seconds(some), "parameters.")
    prompt = _prompt(words, ids, images, model)
    return _asked(given, prompt, name, own_id, stream, model, by_ids=ids is not None)


def _asked(
    given: GivenParameters,
    prompt: Prompt,
    name: str,
    own_id: str | None,
    stream: bool | None,
    model: ServedModel,
    *,
    by_ids: bool,
) -> ReadRequest:
    options, names = given.options(name, stream)
    if given.value("do_sample"):
        options.temperature = drawn(options.temperature, model)
    with fields_named(names):
        request = read_generation(options, prompt, ReplyKind.REPLY_KIND_TRITON, None, model)
    request.reply.client_id = text("id", own_id, _LONGEST_ID)
    request.reply.details = given.value("details") is True
    if given.value("exclude_input_in_output") is False:
        request.reply.prompt_text = prompt.text()
    return ReadRequest(request, options, by_ids)


def _prompt(
    words: Tensor | None, ids: Tensor | None, images: Tensor | None, model: ServedModel
) -> Prompt:
    if words is None:
        if ids is None:
            raise wrong(f"inputs.{_TEXT}", "is missing: send a text as BYTES, or token ids")
        if images is not None:
            raise wrong(f"inputs.{_IMAGES}", f"is for a text in {_TEXT}")
        return ids_prompt(list(ids.values), model, f"inputs.{ids.name[:64]}")
    if words.datatype != BYTES:
        raise wrong(f"inputs.{_TEXT}", f"must be of BYTES, not {words.datatype}")
    written = _text(_one(words), f"inputs.{_TEXT}")
    parts = [_image(value, f"inputs.{_IMAGES}") for value in _images(images)]
    return parts_prompt([*parts, Part(text=written)], model)


def _images(images: Tensor | None) -> Sequence[bytes]:
    if images is None:
        return ()
    if images.datatype != BYTES:
        raise wrong(f"inputs.{_IMAGES}", f"must be of BYTES, not {images.datatype}")
    return images.values


def _image(value: bytes, field: str) -> Part:
    """A picture by its URL or path, its file in base64, or the file itself."""
    if value.startswith(_URL_BEGINS):
        return image_part(_text(value, field), field)
    if value and value.isascii():
        return image_part(f"data:;base64,{value.decode()}", field)
    return Part(media=read_image_bytes(value, field))


def _add_parameter(given: GivenParameters, tensor: Tensor) -> None:
    field = f"inputs.{tensor.name[:64]}"
    if tensor.name not in Parameters.__struct_fields__:
        raise unsupported(field, "is not an input of this model: leave it out")
    values: list[Any] = [
        _text(value, field) if isinstance(value, bytes) else value for value in tensor.values
    ]
    value: Any = values if tensor.name.startswith("stop") else _one(tensor._replace(values=values))
    decoder_of(Parameters)
    try:
        given.add(msgspec.convert({tensor.name: value}, Parameters), "inputs.")
    except msgspec.ValidationError:
        raise wrong(field, f"cannot be of {tensor.datatype}", "INVALID_TYPE") from None


def _in_seconds(parameters: Parameters | None) -> Parameters | None:
    """Triton's timeout of a request is in microseconds, MindIE's in seconds; 0 is none."""
    if not isinstance(parameters, InferParameters) or parameters.timeout is None:
        return parameters
    return msgspec.structs.replace(parameters, timeout=parameters.timeout / 1e6 or None)


def _one(tensor: Tensor) -> Any:
    if len(tensor.values) != 1:
        raise wrong(f"inputs.{tensor.name[:64]}", f"must have one value, not {len(tensor.values)}")
    return tensor.values[0]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, bytes):
        raise wrong(field, "must be of BYTES")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise wrong(field, "is no text in UTF-8") from None
