"""DeepSeek-VL2, whole: pictures, prompts and answers are those of a reference written from the model's description."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from services.families import registry
from services.families.deepseek_vl2.generic import load_text_model
from services.families.family import ItemSize
from services.preprocess.worker.pixel_maker import PixelMaker
from services.vision_encoder.towers.encoder import BadPixels, pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_name
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tests.preprocess.prompt.test_counts import sizes
from tests.reference_models.common import IMAGE, noise
from tests.reference_models.deepseek_vl2 import DeepSeekVL2, write_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)
from tests.support.family_parts import encoder_of, rule_of
from tests.support.generic_models import parameters
from tests.support.pictures import data_url, png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.vision_encoder import tower_engine
from tests.test_checkpoint_split import names_read

# A model by the code of transformers or beside it: others of the kind are tried in every run.
pytestmark = pytest.mark.full

PICTURES = [noise(50, 70, 1), noise(150, 40, 2), noise(30, 190, 3), noise(300, 280, 4)]
SIZES = [(300, 180), (60, 400), (64, 64), (350, 340)]
# Of the smallest model, whose sizes of latent attention are none.
PLAIN: dict[str, Any] = {
    "use_mla": False,
    "kv_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
}
# The tiles of "odd" are, as those of released models, no whole number of patches, and these no whole squares.
VARIANTS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v3": {"third": True, "seed": 1},
    "plain": {"text": PLAIN, "seed": 2},
    "odd": {"side": 48, "text": {"topk_method": "group_limited_greedy", "n_group": 2}},
}
TOKENS = 10


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek") / "under-test"
    write_checkpoint(path, **VARIANTS[request.param])
    tensors = load_file(path / "model.safetensors")
    # To the reference this token is a picture's row wherever it stands, in an answer too.
    tensors["language.lm_head.weight"][DeepSeekVL2(path).image_id] = 0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("engine", tower_engine.ENGINES)
def test_pixels_and_rows(folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower_engine.choose(engine, monkeypatch)
    checkpoint, reference = Checkpoint(folder), DeepSeekVL2(folder)
    config = registry.find(checkpoint).processor_config(checkpoint)
    maker = PixelMaker(image_processor_name(config), config, None)
    assert maker.scaling is not None
    encoder = encoder_of(checkpoint)
    assert not encoder.stacked
    items = []
    for picture in PICTURES:
        pixels, _ = maker.make(picture)
        values = torch.from_numpy(maker.scaling.table())[0][torch.from_numpy(pixels).long()]
        torch.testing.assert_close(values, reference.pixel_values(picture), rtol=0, atol=0)
        width, height = picture.size
        items.append(pixel_item(pixels, height=height, width=width, scaling=maker.scaling))
        assert encoder.cost(items[-1]) == encoder.cost(encoder.sample(ItemSize(width, height)))
    together = encoder.encode(items)
    for rows, picture in zip(together, PICTURES, strict=True):
        expected = reference.embed_image(picture)
        close = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=close)
    assert torch.equal(encoder.encode(items[1:2])[0], together[1])
    wrong = pixel_item(items[0].pixels, height=300, width=10, scaling=maker.scaling)
    with pytest.raises(BadPixels, match="10x300"):
        encoder.cost(wrong)


def test_ids_of_drawn_sizes(folder: Path) -> None:
    rule, reference, checkpoint = rule_of(folder), DeepSeekVL2(folder), Checkpoint(folder)
    largest = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
    assert rule.span(largest).rows == largest.tokens
    encoder = encoder_of(checkpoint)
    assert len(encoder.encode([encoder.sample(largest)])[0]) == largest.tokens
    for size in sizes(400):
        span = rule.span(ItemSize(*size))
        assert set(span.token_ids) == {reference.image_id} and not span.embed_runs
        assert len(span.token_ids) == span.rows == reference.count_rows(*size, images=1)
        assert span.rows <= largest.tokens


def turns(number: int) -> list[tuple[str, str]]:
    image = f"{IMAGE}\n"
    asked = [("user", f"{image * (number % 3)}What is red? {'And blue? ' * number}".strip())]
    if number % 2:
        asked += [("assistant", "A circle."), ("user", f"{image}And then?")]
    return asked if number < 3 else [("system", "Be brief."), *asked]


def messages(number: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": data_url(png(number, SIZES[number]))}}
    return [
        {
            "role": role,
            "content": [
                *[image] * text.count(IMAGE),
                {"type": "text", "text": text.replace(f"{IMAGE}\n", "")},
            ],
        }
        for role, text in turns(number)
    ]


@pytest.mark.timeout(300)
@pytest.mark.full
def test_answers_are_those_of_the_reference(folder: Path, redis_url: str) -> None:
    reference = DeepSeekVL2(folder)
    chats = [messages(number) for number in range(len(SIZES))]
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, chats, TOKENS)
    for number, (prompt, tokens) in enumerate(answers):
        shown = sum(text.count(IMAGE) for _, text in turns(number))
        assert prompt == reference.prompt_ids(turns(number), [SIZES[number]] * shown)
        picture = Image.open(io.BytesIO(png(number, SIZES[number]))).convert("RGB")
        made = reference.generate(prompt, [picture] * shown, TOKENS)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


@pytest.mark.timeout(300)
def test_more_than_two_pictures_have_one_tile_each(folder: Path, redis_url: str) -> None:
    """The same picture has other rows than in a prompt of its own, whichever of the two came first."""
    reference = DeepSeekVL2(folder)
    files = [png(number, size) for number, size in enumerate(SIZES)]
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    urls = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]

    def chat(count: int) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "What is red?"}
        return [{"role": "user", "content": [*urls[:count], text]}]

    with services_in_process(folder, redis_url) as system:
        answers = [ask_all(system.base_url, [chat(count)], TOKENS)[0] for count in (3, 2, 4, 1)]
    for count, (prompt, tokens) in zip((3, 2, 4, 1), answers, strict=True):
        text = [("user", f"{IMAGE}\n" * count + "What is red?")]
        assert prompt == reference.prompt_ids(text, SIZES[:count])
        made = reference.generate(prompt, pictures[:count], TOKENS)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


async def test_tokens_of_prompts_in_pieces(folder: Path, short_tmp: Path) -> None:
    """Eight at once in pieces of 16 tokens, with no picture to two."""
    reference, rule = DeepSeekVL2(folder), rule_of(folder)
    spans = [rule.span(ItemSize(*picture.size)) for picture in PICTURES]
    store = ArtifactStore(short_tmp / "artifacts", "producer", "")
    digests = [f"image-{i}".encode().ljust(16, b"-") for i in range(len(PICTURES))]
    texts, shown = [], []
    for slot in range(8):
        order = [[slot % 4], [1, 3], []][slot % 3]
        talk = [("user", f"{IMAGE}and " * len(order) + f"number {slot}?")]
        ids = reference.prompt_ids(talk, [PICTURES[i].size for i in order])
        media, start = [], 0
        for i in order:
            start = ids.index(reference.image_id, start)
            count = spans[i].rows
            assert tuple(ids[start : start + count]) == spans[i].token_ids
            media.append(
                MediaItem(
                    digest=digests[i],
                    modality=Modality.MODALITY_IMAGE,
                    offset=start,
                    length=count,
                    rows=count,
                )
            )
            start += count
        texts.append(Text(slot, ids, greedy(), media=media))
        shown.append([PICTURES[i] for i in order])
    async with (
        running_decoder(folder, short_tmp / "s", kv_cache_memory_bytes=64 << 20) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        rows = [reference.embed_image(picture).numpy() for picture in PICTURES]
        refs = [store.put(digest, row) for digest, row in zip(digests, rows, strict=True)]
        await stream.run(make_plan(fetch=refs))
        while len(stream.ready) < len(refs):
            await stream.next_message()
        await NaiveScheduler(stream).generate(texts, 6, chunk=16)
    for text, pictures in zip(texts, shown, strict=True):
        expected = reference.generate(list(text.prompt), pictures, 6)
        assert_same_up_to_ties(text.output, expected.tokens, expected.logits)


def test_every_tensor_is_read_by_one_service(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    encoders = names_read(folder, encoder_of)
    decoders = set(checkpoint.names()) - encoders
    assert decoders == {name for name in checkpoint.names() if name.startswith("language.")}
    model = load_text_model(checkpoint, torch.float32)
    buffers = {name: values.numel() for name, values in model.state_dict().items()}
    taken = sum((parameters(model) | buffers).values())
    assert taken == sum(checkpoint.tensor(name).numel() for name in decoders)


def test_settings_that_the_files_leave_out_are_those_of_the_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"], config["tile_tag"], config["global_view_pos"]
    config["projector_config"] = {"model_type": "mlp_projector", "n_embed": 64}
    for key in ("use_mla", "routed_scaling_factor", "n_group", "topk_group", "rms_norm_eps"):
        config["language_config"].pop(key)
    (folder / "config.json").write_text(json.dumps(config))
    colours = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "normalize": True}
    (folder / "processor_config.json").write_text(json.dumps(colours))
    checkpoint = Checkpoint(folder)
    settings = registry.find(checkpoint).processor_config(checkpoint)
    assert settings["image_mean"] == [0.1, 0.2, 0.3] and settings["image_std"] == [0.5, 0.6, 0.7]
    decoder = registry.find_decoder(checkpoint)
    assert decoder is registry.find_decoder(checkpoint, ModelBackend.TRANSFORMERS)
    with pytest.raises(InvalidRequest, match="deepseek_vl_v2 cannot be served"):
        registry.find_decoder(checkpoint, ModelBackend.NATIVE)
    assert load_text_model(checkpoint, torch.float32).config.first_k_dense_replace == 1
    assert len(encoder_of(checkpoint).encode([encoder_of(checkpoint).sample(ItemSize(9, 9))])) == 1


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (
            "language_config",
            {"use_mla": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        ),
        ("language_config", {"rope_scaling": {"type": "yarn"}, "use_mla": False}),
        ("language_config", {"num_attention_heads": 5, "use_mla": False}),
        ("language_config", {"moe_layer_freq": 2}),
        ("language_config", {"hidden_act": "gelu"}),
        ("language_config", {"attention_bias": True}),
        ("language_config", {"scoring_func": "sigmoid"}),
        ("language_config", {"norm_topk_prob": True}),
        ("language_config", {"topk_method": "noaux_tc"}),
        ("language_config", {"topk_method": "hash"}),
        ("language_config", {"n_routed_experts": None}),
        ("vision_config", {"model_name": "sam_vit_b"}),
        ("vision_config", {"class_token": True}),
        ("vision_config", {"ignore_head": False}),
        ("projector_config", {"projector_type": "linear"}),
        ("projector_config", {"depth": 3}),
        ("projector_config", {"token_pooling": True}),
        ("projector_config", {"n_embed": 7}),
        ("", {"tile_tag": "1D"}),
        ("", {"global_view_pos": "tail"}),
        ("", {"candidate_resolutions": [[56, 56], [60, 56]]}),
        ("", {"candidate_resolutions": [[112, 112]]}),
    ],
    ids=lambda value: str(value),
)
def test_what_is_not_served_is_refused_by_its_name(
    tmp_path: Path, part: str, wrong: dict[str, Any]
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config).update(wrong)
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder)
    name = "scoring_func" if wrong == {"topk_method": "noaux_tc"} else next(iter(wrong))
    with pytest.raises(InvalidRequest, match=name) as refused:
        registry.text_sizes(checkpoint)
        registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
        encoder_of(checkpoint)
    assert refused.value.reason == "UNSUPPORTED_CONFIG"
