"""Ports, certificates, raw protocols and small servers for tests over sockets."""
