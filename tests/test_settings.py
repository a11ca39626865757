"""Settings: where each comes from, which wins, and what the user reads when one is wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import SettingsError
from attnquant.settings import PREFIX, Settings


def test_defaults_are_the_checkpoint_as_it_is():
    settings = Settings.read(environ={})
    assert settings == Settings()
    assert (settings.blocks, settings.rank, settings.quant) == (None, 0, "none")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ATTNQUANT_BLOCKS", "26", "blocks", 26),
        ("ATTNQUANT_BLOCKS", " 6 ", "blocks", 6),
        ("ATTNQUANT_RANK", "0", "rank", 0),
        ("ATTNQUANT_PRECOMPUTE_OUTSIDE", "1", "precompute_outside", True),
        ("ATTNQUANT_PRECOMPUTE_OUTSIDE", "0", "precompute_outside", False),
        ("ATTNQUANT_PRECOMPUTE_OUTSIDE", "False", "precompute_outside", False),
        ("ATTNQUANT_GEMM", "auto", "gemm", "auto"),
        ("ATTNQUANT_QUANT", "nvfp4", "quant", "nvfp4"),
        ("ATTNQUANT_QUANT_SCALES", "absmax", "quant_scales", "absmax"),
        ("ATTNQUANT_QUANT_IGNORE", "self_attn, o_proj,", "quant_ignore", ("self_attn", "o_proj")),
        ("ATTNQUANT_QUANT_IGNORE", "", "quant_ignore", ()),
        ("ATTNQUANT_QUANT_LM_HEAD", "nvfp4", "quant_lm_head", "nvfp4"),
    ],
)
def test_variables(variable: str, text: str, name: str, value: object):
    environ = {"ATTNQUANT_QUANT": "nvfp4"} if name.startswith("quant_") else {}
    settings = Settings.read(environ={**environ, variable: text})
    assert getattr(settings, name) == value
    assert settings == Settings(**({"quant": "nvfp4"} if environ else {}) | {name: value})


def test_every_setting_has_a_sentence_and_says_what_is_allowed():
    for setting in fields(Settings):
        assert setting.metadata["doc"].endswith(".")
        assert setting.metadata["allowed"]


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("ATTNQUANT_BLOCKS", "0", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "six", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "6.0", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "+6", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "1_0", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "٣", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "9" * 10, "a whole number, 1 or more"),
        ("ATTNQUANT_RANK", "-1", "a whole number, 0 or more"),
        ("ATTNQUANT_PRECOMPUTE_OUTSIDE", "yes", "0 or 1"),
        ("ATTNQUANT_GEMM", "sparse", "auto, dense or factored"),
        ("ATTNQUANT_QUANT", "fp8", "none or nvfp4"),
        ("ATTNQUANT_QUANT", "NVFP4", "none or nvfp4"),
        ("ATTNQUANT_QUANT_SCALES", "max", "absmax, mse or profile"),
    ],
)
def test_an_impossible_value_names_variable_value_and_what_is_allowed(
    variable: str, text: str, allowed: str
):
    with pytest.raises(SettingsError) as caught:
        Settings.read(environ={variable: text})
    message = str(caught.value)
    assert message == f"{variable}={text!r} is not {allowed}"


def test_an_unknown_variable_comes_with_the_nearest_name():
    with pytest.raises(SettingsError, match=r"^ATTNQUANT_BLOKS is not.*mean ATTNQUANT_BLOCKS\?$"):
        Settings.read(environ={"ATTNQUANT_BLOKS": "6"})


def test_an_unknown_variable_like_none_comes_with_all_names():
    with pytest.raises(SettingsError) as caught:
        Settings.read(environ={"ATTNQUANT_" + "Z" * 40: "6"})
    for setting in fields(Settings):
        assert PREFIX + setting.name.upper() in str(caught.value)


def test_all_problems_are_reported_at_once_in_one_line():
    with pytest.raises(SettingsError) as caught:
        Settings.read(
            config={"blokcs": 3, "rank": "many"},
            environ={"ATTNQUANT_BLOCKS": "0", "ATTNQUANT_QUANTS": "nvfp4", "ATTNQUANT_RNK": "1"},
        )
    message = str(caught.value)
    assert "\n" not in message
    assert message.count(";") == 4
    for word in ("blokcs", "attnquant.rank='many'", "ATTNQUANT_BLOCKS='0'", "ATTNQUANT_QUANTS"):
        assert word in message


def test_config_values_are_read_like_variables():
    config = {"blocks": 6, "rank": 32, "quant": "nvfp4", "quant_ignore": ["self_attn", "o_proj"]}
    assert Settings.read(config=config, environ={}) == Settings(
        blocks=6, rank=32, quant="nvfp4", quant_ignore=("self_attn", "o_proj")
    )


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_of_config_is_a_json_boolean(value: bool):
    settings = Settings.read(config={"precompute_outside": value}, environ={})
    assert settings.precompute_outside is value


def test_a_variable_beats_config():
    settings = Settings.read(config={"blocks": 6, "rank": 32}, environ={"ATTNQUANT_BLOCKS": "9"})
    assert (settings.blocks, settings.rank) == (9, 32)


def test_an_impossible_value_in_config_names_the_field():
    with pytest.raises(SettingsError, match=r"config\.json's attnquant\.blocks='0' is not a whole"):
        Settings.read(config={"blocks": 0}, environ={})


def test_the_environment_is_the_processes_own_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNQUANT_RANK", "7")
    assert Settings.read().rank == 7


@given(st.dictionaries(st.text(), st.text()))
def test_variables_of_others_do_not_matter(environ: dict[str, str]):
    others = {name: text for name, text in environ.items() if not name.upper().startswith(PREFIX)}
    assert Settings.read(environ=others) == Settings()


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_numbers_come_through(blocks: int, rank: int):
    environ = {"ATTNQUANT_BLOCKS": str(blocks), "ATTNQUANT_RANK": str(rank)}
    assert Settings.read(environ=environ) == Settings(blocks=blocks, rank=rank)


def test_settings_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Settings().rank = 3  # type: ignore[misc]


def test_how_to_quantize_without_quantizing_is_a_contradiction():
    with pytest.raises(SettingsError, match="ATTNQUANT_QUANT_IGNORE says how to quantize"):
        Settings.read(environ={"ATTNQUANT_QUANT_IGNORE": "self_attn"})
    with pytest.raises(SettingsError, match=r"attnquant.quant_lm_head says how to quantize"):
        Settings.read({"quant_lm_head": "nvfp4"}, environ={"ATTNQUANT_QUANT": "none"})
    # The default may be spelled out.
    assert Settings.read(environ={"ATTNQUANT_PROFILE_TOKENS": "4096"}) == Settings()


@pytest.mark.parametrize("outside", ["1", None])
def test_what_a_graph_does_with_bundles_needs_bundles_in_it(outside: str | None):
    environ = {} if outside is None else {"ATTNQUANT_PRECOMPUTE_OUTSIDE": outside}
    with pytest.raises(SettingsError, match="ATTNQUANT_GEMM=dense says what a graph does with"):
        Settings.read(environ={**environ, "ATTNQUANT_GEMM": "dense"})
    environ["ATTNQUANT_PRECOMPUTE_OUTSIDE"] = "0"
    assert Settings.read(environ={**environ, "ATTNQUANT_GEMM": "dense"}).gemm == "dense"


def test_the_format_of_a_theta_checkpoint_is_no_setting():
    assert Settings.read({"format": 1, "blocks": 6}, environ={}) == Settings(blocks=6)


@pytest.mark.parametrize("name", ["ATTNQUANT_quant", "attnquant_quant", "Attnquant_Quant"])
def test_letters_of_the_wrong_case_are_not_overlooked(name: str):
    with pytest.raises(SettingsError) as caught:
        Settings.read(environ={name: "nvfp4"})
    assert str(caught.value) == f"{name} is not a setting: did you mean ATTNQUANT_QUANT?"


@pytest.mark.parametrize(
    ("name", "start"), [("A\nB", "ATTNQUANT_A\\nB"), ("x" * 10_000, "ATTNQUANT_xx...")]
)
def test_a_hostile_name_stays_in_one_short_line(name: str, start: str):
    with pytest.raises(SettingsError) as caught:
        Settings.read(environ={PREFIX + name: "1"})
    assert str(caught.value).removeprefix("'").startswith(start)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("config", [[], "nvfp4", 3, True])
def test_a_section_that_is_no_object_is_refused_with_the_rest(config: Any):
    with pytest.raises(SettingsError) as caught:
        Settings.read(config, environ={"ATTNQUANT_RANK": "x"})
    first, second = str(caught.value).split("; ")
    assert first == f"config.json's attnquant is {config!r}, expected an object"
    assert second.startswith("ATTNQUANT_RANK='x' is not")


@pytest.mark.parametrize(
    ("name", "value"),
    [("blocks", [6]), ("blocks", True), ("blocks", 6.0), ("rank", None), ("quant", ["nvfp4"])],
)
def test_a_field_of_another_type_is_refused(name: str, value: Any):
    with pytest.raises(SettingsError, match=rf"^config\.json's attnquant\.{name}=.* is not "):
        Settings.read({name: value}, environ={})


def test_a_head_that_is_asked_for_and_ignored_is_a_contradiction():
    environ = {"ATTNQUANT_QUANT": "nvfp4", "ATTNQUANT_QUANT_LM_HEAD": "nvfp4"}
    with pytest.raises(SettingsError, match=r"QUANT_IGNORE names lm_head, and .*_LM_HEAD=nvfp4"):
        Settings.read(environ=environ | {"ATTNQUANT_QUANT_IGNORE": "o_proj,lm_head"})
    assert Settings.read(environ=environ | {"ATTNQUANT_QUANT_IGNORE": "o_proj"}).quant == "nvfp4"


def test_contradictions_are_said_beside_what_cannot_be_read():
    with pytest.raises(SettingsError) as caught:
        Settings.read(environ={"ATTNQUANT_QUANT_IGNORE": "self_attn", "ATTNQUANT_BLOCKS": "many"})
    first, second = str(caught.value).split("; ")
    assert first.startswith("ATTNQUANT_BLOCKS='many' is not")
    assert second.startswith("ATTNQUANT_QUANT_IGNORE says how to quantize")
    # What a value that cannot be read was to say is not guessed.
    with pytest.raises(SettingsError, match=r"^ATTNQUANT_QUANT='nvpf4' is not none or nvfp4$"):
        Settings.read(environ={"ATTNQUANT_QUANT_IGNORE": "self_attn", "ATTNQUANT_QUANT": "nvpf4"})
