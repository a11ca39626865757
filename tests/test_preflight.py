"""What is wrong is said before MAX starts: one line, status 2, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from attnquant.checkpoint.export_theta import export_theta
from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.nvfp4.reference import encode
from attnquant.preflight import check_draft, check_model, check_settings
from tests.checkpoint.files import write
from tests.configs import gemma4_31b
from tests.hub import Hub
from tests.test_run_max import run
from tests.tiny.cases import CASES as ALL_CASES
from tests.tiny.gemma3 import CASES
from tests.tiny.gemma4 import CASES as GEMMA4
from tests.tiny.gemma4_drafter import DRAFTERS

CASE = CASES["pattern2-scalar"]


def test_a_good_checkpoint_passes(tmp_path: Path) -> None:
    check_model(str(CASE.write(tmp_path / "good")))


def test_other_architectures_are_max_s_to_judge(tmp_path: Path) -> None:
    check_model(None)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    check_model(str(tmp_path))


def test_an_id_is_checked_from_its_config(hub: Hub) -> None:
    config = hub.directory / "config.json"
    config.write_text(json.dumps(gemma4_31b()))
    check_model(hub.model)
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    check_model(hub.model)
    config.write_text(json.dumps(gemma4_31b() | {"architectures": []}))
    with pytest.raises(CheckpointError, match=f"{hub.model}: architectures is"):
        check_model(hub.model)


def test_an_id_that_cannot_be_fetched_is_refused_in_one_line(tmp_path: Path) -> None:
    # The real client, which gets no connection: nothing listens on this port.
    result = run(
        *("generate", "--model", "google/gemma-3-1b-it", "--prompt", "a"),
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HOME=str(tmp_path),
    )
    assert result.returncode == 2
    assert "config.json cannot be fetched from Hugging Face: no connection" in result.stderr
    assert "Traceback" not in result.stderr


def _config(**fields: object) -> dict[str, bytes]:
    return {"config.json": json.dumps(fields).encode()}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "config.json: cannot be read (No such file or directory)"),
        ({"config.json": b"version https://git-lfs.github.com/spec/v1"}, "a Git LFS pointer"),
        (_config(model_type="llama"), "architectures is None, expected a list with Gemma3For"),
        (_config(architectures="Gemma3ForCausalLM"), "architectures is 'Gemma3ForCausalLM', expec"),
        (_config(architectures=[]), "architectures is [], expected"),
        (_config(architectures=[["x\n"]]), r"architectures is [['x\n']], expected"),
        (
            _config(architectures=["Gemma3ForCasualLM"], model_type="gemma3_text"),
            "architectures is ['Gemma3ForCasualLM'], expected a list with Gemma3ForCausalLM; cor",
        ),
        (
            _config(architectures=["Gemma4Model"], model_type="gemma4"),
            "expected a list with Gemma4ForConditionalGeneration; correct it",
        ),
    ],
    ids=["empty", "lfs", "none", "string", "no name", "nested", "misspelt", "another head"],
)
def test_no_directory_reaches_max_unread(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_model(str(write(tmp_path, files)))
    assert words in str(caught.value) and str(caught.value).isprintable()
    check_settings(str(tmp_path))


def test_paths_that_max_would_read_otherwise(tmp_path: Path) -> None:
    for name, words in (
        ("nothing/at/all", "found no such directory, expected a checkpoint's directory, or a Hug"),
        ("model[1]", "in the path, which MAX takes for a pattern of other paths"),
        ("file", "found a file, expected a checkpoint's directory"),
        ("dangling", "found nothing, expected a checkpoint's directory"),
    ):
        path = tmp_path / name
        if name == "file":
            path.write_text("x")
        elif name == "dangling":
            path.symlink_to("nowhere")
        elif name == "model[1]":
            CASE.write(path)
        with pytest.raises(CheckpointError) as caught:
            check_model(str(path))
        assert words in str(caught.value)


def test_models_of_several_networks_are_max_s_to_judge(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    check_model(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_the_files_beside_the_weights_are_checked(tmp_path: Path, name: str) -> None:
    directory = CASE.write(tmp_path / "model")
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=f"{name}: found a Git LFS pointer"):
        check_model(str(directory))


def test_values_of_the_config_are_checked(tmp_path: Path) -> None:
    directory = CASE.write(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": None}))
    with pytest.raises(CheckpointError, match="rms_norm_eps is None, expected a decimal number"):
        check_model(str(directory))


def test_a_truncated_file_is_refused_by_the_command(tmp_path: Path) -> None:
    directory = CASE.write(tmp_path / "short")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run("generate", "--model", str(directory), "--prompt", "x")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("run_max.py: ") and "model.safetensors" in line


def test_the_last_model_and_the_one_of_a_file_are_checked(tmp_path: Path) -> None:
    good, bad = CASE.write(tmp_path / "good"), write(tmp_path / "bad", {"config.json": b"["})
    options = tmp_path / "options.yaml"
    options.write_text(f"model:\n  model_path: {bad}\n")
    for arguments in (
        ("--model", str(good), "--model-path", str(bad)),
        (f"--model={good}", f"--model={bad}"),
        ("--config-file", str(options)),
    ):
        result = run("generate", *arguments, "--prompt", "x")
        assert result.returncode == 2
        assert result.stderr.startswith(f"run_max.py: {bad}/config.json: found no valid JSON")
        assert result.stderr.count("\n") == 1


def test_settings_of_the_checkpoint_are_checked_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CASE.write(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attnquant": {"quants": "nvfp4"}}))
    with pytest.raises(SettingsError, match="did you mean quant"):
        check_model(str(directory))
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    monkeypatch.setenv("ATTNQUANT_QUANT_IGNORE", "self_atn")
    with pytest.raises(SettingsError, match="'self_atn' matches no projection"):
        check_model(str(directory))
    monkeypatch.delenv("ATTNQUANT_QUANT_IGNORE")
    monkeypatch.setenv("ATTNQUANT_BLOCKS", "26")
    with pytest.raises(SettingsError, match="ATTNQUANT_BLOCKS=26 is not a whole number from 1 to"):
        check_model(str(directory))


def test_all_that_is_wrong_with_settings_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CASE.write(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    section = {"attnquant": {"rank": "many", "blokcs": 2}}
    (directory / "config.json").write_text(json.dumps(config | section))
    monkeypatch.setenv("ATTNQUANT_QUANT", "fp8")
    with pytest.raises(SettingsError) as caught:
        check_settings(str(directory))
    assert str(caught.value) == (
        "config.json's attnquant.blokcs is not a setting: did you mean blocks?; "
        "config.json's attnquant.rank='many' is not a whole number, 0 or more; "
        "ATTNQUANT_QUANT='fp8' is not none or nvfp4"
    )
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    monkeypatch.setenv("ATTNQUANT_QUANT_IGNORE", "self_atn,o_proj,q_porj,re:(")
    monkeypatch.setenv("ATTNQUANT_BLOCKS", "26")
    check_settings(str(directory))
    with pytest.raises(SettingsError) as caught:
        check_model(str(directory))
    words = ("'re:(' is not a regular", "'self_atn', 'q_porj' match no projection", "BLOCKS=26")
    for problem, word in zip(str(caught.value).split("; AT"), words, strict=True):
        assert word in problem


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": [["x"], {}]}', "{}"])
def test_a_config_that_cannot_be_read_says_nothing_of_settings(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    check_settings(str(tmp_path))


def test_a_config_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    directory = CASE.write(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    with pytest.raises(CheckpointError, match=r"expected .* as config\.json implies"):
        check_model(str(directory))


def test_bundles_are_checked_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = CASE.write(tmp_path / "source"), tmp_path / "theta"
    export_theta(source, target, blocks=2, rank=4, encode=encode, recipe={})
    check_model(str(target))
    monkeypatch.setenv("ATTNQUANT_RANK", "3")
    check_model(str(target))
    monkeypatch.setenv("ATTNQUANT_BLOCKS", "1")
    with pytest.raises(SettingsError, match="ATTNQUANT_BLOCKS=1: the checkpoint holds bundles of"):
        check_model(str(target))
    config = json.loads((target / "config.json").read_text())
    del config["attnquant"]["format"]
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="found a part of a theta bundle"):
        check_model(str(target))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A Gemma 4 and its drafter."""
    target = GEMMA4["gemma4-shared-values"].write(tmp_path / "target")
    return target, DRAFTERS["gemma4-shared-values"].write(tmp_path / "drafter")


