"""OpenAI's files and batches: many requests in one file, which gateways send one by one."""
