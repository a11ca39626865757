"""Every recipe is what MAX accepts, key by key, and fits the card that it is for."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from max.pipelines.lib import PipelineArgs

from attnquant.decoder_shapes import DecoderShapes
from attnquant.drafter_shapes import DrafterShapes
from attnquant.memory import MemoryPlan, Serving, parse_size
from attnquant.nvfp4.coverage import coverage_of
from attnquant.settings import Settings
from tests.configs import gemma4_31b, gemma4_31b_drafter
from tests.test_vision_shapes import gemma4_31b_vision

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
MEMORY = {"32gb": "32GB", "80gb": "80GB", "b200": "180GB"}
QUANTIZED = {"mlp": 180}

Keys = tuple[str, ...]


def parsed(recipe: Path, **options: Any) -> PipelineArgs:
    """As `max serve --config-file` reads it, before anything is looked up.

    Raises:
        ValueError: a key that MAX refuses, or that it leaves out without a word: it drops all of
            `speculative` where `speculative_method` is missing.
    """
    arguments = PipelineArgs.from_flat_kwargs(config_file=str(recipe), **options)
    for path in keys_of(yaml.safe_load(recipe.read_text(encoding="utf-8"))):
        # The fields of `model` are the arguments' own.
        *sections, key = path[1:] if path[0] == "model" and len(path) > 1 else path
        holder: Any = arguments
        for section in sections:
            holder = getattr(holder, section)
        if path != ("model",) and key not in getattr(holder, "model_fields_set", ()):
            raise ValueError(f"{path} is left out")
    return arguments


def keys_of(value: dict[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for key, below in value.items():
        yield (*above, key)
        if isinstance(below, dict):
            yield from keys_of(below, (*above, key))


def commands(recipe: Path) -> list[list[str]]:
    """The words of each command in the comments."""
    lines = re.findall(r"^#   (.*)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def settings(recipe: Path) -> Settings:
    words = commands(recipe)[0]
    return Settings.read(environ=dict(word.split("=") for word in words if "=" in word))


def drafted_tokens(arguments: PipelineArgs) -> int:
    return arguments.speculative.num_speculative_tokens if arguments.speculative else 0


def drafter_bytes(target: dict[str, Any]) -> int:
    """In bfloat16."""
    shapes = DrafterShapes.from_config(gemma4_31b_drafter(), target)
    return 2 * sum(map(math.prod, shapes.tensors.values()))


def test_the_drafter_s_recipe_drafts_as_many_tokens_as_it_was_trained_for() -> None:
    (arguments,) = (parsed(recipe) for recipe in RECIPES if "drafter" in recipe.stem)
    assert arguments.draft_model is not None
    assert arguments.draft_model.model_path == "google/gemma-4-31B-it-assistant"
    assert arguments.speculative is not None
    assert arguments.speculative.speculative_method == "mtp"
    assert drafted_tokens(arguments) == 3
    # 4 layers of 1024 columns, and an embedding of 262,144 rows.
    config = gemma4_31b(sliding_window=1024, max_position_embeddings=262144)
    assert 0.9e9 < drafter_bytes(config) < 1e9


def test_there_is_one_for_each_use() -> None:
    assert {recipe.stem for recipe in RECIPES} == {
        "gemma4-31b-nvfp4-32gb",
        "gemma4-31b-nvfp4-b200",
        "gemma4-31b-nvfp4-drafter-b200",
        "gemma4-31b-nvfp4-mlp-80gb",
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_max_reads_it_as_it_stands(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    # What run_max.py adds must leave the rest of a section alone.
    arguments = parsed(recipe, custom_architectures=["attnquant"], enable_in_flight_batching=True)
    assert arguments.model_path == "google/gemma-4-31B-it"
    assert arguments.max_length == values["model"]["max_length"]
    assert arguments.runtime.max_batch_size == values["runtime"]["max_batch_size"]
    assert arguments.runtime.custom_architectures == ["attnquant"]
    assert arguments.runtime.enable_in_flight_batching


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_max_refuses_each_key_misspelt(recipe: Path, tmp_path: Path) -> None:
    for path in list(keys_of(yaml.safe_load(recipe.read_text(encoding="utf-8")))):
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        section = values
        for key in path[:-1]:
            section = section[key]
        section[path[-1] + "x"] = section.pop(path[-1])
        wrong = tmp_path / recipe.name
        wrong.write_text(yaml.safe_dump(values))
        with pytest.raises(ValueError, match=f"{path[-1]}x|is left out"):
            parsed(wrong)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_its_commands_name_it_and_are_good_settings(recipe: Path) -> None:
    for words in commands(recipe):
        assert words[words.index("--config-file") + 1] == f"recipes/{recipe.name}"
    assert settings(recipe).quant == "nvfp4"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_it_fits_its_card(recipe: Path) -> None:
    arguments = parsed(recipe)
    config = gemma4_31b(sliding_window=1024, max_position_embeddings=262144)
    config["vision_config"] = gemma4_31b_vision()
    coverage = coverage_of(settings(recipe), DecoderShapes.from_config(config), ())
    kind, card = recipe.stem.split("-")[-2:]
    assert len(coverage.quantized) == QUANTIZED.get(kind, 410)
    plan = MemoryPlan.from_config(
        config,
        coverage,
        parts_bound=True,
        serving=Serving(
            max_batch_input_tokens=arguments.runtime.max_batch_input_tokens,
            device_memory_utilization=arguments.kv_cache.device_memory_utilization,
            num_speculative_tokens=drafted_tokens(arguments),
        ),
    )
    length, batch = arguments.max_length, arguments.runtime.max_batch_size
    budget = plan.cache_budget(parse_size(MEMORY[card]), length, batch)
    if arguments.draft_model is not None:
        budget -= drafter_bytes(config)
    # The longest request alone, and all requests at once at a sixteenth of its length.
    assert plan.cache(length, 1) <= budget
    assert plan.cache(length // 16, batch) <= budget
