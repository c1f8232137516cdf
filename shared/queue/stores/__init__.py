"""What is kept in Redis beside the queue: media, files, batches, responses, timelines and errors."""
