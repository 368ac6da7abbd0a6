"""HTML read back: its elements, the pixels of its pictures, and words that would do harm if they were not text."""

import base64
import re
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import torch
from PIL import Image

EVIL = [
    "</script>",
    "<script>said='evil'</script>",
    "&amp;",
    "<img src=x onerror=alert(1)>",
    "\"'",
    "\x00",
    "\u202e",
    "שלום",
    "\ud800",
]


class Page(HTMLParser):
    """Elements by name with their attributes, and the text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.text, self.inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, text):
        self.text += text if self.inside != "script" else ""

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def pixels(element):
    """The indices of the palette in the picture of an img."""
    svg = base64.b64decode(element["src"].partition(",")[2]).decode()
    address = re.search(r'href="data:image/png;base64,([^"]+)"', svg)[1]
    return torch.tensor(np.array(Image.open(BytesIO(base64.b64decode(address)))).astype(int))
