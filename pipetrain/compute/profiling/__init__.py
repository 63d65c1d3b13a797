"""What a block costs: its seconds, its operations, its memory, and the cache of profiles."""
