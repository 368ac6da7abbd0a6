"""Random problems of attention, and what a function of one of the page's modules answers to them."""

import json

import torch

import regard
from regard.mechanism import Given, Steps

ASK = """async ({module, name, given}) => {
  const found = (await import(`./static/${module}.js`))[name];
  return JSON.stringify(given.map((one) => found(...one)), (_, value) =>
    typeof value === "number" && !Number.isFinite(value) ? String(value).replace("Infinity", "inf").toLowerCase() : value);
}"""


def draw_problems(count: int) -> list[tuple[dict, Steps, float]]:
    """Random problems of every kind, as JSON, with their steps by attend in float64, and their scale."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for n in range(count):
        t, d, e = (int(torch.randint(1, most, (), generator=generator)) for most in (8, 6, 6))
        q, k, v = (torch.randn(t, width, dtype=torch.float64, generator=generator) for width in (d, d, e))
        visible = torch.rand(t, t, generator=generator) < (1 if n % 4 == 0 else 0.7)
        bias = torch.randn(t, t, dtype=torch.float64, generator=generator) if n % 5 == 0 else None
        sink = float(torch.randn((), generator=generator)) if n % 7 == 0 else None
        softcap, scale = [None, 5.0][n % 2], [d**-0.5, 1.0, 0.3][n % 3]
        sinks = None if sink is None else torch.tensor([sink], dtype=torch.float64)
        steps = regard.attend(q[None], k[None], v[None], Given(visible), scale=scale, softcap=softcap, bias=bias, sinks=sinks)
        problem = {"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "scale": scale, "softcap": softcap, "sink": sink}
        problem |= {"bias": None if bias is None else bias.tolist(), "visible": visible.tolist()}
        found.append((problem, Steps(*(part[0] for _, part in steps.items())), scale))
    return found


def call_function(page, module: str, name: str, given: list[list]) -> list:
    """What a function of a module answers, to each list of arguments."""
    return json.loads(page.evaluate(ASK, {"module": module, "name": name, "given": given}))
