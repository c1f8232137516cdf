"""The gRPC server that every service has, and how errors travel over gRPC."""
