"""Presets: named sets of parameters, one YAML file each, and the user's own files of the same kind.

description: one line
parameters:            # for every notebook that has them
  new_tokens: 32
notebooks:             # for one notebook; these win
  04_sweep: {rounds: 3}
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gaac_lab.errors import RequestError
from gaac_lab.parameters import ParameterError, check

FOLDER = Path(__file__).parent / "presets"
SUFFIXES = (".yaml", ".yml")


class PresetError(RequestError):
    """A preset is unknown, or its file is not what a preset is."""


class Preset(BaseModel):
    """A preset as its file says it; the values are checked, the notebooks' names are not yet."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str = Field(min_length=1)
    parameters: dict[str, Any] = Field(default_factory=dict)
    notebooks: dict[str, dict[str, Any]] = Field(default_factory=dict)


def names() -> list[str]:
    """The presets that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Preset:
    """A preset by name, or by the path of a YAML file.

    Raises PresetError with one sentence if it is not there or not right, and ParameterError for
    parameters that are not.
    """
    path = Path(name).expanduser() if _is_path(name) else FOLDER / f"{name}.yaml"
    if not _is_path(name) and name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise PresetError(
            f"there is no preset {name!r}{hint}: give one of {', '.join(names())}, "
            "or the path of a YAML file."
        )
    preset = _validated(path, _read(path))
    for where, values in {"parameters": preset.parameters, **preset.notebooks}.items():
        try:
            check(values)
        except ParameterError as error:
            raise ParameterError(
                "\n".join(f"{path}, {where}: {line}" for line in str(error).splitlines())
            ) from error
    return preset


def _is_path(name: str) -> bool:
    return name.endswith(SUFFIXES) or "/" in name


class _StrictLoader(yaml.SafeLoader):
    """YAML's own loader takes a key twice and keeps the last; this one refuses."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise PresetError(f"there is no preset file {path}: check the path.") from None
    except OSError as error:
        raise PresetError(f"the preset {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = getattr(error, "problem", None) or "it is not text"
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise PresetError(f"the preset {path}{line} is not valid YAML: {problem}.") from error


def _validated(path: Path, content: Any) -> Preset:
    if not isinstance(content, dict):
        raise PresetError(f"the preset {path} is no mapping: it needs description and parameters.")
    try:
        return Preset.model_validate({**content, "name": path.stem})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            reason = "it may hold description, parameters and notebooks only"
        else:
            reason = first["msg"][:1].lower() + first["msg"][1:]
        raise PresetError(f"the preset {path} is wrong at {where!r}: {reason}.") from error