def change(directory: Path, **fields: Any) -> None:
    """Changes fields of config.json, or of its text_config."""
    config = json.loads((directory / "config.json").read_text())
    for name, value in fields.items():
        holder = config if name in config else config["text_config"]
        holder[name] = value
    (directory / "config.json").write_text(json.dumps(config))


def test_a_drafter_passes_beside_its_target_whatever_the_settings(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_QUANT", "nvfp4")
    target, drafter = map(str, pair)
    check_draft(target, drafter, on_cpu=False)
    check_draft("google/gemma-4-31B-it", drafter, on_cpu=False)
    check_draft(target, "google/gemma-4-31B-it-assistant", on_cpu=False)
    check_draft(target, None, on_cpu=True)
    with pytest.raises(UnsupportedError, match="MAX drafts on GPUs only"):
        check_draft(target, drafter, on_cpu=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backbone_hidden_size": 5376}, "backbone_hidden_size is 5376, expected 128, the target"),
        ({"vocab_size": 641}, "vocab_size is 641, expected 640, as in the target"),
        ({"head_dim": 128}, "head_dim is 128, expected 256"),
        ({"global_head_dim": 256}, "global_head_dim is 256, expected 512"),
        ({"sliding_window": 512}, "sliding_window is 512, expected 128"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, expected a multiple of the target"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"layer_types": ["sliding"] * 3}, r"layer_types\[0\] is 'sliding', expected sliding_att"),
        ({"use_ordered_embeddings": True}, "use_ordered_embeddings is set"),
        (
            {"architectures": ["Gemma4ForCausalLM"]},
            "architectures is .*; attnquant serves Gemma4A",
        ),
        (
            {"intermediate_size": 100},
            r"tensor .*gate_proj.weight is \[96, 64\], expected \[100, 64\]",
        ),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
        ({"num_hidden_layers": 2}, "layer_types has 3 entries"),
    ],
)
def test_a_drafter_that_is_not_its_target_s_is_refused(
    pair: tuple[Path, Path], fields: dict[str, Any], message: str
) -> None:
    target, drafter = pair
    change(drafter, **fields)
    with pytest.raises((CheckpointError, UnsupportedError), match="the drafter's .*" + message):
        check_draft(str(target), str(drafter), on_cpu=False)


@pytest.mark.parametrize("case", ["gemma4-unified", "pattern2-scalar"])
def test_a_target_that_no_drafter_is_served_with_is_named(
    pair: tuple[Path, Path], case: str, tmp_path: Path
) -> None:
    target = ALL_CASES[case].write(tmp_path / "another")
    with pytest.raises(
        UnsupportedError, match=r"the target is a Gemma\w+; attnquant serves Gemma4A"
    ):
        check_draft(str(target), str(pair[1]), on_cpu=False)


def test_a_drafter_with_a_tensor_more_is_refused(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    values = load_file(drafter / "model.safetensors")
    save_file(
        values | {"model.k.weight": values["model.norm.weight"]}, drafter / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"'model\.k\.weight' is none of a drafter"):
        check_draft(str(target), str(drafter), on_cpu=False)


@pytest.mark.parametrize("option", ["--draft-model", "--draft-model-path"])
def test_the_command_refuses_a_drafter_on_a_cpu(pair: tuple[Path, Path], option: str) -> None:
    target, drafter = map(str, pair)
    result = run("serve", "--model", target, option, drafter, "--devices", "cpu")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("run_max.py: --draft-model-path ")
