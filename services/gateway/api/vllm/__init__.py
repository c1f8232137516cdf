"""The API of vLLM's plain server: POST /generate."""
