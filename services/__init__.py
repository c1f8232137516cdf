"""The services, which never import each other, and the families of models."""
