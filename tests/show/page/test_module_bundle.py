"""One script of all modules of the page."""

import re

from regard.show.page.module_bundle import bundle_modules
from regard.show.page.single_file import STATIC


def test_a_module_stands_once_and_after_what_it_imports(tmp_path):
    (tmp_path / "deep").mkdir()
    imports = 'import { two as b } from "./deep/two.js";\nimport * as one from "./one.js";\n'
    (tmp_path / "main.js").write_text(f"{imports}b(one.value);\n")
    (tmp_path / "deep/two.js").write_text('import { value } from "../one.js";\nexport const two = (x) => x + value;\n')
    (tmp_path / "one.js").write_text("export const value = 1;\nexport async function three() {}\nexport class Four {}\n")
    code = bundle_modules(tmp_path, "main.js")
    assert re.findall(r"// (.*\.js)", code) == ["one.js", "deep/two.js", "main.js"]
    assert "const { two: b } = module1;\nconst one = module0;" in code
    assert "return { value, three, Four };" in code


def test_every_import_and_export_of_the_page_is_resolved():
    code = bundle_modules(STATIC, "main.js")
    assert not re.search(r"^\s*(import|export)\b", code, re.MULTILINE)
    parts = re.split(r"^const (module\d+) = \(\(\) => \{", code, flags=re.MULTILINE)[1:]
    exported = {
        name: re.search(r"return \{ (.*) \};\n\}\)\(\);", body)[1].split(", ")
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
    for body in parts[1::2]:
        for names, module in re.findall(r"^const \{(.*)\} = (module\d+);$", body, re.MULTILINE):
            assert {one.split(":")[0].strip() for one in names.split(",")} <= set(exported[module])


def test_the_page_has_nothing_that_would_end_the_script_element():
    assert not re.search(r"</script|<!--", bundle_modules(STATIC, "main.js"), re.IGNORECASE)
