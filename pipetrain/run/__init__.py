"""Execution: devices, one thread per stage, and the mailboxes between them."""
