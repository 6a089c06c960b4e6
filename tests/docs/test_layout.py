"""The size of modules (decision 27). Ruff checks the complexity of functions."""

from config.environment import ROOT

PRODUCT = ("config", "scheduling", "rpa_tasks", "sessions", "examples")
MOST_LINES = 800


def test_module_of_the_product_has_at_most_800_lines():
    paths = [path for app in PRODUCT for path in (ROOT / app).rglob("*.py") if "migrations" not in path.parts]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {path: size for path, size in sizes.items() if size > MOST_LINES} == {}
