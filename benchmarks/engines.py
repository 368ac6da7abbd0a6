"""Who generates beside regard: programs that take GPT-2's weights, each with what it needs prepared beforehand.

ONNX Runtime and OpenVINO run one graph, written here with onnx's helper; llama.cpp reads a GGUF file that gguf writes.
Each only where it is installed, which is said. On an Intel processor with AMX, gcc 12 takes
`_tile_loadconfig` to read 8 bytes, and removes what llama.cpp writes into the rest of the configuration: its first product is
an illegal instruction. In `ggml-cpu/amx/mmq.cpp`, write `asm volatile("ldtilecfg %0" :: "m"(tc));` in its place.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

from regard.compiled.kernel_choice import has_bfloat16_products
from regard.text.byte_pair import BytePair

Arrays = list[np.ndarray]
Step = Callable[[dict[str, np.ndarray]], Arrays]  # inputs of the graph by name to its outputs: the logits, then keys and values


@dataclass(frozen=True, eq=False)
class Contender:
    """Who computes, in what; a function (prompts, count) to tokens (b, count), and one from prompts to logits (b, t, n)."""

    by: str
    weights: str
    tokens: Callable[[Tensor, int], Tensor]
    logits: Callable[[Tensor], Tensor]
    most_rows: int = 10**9  # the largest batch that it takes


def is_installed(*packages: str) -> bool:
    """Return whether these packages are there; print it of the first that is not."""
    missing = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        print(f"{packages[0]} is left out: {missing} is not installed (pip install 'regard[bench]').")
    return missing is None


def list_engines(folder: Path, model: GPT2LMHeadModel, words: GPT2TokenizerFast) -> list[Contender]:
    """The contenders that are installed, all with the weights of a model that is saved in folder / "model"."""
    found = list_ctranslate2(folder, words) if is_installed("ctranslate2") else []
    if importlib.util.find_spec("onnx") is not None:
        graph = folder / "gpt2.onnx"
        write_onnx(model, graph)
        found += list_onnxruntime(graph, model) if is_installed("onnxruntime") else []
        found += list_openvino(graph, model) if is_installed("openvino", "nncf") else []
    else:
        print("ONNX Runtime and OpenVINO are left out: onnx is not installed (pip install 'regard[bench]').")
    return found + (list_llama_cpp(folder, model) if is_installed("llama_cpp", "gguf") else [])


def list_ctranslate2(folder: Path, words: GPT2TokenizerFast) -> list[Contender]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    found = []
    for kind in ("float32", "int8"):
        converted = TransformersConverter(str(folder / "model")).convert(str(folder / kind), quantization=kind)
        generator = ctranslate2.Generator(converted, device="cpu", intra_threads=torch.get_num_threads(), compute_type=kind)
        found.append(translate(generator, words, kind))
    return found


def translate(generator: Any, words: GPT2TokenizerFast, weights: str) -> Contender:
    def read_tokens(given: Tensor) -> list[list[str]]:
        return [words.convert_ids_to_tokens(row) for row in given.tolist()]

    def tokens(given: Tensor, new: int) -> Tensor:
        settings = {
            "max_length": new,
            "min_length": new,
            "sampling_topk": 1,
            "include_prompt_in_result": False,
            "end_token": [],
        }
        return torch.tensor([one.sequences_ids[0] for one in generator.generate_batch(read_tokens(given), **settings)])

    return Contender(
        "CTranslate2", weights, tokens, lambda given: torch.from_numpy(np.array(generator.forward_batch(read_tokens(given))))
    )


def write_onnx(model: GPT2LMHeadModel, path: Path) -> None:
    """Write GPT-2 as a graph: tokens, positions, a mask, the first wanted, keys and values to logits, keys, values."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    config, state = model.config, {name: x.numpy() for name, x in model.state_dict().items()}
    heads, d = config.n_head, config.n_embd // config.n_head
    nodes: list[Any] = []
    tensors: dict[str, np.ndarray] = {}

    def add(kind: str, *inputs: str | np.ndarray, count: int = 1, **settings: Any) -> Any:
        """A node more; the names of what it computes."""
        names = []
        for one in inputs:
            if not isinstance(one, str):
                tensors[f"constant_{len(tensors)}"] = one
                one = f"constant_{len(tensors) - 1}"
            names.append(one)
        outputs = [f"{kind}_{len(nodes)}_{n}" for n in range(count)]
        nodes.append(helper.make_node(kind, names, outputs, **settings))
        return outputs[0] if count == 1 else outputs

    def norm(x: str, name: str) -> str:
        return add("LayerNormalization", x, state[f"{name}.weight"], state[f"{name}.bias"], axis=-1, epsilon=1e-5)

    def project(x: str, name: str) -> str:
        return add("Add", add("MatMul", x, state[f"{name}.weight"]), state[f"{name}.bias"])

    def name_output(x: str, name: str) -> str:
        nodes.append(helper.make_node("Identity", [x], [name]))
        return name

    words = state["transformer.wte.weight"]
    x = add("Add", add("Gather", words, "tokens"), add("Gather", state["transformer.wpe.weight"], "positions"))
    kept = []
    for n in range(config.n_layer):
        at = f"transformer.h.{n}"
        parts = add("Split", project(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn"), count=3, axis=-1, num_outputs=3)
        q, k, v = (add("Transpose", add("Reshape", one, np.array([0, 0, heads, d])), perm=[0, 2, 1, 3]) for one in parts)
        k, v = (add("Concat", f"{kind}_{n}", one, axis=2) for kind, one in (("keys", k), ("values", v)))
        kept += [name_output(k, f"new_keys_{n}"), name_output(v, f"new_values_{n}")]
        scores = add("MatMul", add("Mul", q, np.float32(d**-0.5)), add("Transpose", k, perm=[0, 1, 3, 2]))
        context = add("MatMul", add("Softmax", add("Add", scores, "mask"), axis=-1), v)
        joined = add("Reshape", add("Transpose", context, perm=[0, 2, 1, 3]), np.array([0, 0, heads * d]))
        x = add("Add", x, project(joined, f"{at}.attn.c_proj"))
        hidden = add("Gelu", project(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        x = add("Add", x, project(hidden, f"{at}.mlp.c_proj"))
    x = add("Slice", norm(x, "transformer.ln_f"), "first", np.array([2**31]), np.array([1]))
    name_output(add("MatMul", x, np.ascontiguousarray(words.T)), "logits")
    long, real = TensorProto.INT64, TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info(name, long, shape) for name, shape in
              (("tokens", ["b", "t"]), ("positions", ["b", "t"]), ("first", [1]))]  # fmt: skip
    inputs.append(helper.make_tensor_value_info("mask", real, ["t", "all"]))
    names = [f"{kind}_{n}" for n in range(config.n_layer) for kind in ("keys", "values")]
    inputs += [helper.make_tensor_value_info(name, real, ["b", heads, "past", d]) for name in names]
    outputs = [helper.make_tensor_value_info("logits", real, ["b", "wanted", len(words)])]
    outputs += [helper.make_tensor_value_info(name, real, ["b", heads, "all", d]) for name in kept]
    weights = [numpy_helper.from_array(np.ascontiguousarray(x), name) for name, x in tensors.items()]
    graph = helper.make_graph(nodes, "gpt2", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


def run_graph(by: str, weights: str, step: Step, model: GPT2LMHeadModel) -> Contender:
    """A contender that is a graph: its keys and values are handed from step to step."""
    config = model.config
    shape = (config.n_head, 0, config.n_embd // config.n_head)

    def read(tokens: np.ndarray, past: Arrays, first: int) -> Arrays:
        (b, t), before = tokens.shape, past[0].shape[2]
        places = np.arange(before, before + t)
        hidden = np.arange(before + t)[None] > places[:, None]
        inputs = {"tokens": tokens, "positions": np.broadcast_to(places, (b, t)).copy(), "first": np.array([first])}
        inputs["mask"] = np.where(hidden, np.float32(-1e9), np.float32(0))
        for n in range(config.n_layer):
            inputs[f"keys_{n}"], inputs[f"values_{n}"] = past[2 * n : 2 * n + 2]
        return step(inputs)

    def empty(b: int) -> Arrays:
        return [np.zeros((b, *shape), np.float32) for _ in range(2 * config.n_layer)]

    def tokens(given: Tensor, new: int) -> Tensor:
        found, (logits, *past) = [], read(given.numpy(), empty(len(given)), -1)
        for _ in range(new):
            found.append(logits[:, -1].argmax(-1))
            if len(found) < new:
                logits, *past = read(found[-1][:, None], past, -1)
        return torch.from_numpy(np.stack(found, -1))

    return Contender(by, weights, tokens, lambda given: torch.from_numpy(read(given.numpy(), empty(len(given)), 0)[0]))


def list_onnxruntime(path: Path, model: GPT2LMHeadModel) -> list[Contender]:
    """In float32, and with blocks of 32 numbers in 8 and in 4 bits."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    found = []
    for weights, bits in (("float32", 0), ("int8", 8), ("int4", 4)):
        file = path.with_name(f"{weights}.onnx") if bits else path
        if bits:
            settings = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=bits)
            quantizer = MatMulNBitsQuantizer(onnx.load(path), algo_config=settings)
            quantizer.process()
            quantizer.model.save_model_to_file(str(file))
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        found.append(run_graph("ONNX Runtime", weights, lambda inputs, session=session: session.run(None, inputs), model))
    return found


def list_openvino(path: Path, model: GPT2LMHeadModel) -> list[Contender]:
    """In float32, and with the weights in 8 bits, a scale a row, and in groups of 32 in 4.

    In bfloat16 only if the processor has instructions for it: else it takes many times as long as float32.
    """
    import nncf
    import openvino

    core, found = openvino.Core(), []
    hints = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int4": "f32"}
    for weights, hint in hints.items():
        if weights == "bfloat16" and not has_bfloat16_products():
            continue
        graph = core.read_model(path)
        if weights.startswith("int"):
            mode = nncf.CompressWeightsMode.INT8_SYM if weights == "int8" else nncf.CompressWeightsMode.INT4_SYM
            settings = {} if weights == "int8" else {"group_size": 32, "all_layers": True}
            graph = nncf.compress_weights(graph, mode=mode, **settings)
        compiled = core.compile_model(
            graph, "CPU", {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        )

        found.append(run_graph("OpenVINO", weights, partial(infer, compiled.create_infer_request()), model))
    return found


def infer(request: Any, inputs: dict[str, np.ndarray]) -> Arrays:
    return list(request.infer(inputs, share_inputs=True).values())


def write_gguf(model: GPT2LMHeadModel, path: Path, kind: Any) -> None:
    """Write GPT-2 as llama.cpp reads it, its matrices in a kind of gguf's."""
    import gguf

    config, state, words = model.config, model.state_dict(), BytePair.gpt2()
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token {n}" for n in range(words.vocabulary)])  # only their numbers are used
    writer.add_token_types([1] * words.vocabulary)
    writer.add_token_merges(["t o"])

    def add(name: str, x: Tensor, matrix: bool = False) -> None:
        numbers = np.ascontiguousarray(x.float().numpy())
        if not matrix or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    add("token_embd.weight", state["transformer.wte.weight"], matrix=True)
    add("position_embd.weight", state["transformer.wpe.weight"])
    names = {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
    names |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    for part in ("weight", "bias"):
        add(f"output_norm.{part}", state[f"transformer.ln_f.{part}"])
        for n in range(config.n_layer):
            for theirs, name in names.items():
                x = state[f"transformer.h.{n}.{theirs}.{part}"]
                add(f"blk.{n}.{name}.{part}", x.T if x.dim() == 2 else x, matrix=x.dim() == 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def list_llama_cpp(folder: Path, model: GPT2LMHeadModel) -> list[Contender]:
    """One sequence at a time, in the formats of its own that are as wide as regard's."""
    import gguf
    import llama_cpp

    kinds = {
        "float32, GELU in float16": "F32",
        "bfloat16": "BF16",
        "float16": "F16",
        "int8, Q8_0": "Q8_0",
        "int4, Q4_0": "Q4_0",
    }
    found, several = [], torch.get_num_threads()
    for weights, name in kinds.items():
        path = folder / f"{name}.gguf"
        write_gguf(model, path, gguf.GGMLQuantizationType[name])
        settings = {"n_ctx": 1024, "n_batch": 1024, "n_threads": several, "n_threads_batch": several, "verbose": False}
        if name == "F32":  # keys and values are float16 by default
            settings |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        reader = llama_cpp.Llama(str(path), **settings)
        every = llama_cpp.Llama(str(path), logits_all=True, **settings)
        found.append(evaluate("llama.cpp", weights, reader, every))
    return found


def evaluate(by: str, weights: str, reader: Any, every: Any) -> Contender:
    import llama_cpp

    size = reader.n_vocab()

    def choose() -> int:
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(reader.ctx, -1), (size,)).argmax())

    def steps(given: Tensor, new: int) -> Iterator[int]:
        reader.reset()
        reader.eval(given[0].tolist())
        for n in range(new):
            yield (token := choose())
            if n + 1 < new:
                reader.eval([token])

    def logits(given: Tensor) -> Tensor:
        found = []
        for row in given.tolist():
            every.reset()
            every.eval(row)
            found.append(torch.tensor(every.scores[: len(row)]))
        return torch.stack(found)

    def tokens(given: Tensor, new: int) -> Tensor:
        return torch.tensor([list(steps(given, new))])

    # It configures the tiles of AMX once for each thread, and torch's products clear them: llama.cpp has threads of its own.
    pool = ThreadPoolExecutor(1)
    return Contender(
        by,
        weights,
        lambda given, new: pool.submit(tokens, given, new).result(),
        lambda given: pool.submit(logits, given).result(),
        most_rows=1,
    )
