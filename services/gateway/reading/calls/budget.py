"""How many tokens a model may think before it answers."""

from services.gateway.decoding.bounds import whole
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.generation import check_form
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from shared.output_format.table import ReasoningFormat


def read_budget(
    request: ValidRequest,
    options: GenerationOptions,
    reasoning: ReasoningFormat | None,
    model: ServedModel,
    field: str,
) -> int | None:
    """The most tokens between the markers of a model's reasoning; None where no bound was asked for. `field`: what the
    client calls it. Raises InvalidRequest for a bound that cannot be held to.
    """
    most = whole(field, options.thinking_token_budget, 0, model.max_model_len)
    if most is None or request.reply.prompt_only:
        return None
    if reasoning is None:
        raise unsupported(
            field,
            "bounds reasoning, and how this model marks what it thinks is not known: leave it out, or start the server"
            " with --reasoning-parser",
        )
    if not can_bound(model):
        raise unsupported(
            field,
            f"bounds reasoning between tokens, and {reasoning.open} and {reasoning.close} are no tokens of this model:"
            " leave it out; max_tokens bounds reasoning and answer together",
        )
    if request.constraint is not None:
        raise InvalidRequest(
            "CONFLICTING_CONSTRAINTS",
            f"{field} and {request.constraint.field} cannot be combined: an answer that is held to a form has no"
            " reasoning; give one",
            field=field,
        )
    check_form(options, field)
    return most


def can_bound(model: ServedModel) -> bool:
    """Whether the markers of the model's reasoning are known, and tokens: only these can be told from spelled text."""
    reasoning = model.forms.reasoning
    return reasoning is not None and {reasoning.open, reasoning.close} <= model.forms.added.keys()
