"""Test the ways to load weight patches into vLLM and SGLang (docs/guides/inference_engines.md).

The programs of the page send requests to a fake server, which records them. This project's back end for vLLM runs with
vLLM's own classes if vLLM is installed, and otherwise with fake classes that have the same interface.
"""

import importlib
import importlib.util
import json
import re
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from helpers.ranks import ranks
from helpers.small_run import ROOT
from helpers.training import LLAMA_STYLE, Case, build_step
from safetensors.torch import load_file

from megazpp.optim.schedule import TrainingProgress
from megazpp.weight_patches.patches import WeightPatches
from megazpp.weight_patches.reader import PatchReader
from megazpp.zero.config import PrecisionConfig

PAGE = "docs/guides/inference_engines.md"


def train(folder: Path) -> None:
    step, dims = build_step(Case(model=LLAMA_STYLE, precision=PrecisionConfig(bf16=True)))
    patches = WeightPatches(folder, 100, step.model, step.sharding, dims, dtype=torch.bfloat16)
    for index in range(3):
        step(Case().batches(index, dims), learning_rate=1e-3, weight_decay=0.01)
        patches.write(TrainingProgress(iteration=index + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("patches")
    ranks(1).run(train, found)
    return found


@pytest.fixture
def engine():
    """Run a fake server of an inference engine, which records each request as (path, values)."""
    requests: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, json.loads(body)))
            if "disk" in self.path:  # like SGLang, the server reads the weights in the folder before it answers
                requests[-1][1]["found"] = load_file(Path(requests[-1][1]["model_path"]) / "model.safetensors")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()


def run_program(heading: str, folder: Path, url: str, **names: Any) -> None:
    """Run one program of the documentation page for two rounds of its loop; only that program contains `heading`.

    The last patch appears in the folder between the rounds.
    """
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / PAGE).read_text(), re.M | re.S)
    (code,) = [code for code in programs if heading in code]
    last = next((folder / "0001").glob("patch-000003-*"))
    hidden, rounds = last.with_suffix(".hidden"), iter(range(2))
    last.rename(hidden)

    def running() -> bool:
        number = next(rounds, None)
        if number == 1:
            hidden.rename(last)
        return number is not None

    exec(code, {"ENGINE": url, "PATCHES": str(folder), "RUNNING": running, **names})


def test_program_for_vllm_sends_each_step_once(folder, engine):
    url, requests = engine
    run_program("init_weight_transfer_engine", folder, url)
    assert requests[0] == ("/init_weight_transfer_engine", {"init_info": {"folder": str(folder)}})
    rounds = [
        [
            ("/pause?mode=wait", {}),
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"step": step}}),
            ("/finish_weight_update", {"weight_version": str(step)}),
            ("/resume", {}),
        ]
        for step in (2, 3)
    ]
    assert requests[1:] == rounds[0] + rounds[1]


def test_program_for_sglang_writes_a_folder_with_each_steps_weights(folder, engine, tmp_path):
    url, requests = engine
    run_program("update_weights_from_disk", folder, url, FOLDER=str(tmp_path / "policy"))
    assert [(path, values["weight_version"]) for path, values in requests] == [
        ("/update_weights_from_disk", "2"),
        ("/update_weights_from_disk", "3"),
    ]
    reader = PatchReader(folder)
    for step, (_, values) in zip((2, 3), requests, strict=True):
        reader.advance(step)
        torch.testing.assert_close(values["found"], dict(reader.weights()), rtol=0, atol=0)


class Policy(torch.nn.Module):
    """A model whose parameters have Hugging Face's names, with a method `load_weights` as in vLLM's models."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            module: torch.nn.Module = self
            *path, attribute = name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(attribute, torch.nn.Parameter(torch.zeros_like(weight)))

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        for name, weight in weights:
            copy = getattr(own[name], "weight_loader", lambda parameter, loaded: parameter.data.copy_(loaded))
            copy(own[name], weight)


def stand_in_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put fakes of the vLLM modules that this project's back end imports into sys.modules."""
    info, update = TypeVar("info"), TypeVar("update")

    class Engine(Generic[info, update]):
        def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
            self.model, self.model_config = model, vllm_config.model_config

        def parse_init_info(self, values: dict[str, Any]) -> Any:
            return self.init_info_cls(**values)

        def update_weights(self, values: dict[str, Any]) -> None:
            self.receive_weights(self.update_info_cls(**values))

    class Factory:
        registry: ClassVar[dict[str, Any]] = {}

        @classmethod
        def register_engine(cls, name: str, engine: Any) -> None:
            if name in cls.registry:
                raise ValueError("is already registered")
            cls.registry[name] = engine

        @classmethod
        def create_engine(cls, config: Any, *rest: Any) -> Any:
            return cls.registry[config.backend](config, *rest)

    parts = {
        "distributed.weight_transfer.base": {
            "WeightTransferEngine": Engine,
            "WeightTransferInitInfo": type("Init", (), {}),
            "WeightTransferUpdateInfo": type("Update", (), {}),
        },
        "distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
    }
    for name, values in parts.items():
        path = f"vllm.{name}"
        while path:
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or types.ModuleType(path))
            parent, _, child = path.rpartition(".")
            if parent:
                monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
                setattr(sys.modules[parent], child, sys.modules[path])
            path = parent
        vars(sys.modules[f"vllm.{name}"]).update(values)


def test_back_end_loads_the_step_that_the_update_names_into_vllm(folder, monkeypatch):
    # vLLM synchronizes the accelerator, which this machine may not have
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    if importlib.util.find_spec("vllm") is None:
        stand_in_for_vllm(monkeypatch)
    plugin = importlib.import_module("megazpp.weight_patches.vllm")
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    plugin.register()
    plugin.register()  # registering twice must work, because vLLM may load a plugin twice
    reader = PatchReader(folder)
    reader.advance(1)
    model = Policy(dict(reader.weights()))
    if hasattr(reload, "record_metadata_for_reloading"):
        reload.record_metadata_for_reloading(model)
    config = types.SimpleNamespace(
        parallel_config=None, model_config=types.SimpleNamespace(quantization=None, dtype=None)
    )
    engine = factory.create_engine(types.SimpleNamespace(backend="megazpp"), config, torch.device("cpu"), model)
    engine.init_transfer_engine(engine.parse_init_info({"folder": str(folder)}))
    for step in (2, 3):
        reader.advance(step)
        engine.start_weight_update()
        engine.update_weights({"step": step})
        engine.finish_weight_update()
        found = {name: parameter.data for name, parameter in model.named_parameters()}
        torch.testing.assert_close(found, dict(reader.weights()), rtol=0, atol=0)
    with pytest.raises(ValueError, match="not have all files that lead to the weights of step 4"):
        engine.update_weights({"step": 4})
    engine.shutdown()
    sys.modules.pop("megazpp.weight_patches.vllm")
