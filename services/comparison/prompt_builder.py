"""A model's prompt builder without a template, for prompts of a comparison."""

from services.families import registry
from services.preprocess.prompt.builder import PromptBuilder
from services.preprocess.prompt.prompt_rule import PromptRule
from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.checkpoint.folder import Checkpoint
from shared.text.templates.processes import TemplateProcesses

_LONGEST = 1 << 20  # tokens; the model's own length is no matter here


def open_builder(checkpoint: Checkpoint, rule: PromptRule) -> PromptBuilder:
    """Raises InvalidRequest for a rule whose examples do not come out."""
    tokenizer = PromptTokenizer(checkpoint.folder)
    return PromptBuilder(
        tokenizer,
        None,
        rule,
        TemplateProcesses(),  # none is started: these prompts have no template
        vocab_size=max(tokenizer.vocab_size, registry.text_sizes(checkpoint).vocab_size),
        max_model_len=_LONGEST,
        processor_adds_special_tokens=True,
        trust_request_template=False,
    )
