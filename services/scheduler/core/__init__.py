"""The deciding half of Tessera: plain Python without I/O, clocks or tensors. Events in, plans out."""
