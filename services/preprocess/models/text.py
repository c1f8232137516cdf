"""Text-only families: Llama, Qwen2, Qwen3, Mistral and whatever else takes no media."""

from services.preprocess.models.prompt_rule import ImagesOnly, MediaSpan


class TextRule(ImagesOnly):
    """No media at all."""

    marker = None
    marker_id = -1

    def span(self, width: int, height: int) -> MediaSpan:
        """Never asked: a prompt without markers has no spans."""
        raise AssertionError("a text-only model has no media spans")
