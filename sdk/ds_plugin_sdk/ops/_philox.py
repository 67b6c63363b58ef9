"""Which elements a dropout keeps, from a counter-based random number generator: the same on every device.

The generator is Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Its key is a seed
of 64 bits. For a tensor seen as rows of columns, the counter ``(16 (column // 64) + column % 16, row, row >> 32, 0)``
gives four words of 32 bits, of which word ``column // 16 % 4`` belongs to the element. It is dropped if its word is
less than ``p * 2**32``. So a mask needs no memory: whoever has the seed makes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Words below it drop their element: `p` in units of ``2**-32``, rounded."""
    return min(round(p * 2**32), _WORD)


def keep(seed: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """The mask of a dropout, True for what is kept.

    Args:
        seed: one element, int64; all 64 bits count.
        rows, columns: of the tensor.
        p: the share that is dropped.

    Returns:
        bool, ``[rows, columns]``, on the device of `seed`.
    """
    blocks = -(-columns // 64)
    row = torch.arange(rows, dtype=torch.int64, device=seed.device).view(-1, 1)
    column = torch.arange(16 * blocks, dtype=torch.int64, device=seed.device)
    words = philox(seed.reshape(()), (column & _WORD, row & _WORD, row >> 32, torch.zeros_like(row)))
    in_order = torch.stack([word.view(rows, blocks, 16) for word in words], dim=2).view(rows, 64 * blocks)
    return in_order[:, :columns] >= threshold(p)


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter, int64 in ``[0, 2**32)``, of the shape to which the counters broadcast."""
    low, high = key & _WORD, (key >> 32) & _WORD
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2**64, as int64 multiplies
        a, b, c, d = _high(second) ^ b ^ low, second & _WORD, _high(first) ^ d ^ high, first & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return a, b, c, d


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _WORD
