"""Equal bits: settings that must not matter, the first node that differs, attestations."""
