"""A form with a file, as it comes: small fields whole, the file piece by piece."""

from collections.abc import Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.gateway.decoding.bounds import wrong
from services.gateway.errors import WrongMediaType
from shared.errors import InvalidRequest

_FILE = "file"
_MOST_FIELDS = 16
_LONGEST_FIELD = 1024  # bytes
_LONGEST_NAME = 255  # characters of a file's name
_MOST_HEADERS = 8
_LONGEST_HEADER = 4096
_KIND = "multipart/form-data"


class UploadForm:
    """Reads one form; `feed` takes its bytes in pieces."""

    def __init__(self, content_type: str) -> None:
        """`content_type` is the header's value. Raises WrongMediaType for one that is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind.decode("latin-1") != _KIND or not boundary:
            raise WrongMediaType(
                "UNSUPPORTED_MEDIA_TYPE",
                f"the body must be {_KIND} with a boundary, not {content_type[:64]!r}",
            )
        # The fields that have come, and the name of the file; empty until it has come.
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._is_whole = False
        self._name = ""
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._file: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header.extend(
                        data[start:end]
                    ),
                    "on_header_value": lambda data, start, end: self._header_value.extend(
                        data[start:end]
                    ),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._read_headers,
                    "on_part_data": self._take,
                    "on_part_end": self._end,
                    "on_end": self._finish,
                },
                max_header_count=_MOST_HEADERS,
                max_header_size=_LONGEST_HEADER,
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, data: bytes) -> bytes:
        """Reads on. Returns what came of the file. Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None
        piece = b"".join(self._file)
        self._file.clear()
        return piece

    def finish(self) -> Mapping[str, str]:
        """The fields, once all has come. Raises InvalidRequest where the form is not whole or has no file."""
        if not self._is_whole:
            raise InvalidRequest("INVALID_FORM", "the form ends before its last boundary")
        if not self.filename:
            raise wrong(_FILE, "is missing: send the file in a part of this name with a filename")
        return self.fields

    def _begin(self) -> None:
        self._name = ""
        self._value.clear()
        self._headers.clear()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _read_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._name = name
        if name == _FILE:
            if self.filename:
                raise wrong(_FILE, "comes twice: send one file at a time")
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = given[:_LONGEST_NAME] or _FILE
        elif len(self.fields) >= _MOST_FIELDS:
            raise InvalidRequest("INVALID_FORM", f"the form has more than {_MOST_FIELDS} fields")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _LONGEST_FIELD:
            shown = self._name[:64] or "a field without a name"
            raise wrong(shown, f"must not be longer than {_LONGEST_FIELD} bytes")

    def _end(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._is_whole = True


def _malformed(error: Exception) -> InvalidRequest:
    return InvalidRequest("INVALID_FORM", f"the body is no valid {_KIND}: {error}")
