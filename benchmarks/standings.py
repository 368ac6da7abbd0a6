"""How fast regard is relative to the fastest other contender of a benchmark, on each processor where it ran."""

from collections.abc import Iterator

from benchmarks.tables import Cell

Row = dict[str, Cell]
Standing = tuple[str, float | None, str]  # the work, how many times as fast regard is (None: not measured), and as whom
PRECISIONS = {
    "float32": ("float32", "float32, GELU in float16"),
    "16 bits": ("bfloat16", "float16"),
    "int8": ("int8", "int8, Q8_0"),
    "int4": ("int4", "int4, Q4_0"),
}
WORKS = {  # by batch and prompt
    (1, 16): "a token after a prompt of 16",
    (1, 768): "256 tokens after a prompt of 768",
    (1, 1000): "a prompt of 1,000",
    (16, 16): "a batch of 16",
}
SUBJECTS = ("attention", "overview", "record", "GPT-2", "SmolLM2", "training")


def summarize_standings(results: dict[str, dict]) -> str:
    """The table 'At a glance' in Markdown: a row for each piece of work, a column for each section of the results."""
    columns = {name: {what: (ratio, rival) for what, ratio, rival in list_standings(own)} for name, own in results.items()}
    works = sorted(dict.fromkeys(what for standings in columns.values() for what in standings), key=find_subject)
    columns = {name: standings for name, standings in columns.items() if any(ratio for ratio, _ in standings.values())}
    lines = ["## At a glance", "", "| what | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 1)]
    for what in works:
        found = [own.get(what, (None, "")) for own in columns.values()]
        if any(ratio for ratio, _ in found):
            lines.append(
                f"| {what} | " + " | ".join(f"{ratio:.2f} × {rival}" if ratio else "" for ratio, rival in found) + " |"
            )
    return "\n".join(lines)


def find_subject(what: str) -> int:
    """The place of a piece of work among the subjects."""
    return next(place for place, subject in enumerate(SUBJECTS) if what.startswith(subject))


def list_standings(own: dict[str, dict]) -> Iterator[Standing]:
    """The standings of one section, from its benchmarks' rows."""
    rows = {name: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]] for name, table in own.items()}
    for row in rows.get("kernels", ()):
        if row["T"] in (512, 4096) and row["rule"] == "causal":
            what = f"attention, causal, {row['T']:,} tokens, {row['dtype']}"
            yield what, row["bare ms"] / row["regard ms"], "torch's kernel"
            yield f"{what}, with backward", row["both: bare"] / row["both: regard"], "torch's kernel"
    for row in rows.get("rules", ()):
        yield f"attention, 8,192 tokens, {row['rule']}", row["times faster"], "torch's kernel, dense mask"
    for row in rows.get("scans", ()):
        others = {"JAX": row["JAX's scan ms"], "torch": row["torch in blocks ms"], "torch.compile": row["torch.compile ms"]}
        rival = min(others, key=others.__getitem__)
        yield f"overview of a head, {row['T']:,} tokens", others[rival] / row["overview ms"], rival
    for row in rows.get("recording", ()):
        if row["eager"]:
            others = {name: row[name] for name in ("eager", "TransformerLens", "nnsight") if row[name]}
            rival = min(others, key=others.__getitem__)
            yield f"record and see every head of GPT-2, {row['T']:,} tokens", others[rival] / row["record + overview"], rival
    yield from rank_generation("GPT-2", rows.get("generation", []))
    yield from rank_generation("SmolLM2", [{**row, "batch": 1} for row in rows.get("decoders", ())])
    yield from rank_training(rows.get("training", []))


def rank_generation(model: str, rows: list[Row]) -> Iterator[Standing]:
    """Tokens a second of each precision, for a short prompt, a long context, a long prompt and a batch."""
    for (batch, prompt), name in WORKS.items():
        for precision, names in PRECISIONS.items():
            group = [row for row in rows if (row["batch"], row["prompt"]) == (batch, prompt) and row["weights"] in names]
            yield rank_contenders(f"{model}, {name}, {precision}", group)


def rank_training(rows: list[Row]) -> Iterator[Standing]:
    """Tokens a second of each shape and precision."""
    for layers, width, precision in dict.fromkeys((row["layers"], row["width"], row["products in"]) for row in rows):
        group = [row for row in rows if (row["layers"], row["width"], row["products in"]) == (layers, width, precision)]
        yield rank_contenders(f"training, {layers} layers of {width}, {precision}", group)


def rank_contenders(what: str, rows: list[Row]) -> Standing:
    """The fastest row of regard relative to the fastest of the others, where both have one."""
    own = [row["tokens a second"] for row in rows if row["by"] == "regard"]
    others = {row["by"]: row["tokens a second"] for row in rows if not row["by"].startswith("regard")}
    if not (own and others):
        return what, None, ""
    rival = max(others, key=others.__getitem__)
    return what, max(own) / others[rival], rival
