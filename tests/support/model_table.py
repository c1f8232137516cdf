"""`python -m tests.support.model_table`: writes docs/models.md from the records of the families."""

from pathlib import Path

from transformers.models.auto import modeling_auto

import services.families
from services.families import registry
from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family, load_part
from services.families.generic import GENERIC
from services.families.report import code_of
from tessera.common.v1.media_pb2 import Modality
from tests.support import quality_table

_ROOT = Path(__file__).parents[2]
FILE = _ROOT / "docs/models.md"
REASONS = _ROOT / "tests/decoder/models/generic_types.txt"  # lines "reason: types"
_CLASSES = Path(modeling_auto.__file__).read_text(encoding="utf-8")
_MODALITIES = {Modality.MODALITY_IMAGE: "images", Modality.MODALITY_VIDEO: "videos"}
_HEAD = """# Models

Written by `python -m tests.support.model_table` from the records of `services/families`; a test compares it with them.
`tessera check FOLDER` says the same of one checkpoint, and why one is refused.

A checkpoint's prompt and encoder are those of its architecture, its decoder is that of its text model: each encoder
goes with every decoder, and where a decoder is missing in a row it is another row's. *native* is code of this project,
*transformers* the model's own class or processor there. *off* is what a decoder does without. The oracle is what
outputs are compared with in the tests, on small models with random weights: the class of `transformers`, or *ours*, an
implementation in `tests/reference_models` that was written from the model's description alone.

Prompts with pictures of a model of which any part is the code of transformers are compared with its class's own forward
before it is served, in a small random model of the checkpoint's configuration: by each decoder at its start, and by
`tessera check`, which therefore takes some seconds the first time
([add-a-model.md](add-a-model.md#the-comparison-with-pictures)). Served so, and compared in the tests with
transformers' `generate`: Idefics3, LLaVA-OneVision, Gemma 3, Qwen3-VL, Chameleon, Molmo2, Ovis2, ERNIE 4.5 VL and,
with a decoder of ours, Llama 3.2 Vision (Mllama).
Known to be refused, each with its reason: classes whose image processor needs torchvision (Kimi-K2.5, Llama 4), those
whose processor does not say what it writes for a picture (Idefics2), and that add rows in layers of their choice
(Granite 4 Vision). A request alone is refused whose picture has other text around it than the rest, which is tokenized
before pictures are seen: of GraniteDocling with `min_patches` 1 one that is a single tile.

"""
_QUANTIZED = """
`--kv-cache-dtype int8` keeps the keys and values of every model here in 8 bits on the CPU and on Ascend 910B
([operations.md](operations.md#keys-and-values-of-8-bits)). Refused are models that have none, and those by the code of
transformers with biases above 8 in an attention whose keys are not made by a `k_proj`.

## Quantized checkpoints

Files of these kinds are read: for decoders marked *native* as codes, for vision encoders, projectors and layers that
the code of transformers runs, experts among them, as the numbers that codes stand for
([below](#quantized-encoders-and-layers-by-the-code-of-transformers)). Tables of tokens, convolutions and parameters
that are no linear layer's have to be numbers. `quantization_config` of config.json is checked before anything
starts, and so are the tensors: by the
headers of the safetensors, and by the small ones among them that say groups and zero points. What is not read is
refused by the name of the field or tensor. Codes, scales and zero points are taken over exactly. The tests have
packers of their own, for the decoders of all text families that are ours; no released weights were loaded. What
AutoAWQ 0.2, AutoRound 0.15, bitsandbytes 0.50, GPTQModel 7.6, llm-compressor 0.14 and Model Optimizer 0.47 made of
small random models was read once: each weight is the number that the tool itself reads, before it rounds to 16 bits.

| `quant_method` | read | refused |
| --- | --- | --- |
| `awq` | `version` gemm, 4 bits, any `group_size`, `modules_to_not_convert` | other versions |
| `gptq` | 4 and 8 bits, `checkpoint_format` gptq (zero points stored less one) and gptq_v2, `desc_act` with `g_idx`, \
layers with other bits or groups, or none (`dynamic`) | \
2 and 3 bits, Marlin's layout, other zero points than the middle where `sym` is true |
| `auto-round` | 4 and 8 bits with `packing_format` auto_round:auto_gptq, for some layers others \
(`extra_config`), 4 with auto_round:auto_awq, mxfp4 with auto_round:llm_compressor | 2 and 3 bits, other formats |
| `bitsandbytes` | 4 bits (nf4, fp4, with `bnb_4bit_use_double_quant` too), as codes where \
blocks divide the inputs, else as numbers; 8 bits (LLM.int8) | `bnb_4bit_quant_storage` other than uint8 |
| `compressed-tensors` | `pack-quantized` of 4 and 8 bits, by group or channel, with zero points and `weight_g_idx`; \
`int-quantized` of 8 and 4 bits (W8A8, W4A8), by tensor, channel or group; `float-quantized` (e4m3), \
by tensor, channel or block; `nvfp4-pack-quantized` and \
`mxfp4-pack-quantized` | several schemes unless all are \
`pack-quantized` without `actorder` group, sparsity, transforms, a quantized cache |
| `fp8` | e4m3, with `weight_block_size` (`weight_scale_inv`, as DeepSeek and Qwen3-FP8 have it) or \
a `weight_scale` of the whole layer, `modules_to_not_convert` | e5m2, scales in 8 bits |
| `fbgemm_fp8` | e4m3 with a scale for each output, `modules_to_not_convert` | |
| msmodelslim: `quant_model_description*.json` beside config.json, weights in `quant_model_weight*.safetensors` \
or under the usual names (of the hub those under the usual names) | \
layers of W8A8, W8A8_DYNAMIC, W8A16 and W4A8_DYNAMIC (both by channel or group; two codes in a byte where \
`version` is 1.0.0, else one) and FLOAT | \
W4A8 with offsets, W4A4 and other kinds of 4 bits, sparse kinds, quantized caches, \
norms that were moved (`module.weight`, biases of norms) |
| `modelopt` (or the content of hf_quant_config.json with that name in config.json) | `quant_algo` FP8, with a scale \
of the whole layer, and NVFP4 | others, such as W4A16_AWQ (`pre_quant_scale`) |
| any other: `hqq`, `torchao`, quanto's files and so on |  | all |

Groups have to divide the inputs. Layers that are computed as one, such as queries, keys and values, get one form where
they are quantized in different ways, which says the numbers of all; their inputs have to be in one order. On the
CPU activations are not quantized as `compressed-tensors` and msmodelslim say: they keep more bits. On
[Ascend NPUs](ascend.md#weights-of-codes) and [CUDA GPUs](operations.md#on-a-cuda-gpu) they have 8 where these say so:
on NPUs static W8A8 of msmodelslim with the step that is stored, all others with a step for each token. Codes of 4 bits
(W4A8) are multiplied with activations as `--dtype` says, on every device. Numbers of 8 bits (e4m3) become what is
stored times its scale, in the model's type: they take the memory of that, unless `--quantization` makes codes of them.

Kernels want whole numbers of a byte, and those that codes of bitsandbytes' 4 bits stand for are none. They are rounded
once, together with their scale: nf4 is off by at most 0.4 % of a block's largest number, fp4 by 0.3 % in its two
smallest. The divergence of the text model (below) is the same with numbers (nf4 0.0286, fp4 0.055) and with codes
(0.0287, 0.054). `--quantization none` computes with the numbers themselves. LLM.int8 keeps some inputs in 16 bits
while it multiplies; here all have 14.

Several ranks divide the inputs of the output layers of attention and MLP. A cut inside of a group makes groups of a
half, a quarter and so on, down to 16 inputs, of the same scale; where an order (`g_idx`) scatters a rank's inputs
over all groups, each group gets columns of zeros up to the size of the largest. Both keep the codes. What no such
groups allow is refused by tensor, group and number of ranks.

### Quantized encoders and layers by the code of transformers

Tools that are not told to leave them out quantize every linear layer of a model with pictures: bitsandbytes
(`load_in_4bit`, `load_in_8bit`), fp8, llm-compressor without `ignore`, AutoRound with `quant_nontext_module` and so on.
Such encoders and projectors are served, also where `vision_config` alone has a `quantization_config`. Their layers
become numbers when they are loaded, rounded once, in `--dtype`: [what that takes](operations.md#quantized-encoders). No
encoder computes with codes: its products have hundreds of rows, for which codes save no time on a CPU.

So do all layers, experts included, of models whose decoder is transformers' code: each layer (of each expert) has to
be stored by itself, as tools store it; codes of several experts in one tensor are refused by its name. Steps of
activations (W8A8, W4A8, fp8) are not applied to numbers. Refused there are a `quantization_config` of `vision_config`
alone and GGUF files.

The tests have Qwen2.5-VL's encoder in every kind of the table above, and those of LLaVA, LLaVA-NeXT, InternVL and
Qwen2-VL in four, each with the rows of the same weights stored as numbers, bit for bit but for nvfp4, mxfp4 and
msmodelslim's, whose numbers the tests round otherwise; of transformers' code Llama 3.2 Vision and Gemma 3, and
Qwen3-MoE in W4A8 of compressed-tensors and of msmodelslim. What
bitsandbytes 0.50 and transformers 5.23 made of small random LLaVA and Qwen2.5-VL was read once: 4-bit weights are
those of bitsandbytes bit for bit, and with `--quantization none` 24 greedy tokens after a picture those of
transformers. (Where a block ends inside of an output, bitsandbytes' own CPU code may give other numbers than its
layout says; ours are those of the layout.) LLM.int8 differs: transformers rounds activations to 8 bits.

FastLLM's files (`tessera convert flm --keep-codes`) are served as `compressed-tensors` with zero points.

## GGUF files

A file is served as it is, `tessera serve model.gguf`, or a folder that holds one \
([operations.md](operations.md#gguf-files)):
of the architectures below. Others, and files in several parts are refused by name. With its vision part beside it
([below](#pictures-with-gguf-files)) a model takes pictures, without one it answers to text. A window that attention
has, as in the first Mistral 7B, is not in the file: as in llama.cpp all tokens are attended to, of Phi-3 too. Which
numbers codes stand for is compared with the library `gguf` in the tests, logits with those that `transformers`
computes. Files that llama.cpp's converter made of small random models of all these but those marked \\* gave the
logits of these, in float32 to within 1e-5. No released file was loaded.

| `general.architecture` | served as | decoder |
| --- | --- | --- |
| `llama` (Mistral's too), `internlm2`\\*, `xverse`\\*, `baichuan`\\* (7B), `exaone`\\* | Llama | native |
| `qwen2`, `qwen2vl`, `qwen`\\*; `qwen3` | Qwen2; Qwen3 | native |
| `chatglm`; `glm4` | GLM; GLM-4-0414 | native |
| `llama` with experts; `qwen2moe`; `qwen3moe`; `olmoe` | Mixtral; Qwen2-MoE; Qwen3-MoE; OLMoE | transformers |
| `gemma`; `gemma2`; `gemma3` | Gemma; Gemma 2; Gemma 3, without pictures | transformers |
| `phi2`; `phi3` | Phi-2; Phi-3 and Phi-4 | transformers |
| `olmo`; `olmo2` | OLMo; OLMo 2 and 3 | transformers |
| `command-r`; `cohere2` | Command R; Command R7B | transformers |
| `granite`, `starcoder2`, `stablelm`, `gptneox`\\*, `nemotron`, `ernie4_5`, `seed_oss`, `smollm3`, `exaone4`, \
`hunyuan-dense` | the models of these names | transformers |

Where the code of transformers runs the layers, linear layers stay codes; experts, and the token embedding, become
numbers when they are loaded. Refused, as their checkpoints are: `falcon`, `gpt2`, and architectures with recurrent
layers (`mamba`, `qwen3next`, `lfm2`). Not read, serve the checkpoint: `deepseek2`, `gpt-oss`, `glm4moe`, `granitemoe`,
`phimoe` and others.

Tokenizers are byte-level BPE (`tokenizer.ggml.model` gpt2) of the kinds in `tokenizer.ggml.pre` that
`shared/checkpoint/gguf/byte_level.py` lists, and sentencepiece's (llama). Others are refused by name; a tokenizer.json
beside the file goes before it.

| types | how they are read | bits of a weight on the CPU, scales included |
| --- | --- | --- |
| Q8_0; Q4_0, IQ4_NL, MXFP4 | exactly, with scales in 16 bits | 8.5; 4.5 |
| Q5_0; Q4_1; Q5_1 | exactly, with scales, and minima, in 16 bits | 5.5; 5; 6 |
| Q4_K; Q5_K | exactly: scale and minimum of a block in 16 bits, a factor of each in a byte for 32 codes | 4.63; 5.63 |
| Q6_K; IQ4_XS | exactly: scale of a block in 16 bits, a factor in a byte for 16 and 32 codes | 6.56; 4.31 |
| Q2_K; Q3_K | exactly, as these; codes in 4 bits and factors for 16 of them | 5.13; 4.56 |
| IQ1, IQ2, IQ3, TQ1_0, TQ2_0 | as numbers, of which codes of 8 bits in groups of 32 are made, with a line in \
the log | 9 |
| F32, F16, BF16 | as numbers; as codes of 8 bits where a layer that is computed with them has codes | 16; 9 |

On [CUDA GPUs](operations.md#on-a-cuda-gpu) all of these stay codes, on Ascend NPUs
[some](ascend.md#weights-of-codes); others become numbers when they are loaded.

### Pictures with GGUF files

The vision part of a model is a file of its own, called mmproj (`general.architecture` is `clip`), and [lies beside
the language model](operations.md#gguf-files). Which are read, by `clip.projector_type`:

| type | model | before |
| --- | --- | --- |
| `mlp` | LLaVA 1.5; with `image_grid_pinpoints` LLaVA 1.6; of a CLIP tower | `llama`, `qwen2` |
| `internvl` | InternVL2 to 3.5 | `llama`, `qwen2`, `qwen3` |
| `qwen2vl_merger` | Qwen2-VL | `qwen2vl` |
| `qwen2.5vl_merger` | Qwen2.5-VL | `qwen2vl` |

What is in no file is as in the checkpoints that were released: pictures of LLaVA 1.5 are resized and cropped, those of
Qwen2-VL have from 3,136 to 12,845,056 pixels, those of InternVL up to 12 tiles where a file does not say it, and
Qwen2.5-VL has windows of 112 pixels and two positions for a second of video. `preprocessor_config.json` beside the
files goes before that, but for InternVL's tiles. Rows of LLaVA are what leaves the last layer of the file, where the
converter cuts a tower, or what `feature_layer` says; without the latter llama.cpp's code stops a layer earlier.
`<image>` becomes a token where the vocabulary lacks it. A model without a chat template has one if it is a LLaVA 1.5,
one for text alone gets pictures in its text, or as Qwen2-VL's if it is one.

Tensors are F32, F16 or BF16, or of any type of the table above: codes become numbers when they are loaded. Prompts and
tokens equal those of `transformers` for small random models, whose files were written by llama.cpp's converters (once)
and by the tests. Other types are refused by name. No released file was loaded.

"""
_SERVED = "served"
_TYPES = """
## Text models by the code of transformers

Every type that `transformers` 5.23 registers as a causal language model, tried in tiny with random weights by
`tests/decoder/models/test_generic_types.py`: served ones give the logits of the class's own forward, alone, together
and in pieces. Only layers of attention were tried: a checkpoint of these types with others, such as the convolutions of
`lfm2`, is refused by the names in its `layer_types`. Sparse attention to the most relevant tokens is refused although
short prompts, of which it takes all, look right.

"""
_RELEASED = """
## What is not known of released folders

No released weights were loaded. What their folders hold was read in copies of them and in their code, or quoted by
others; `tests/families/released` has those forms, each with its source. Not established:

"""
_NOT_KNOWN = [
    ["model", "not known", "here"],
    ["---"] * 3,
    [
        "InternLM2-chat",
        "which revisions name `<\\|im_end\\|>` in generation_config.json",
        "it ends an answer in all, by the chat template",
    ],
    [
        "InternLM-XComposer2-4KHD",
        "whether each part of a text between pictures begins with `<s>` or the first alone: copies of its code differ",
        "every part that is not empty",
    ],
    ["", "rank 8 and alpha 16 of the partial LoRA of queries, keys and values", "so"],
    [
        "",
        "how many tiles are meant: its class has 25 by default, the example on its card passes 55",
        "25, or `hd_num` of config.json",
    ],
    [
        "WeMM",
        "`model_type` of the release, which has no adapter_config.json",
        "found by its keys; without that file the factor of its partial LoRA is 1",
    ],
    ["ChatGLM3", "how a reply with the name of a tool in its first line is to be shown", "whole"],
    [
        "GLM-4, first layout",
        "what its code does to a reply, which begins with a line break",
        "nothing",
    ],
    [
        "GLM-4 (`-hf`)",
        "ids of its control tokens, later forms of its template",
        "as its files say",
    ],
    [
        "Qwen-Chat, Qwen-VL-Chat",
        "sampling defaults of later revisions",
        "as generation_config.json says; too long a prompt is refused, where Qwen's code drops the oldest turns",
    ],
    [
        "DeepSeek-VL2",
        "whether tokenizer.json has the tokens of pictures, grounding and roles that the processor adds",
        "added where it lacks them, with the ids that they get there",
    ],
    ["", "`tile_tag` and `global_view_pos` of the releases", "`2D` and `head`, others are refused"],
    [
        "",
        "sizes of latent attention in small and base, and base's choice of experts",
        "by their keys",
    ],
    [
        "InternVL-Chat-V1.5",
        "how its files differ from InternVL2-26B's, whose `template` is the same",
        "its own system message where the folder has its conversation.py, else InternVL2's",
    ],
    ["InternVL2", "ends in generation_config.json", "the end of a turn, whatever the files name"],
    ["", "`template` of 1B, 40B and 76B", "by that key"],
    ["", "names of bare parameters (`class_embedding`, `ls1`)", "as those of the module"],
    [
        "InternVL2-4B",
        "its files, but for the format of its chats",
        "refused: there is no decoder here for Phi-3 within another layout than that of transformers",
    ],
    ["Molmo", "ids of the marks of pictures", "the tokenizer's"],
    ["", "`layer_norm_eps` and length of 7B-D, sizes of 7B-O", "by their keys"],
    ["", "how a second turn was trained: its processor knows one", "as the tokenizer's template"],
    ["MolmoE-1B", "its configuration", "refused for its experts"],
    [
        "Fuyu",
        "ids of the tokens of pictures, names within layers",
        "by the tokenizer; as the class",
    ],
    ["Chameleon", "edge of pictures", "as preprocessor_config.json says"],
    [
        "BLIP-2, Flan-T5",
        "config.json",
        "refused: its text model is an encoder and a decoder",
    ],
    [
        "LLaVA, LLaVA-NeXT",
        "generation_config.json, names of the first tensors",
        "`eos_token` where no file names an end; both spellings of names",
    ],
    [
        "Qwen2-VL, Qwen2.5-VL",
        "no file of a repository was read",
        "as transformers reads its older and newer layouts",
    ],
]


