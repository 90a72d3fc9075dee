"""What a user would otherwise choose, on the same lines and over the same values; see `python -m benchmarks.peers --help`."""
