"""REST and gRPC in, text out: admits requests, and follows their token logs."""
