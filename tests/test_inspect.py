"""`inspect`: the same report from a directory, a file and an id, and no weight is ever fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

from attnquant.errors import CheckpointError, SettingsError, UnsupportedError
from attnquant.inspect import Device, inspect, render, to_json
from attnquant.memory import Serving
from tests.configs import gemma3_270m, gemma4_31b
from tests.hub import Hub, http_error
from tests.test_vision_shapes import gemma4_31b_vision


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path, gemma4_31b())
    return tmp_path


def write(directory: Path, config: dict[str, Any], name: str = "config.json") -> None:
    (directory / name).write_text(json.dumps(config))


def test_gemma4_31b(directory: Path) -> None:
    assert render(inspect(directory)).splitlines() == [
        f"{directory}: Gemma4ForConditionalGeneration, 60 layers, hidden 5376, vocabulary 262144, "
        "tied head",
        "",
        "projection  nvfp4  left",
        "q_proj         60     0",
        "k_proj         60     0",
        "v_proj         50     0",
        "o_proj         60     0",
        "gate_proj      60     0",
        "up_proj        60     0",
        "down_proj      60     0",
        "all           410     0",
        "",
        "bytes per token       bf16  as served  ratio",
        "attention        16.955 GB   4.769 GB  3.56x",
        "mlp              41.618 GB  11.705 GB  3.56x",
        "head              2.819 GB   2.819 GB  1.00x",
        "norms               2.7 MB     2.7 MB  1.00x",
        "total            61.395 GB  19.295 GB  3.18x",
        "with self_attn ignored: 31.482 GB, 1.63x of this",
    ]


def test_json(directory: Path) -> None:
    value = json.loads(to_json(inspect(directory, quant_lm_head="nvfp4")))
    assert (value["quantized"], value["left"], value["lm_head"]) == (410, 0, True)
    assert value["roles"]["v_proj"] == {"quantized": 50, "left": 0}
    totals = {when: sizes["total"] for when, sizes in value["bytes_per_token"].items()}
    assert totals == {
        "before": 61_394_690_680,
        "after": 17_269_172_452,
        "self_attn_ignored": 31_481_767_240,
    }
    assert value["ratio"] == pytest.approx(61_394_690_680 / 17_269_172_452)


def write_with_tower(directory: Path, **changes: Any) -> None:
    config = gemma4_31b(sliding_window=1024, max_position_embeddings=262144) | changes
    write(directory, config | {"vision_config": gemma4_31b_vision()})


def test_what_fits_a_32_gb_card(tmp_path: Path) -> None:
    write_with_tower(tmp_path)
    device = Device(memory=32 * 2**30, max_length=8192)
    assert render(inspect(tmp_path, device=device)).splitlines()[19:] == [
        "",
        "memory                        bytes",
        "weights: decoder          19.295 GB",
        "weights: copies              0.0 MB",
        "weights: rotary             12.7 MB",
        "weights: vision            1.902 GB",
        "weights: total            21.210 GB",
        "activations: layers        1.498 GB",
        "activations: vision        2.961 GB",
        "activations: logits          3.7 MB",
        "activations: captured        1.8 MB",
        "activations: margin        1.653 GB",
        "activations: total         6.117 GB",
        "left for the cache         3.417 GB",
        "cache of 1 x 8192 tokens   1.783 GB",
        "cache per token, sliding_attention: 819.2 KB, up to 1152 tokens of a request",
        "cache per token, full_attention: 81.9 KB, all tokens",
        "fits 30.924 GB, 90% of 34.360 GB",
        "longest context at batch 1: 28160 of 262144 tokens",
        "largest batch at 8192 tokens: 2",
    ]


def test_what_does_not_fit(tmp_path: Path) -> None:
    write_with_tower(tmp_path)
    report = inspect(tmp_path, ignore=("self_attn",), device=Device(memory=32 * 2**30))
    lines = render(report).splitlines()
    assert ["left", "for", "the", "cache", "nothing"] in [line.split() for line in lines]
    assert lines[-3:] == [
        "does not fit 30.924 GB, 90% of 34.360 GB",
        "longest context at batch 1: 0 of 262144 tokens",
        "largest batch at 262144 tokens: 0",
    ]


def test_what_fits_as_json(tmp_path: Path) -> None:
    write_with_tower(tmp_path)
    serving = Serving(max_batch_input_tokens=2048, device_memory_utilization=0.95)
    device = Device(memory=32 * 10**9, max_length=4096, batch=2, serving=serving)
    value = json.loads(to_json(inspect(tmp_path, device=device)))["memory"]
    assert value["usable"] == 30_400_000_000
    assert value["weights"]["decoder"] == 19_295_021_280
    for parts in (value["weights"], value["activations"]):
        assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    spent = value["weights"]["total"] + value["activations"]["total"]
    assert value["cache_budget"] == 30_400_000_000 - spent - (30_400_000_000 - spent) // 20
    assert value["cache_per_token"] == {"sliding_attention": 819_200, "full_attention": 81_920}
    assert value["fits"] and value["cache"] <= value["cache_budget"]
    assert (value["max_length"], value["batch"]) == (4096, 2)
    assert value["longest_context"] >= 4096 and value["largest_batch"] >= 2


def test_gemma3_has_no_tower_and_more_room(tmp_path: Path) -> None:
    write(tmp_path, gemma3_270m(sliding_window=512, max_position_embeddings=32768))
    device = Device(memory=8 * 10**9)
    value = json.loads(to_json(inspect(tmp_path / "config.json", device=device)))["memory"]
    assert (value["weights"]["vision"], value["activations"]["vision"]) == (0, 0)
    assert value["max_length"] == value["longest_context"] == 32768


@pytest.mark.parametrize(
    ("dtype", "stacked"), [(None, True), ("bfloat16", True), ("float32", False)]
)
def test_another_dtype_is_stacked_on_the_way(
    tmp_path: Path, dtype: str | None, stacked: bool
) -> None:
    write(tmp_path, gemma3_270m(torch_dtype=dtype))
    report = inspect(tmp_path, quant="none", device=Device(memory=10**9))
    value = json.loads(to_json(report))["memory"]
    assert (value["weights"]["copies"] > 0) is stacked


def test_a_request_that_is_too_long(tmp_path: Path) -> None:
    write_with_tower(tmp_path)
    device = Device(memory=10**9, max_length=262145)
    with pytest.raises(SettingsError, match=r"--max-length=262145 is beyond .*, 262144"):
        inspect(tmp_path, device=device)


def test_ignore(directory: Path) -> None:
    report = inspect(directory, ignore=("self_attn",))
    value = json.loads(to_json(report))
    assert (value["quantized"], value["left"]) == (180, 230)
    assert value["left_because"] == {"ignored": 230}
    assert value["ratio_to_self_attn_ignored"] == 1
    assert "left: 230 ignored" in render(report)
    with pytest.raises(SettingsError, match=r"^--ignore: 'q_porj' matches no projection"):
        inspect(directory, ignore=("q_porj",))


def test_not_quantized(directory: Path) -> None:
    report = inspect(directory, quant="none")
    assert report.after == report.before
    assert "left: 410 not asked for" in render(report)
    assert "self_attn" not in render(report)


def test_file_and_directory_agree(directory: Path) -> None:
    of_file = inspect(str(directory / "config.json"))
    assert json.loads(to_json(of_file)) | {"model": str(directory)} == json.loads(
        to_json(inspect(str(directory)))
    )


def test_odd_columns_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, gemma3_270m(intermediate_size=2040))
    report = inspect(tmp_path)
    assert "left: 18 in = 2040 is not a multiple of 16" in render(report)
    assert json.loads(to_json(report))["roles"]["down_proj"] == {"quantized": 0, "left": 18}


@pytest.mark.parametrize("separate", [False, True])
def test_checkpoint_in_nvfp4(tmp_path: Path, separate: bool) -> None:
    ignored = ["lm_head", "model.vision_tower*", "model.language_model.layers.*.self_attn*"]
    if separate:
        write(tmp_path, gemma4_31b())
        quantization = {"quant_algo": "NVFP4", "exclude_modules": ignored}
        write(tmp_path, {"quantization": quantization}, "hf_quant_config.json")
    else:
        quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}
        write(tmp_path, gemma4_31b() | {"quantization_config": quantization})
    report = inspect(tmp_path, quant="none")
    assert report.is_nvfp4
    assert "in NVFP4 already" in render(report)
    assert report.after == report.self_attn_ignored
    assert not report.coverage.lm_head
    assert inspect(tmp_path, quant_lm_head="nvfp4").coverage.lm_head


def test_untied_head_of_an_nvfp4_checkpoint(tmp_path: Path) -> None:
    for ignored, expected in ((["lm_head"], False), ([], True)):
        quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}
        config = gemma3_270m(tie_word_embeddings=False, quantization_config=quantization)
        write(tmp_path, config)
        assert inspect(tmp_path).coverage.lm_head is expected


def test_other_quantization(tmp_path: Path) -> None:
    write(tmp_path, gemma3_270m(quantization_config={"quant_method": "gptq"}))
    with pytest.raises(UnsupportedError, match="says gptq"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "config.json"), ("{", "config.json"), ("[]", "config.json"), ("{}", "architectures")],
)
def test_bad_directory(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        inspect(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["/no/such/directory", "./nothing", "a/b/c", "a b"])
def test_no_such_source(source: str) -> None:
    with pytest.raises(CheckpointError, match="found no such file or directory"):
        inspect(source)


def test_hugging_face_id(hub: Hub) -> None:
    write(hub.directory, gemma4_31b())
    report = inspect("google/gemma-4-31b-it")
    assert report.after.total == 19_295_021_280
    assert hub.asked == ["config.json", "hf_quant_config.json"]


def test_hugging_face_id_in_nvfp4(hub: Hub) -> None:
    write(hub.directory, gemma4_31b())
    write(hub.directory, {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json")
    assert inspect("google/gemma-4-31b-it").is_nvfp4


def test_cached_config_serves_without_a_connection(hub: Hub) -> None:
    hub.probe_error = httpx.ConnectError("no route")
    write(hub.directory, gemma4_31b())
    assert not inspect("google/gemma-4-31b-it").is_nvfp4


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ConnectError("no route"), "no connection"),
        (http_error(errors.RepositoryNotFoundError), "there is no such model"),
        (http_error(errors.GatedRepoError), "the model is gated"),
    ],
)
def test_hugging_face_errors(hub: Hub, error: Exception, message: str) -> None:
    hub.probe_error = error
    with pytest.raises(CheckpointError, match=message) as raised:
        inspect("google/gemma-4-31b-it")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("google/gemma-4-31b-it: found no such directory")


def test_hugging_face_model_without_a_config(hub: Hub) -> None:
    hub.probe_error = http_error(errors.RemoteEntryNotFoundError)
    with pytest.raises(CheckpointError, match=r"a Hugging Face model without config\.json"):
        inspect("google/gemma-4-31b-it")
