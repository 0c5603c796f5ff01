"""The fake loads, quantises and builds, or refuses to."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fake_tensorrt_llm.calls import (
    Install,
    K,
    S,
    build_config,
    copy_checkpoint,
    lib,
    load_model,
    open_runner,
    save_engine,
)
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario


def test_a_saved_config_holds_what_the_build_changed(install: Install, tiny_target: Path):
    install(Scenario())
    folder = save_engine(tiny_target, Path("engine"), "DRAFT_TOKENS_EXTERNAL", max_num_tokens=2)

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["version"] == "1.2.1"
    assert config["pretrained_config"]["vocab_size"] == 320
    assert config["pretrained_config"]["mapping"]["world_size"] == 1
    saved = config["build_config"]
    assert saved["speculative_decoding_mode"] == 2
    assert (saved["max_input_len"], saved["max_seq_len"]) == (S, S + K)
    assert saved["max_num_tokens"] == K + 1
    assert saved["plugin_config"]["use_paged_context_fmha"] is True
    assert saved["plugin_config"]["dtype"] == "bfloat16"


def test_a_timing_cache_lands_in_the_working_folder_unless_told(
    install: Install, tiny_target: Path
):
    install(Scenario())
    lib("tensorrt_llm.builder").build(
        load_model(tiny_target), lib("tensorrt_llm.builder").BuildConfig()
    )

    assert Path("model.cache").is_file()


def test_a_model_is_built_once(install: Install, tiny_target: Path):
    install(Scenario())
    model, config = load_model(tiny_target), build_config("NONE")
    lib("tensorrt_llm.builder").build(model, config)

    with pytest.raises(RuntimeError, match="load it afresh"):
        lib("tensorrt_llm.builder").build(model, config)


def test_a_checkpoint_that_cannot_be_loaded_is_refused(
    install: Install, tiny_target: Path, tmp_path: Path
):
    install(Scenario())
    with pytest.raises(AssertionError):
        load_model(Path("meta-llama/Llama-3.2-1B"))
    foreign = copy_checkpoint(tiny_target, tmp_path / "a", architectures=["SmolLM3ForCausalLM"])
    with pytest.raises(NotImplementedError, match="is not supported in TRT-LLM yet"):
        load_model(foreign)
    with pytest.raises(ModuleNotFoundError):
        load_model(copy_checkpoint(tiny_target, tmp_path / "Davila" / "model"))
    packed = copy_checkpoint(tiny_target, tmp_path / "b", quantization_config={"bits": 4})
    with pytest.raises(NotImplementedError, match="Unsupported quantization_config"):
        load_model(packed)


def test_a_prequantised_checkpoint_needs_its_quant_config(
    install: Install, tiny_target: Path, tmp_path: Path
):
    install(Scenario())
    folder = copy_checkpoint(tiny_target, tmp_path / "fp8")
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization), encoding="utf-8")
    utils, algorithms = lib("tensorrt_llm.models.modeling_utils"), lib("tensorrt_llm.quantization")
    fp8 = algorithms.QuantAlgo.FP8

    with pytest.raises(ValueError, match="FP8"):
        load_model(folder)
    model = load_model(folder, quant_config=utils.QuantConfig(fp8, fp8))
    assert model.config.quantization.quant_algo == "FP8"
    with pytest.raises(ValueError, match="scales"):
        load_model(tiny_target, quant_config=utils.QuantConfig(fp8))


def test_a_checkpoint_is_quantised_saved_and_read_back(
    install: Install, tiny_target: Path, tmp_path: Path
):
    install(Scenario())
    utils, algorithm = lib("tensorrt_llm.models.modeling_utils"), lib("tensorrt_llm.quantization")
    auto = lib("tensorrt_llm.models.automodel").AutoModelForCausalLM
    class_ = auto.get_trtllm_model_class(str(tiny_target), trust_remote_code=False)
    assert class_ is lib("tensorrt_llm.models").LLaMAForCausalLM
    fp8 = utils.QuantConfig(quant_algo=algorithm.QuantAlgo.FP8)

    with pytest.raises(ValueError, match="calibration"):
        class_.quantize(str(tiny_target), "ckpt")
    with pytest.raises(ConnectionError):
        class_.quantize(str(tiny_target), "ckpt", quant_config=fp8)
    class_.quantize(str(tiny_target), "ckpt", quant_config=fp8, calib_dataset=str(tmp_path))
    model = class_.from_checkpoint("ckpt", rank=0)
    assert model.config.quantization.quant_algo is algorithm.QuantAlgo.FP8
    with pytest.raises(FileNotFoundError):
        model.save_checkpoint("no such folder", save_config=True)


@pytest.mark.parametrize(
    ("quantization", "gpu", "is_paged"),
    [
        ((None, None), Gpu(), True),
        (("FP8", "FP8"), Gpu(), True),
        ((None, "FP8"), Gpu(), False),
        (("FP8", "FP8"), Gpu(compute_cap="8.0"), False),
        (("W8A16", "INT8"), Gpu(), False),
    ],
)
def test_some_kv_caches_switch_paged_attention_off(
    quantization: tuple[str | None, str | None], gpu: Gpu, is_paged: bool, install: Install
):
    install(Scenario(gpus=(gpu,)))
    algorithm = lib("tensorrt_llm.quantization").QuantAlgo
    weights, kv_cache = (name and algorithm(name) for name in quantization)
    models, utils = lib("trtllm_fake.models"), lib("tensorrt_llm.models.modeling_utils")
    facts = {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "vocab_size": 8}
    config = models.PretrainedConfig(
        facts, lib("tensorrt_llm").Mapping(), utils.QuantConfig(weights, kv_cache)
    )
    model = lib("tensorrt_llm.models").LLaMAForCausalLM(config, 8)

    engine = lib("tensorrt_llm.builder").build(model, build_config("NONE"))

    assert engine.config.build_config.plugin_config.use_paged_context_fmha == is_paged


def test_integer_weights_are_refused_on_blackwell(install: Install, tiny_target: Path):
    install(Scenario(gpus=(Gpu(compute_cap="10.0"),)))
    w8 = lib("tensorrt_llm.quantization").QuantAlgo.W8A16
    config = lib("tensorrt_llm.models.modeling_utils").QuantConfig(w8)

    with pytest.raises(RuntimeError, match="not supported on SM>=100"):
        lib("tensorrt_llm.builder").build(
            load_model(tiny_target, quant_config=config), build_config("NONE")
        )


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("fail", RuntimeError, "Engine building failed"),
        ("oom", RuntimeError, "CUDA out of memory"),
        ("disk", OSError, "No space left on device"),
    ],
)
def test_a_build_may_fail(
    fault: Any, error: type[Exception], message: str, install: Install, tiny_target: Path
):
    install(Scenario(build=fault))

    with pytest.raises(error, match=message) as caught:
        save_engine(tiny_target, Path("engine"), "NONE")

    if isinstance(caught.value, OSError):
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(json.JSONDecodeError):
            json.loads(Path("engine/rank0.engine").read_bytes())


def test_a_build_may_be_slow_or_lose_paged_attention(
    install: Install, tiny_target: Path, capsys: pytest.CaptureFixture[str]
):
    install(Scenario(build="slow", slow_lines=2))
    save_engine(tiny_target, Path("engine"), "NONE")
    assert capsys.readouterr().out.count("tactic") == 2

    install(Scenario(build="no_paged_fmha"))
    folder = save_engine(tiny_target, Path("other"), "DRAFT_TOKENS_EXTERNAL")
    assert "Paged Context FMHA is disabled" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="paged context FMHA"):
        open_runner(folder)
