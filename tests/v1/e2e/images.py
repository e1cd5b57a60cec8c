# SPDX-License-Identifier: Apache-2.0
"""Images, and the image processor of the tests' Qwen2.5-VL.

Engine processes import this, too. The last tokens of the vocabulary, which do not occur
in text, are the special tokens of images.
"""

import numpy as np
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

START, END, IMAGE, VIDEO = range(2556, 2560)
# Pixels per side of a cell. Each cell of an image is a token.
CELL = 8
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN_PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=CELL // 2, merge_size=2, min_pixels=64, max_pixels=64 * 64, **NORMAL
)


def picture(rows: int, columns: int, seed: int = 0) -> Image.Image:
    """A random image of rows x columns cells."""
    shape = (rows * CELL, columns * CELL, 3)
    pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return Image.fromarray(pixels)
