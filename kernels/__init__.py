"""Device code: arith (scalar functions, one source for all targets), reference (the definition), cpu and cuda (fast,
equal to it)."""
