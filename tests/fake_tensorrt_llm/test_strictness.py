"""The fake has the names and parameters of its version, and takes no others."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.child import PROJECT_ROOT
from tests.fake_tensorrt_llm.calls import (
    PROMPT,
    Install,
    build_config,
    generate,
    ids_tensor,
    lib,
    open_runner,
)
from tests.fake_tensorrt_llm.contract import API_FILE, VERSIONS, api_from_contract, to_text
from tests.fake_tensorrt_llm.scenario import Scenario

CONTRACT_FILE = Path(
    os.environ.get("SPECDEC_TRTLLM_CONTRACT")
    or PROJECT_ROOT.parent / "shared" / "tensorrt_llm_contract.json"
)


@pytest.fixture
def contract() -> dict[str, Any]:
    if not CONTRACT_FILE.is_file():
        pytest.skip(f"the contract is not at {CONTRACT_FILE} (SPECDEC_TRTLLM_CONTRACT)")
    found: dict[str, Any] = json.loads(CONTRACT_FILE.read_text(encoding="utf-8"))
    return found


def test_the_api_is_what_the_contract_says(contract: dict[str, Any]):
    assert API_FILE.read_text(encoding="utf-8") == to_text(api_from_contract(contract)) + "\n"


def find_params(api: Any, call: str) -> Any:
    """Return the parameters of a call that the contract names."""
    owner, _, name = call.rpartition(".")
    module = api.modules().get(owner, {})
    if name in module.get("functions", {}):
        return module["functions"][name]["params"]
    if name in module.get("classes", {}):
        return module["classes"][name]["init"]
    return api.class_entry(owner)["methods"][name]["params"]


def test_every_recommended_call_binds(contract: dict[str, Any], install: Install):
    values = [
        [],
        1,
        "auto",
        True,
        0.5,
        ["a"],
        {1: 2},
        [1],
        [[1]],
        [[[1]]],
        [ids_tensor([1])],
        [torch.ones(1)],
    ]
    for version in contract["profiles"]:
        install(Scenario(version=version))
        lib("tensorrt_llm")
        api, fits = lib("trtllm_fake.api"), lib("trtllm_fake.checking").fits

        def value_for(type_: str, fits: Any = fits) -> Any:
            named = type(type_.rstrip("?"), (), {})()
            return next(value for value in [*values, named] if fits(value, type_))

        for call in contract["recommended_calls"]:
            if version not in call["profiles"]:
                continue
            params = find_params(api, call["call"])
            types = {name: param["type"] for name, param in api.parameters(params).items()}
            args = tuple(value_for(type_) for type_ in list(types.values())[: call["args"]])
            kwargs = {name: value_for(types[name]) for name in call["kwargs"]}
            api.bind(call["call"], params, args, kwargs)


MODEL = "lib('tensorrt_llm.models.automodel').AutoModelForCausalLM"
LLMAPI = "lib('tensorrt_llm.llmapi')"
RUNNER = "lib('tensorrt_llm.runtime').ModelRunnerCpp"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("lib('tensorrt_llm.builder').BuildConfig(max_sequence_len=3)", "unexpected keyword"),
        ("lib('tensorrt_llm.builder').BuildConfig(8)", "takes 0 positional arguments"),
        ("lib('tensorrt_llm.builder').BuildConfig(max_draft_len=True)", "must be int, not bool"),
        ("lib('tensorrt_llm.builder').BuildConfig(max_draft_len='4')", "must be int, not str"),
        ("lib('tensorrt_llm.builder').BuildConfig(speculative_decoding_mode=2)", "not int"),
        ("lib('tensorrt_llm.builder').build(3, 4)", "must be PretrainedModel"),
        ("lib('tensorrt_llm.plugin').PluginConfig(paged=True)", "unexpected keyword"),
        ("lib('tensorrt_llm.plugin').PluginConfig(gemm_plugin='int4')", "Literal"),
        ("lib('tensorrt_llm.models.modeling_utils').QuantConfig(quant_algo='FP8')", "QuantAlgo"),
        ("lib('tensorrt_llm.mapping').Mapping(1, 0, 8, 1)", "takes 3 positional arguments"),
        (f"{MODEL}.from_hugging_face(Path('.'))", "must be str, not"),
        (f"{MODEL}.from_hugging_face()", "missing required argument 'hf_model_or_dir'"),
        (f"{MODEL}.from_hugging_face('.', hf_model_or_dir='.')", "multiple values"),
        (f"{MODEL}.from_hugging_face('.', load_on_cpu=True)", "unexpected keyword"),
        (f"{RUNNER}.from_dir(Path('.'))", "must be str, not"),
        (f"{RUNNER}.from_dir('.', None)", "takes 1 positional arguments"),
        (f"{LLMAPI}.LLM(model='.', max_batch='1')", "unexpected keyword"),
        (f"{LLMAPI}.KvCacheConfig(free_gpu_memory_fraction=1.5)", "must be Fraction"),
        (f"{LLMAPI}.SamplingParams(top_k='1')", "must be int?, not str"),
        ("lib('tensorrt_llm.logger').logger.set_level(1)", "must be str, not int"),
    ],
)
def test_a_wrong_call_is_refused(call: str, message: str, install: Install):
    fake = install(Scenario())

    with pytest.raises(TypeError) as error:
        eval(call)  # the table reads better as code

    assert message in str(error.value)
    assert fake.read_calls() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_input_ids": [[5, 6, 7]]},
        {"batch_input_ids": ids_tensor([5])},
        {"batch_input_ids": [torch.tensor([5, 6, 7])]},  # int64
        {"batch_input_ids": [ids_tensor([5])[None]]},  # two dimensions
        {"draft_tokens_list": [1, 2]},
        {"stop_words_list": [[1]]},
        {"max_tokens": 4},
    ],
)
def test_generate_takes_nothing_that_the_library_would_ignore(
    wrong: dict[str, Any], install: Install, open_pair: Callable[..., Any]
):
    install(Scenario())
    _, target = open_pair()

    with pytest.raises(TypeError):
        target.generate(**({"batch_input_ids": [ids_tensor([5])], "end_id": -1} | wrong))


def test_settings_take_no_other_fields_later(install: Install):
    install(Scenario())
    config = build_config("NONE")
    config.max_batch_size = 2

    with pytest.raises(ValueError, match="no field 'batch_size'"):
        config.batch_size = 2
    with pytest.raises(ValueError, match="no such value"):
        config.plugin_config.use_paged_context_fmha = 1
    assert config.plugin_config.gemm_plugin == "float16"  # "auto" reads back as the dtype


def test_a_call_is_recorded_with_what_was_given(install: Install, open_pair: Callable[..., Any]):
    fake = install(Scenario())
    _, target = open_pair()
    generate(target, PROMPT, 2, draft_tokens_list=[[9]])

    (call,) = fake.read_calls("ModelRunnerCpp.generate")
    assert call["args"]["batch_input_ids"] == [PROMPT]
    assert call["args"]["draft_tokens_list"] == [[9]]
    assert "temperature" not in call["args"]
    first_config = fake.read_calls("BuildConfig")[0]["args"]
    assert first_config["speculative_decoding_mode"] == "NONE"
    assert first_config["plugin_config"] == {"gemm_plugin": "auto"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_names_that_it_had(version: Any, install: Install):
    fake = install(Scenario(version=version))
    has_engines = version in ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc15")

    for file in ("builder.py", "runtime/model_runner_cpp.py"):
        assert (fake.site / "tensorrt_llm" / file).is_file() == has_engines
    assert (fake.site / "tensorrt").is_dir() == has_engines
    assert hasattr(lib("tensorrt_llm"), "AutoModelForCausalLM") == has_engines
    assert lib("tensorrt_llm").__version__ == importlib.metadata.version("tensorrt_llm") == version
    fields = lib("tensorrt_llm.llmapi").DraftTargetDecodingConfig.model_fields
    assert ("speculative_model" in fields) == (version not in ("1.0.0", "1.1.0"))
    assert ("acceptance_rate_threshold" in fields) == version.startswith(("1.3", "1.4"))
    assert ("use_rejection_sampling" in fields) == (version == "1.4.0rc1")
    if not has_engines:
        with pytest.raises(ModuleNotFoundError):
            lib("tensorrt_llm.builder")


def test_the_old_name_of_the_draft_model_is_an_alias_until_it_goes(install: Install):
    for version, names in {
        "1.1.0": ["speculative_model_dir"],
        "1.2.1": ["speculative_model_dir", "speculative_model"],
        "1.4.0rc1": ["speculative_model"],
    }.items():
        install(Scenario(version=version))  # type: ignore[arg-type]
        config = lib("tensorrt_llm.llmapi").DraftTargetDecodingConfig
        for name in ("speculative_model_dir", "speculative_model"):
            if name in names:
                made = config(max_draft_len=3, **{name: "draft"})
                assert getattr(made, names[-1]) == "draft"
            else:
                with pytest.raises(TypeError):
                    config(max_draft_len=3, **{name: "draft"})


def test_attention_windows_fail_fast_from_1_2(install: Install):
    for version, error in {"1.1.0": TypeError, "1.2.1": FileNotFoundError}.items():
        install(Scenario(version=version))  # type: ignore[arg-type]
        with pytest.raises(error):
            open_runner(Path("none"), fail_fast_on_attention_window_too_large=False)
