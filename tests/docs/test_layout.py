"""The layout rules of decision 27."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from config.environment import ROOT

PRODUCT = ("config", "scheduling", "rpa_tasks", "sessions", "examples")
MOST_MODULES = 16
MOST_LINES = 400
MOST_FUNCTION_LINES = 40
#: Names of Django; states nested in their models; the flow of the SDK and its row; entry points.
MAY_REPEAT = {"Command", "Media", "Meta", "State", "Flow", "main", "run"}
SHARED_MODULE_NAMES = {"__init__.py", "__main__.py", "base.py", "main.py", "schemas.py", "errors.py"}


def product_modules() -> list[Path]:
    paths = [path for app in PRODUCT for path in sorted((ROOT / app).rglob("*.py"))]
    return [path for path in paths if "migrations" not in path.parts]


def test_product_folder_has_at_most_16_modules() -> None:
    modules = [path for app in PRODUCT for path in (ROOT / app).rglob("*.py")]
    counts = Counter(path.parent for path in modules if path.name != "__init__.py" and "migrations" not in path.parts)
    assert len(counts) > 30
    assert {
        str(Path(folder).relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_MODULES
    } == {}


def test_module_of_the_product_has_at_most_400_lines() -> None:
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in product_modules()}
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > MOST_LINES} == {}


def test_function_of_the_product_has_at_most_40_lines() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name} {node.end_lineno - node.lineno + 1}"
        for path in product_modules()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert long == []


def test_class_and_function_names_are_defined_once_in_an_app() -> None:
    classes: Counter[tuple[str, str]] = Counter()
    functions: Counter[tuple[str, str]] = Counter()
    for path in product_modules():
        app, tree = path.relative_to(ROOT).parts[0], ast.parse(path.read_text("utf-8"))
        classes.update((app, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        functions.update(
            (app, node.name) for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
    twice = {name for names in (classes, functions) for (_, name), count in names.items() if count > 1}
    assert twice <= MAY_REPEAT


def test_module_name_is_used_once_in_an_app() -> None:
    names: Counter[tuple[str, str]] = Counter()
    for path in product_modules():
        parts = path.relative_to(ROOT).parts
        if not {"models", "api", "admin", "commands", "settings"} & set(parts) and parts[-1] not in SHARED_MODULE_NAMES:
            names[parts[0], parts[-1]] += 1
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_support_module_name_is_used_once_in_the_tests() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_"))
    assert {name for name, count in names.items() if count > 1} == {"conftest.py"}
