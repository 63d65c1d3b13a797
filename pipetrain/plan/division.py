"""What a minibatch costs in any number of microbatches, from profiles of it whole and in some number of them."""

from __future__ import annotations

from dataclasses import asdict, replace

from pipetrain.plan.profile import BlockProfile, Profile, Seconds


def divided(whole: Profile, pieces: Profile | None, microbatches: int) -> Profile:
    """An estimate of the profile in so many microbatches; what is measured stays as it is.

    What a block takes is ``a + b * microbatches``: a part that goes with the rows, and one that every microbatch takes
    whatever its rows are, such as reading the weights. Both profiles together give a and b of every block; b is at
    least 0 for more microbatches than ``pieces`` has. Without ``pieces``, or where these are whole minibatches too, b
    is taken to be 0.
    """
    if pieces is None or pieces.microbatches == 1 or microbatches == 1:
        return replace(whole, microbatches=microbatches)
    part = (microbatches - 1) / (pieces.microbatches - 1)

    def between(first_s: float, last_s: float) -> float:
        """The time in between, or beyond."""
        return first_s + (part if last_s > first_s else min(part, 1.0)) * (last_s - first_s)

    def seconds(first: Seconds, last: Seconds) -> Seconds:
        forward_s, backward_s = between(first.forward_s, last.forward_s), between(first.backward_s, last.backward_s)
        return Seconds(forward_s, backward_s, last.update_s)

    def block(first: BlockProfile, last: BlockProfile) -> BlockProfile:
        plain = seconds(first.seconds, last.seconds)
        compiled = seconds(first.compiled, last.compiled) if first.compiled and last.compiled else last.compiled
        return replace(last, forward_s=plain.forward_s, backward_s=plain.backward_s, compiled=compiled)

    blocks = tuple(block(*both) for both in zip(whole.blocks, pieces.blocks, strict=True))
    loss_s = between(whole.loss_s, pieces.loss_s)
    return replace(pieces, blocks=blocks, loss_s=loss_s, microbatches=microbatches)


def undisturbed(whole: Profile, pieces: Profile | None) -> Profile:
    """The profile of whole minibatches, no block of which takes longer than in microbatches, as far as that is known.

    Fewer calls for the same rows take no longer: if they seem to, other programs had the processor meanwhile.
    """
    if pieces is None or pieces.microbatches == 1:
        return whole

    def less(a: Seconds, b: Seconds) -> Seconds:
        return Seconds(min(a.forward_s, b.forward_s), min(a.backward_s, b.backward_s), min(a.update_s, b.update_s))

    def block(own: BlockProfile, other: BlockProfile) -> BlockProfile:
        plain = less(own.seconds, other.seconds)
        compiled = less(own.compiled, other.compiled) if own.compiled and other.compiled else own.compiled
        return replace(own, **asdict(plain), compiled=compiled)

    blocks = tuple(block(*both) for both in zip(whole.blocks, pieces.blocks, strict=True))
    return replace(whole, blocks=blocks, loss_s=min(whole.loss_s, pieces.loss_s))
