"""JSON as bytes, as every answer of the page has it."""

import json
from typing import Any


def dumped(found: Any) -> bytes:
    """JSON in UTF-8; half of a surrogate pair as its escape. Raises ValueError for NaN and the infinities."""
    return json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
