"""What every other folder uses: errors, exact functions of float64 on the host, how tensors lie in memory, defaults,
the rope table."""
