"""Formats of frozen weights of fewer bits than products take (QLoRA, arXiv:2305.14314): what is stored
of a number, and what a product does first."""

from dataclasses import dataclass
from typing import Any

#: Bytes of a scale in fp32, and of one that is quantized itself [B].
_FP32, _BYTE = 4, 1


@dataclass(frozen=True)
class FrozenFormat:
    """How the weights of products of layers are stored that are not trained.

    Parameters
    ----------
    name : str
        Name by which models choose it.
    bits : int
        Bits of a number [-].
    block : int
        Numbers that have a scale together [-].
    scale_block : int
        Scales, of 8 bits then, that have a scale in fp32 together; 0 for scales in fp32 [-].

    Examples
    --------
    Double quantization takes 0.127 bits of constants a number and not 0.5 (QLoRA, section 3):

    >>> [round(8 * FROZEN_FORMATS[name].count_bytes(2**20) / 2**20, 3) for name in ("nf4", "nf4-dq")]
    [4.5, 4.127]
    """

    name: str
    bits: int
    block: int
    scale_block: int = 0

    def count_scales(self, numbers: Any) -> Any:
        """Count the scales of blocks.

        Parameters
        ----------
        numbers : int
            Numbers of a weight [-].

        Returns
        -------
        scales : int
            One for each block, the last of which may be shorter [-].
        """
        return -(-numbers // self.block)

    def count_bytes(self, numbers: Any) -> Any:
        """Count what is stored of a weight.

        Parameters
        ----------
        numbers : int
            Its numbers [-].

        Returns
        -------
        nbytes : int
            Numbers, scales, and scales of scales, without tables of 16 or 256 values [B].
        """
        packed = -(-numbers * self.bits // 8)
        scales = self.count_scales(numbers)
        if not self.scale_block:
            return packed + _FP32 * scales
        return packed + _BYTE * scales + _FP32 * -(-scales // self.scale_block)


#: Formats by name. NF4 has one of 16 values for a number, and a scale for 64; with double quantization
#: ("dq") scales have 8 bits, and a scale for 256 of them: QLoRA, section 3, and bitsandbytes.
FROZEN_FORMATS = {
    frozen_format.name: frozen_format
    for frozen_format in (
        FrozenFormat("nf4", bits=4, block=64),
        FrozenFormat("nf4-dq", bits=4, block=64, scale_block=256),
    )
}
