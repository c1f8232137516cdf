"""Tessera's own API: gRPC, `/v1/requests`, health, metrics, and the page for people."""
