"""Join the modules of the page into one script, for a document that may load none: not even by data: URLs.

A notebook's policy, which a frame inherits, can allow inline scripts alone (VS Code's does).
"""

import posixpath
import re
from pathlib import Path

IMPORT = re.compile(r'^import (?:\{([^}]*)\}|\* as (\w+)) from "(\.{1,2}/[^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def bundle_modules(folder: Path, main: str) -> str:
    """Return the module `main` of a folder, with all that it imports, as the text of one module that imports nothing.

    Each module is a function that is called once, after those that it imports; cycles are not supported.
    """
    order: dict[str, str] = {}
    collect_modules(folder, main, order)
    names = {name: f"module{n}" for n, name in enumerate(order)}
    return "\n".join(wrap_module(name, code, names) for name, code in order.items())


def collect_modules(folder: Path, name: str, order: dict[str, str]) -> None:
    """Add a module to those in order, after all that it imports."""
    if name in order:
        return
    code = (folder / name).read_text(encoding="utf-8")
    for _, _, place in IMPORT.findall(code):
        collect_modules(folder, resolve_import(name, place), order)
    order[name] = code


def resolve_import(name: str, place: str) -> str:
    """Return the name of what a module imports from a relative place."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), place))


def wrap_module(name: str, code: str, names: dict[str, str]) -> str:
    """Return a module as a constant, the object of what it exports."""

    def read_import(found: re.Match[str]) -> str:
        kept = f"{{{found[1].replace(' as ', ': ')}}}" if found[1] is not None else found[2]
        return f"const {kept} = {names[resolve_import(name, found[3])]};"

    exported = ", ".join(one for _, one in EXPORT.findall(code))
    body = EXPORT.sub(r"\1", IMPORT.sub(read_import, code)).rstrip()
    return f"const {names[name]} = (() => {{ // {name}\n{body}\nreturn {{ {exported} }};\n}})();"
