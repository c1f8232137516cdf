"""What methods of gRPC share, whatever their API: calls, answers that are generated, prompts that become vectors."""
