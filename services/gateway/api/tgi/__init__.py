"""The API of Hugging Face's text-generation-inference (TGI), version 3."""
