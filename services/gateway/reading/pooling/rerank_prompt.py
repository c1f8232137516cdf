"""The prompt of rerankers that answer "yes" or "no".

Its words are those that Qwen3-Reranker was trained with (Zhang et al., 2025); the chat template writes the rest.
"""

from services.gateway.model.served_model import ServedModel
from services.gateway.reading.generation import Prompt, conversation_prompt
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_NO_THINKING = '{"enable_thinking": false}'


def answering_prompt(
    query: str, document: str, instruction: str | None, model: ServedModel
) -> Prompt:
    """Asks whether a document answers a query; `instruction` says what that means, None is a search on the web."""
    prepare = PrepareRequest()
    conversation = prepare.conversation
    conversation.add_generation_prompt = True
    conversation.chat_template_kwargs_json = _NO_THINKING
    asked = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    for role, text in (("system", _SYSTEM), ("user", asked)):
        message = conversation.messages.add(role=role, is_string=True)
        message.content.add(text=text)
    return conversation_prompt(prepare, model)
