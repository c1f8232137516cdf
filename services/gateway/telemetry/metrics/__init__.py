"""Series of the metrics page, under the names of vLLM where they mean the same."""
