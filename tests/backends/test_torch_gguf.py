"""GGUF files on the torch backend: against llama.cpp, and against transformers on the same
weights in a Hugging Face folder."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pipeinfer.errors import UnsupportedArchitecture
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.text.hf_tokenizer import byte_tokens
from tests.kit import launch
from tests.kit.llama import load as load_llama
from tests.kit.random_model import RandomSpec, finish, tiny, write_random_model
from tests.kit.references import encoded
from tests.kit.rows import chain
from tests.kit.tiny_torch import forward, load, reference, save, tokens_of, torch

EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"
TEXT = ("def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + "
        "fibonacci(n - 2)\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n")


def llama_logits(path, tokens, **options):
    backend = load_llama(path, n_batch=128, **options)
    logits = backend.decode(chain(tokens))
    backend.close()
    return logits


def torch_logits(path, tokens):
    """In two stages."""
    n = ModelFile(path).n_layers
    first, last = (load(path, layers, n_batch=128) for layers in ((0, 1), (1, n)))
    return last.decode(chain(tokens), first.decode(chain(tokens)))


@pytest.mark.parametrize("spec", [
    RandomSpec(), RandomSpec(tied=True), RandomSpec(rope_freqs=True),
    RandomSpec(architecture="qwen2"), RandomSpec(architecture="qwen3", tied=True)],
    ids=["llama", "llama-tied", "llama-rope-factors", "qwen2", "qwen3-tied"])
def test_float_weights_give_llama_cpps_logits(tmp_path, spec):
    """Everything in float32 on both sides: what is left are the orders of sums, some 1e-6 of
    logits whose spread is 3, grown by random layers."""
    path = write_random_model(tmp_path / "m.gguf", spec)
    tokens = np.random.default_rng(0).integers(0, spec.n_vocab, 70).tolist()
    wanted = llama_logits(path, tokens, type_k="f32", type_v="f32", flash_attn="off")
    found = torch_logits(path, tokens)
    assert wanted.std() > 2
    assert np.abs(found - wanted).max() < 1e-3
    assert np.array_equal(found.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_embedded_pair_agrees_with_llama_cpp(name):
    """llama.cpp multiplies 8-bit weights by activations that it rounds to 8 bits, 1/254 of the
    largest of 32 each time; torch does not. The mean error is a hundredth of the logits' spread,
    and a choice may differ only where two tokens are that close."""
    path = EMBEDDED / f"{name}.gguf"
    tokens = encoded(path, TEXT)
    wanted = llama_logits(path, tokens, type_k="f32", type_v="f32", flash_attn="off")
    found = torch_logits(path, tokens)
    assert np.abs(found - wanted).mean() < 0.02 * wanted.std()
    assert np.abs(found - wanted).max() < 0.2 * wanted.std()
    differs = found.argmax(1) != wanted.argmax(1)
    assert differs.mean() < 0.05
    best = np.sort(wanted, 1)
    assert (best[differs, -1] - best[differs, -2] < 0.15).all()


def test_a_folder_and_a_gguf_of_one_model_are_the_same_bits(tmp_path):
    """And both are what transformers computes: the pairs of rotated rows were put back right."""
    from transformers import AutoModelForCausalLM

    from tests.kit.embedded_folder import write_folder

    path = EMBEDDED / "target.gguf"
    folder = write_folder(path, tmp_path / "target")
    tokens = encoded(path, TEXT)
    from_gguf = torch_logits(path, tokens)
    assert np.array_equal(from_gguf, load(folder, n_batch=128).decode(chain(tokens)))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert np.abs(forward(model, tokens) - from_gguf).max() < 2e-4


# --- Gemma and Phi-3, which random_model does not write so ------------------------------------

GEMMA = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}


PHI3 = {"input_layernorm": "attn_norm", "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm"}


def write_model(path, model, family):
    """The model as llama.cpp's converter writes it: Gemma's norms with one added."""
    c = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    names = dict(PHI3 if family == "phi3" else GEMMA)
    if family == "phi3":
        pass
    elif family == "gemma":
        names["post_attention_layernorm"] = "ffn_norm"
    else:
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
        writer.add_sliding_window(c.sliding_window)
    texts = [*byte_tokens()[33 : c.vocab_size + 31], "AB", "<eos>"]  # of plain characters
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([1] * (len(texts) - 1) + [3])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(len(texts) - 1)
    writer.add_eos_token_id(len(texts) - 1)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name.endswith("norm.weight") and family != "phi3":
            array = array + 1
        parts = name.split(".")
        if parts[1] == "layers":
            writer.add_tensor(f"blk.{parts[2]}.{names['.'.join(parts[3:-1])]}.weight", array)
        elif name != "lm_head.weight":
            writer.add_tensor({"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]]
                              + ".weight", array)
        elif not c.tie_word_embeddings:
            writer.add_tensor("output.weight", array)
    finish(writer)
    return path


@pytest.mark.parametrize("family", ["gemma", "gemma2", "phi3"])
def test_gemma_and_phi_from_gguf(tmp_path, family):
    change = {"gemma2": {"query_pre_attn_scalar": 32, "head_dim": 32},
              "phi3": {"sliding_window": None}}.get(family, {})
    model = reference(family, **change)
    path = write_model(tmp_path / "m.gguf", model, family)
    tokens = tokens_of(60)
    expected = forward(model, tokens)
    found = torch_logits(path, tokens)
    # One was added to the norms and taken off again, in float32.
    assert np.abs(found - expected).max() < 2e-5
    assert np.abs(load(save(model, tmp_path / "f")).decode(chain(tokens)) - found).max() < 2e-5
    theirs = llama_logits(path, tokens, type_k="f32", type_v="f32", flash_attn="off")
    assert np.abs(found - theirs).max() < 1e-3


@pytest.mark.parametrize(("spec", "says"), [
    (RandomSpec(n_expert=4, n_layer=2), "llama.expert_count = 4"),
    (tiny("phi3"), "phi3.rope.scaling.attn_factor = 1.19"),
])
def test_gguf_files_that_would_be_computed_wrongly_are_refused(tmp_path, spec, says):
    path = write_random_model(tmp_path / "m.gguf", spec)
    with pytest.raises(UnsupportedArchitecture, match=says):
        load(path)


@pytest.mark.parametrize(("key", "add", "says"), [
    ("yarn", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaling of type 'yarn"),
    ("window", lambda w: w.add_sliding_window(512), "sliding windows in a GGUF file"),
    ("part", lambda w: w.add_rope_dimension_count(4), "only part of each head is rotated"),
    ("falcon", None, "architecture 'falcon' are not supported"),
])
def test_gguf_metadata_that_is_refused(tmp_path, key, add, says):
    writer = gguf.GGUFWriter(tmp_path / f"{key}.gguf", "llama" if add else key)
    for name, value in (("embedding_length", 64), ("block_count", 2), ("feed_forward_length", 96),
                        ("head_count", 4), ("vocab_size", 32), ("context_length", 64)):
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    if add is not None:
        add(writer)
    finish(writer)
    with pytest.raises(UnsupportedArchitecture, match=says):
        load(tmp_path / f"{key}.gguf")


def test_a_linear_rope_scale_of_a_gguf(tmp_path):
    """A factor of 4 is the same as positions a quarter apart; llama.cpp agrees."""
    spec = RandomSpec(n_layer=2)
    plain = write_random_model(tmp_path / "m.gguf", spec)
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for name, value in (("vocab_size", spec.n_vocab), ("context_length", 512),
                        ("embedding_length", 64), ("block_count", 2), ("head_count", 4),
                        ("feed_forward_length", 128), ("head_count_kv", 2),
                        ("rope_freq_base", 10000.0), ("layer_norm_rms_eps", 1e-5),
                        ("rope_scaling_type", gguf.RopeScalingType.LINEAR),
                        ("rope_scaling_factor", 4.0), ("tokenizer_model", "gpt2"),
                        ("tokenizer_pre", "gpt-2"), ("token_merges", ["A B"]),
                        ("token_list", [*byte_tokens(), "AB", *(f"<{i}>" for i in range(63))]),
                        ("token_types", [1] * 320), ("eos_token_id", 1), ("bos_token_id", 1)):
        getattr(writer, f"add_{name}")(value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    tokens = tokens_of(40)
    found = torch_logits(tmp_path / "scaled.gguf", tokens)
    theirs = llama_logits(tmp_path / "scaled.gguf", tokens, type_k="f32", type_v="f32",
                          flash_attn="off")
    assert np.abs(found - theirs).max() < 1e-3
    assert np.abs(found - torch_logits(plain, tokens)).max() > 0.05
    assert torch.get_num_threads() == 1
