"""A client of the page's server, and recordings for it."""

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

import numpy as np
import torch

import regard
from regard import GPT2, GPT2Config, Recording
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.server import Server, make_server
from regard.show.page.session import Session

TEXT = "CBABBCABBBC"


def record_sorter(text: str = TEXT, **keep: str) -> Recording:
    """The sorter on a text, in float64: its weights and their codes are the same whatever they are computed with."""
    model = GPT2.load("sorter", torch.float64)
    ids = model.text.encode(text)
    with torch.inference_mode(), regard.record(model, **keep) as recording:
        model(torch.tensor([ids]))
    recording.model, recording.tokens = "sorter", model.text.pieces(ids)
    return recording


def make_sorter(dtype: torch.dtype | None = None) -> GPT2Adapter:
    """The sorter and its letters."""
    return GPT2Adapter("sorter", GPT2.load("sorter", dtype))


def make_writer() -> GPT2Adapter:
    """A model that may write much, of no sense."""
    model = GPT2(GPT2Config(layers=1, heads=2, width=8, context=512, vocabulary=3)).eval()
    model.text = GPT2.load("sorter").text
    return GPT2Adapter("writer", model)


def rows_and_keys(q: torch.Tensor, k: torch.Tensor, mask: regard.mechanism.Mask | None = None, **more) -> Recording:
    """A recording of one layer whose queries and keys are given."""

    class Layer(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return regard.attention(q, k, k, regard.Causal() if mask is None else mask, **more)

    layer = Layer()
    with torch.inference_mode(), regard.record(layer) as recording:
        layer()
    return recording


def in_steps(
    layers: int = 2, heads: int = 4, groups: int = 2, tokens: int = 13, width: int = 5, dtype: torch.dtype = torch.float64
) -> Recording:
    """A recording of some layers that were called a token at a time, their keys kept as by a cache."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(layers, 2, heads, tokens, width, dtype=dtype, generator=generator)
    given = x, x[:, :, :groups].contiguous()
    model = torch.nn.Sequential(*(Stepped() for _ in range(layers)))
    with torch.inference_mode(), regard.record(model, keep="values") as recording:
        for n in range(tokens):
            model((*given, n))
    recording.tokens = [[f" {row}{n}" for n in range(tokens)] for row in "ab"]
    return recording


class Stepped(torch.nn.Module):
    """One step of attention with a cache, and what is left for the layers after it."""

    def forward(self, given):
        (q, *others), (k, *more), n = given
        regard.attention(q[:, :, n : n + 1], k[:, :, : n + 1], k[:, :, : n + 1], regard.Causal(), offset=n)
        return others, more, n


class Layer(torch.nn.Module):
    """Attention of what it is given to itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x)


def record_encoder_and_decoder() -> Recording:
    """A recording of an encoder and a decoder of one layer each."""
    model = torch.nn.ModuleDict({part: torch.nn.Sequential(Layer()) for part in ("encoder", "decoder")})
    x = torch.randn(1, 1, 7, 5, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), regard.record(model) as recording:
        model["decoder"](model["encoder"](x))
    return recording


def fill_in_ids(session: Session, address: str) -> str:
    """An address or a link with the ids of the recordings that all visitors see in place of r1, r2, ..."""
    ids = {f"r{n + 1}": name for n, name in enumerate(session.listed)}
    return re.sub(r"((?<=/r/)|(?<=\br=)|(?<=\br2=))r\d+\b", lambda found: ids.get(found[0], found[0]), address)


class Client:
    """Asks a server, a connection a request; r1, r2, ... in a path are the recordings that all visitors see."""

    def __init__(self, of: Server) -> None:
        self.address, self.session = urlsplit(of.address), of.page.session

    @property
    def ids(self) -> list[str]:
        """The ids of the recordings that all visitors see."""
        return self.session.listed

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str):
        """The status, the headers and the body of an answer."""
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=300)
        try:
            connection.request(
                method,
                fill_in_ids(self.session, path),
                body,
                {name.replace("_", "-"): value for name, value in headers.items()},
            )
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str, **query):
        """An answer in JSON."""
        status, _, body = self.ask(format_address(path, query))
        assert status == 200, body
        return json.loads(body)

    def lines(self, path: str, **query):
        """The objects of a stream."""
        status, _, body = self.ask(format_address(path, query))
        assert status == 200, body
        return [json.loads(line) for line in body.splitlines()]

    def codes(self, path: str, **query):
        """Codes in their shape."""
        status, headers, body = self.ask(format_address(path, query))
        assert status == 200, body
        return torch.from_numpy(np.frombuffer(body, "<u2").astype(np.int32)).view(*map(int, headers["x-shape"].split(",")))

    def post(self, path: str, found, kind: str = "application/json"):
        """The status and the answer to an object that is sent."""
        status, _, body = self.ask(path, "POST", json.dumps(found).encode(), content_type=kind)
        return status, body

    def expect_refusal(self, path: str, query=(), **more):
        """The status and the sentence of a refusal."""
        query = query or more
        status, headers, body = self.ask(format_address(path, query))
        assert status >= 400
        assert headers["content-type"] == "application/json"
        return status, json.loads(body)["error"]

    def connect(self) -> socket.socket:
        """A connection on which nothing has been said."""
        return socket.create_connection((self.address.hostname, self.address.port), timeout=300)

    def leaving(self, path: str, sent: object = None) -> socket.socket:
        """A connection on which something has been asked, to be closed before the answer comes."""
        body = b"" if sent is None else json.dumps(sent).encode()
        kind = "Host: localhost\r\nContent-Type: application/json\r\n"
        head = f"{'GET' if sent is None else 'POST'} {fill_in_ids(self.session, path)} HTTP/1.1\r\n{kind}"
        found = self.connect()
        found.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return found

    def idle(self) -> None:
        """Waits until no request is being answered."""
        wait_until(lambda: self.server.page.executor.request_count == 0)


def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    """Waits until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "this did not become true"
        time.sleep(0.01)


@contextmanager
def join_server_threads() -> Iterator[None]:
    """A block whose servers' threads have ended after it."""
    before = set(threading.enumerate())
    yield
    for one in set(threading.enumerate()) - before:
        if one.name.startswith("regard-page"):
            one.join(60)
            assert not one.is_alive(), f"{one.name} goes on"


def format_address(path: str, query) -> str:
    return f"{path}?{urlencode(query)}" if query else path


@contextmanager
def open_client(*given, **more) -> Iterator[Client]:
    """A client of a server that runs as long as the block."""
    with make_server(*given, **more) as running:
        client = Client(running)
        client.server = running
        yield client
