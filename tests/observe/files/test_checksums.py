import struct
import zlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.observe.files import checksums


@given(st.integers(0, 300), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.integers(1, 100))
def test_a_checksum_is_that_of_the_standard_library_over_blocks(count, dtype, block):
    x = torch.arange(count, dtype=torch.float32).to(dtype)
    data = x.view(torch.uint8).numpy().tobytes()
    blocks = [zlib.crc32(data[start : start + block]) for start in range(0, len(data), block)]
    expected = zlib.crc32(b"".join(struct.pack("<I", one) for one in blocks))
    whole, checksums.BLOCK = checksums.BLOCK, block
    try:
        assert checksums.compute_checksums({"x": x}) == {"x": expected}
    finally:
        checksums.BLOCK = whole
