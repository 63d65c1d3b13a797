"""What a block takes: its seconds, its operations, its memory, and the profiles that are kept."""
