"""One kernel, layer or step, without a service around it."""
