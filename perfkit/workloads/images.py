"""Sizes of images that a Transformer classifies: square ones, cut into square patches (ViT,
arXiv:2010.11929, section 3.1)."""

from typing import Any

import numpy as np

from perfkit.ground.units import Array, check_positive

#: Channels of an image [-].
CHANNELS = 3


def count_image_tokens(image: int, patch: int) -> int:
    """Count the patches of a square image, with the vector of its class.

    Parameters
    ----------
    image, patch : int
        Edges of the image and of a patch [-].

    Returns
    -------
    tokens : int
        [-].

    Raises
    ------
    ValueError
        If patches do not fill the image.

    Examples
    --------
    >>> count_image_tokens(224, 16)
    197
    """
    image = check_positive("image", image, integer=True)
    patch = check_positive("patch", patch, integer=True)
    if image % patch:
        raise ValueError(
            f"image is {image}; it must be a multiple of patch, {patch}; change one of them"
        )
    return int((image // patch) ** 2 + 1)


def count_patches_of_edge(tokens: Any) -> Array:
    """Count the patches along an edge of a square image; a fraction for tokens that no image has.

    Parameters
    ----------
    tokens : int or array
        As `count_image_tokens` counts them [-].

    Returns
    -------
    count : array
        [-].

    Examples
    --------
    >>> float(count_patches_of_edge(197))
    14.0
    """
    return np.asarray(np.sqrt(np.asarray(tokens, dtype=float) - 1.0))
