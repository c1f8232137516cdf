"""How an error says that a prompt or an answer is too long; without imports, for code that only decides."""

LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"


def length_text(longest: int, found: str, advice: str, whose: str = "This model's") -> str:
    """OpenAI's wording, by which LiteLLM and LangChain know the error: `found` in place of what a length of `longest`
    tokens allows.
    """
    return f"{whose} maximum context length is {longest} tokens. However, {found}: {advice}"
