"""Small files of sentence pairs."""

from pathlib import Path

SAMPLE = [
    ("A man sleeps.", "Un homme dort."),
    ("A dog runs on the grass.", "Un chien court sur l'herbe."),
    ("Two dogs.", "Deux chiens."),
    ("The man and the dog sleep in the grass.", "L'homme et le chien dorment dans l'herbe."),
    ("Run!", "Cours !"),
]


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
MOTS = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"]


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]]) -> Path:
    """name.en and name.fr."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, language in enumerate(("en", "fr")):
        (folder / f"{name}.{language}").write_text("".join(f"{one[number]}\n" for one in pairs), encoding="utf-8")
    return folder / name


def make_pairs(count: int) -> list[tuple[str, str]]:
    """Pairs of one to nine words, each another."""
    found = []
    for n in range(count):
        digits = [int(digit) - 1 for digit in str(n + 1) if digit != "0"] * (1 + n % 3)
        found.append((f"{n} " + " ".join(WORDS[d] for d in digits), f"{n} " + " ".join(MOTS[d] for d in digits)))
    return found
