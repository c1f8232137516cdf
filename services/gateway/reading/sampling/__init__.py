"""How tokens are chosen: the fields of a request, checked, as `SamplingParams`."""