def table() -> str:
    """The file's text."""
    rows = [_row(name, family) for name, family in zip(_folders(), registry.in_tree(), strict=True)]
    generic = Family(("",), prompt=GENERIC_PROMPT, encoder=GENERIC_ENCODER)
    rows.append(
        [
            "any other with images",
            "of `transformers`",
            "",
            *_codes(generic),
            "images",
            "",
            "transformers",
        ]
    )
    head = "family | architectures | text models | prompt | encoder | decoder | media | off | oracle | released weights"
    rows.append(
        [
            "any other of text alone",
            "of `transformers`",
            "any",
            *_codes(GENERIC),
            "none",
            "measured at start",
            "transformers",
        ]
    )
    lines = [head.split(" | "), ["---"] * 10, *([*row, "never loaded"] for row in rows)]
    return (
        _HEAD
        + _written(lines)
        + _QUANTIZED
        + quality_table.section()
        + _RELEASED
        + _written(_NOT_KNOWN)
        + _TYPES
        + _written(_types())
    )


def _written(lines: list[list[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _types() -> list[list[str]]:
    """Reasons with the types that have them; first those that are served."""
    lines = REASONS.read_text(encoding="utf-8").splitlines()
    reasons = [line.partition(": ") for line in lines]
    reasons.sort(key=lambda line: line[0] != _SERVED)
    rows = [
        [reason, str(len(types.split())), types.replace(" ", ", ")] for reason, _, types in reasons
    ]
    return [["", "number", "model types"], ["---"] * 3, *rows]


def _folders() -> list[str]:
    base = Path(services.families.__path__[0])
    return sorted(file.parent.name for file in base.glob("*/__init__.py"))


def _row(name: str, family: Family) -> list[str]:
    media = ", ".join(_MODALITIES[modality] for modality in family.modalities)
    off = ", ".join(load_part(family.decoder).needs.off) if family.decoder else ""
    has_class = any(f'"{architecture}"' in _CLASSES for architecture in family.architectures)
    return [
        name,
        ", ".join(family.architectures),
        ", ".join(family.text_types),
        *_codes(family),
        media or "none",
        off,
        "transformers" if has_class else "ours",
    ]


def _codes(family: Family) -> list[str]:
    """Of prompt, encoder and decoder; empty where another family's is taken, or none."""
    prompt = code_of(family.prompt) if family.prompt or family.decoder else ""
    return [prompt, *(code_of(name) if name else "" for name in (family.encoder, family.decoder))]


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
