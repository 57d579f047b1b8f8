"""Forward FLOPs of the tensors in `collectives/overlap/models.json`.

`python -m tests.data.make_flops` writes them there.

A tensor of n parameters that a sample uses at p positions counts 2 n p: a multiplication and an
addition each. p is the height times the width of what a convolution or a norm gives, the tokens of
a sequence, or 1. Norms and biases count by the same rule, little but not nothing; what they cost
beyond, as they wait for memory, does not count, nor do activations and pooling. In BERT and GPT-2
an embedding only adds its rows; `value.weight` or `c_attn.weight` carries the two products of
attention (causal ones are not halved), and the last bias the product with the word embeddings,
which are used there a second time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).parents[2] / "collectives" / "overlap" / "models.json"
TOKENS = {"bert-base": 64, "bert-large": 64, "gpt2": 1024}
"""Of a sequence: BERT's as in table III of ASC-WFBP, GPT-2's whole context."""
_IMAGE = "3x224x224"
_RESNET = {
    "conv1|bn1": 112, r"layer1|layer2\.0\.(conv|bn)1": 56, r"layer2|layer3\.0\.(conv|bn)1": 28,
    r"layer3|layer4\.0\.(conv|bn)1": 14, "layer4": 7, "fc": 1,
}  # fmt: skip
INPUTS = {
    "inceptionv4": "3x299x299", "vgg16-cifar": "3x32x32", "mobilenetv2-cifar": "3x32x32",
    **{name: f"{tokens} tokens" for name, tokens in TOKENS.items()},
}  # fmt: skip
"""One sample, where it is no image of 224 x 224."""
SIDES: dict[str, dict[str, int]] = {
    "resnet50": _RESNET,
    "resnet152": _RESNET,
    "densenet201": {
        r"features\.(conv|norm)0": 112, r".*(denseblock|transition)1": 56,
        r".*(denseblock|transition)2": 28, r".*(denseblock|transition)3": 14,
        r".*(denseblock4|norm5)": 7, "classifier": 1,
    },
    "inceptionv4": {
        r"features\.0\.": 149, r"features\.[12]\.": 147, r"features\.4\.branch(0\.1|1\.3)": 71,
        r"features\.[34]\.": 73, r"features\.10\.branch1\.[01]": 35, r"features\.[5-9]\.": 35,
        r"features\.18\.branch(0\.1|1\.3)": 8, r"features\.1[0-8]\.": 17, "features": 8,
        "last_linear": 1,
    },
    "vgg16": {
        r"features\.[02]\.": 224, r"features\.[57]\.": 112, r"features\.1[024]\.": 56,
        r"features\.(17|19|21)\.": 28, "features": 14, "classifier": 1,
    },
    "vgg16-cifar": {
        r"features\.[0-4]\.": 32, r"features\.([78]|1[01])\.": 16, r"features\.(1|2[01])": 8,
        r"features\.(2|3[01])": 4, "features": 2, "fc": 1,
    },
    "mobilenetv2": {
        r"features\.([01]\.|2\.conv\.0)": 112, r"features\.([23]\.|4\.conv\.0)": 56,
        r"features\.([4-6]\.|7\.conv\.0)": 28, r"features\.([7-9]\.|1[0-3]\.|14\.conv\.0)": 14,
        "features": 7, "classifier": 1,
    },
    "mobilenetv2-cifar": {
        r"pre|stage1|stage2\.0\.residual\.[01]": 34, r"stage2|stage3\.0\.residual\.[01]": 17,
        r"stage3|stage4\.0\.residual\.[01]": 9, "stage|conv1": 5, "conv2": 1,
    },
    "googlenet": {"conv1": 112, "conv": 56, "inception3": 28, "inception4": 14, "inception5": 7,
                  "fc": 1},
    "zfnet": {r"conv1": 110, r"conv2": 26, r"conv": 13, "fc": 1},
}  # fmt: skip
"""How high and wide the output of a tensor's operation is, by the first pattern that its name
begins with. From torchvision's models, Cadene's Inception-v4 and US-Byte's CIFAR models."""


def forward_flops(model: str, names: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """Of one sample, for each tensor."""
    if model in TOKENS:
        return _transformer(dict(zip(names, sizes, strict=True)), TOKENS[model])
    found = []
    for name, size in zip(names, sizes, strict=True):
        side = next(s for pattern, s in SIDES[model].items() if re.match(pattern, name))
        found.append(2 * size * side * side)
    return found


def _transformer(sizes: dict[str, int], tokens: int) -> list[int]:
    words, hidden = next(
        (name, sizes[norm])
        for name, norm in (
            ("bert.embeddings.word_embeddings.weight", "bert.embeddings.LayerNorm.weight"),
            ("wte.weight", "ln_f.weight"),
        )
        if name in sizes
    )
    found = {}
    for name, size in sizes.items():
        once = name.startswith(("bert.pooler", "cls.seq_relationship"))
        found[name] = 2 * size * (1 if once else tokens)
        if "_embeddings" in name or name.startswith(("wte", "wpe")):
            found[name] = tokens * hidden
        elif name.endswith(("self.value.weight", "attn.c_attn.weight")):
            found[name] += 2 * 2 * tokens * tokens * hidden
    last = "cls.predictions.bias" if "cls.predictions.bias" in sizes else "ln_f.bias"
    found[last] += 2 * sizes[words] * tokens
    return list(found.values())


def main() -> None:
    models = json.loads(FILE.read_text())
    for name, known in models.items():
        known["input"] = INPUTS.get(name, _IMAGE)
        known["flops"] = forward_flops(name, known["names"], known["numel"])
    fields = ("input", "names", "numel", "flops")
    FILE.write_text(
        "{\n" + ",\n".join(
            f' "{name}": {{\n' + ",\n".join(
                f'  "{field}": {json.dumps(known[field], separators=(",", ":"))}'
                for field in fields
            ) + "\n }"
            for name, known in models.items()
        ) + "\n}\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
