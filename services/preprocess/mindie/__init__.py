"""Pictures among token ids as MindIE-LLM passes them: tensors in shared memory, named by ids (`--mindie-shm`)."""
