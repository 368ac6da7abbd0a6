"""JSON as bytes, the format of every answer of the page."""

import json
from typing import Any


def encode_json(found: Any) -> bytes:
    """Encode JSON in UTF-8, with unpaired surrogates as escapes. Raises ValueError for NaN and the infinities."""
    return json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
