"""Find and load flows: `<name>.py` in the directories of AFTERTOUCH_RPA_FLOWS, then in `examples/flows`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpa_tasks.flow_sdk.flow import Misused

FLOWS_VARIABLE = "AFTERTOUCH_RPA_FLOWS"
EXAMPLE_FLOWS = Path(__file__).resolve().parents[2] / "examples" / "flows"
#: `<platform>_<task type>`; a path does not match.
FLOW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,139}")

RunFunction = Callable[[Any], object]


def flow_directories() -> list[Path]:
    """Return the search path: your directories precede the examples."""
    named = [
        Path(word).expanduser().absolute() for word in os.environ.get(FLOWS_VARIABLE, "").split(os.pathsep) if word
    ]
    return [*named, EXAMPLE_FLOWS]


def find_flow(name: str) -> Path:
    """Return the file of a flow. Raises `Misused` with the searched directories if there is none."""
    if not FLOW_NAME.fullmatch(name):
        raise Misused(f"{name!r} is no name for a flow: letters, digits, “_”, “-” and “.”, at most 140.")
    for folder in flow_directories():
        if (path := folder / f"{name}.py").is_file():
            return path
    looked = ", ".join(str(folder) for folder in flow_directories())
    raise Misused(f"There is no flow {name}. Looked for {name}.py in {looked}. More directories: {FLOWS_VARIABLE}.")


def load_flow(name: str) -> RunFunction:
    """Import a flow and return its `run`. Raises `Misused` if the import fails or there is no `run`."""
    path = find_flow(name)
    # Last, so that a flow can import files beside it but hides no module of the library by its name.
    sys.path.append(str(path.parent))
    module_name = "rpa_flow_" + re.sub(r"\W", "_", name)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception:
        raise Misused(f"{path} cannot be imported.\n{traceback.format_exc()}") from None
    run = getattr(module, "run", None)
    if not callable(run):
        raise Misused(f"{path} has no function run(flow).")
    return run  # type: ignore[no-any-return]


def list_flows() -> list[tuple[str, str, Path]]:
    """Return name, first line of the description, and file of every flow that can be found."""
    found: dict[str, tuple[str, str, Path]] = {}
    for folder in flow_directories():
        for path in sorted(folder.glob("*.py")):
            if not FLOW_NAME.fullmatch(path.stem) or path.stem in found:
                continue
            try:
                text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
            except (SyntaxError, ValueError) as error:
                first_line = f"(cannot be read: {error})"
            else:
                first_line = text.partition("\n")[0]
            found[path.stem] = (path.stem, first_line, path)
    return sorted(found.values())
