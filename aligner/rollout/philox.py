"""Random numbers that are a pure function of what they are for: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), vectorised over numpy arrays."""

import numpy as np

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


def philox4x32(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """Ten rounds over `counter` (four arrays) under `key` (two arrays): uint64 holding 32-bit words, shapes that broadcast.

    Returns the four output words, uint64 below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> WORD_BITS) ^ c1 ^ k0,
            second & LOW_WORD,
            (first >> WORD_BITS) ^ c3 ^ k1,
            first & LOW_WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW_WORD, (k1 + WEYL[1]) & LOW_WORD
    return [c0, c1, c2, c3]


def uniforms(seed, sample_ids, positions, stream) -> np.ndarray:
    """The uniforms behind tokens, float32 multiples of 2**-24 in [0, 1), of the arguments' broadcast shape.

    seed: 64 bits, the key (low word, high word). sample_ids: 64 bits; positions: of the token in its response; stream: 0 trains,
    1 validates. The counter is (sample_id low, sample_id high, position, stream); the first output word, shifted right by 8, counts."""
    seed, sample_ids, positions, stream = np.broadcast_arrays(
        *(np.asarray(x, np.uint64) for x in (seed, sample_ids, positions, stream))
    )
    counter = [sample_ids & LOW_WORD, sample_ids >> WORD_BITS, positions, stream]
    word = philox4x32(counter, [seed & LOW_WORD, seed >> WORD_BITS])[0]
    return (word >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
