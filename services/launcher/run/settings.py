"""Settings of `tessera run`. Names and defaults are those of MindIE-LLM's runner for multimodal models."""

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from services.decoder.settings import DecoderOptions
from services.launcher.settings import ServeSettings
from services.scheduler.settings import SchedulerOptions
from shared.settings import DEMO_MODEL, ChatTemplateSettings, FamilySettings

_PREDICTIONS = "predictions.json"
_PERFORMANCE = "performance.csv"


class RunSettings(DecoderOptions, SchedulerOptions, ChatTemplateSettings, FamilySettings):
    """Which pictures are asked about and how. Settings of the services are inherited."""

    images: CliPositionalArg[list[Path]] = Field(
        [],
        description="Files of pictures, or folders whose pictures are taken in the order of their names.",
    )
    model: Path = Field(
        DEMO_MODEL,
        description="Hugging Face checkpoint folder, or a model's name on the hub; the demo model unless given.",
    )
    revision: str = Field(
        "", description="Branch, tag or commit of a model from the hub; main unless given."
    )
    input_texts: str = Field(
        "What is in the picture?",
        description="The text for every picture; or one for each: a JSON list, a .json file with one, or another file"
        " with one a line. Where there are fewer than pictures the last is repeated.",
    )
    input_dict: str = Field(
        "",
        description='In place of pictures and texts: a JSON list of {"image": ..., "prompt": ...}, or a file with one.'
        " An entry may have an adapter, whose name goes before --lora-adapter-id.",
    )
    max_batch_size: int = Field(
        1,
        gt=0,
        description="Pictures that are asked about at once. The next batch begins when all answers have ended; the last"
        " one is filled up with the last picture, whose copies are not in the output.",
    )
    max_input_length: int = Field(
        4096, ge=1, description="Most tokens of a prompt, those of its picture counted."
    )
    max_output_length: int = Field(256, ge=1, description="Most tokens of an answer.")
    ignore_eos: bool = Field(False, description="Answers go on to --max-output-length.")
    precision_save: bool = Field(
        False,
        description=f"Writes the answers by file into {_PREDICTIONS} of --output-dir, sorted, beside those that are"
        " there.",
    )
    performance: bool = Field(
        False,
        description=f"Appends lengths and times of each batch to {_PERFORMANCE} of --output-dir.",
    )
    output_dir: Path = Field(Path(), description="Folder of the two files.")
    lora_adapter_id: str = Field(
        "",
        description="Name of the adapter that answers, of --lora-modules or of lora_adapter.json in the model's folder;"
        " base is none. The only one of that file unless given.",
    )
    num_beams: int = Field(1, ge=1, description="Beams of beam search; 1 is none.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 takes the likeliest token.")
    top_k: int = Field(1, ge=-1, description="Likeliest tokens that are drawn from; 0 is all.")
    top_p: float = Field(
        0.0, ge=0, le=1, description="Share of the likeliest tokens that are drawn from; 0 is all."
    )
    length_penalty: float = Field(
        1.0, ge=-10, le=10, description="Exponent of the length in a beam's score."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="Divides the logits of tokens that are there already."
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logits of tokens of the answer; 0 is none.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtracted for each time that a token is in the answer; 0 is none.",
    )
    seed: int | None = Field(None, ge=0, description="Equal seeds give equal answers.")

    @property
    def predictions(self) -> Path:
        """The file of answers."""
        return self.output_dir / _PREDICTIONS

    @property
    def measurements(self) -> Path:
        """The file of times."""
        return self.output_dir / _PERFORMANCE

    @property
    def serve_flags(self) -> dict[str, Any]:
        """What was given of the settings of `tessera serve`."""
        known = ServeSettings.model_fields.keys() & self.model_fields_set
        return {name: getattr(self, name) for name in sorted(known - {"model"})}
