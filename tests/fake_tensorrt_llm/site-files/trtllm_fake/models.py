"""Model classes of the engine flow: from a checkpoint folder to something that can be built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from trtllm_fake.api import Given, find, implementations, implements, whole_api
from trtllm_fake.table import count_token_ids

DTYPES = ("auto", "bfloat16", "float16", "float32")
NO_CALIBRATION = ("W8A16", "W4A16")
OTHER_LOADERS = ("exaone", "llava", "vila")  # the Llama loader looks for them in the path's text


@implements("tensorrt_llm.mapping.Mapping")
class Mapping:
    """How ranks share the work."""

    world_size: int
    rank: int
    tp_size: int

    def __init__(self, given: Given) -> None:
        vars(self).update(vars(given))
        if given.tp_size * given.pp_size * given.cp_size != given.world_size:
            raise ValueError("world_size must equal to tp_size * pp_size * cp_size")
        if not 0 <= given.rank < given.world_size:
            raise ValueError(f"rank {given.rank} is not in [0, {given.world_size})")

    def to_dict(self, given: Given | None = None) -> dict[str, Any]:
        return dict(vars(self))


@implements("tensorrt_llm.models.modeling_utils.PretrainedConfig")
class PretrainedConfig:
    """The facts about a model that its engine keeps."""

    mapping: Any
    quantization: Any

    def __init__(self, facts: dict[str, Any], mapping: Any, quantization: Any) -> None:
        vars(self).update(facts)
        self.mapping = mapping
        self.quantization = quantization

    def to_dict(self) -> dict[str, Any]:
        facts = dict(vars(self))
        facts["mapping"] = self.mapping.to_dict()
        facts["quantization"] = self.quantization.to_dict()
        return facts

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Self:
        quantization = find("QuantConfig").from_dict(facts["quantization"])
        return cls(facts, find("Mapping")(**facts["mapping"]), quantization)


@implements("tensorrt_llm.models.modeling_utils.PretrainedModel")
class PretrainedModel:
    """A loaded model; building takes it apart."""

    def __init__(self, config: PretrainedConfig, num_token_ids: int) -> None:
        self.config = config
        self.num_token_ids = num_token_ids
        self.is_built = False

    @classmethod
    def from_hugging_face(cls, given: Given) -> Self:
        folder = given.hf_model_or_dir
        facts = read_checkpoint(folder)
        if cls.__name__ == "LLaMAForCausalLM":
            for name in OTHER_LOADERS:
                if name in folder.lower():
                    raise ModuleNotFoundError(f"No module named 'llava' (path has {name!r})")
        _check_quantization(Path(folder), given.quant_config)
        config = _config(facts, given)
        return cls(config, count_token_ids(Path(folder), facts["vocab_size"]))

    @classmethod
    def quantize(cls, given: Given) -> None:
        facts = read_checkpoint(given.hf_model_dir)
        algorithm = given.quant_config and given.quant_config.quant_algo
        if algorithm is None or algorithm in NO_CALIBRATION:
            raise ValueError(f"The quant_config ({algorithm}) does not require calibration")
        if not Path(given.calib_dataset).is_dir():
            raise ConnectionError(f"Couldn't reach '{given.calib_dataset}' on the Hub")
        Path(given.output_dir).mkdir(parents=True, exist_ok=True)
        num_token_ids = count_token_ids(Path(given.hf_model_dir), facts["vocab_size"])
        cls(_config(facts, given), num_token_ids)._write(Path(given.output_dir), save_config=True)

    def save_checkpoint(self, given: Given) -> None:
        self._write(Path(given.output_dir), given.save_config)

    @classmethod
    def from_checkpoint(cls, given: Given) -> Self:
        folder = Path(given.ckpt_dir)
        rank = given.rank or 0
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        facts["mapping"]["rank"] = rank
        weights = json.loads((folder / f"rank{rank}.safetensors").read_text(encoding="utf-8"))
        return cls(PretrainedConfig.from_dict(facts), weights["num_token_ids"])

    def _write(self, folder: Path, save_config: bool) -> None:
        weights = {"num_token_ids": self.num_token_ids}
        file = folder / f"rank{self.config.mapping.rank}.safetensors"
        file.write_text(json.dumps(weights), encoding="utf-8")
        if save_config:
            text = json.dumps(self.config.to_dict(), indent=4)
            (folder / "config.json").write_text(text, encoding="utf-8")


def family(name: str) -> Any:
    """Return the model class of that name, made at its first use."""
    path = f"tensorrt_llm.models.{name}"
    if path not in implementations:
        implementations[path] = type(
            name, (PretrainedModel,), {"__module__": "tensorrt_llm.models"}
        )
    return implementations[path]


def read_checkpoint(folder: str) -> dict[str, Any]:
    file = Path(folder) / "config.json"
    assert file.is_file(), f"{folder} is no local folder with a config.json"
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return facts


def _config(facts: dict[str, Any], given: Given) -> PretrainedConfig:
    if given.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {given.dtype!r}")
    own_dtype = facts.get("dtype") or facts.get("torch_dtype") or "bfloat16"
    own_dtype = "float16" if own_dtype == "float32" else own_dtype
    kept = {
        "architecture": facts["architectures"][0],
        "dtype": own_dtype if given.dtype == "auto" else given.dtype,
        "vocab_size": facts["vocab_size"],
        "hidden_size": facts["hidden_size"],
        "num_hidden_layers": facts["num_hidden_layers"],
        "num_attention_heads": facts["num_attention_heads"],
        "num_key_value_heads": facts.get("num_key_value_heads", facts["num_attention_heads"]),
        "max_position_embeddings": facts.get("max_position_embeddings"),
    }
    mapping = given.mapping or find("Mapping")()
    if kept["num_key_value_heads"] % mapping.tp_size:
        raise ValueError(f"{kept['num_key_value_heads']} KV heads for tp_size={mapping.tp_size}")
    return PretrainedConfig(kept, mapping, given.quant_config or find("QuantConfig")())


def _check_quantization(folder: Path, quant_config: Any) -> None:
    """Refuse what the library would load into nonsense."""
    algorithm = quant_config and quant_config.quant_algo
    file = folder / "hf_quant_config.json"
    if not file.is_file():
        foreign = read_checkpoint(str(folder)).get("quantization_config")
        if foreign:
            raise NotImplementedError(f"Unsupported quantization_config: {foreign}.")
        if algorithm is not None and algorithm not in NO_CALIBRATION:
            raise ValueError(f"{algorithm} needs scales that {folder} does not have")
        return
    own = json.loads(file.read_text(encoding="utf-8"))["quantization"].get("quant_algo")
    if own is None:
        raise ValueError("Pre-quantized checkpoint must have quant_algo.")
    if algorithm != own:
        raise ValueError(f"{folder} is quantised with {own}, and quant_config says {algorithm}")


@implements("tensorrt_llm.models.automodel.AutoModelForCausalLM")
class AutoModelForCausalLM:
    """Finds the class of a checkpoint."""

    @staticmethod
    def get_trtllm_model_class(given: Given) -> Any:
        return _model_class(str(given.hf_model_or_dir))

    @staticmethod
    def from_hugging_face(given: Given) -> Any:
        return _model_class(given.hf_model_or_dir).from_hugging_face(**vars(given))


def _model_class(folder: str) -> Any:
    known = whole_api()["modules"]["tensorrt_llm.models"]["constants"]["MODEL_MAP"]
    architecture = read_checkpoint(folder)["architectures"][0]
    if architecture not in known:
        raise NotImplementedError(f"{architecture} is not supported in TRT-LLM yet")
    return family(known[architecture])


for _name in ("LLaMAForCausalLM", "QWenForCausalLM", "GemmaForCausalLM", "Phi3ForCausalLM"):
    family(_name)
