"""What a request may set of an item's processing: `mm_processor_kwargs` and `media_io_kwargs`, under vLLM's names."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.prompt.json_fields import bad_json, read_json
from shared.errors import InvalidRequest
from shared.prompts.modality import IMAGE, NAMES, VIDEO
from tessera.preprocess.v1.preprocess_pb2 import MediaOptions

PROCESSOR = "mm_processor_kwargs"
READING = "media_io_kwargs"
# Of which frames of a video are shown; both fields may have them.
FRAME_NAMES = ("fps", "num_frames", "min_frames", "max_frames")
_MOST_FPS = 1000.0


def processor_options(asked: MediaOptions) -> Mapping[str, Any]:
    """`mm_processor_kwargs`. Raises InvalidRequest."""
    return _object(asked.mm_processor_kwargs_json, PROCESSOR)


def frame_options(asked: MediaOptions) -> Mapping[str, tuple[str, Any]]:
    """What is asked of the frames of videos, by its name: the field and the value. Raises InvalidRequest."""
    reading = _object(asked.media_io_kwargs_json, READING)
    for kind in reading.keys() - {NAMES[IMAGE], NAMES[VIDEO]}:
        raise wrong(f"{READING}.{kind[:64]}", "is not known: it has image and video")
    for kind, known in ((NAMES[IMAGE], ()), (NAMES[VIDEO], FRAME_NAMES[:2])):
        given = reading.get(kind) or {}
        if not isinstance(given, dict):
            raise wrong(f"{READING}.{kind}", "must be an object")
        check_names(
            given,
            known,
            f"{READING}.{kind}",
            f"reading an {kind}" if not known else "reading a video",
        )
    found = {
        name: (f"{READING}.video.{name}", value)
        for name, value in (reading.get(NAMES[VIDEO]) or {}).items()
    }
    processor = processor_options(asked)
    for name in FRAME_NAMES:
        if processor.get(name) is None:
            continue
        if name in found:
            raise wrong(f"{PROCESSOR}.{name}", f"stands in {READING}, too: give one")
        found[name] = f"{PROCESSOR}.{name}", processor[name]
    return {name: asked for name, asked in found.items() if asked[1] is not None}


def selection(
    usual: FrameSelection, asked: Mapping[str, tuple[str, Any]], most: int
) -> FrameSelection:
    """The selection of frames of a request, within `most`, the server's limit. Raises InvalidRequest naming what is
    beyond a limit.
    """
    if "fps" in asked and "num_frames" in asked:
        raise wrong(asked["num_frames"][0], "cannot be combined with fps: give one")
    given = {name: value for name, (_, value) in asked.items()}
    fields = {name: field for name, (field, _) in asked.items()}
    changed = usual
    if "fps" in given:
        changed = replace(changed, fps=_rate(fields["fps"], given["fps"]))
    for name in ("min_frames", "max_frames"):
        if name in given:
            count = frames(fields[name], given[name], most)
            changed = replace(changed, **{name: count})
    if changed.min_frames > changed.max_frames:
        name = "min_frames" if "min_frames" in fields else "max_frames"
        both = f"{changed.min_frames} frames at least are more than {changed.max_frames} at most"
        raise wrong(fields[name], f"leaves no number of frames: {both}")
    if "num_frames" in given:
        wanted = frames(fields["num_frames"], given["num_frames"], most)
        # As transformers' video processors round it.
        count = min(most, max(1, round(wanted / usual.multiple)) * usual.multiple)
        changed = replace(changed, min_frames=count, max_frames=count)
    return changed


def frames(field: str, value: Any, most: int) -> int:
    """A number of frames within the server's limit. Raises InvalidRequest."""
    return whole(field, value, 1, most, "--max-video-frames")


def whole(field: str, value: Any, low: int, high: int, limit: str) -> int:
    """A whole number in [low, high]; `limit` says whose bound `high` is. Raises InvalidRequest."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(field, "must be a whole number")
    if not low <= value <= high:
        shown = str(value)[:24]
        raise wrong(field, f"must be between {low} and {high} ({limit}), not {shown}")
    return value


def check_names(given: Mapping[str, Any], known: Collection[str], field: str, family: str) -> None:
    """Raises InvalidRequest for a key that is not among those known of a family."""
    for name in given:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise wrong(f"{field}.{name[:64]}", f"is no option of {family}: {has}")


def wrong(field: str, message: str) -> InvalidRequest:
    """An error about one option."""
    return InvalidRequest("MEDIA_OPTION", f"{field} {message}", field=field)


def _rate(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST_FPS:
        raise wrong(field, f"must be a number above 0, to {_MOST_FPS:g}")
    return float(value)


def _object(text: str, field: str) -> Mapping[str, Any]:
    if not text:
        return {}
    given = read_json(text, field)
    if not isinstance(given, dict):
        raise bad_json(field, "is not a JSON object")
    return given
