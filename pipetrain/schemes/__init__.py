"""What a scheme is, as pure functions of numbers: actions, the order of them, which weights each reads, and what an
update makes up for. One paper, one file. Nothing here knows of tensors, threads, seconds or bytes.
"""
