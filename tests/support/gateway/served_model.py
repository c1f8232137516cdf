"""A model as the gateway knows it, without a folder."""

from services.gateway.model.generation_defaults import GenerationDefaults
from services.gateway.model.served_model import ServedModel
from shared.text.text_fold import TokenBytes
from tests.support.tokenizers import byte_level_tokenizer


def model(**defaults: float) -> ServedModel:
    """512 tokens long, with an end of its own (2); `defaults` are of sampling."""
    return ServedModel(
        name="tiny",
        max_model_len=512,
        vocab_size=480,
        eos_token_ids=(2,),
        own_eos_ids=frozenset({2}),
        defaults=GenerationDefaults(defaults),
        table=TokenBytes([b"x"] * 480),
        tokenizer=byte_level_tokenizer(),
        created_unix_s=0,
        tokenizer_info={},
    )
