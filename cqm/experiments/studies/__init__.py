"""Studies beyond the benchmark."""
