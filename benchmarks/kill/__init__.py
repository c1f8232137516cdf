"""`tessera bench kill`: load on a live system whose processes are killed, and what its clients lost."""
