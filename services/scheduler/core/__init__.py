"""The pure core of the scheduler: events in, plans out; no I/O, no clocks, no tensors."""
