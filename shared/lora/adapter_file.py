"""`lora_adapter.json` beside a model's weights, as MindIE-LLM reads it: folders of adapters by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.bounded_file import read_value
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.lora.adapter import WEIGHTS

ADAPTER_FILE = "lora_adapter.json"
_PARTIAL = ".Plora_A."  # in names of tensors of partial LoRA


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """folders: by name, whether there is anything or not; none where there is no file."""

    path: Path
    folders: Mapping[str, Path]

    def is_own(self, name: str) -> bool:
        """Whether the name means partial LoRA that is among the model's own weights, as with WeMM. Raises
        InvalidRequest where the model's folder is named and has neither that nor an adapter's file."""
        model, folder = self.path.parent, self.folders[name]
        if not (folder.is_dir() and folder.samefile(model)) or (model / WEIGHTS).is_file():
            return False
        checkpoint = Checkpoint(model)
        try:
            if any(_PARTIAL in tensor for tensor in checkpoint.names()):
                return True
        finally:
            checkpoint.close()
        raise _bad(
            self.path,
            f"{name!r} names the model's own folder, which has no {WEIGHTS}, and the model's weights no partial LoRA",
        )


def read_adapter_file(model: Path) -> AdapterFile:
    """That of a model's folder. Relative folders begin there. Raises InvalidRequest for a file that is no such."""
    path = model / ADAPTER_FILE
    try:
        said = read_value(path)
    except FileNotFoundError:
        return AdapterFile(path, {})
    except (OSError, ValueError) as error:
        raise _bad(path, f"cannot be read: {error}") from error
    if not isinstance(said, dict) or not all(isinstance(one, str) and one for one in said.values()):
        raise _bad(path, "must be a JSON object with the folder of each adapter by its name")
    return AdapterFile(path, {name: model / folder for name, folder in said.items()})


def _bad(path: Path, what: str) -> InvalidRequest:
    return InvalidRequest("BAD_LORA_MODULES", f"{path}: {what}", field="lora_modules")
