"""What the EmbRace paper published, and the constants of its clusters.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks". Its MB are 2^20 bytes: GNMT-8's 252.5 MB are two float32 tables of 32,320 x 1024.
"""

from __future__ import annotations

from dataclasses import dataclass

from linkweave.collectives.overlap import network

MB = 1 << 20
BANDWIDTH = 100e9 / 8
"""Bytes/s of a node's InfiniBand (section 5.2.1)."""
STARTUP = network("56GbIB", 8).message[0]
"""Start-up of a message in seconds. The paper gives none: this is MG-WFBP's measurement."""
GPUS_A_NODE = 4
WORKERS = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers, divided evenly over nodes."""

    workers: int
    nodes: int


CLUSTERS = tuple(Cluster(workers, workers // GPUS_A_NODE) for workers in WORKERS)
FIGURE4 = {"4a": Cluster(8, 2), "4b": Cluster(4, 4)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """`flops` is the peak of float32 operations a second, by NVIDIA's data sheets."""

    name: str
    flops: float


GPUS = (Gpu("RTX3090", 35.6e12), Gpu("RTX2080", 10.1e12))


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper; sizes in MB.

    `whole` and `embedding` are from table 1, `original`, `coalesced` and `prioritized` gradients
    from table 3 (RTX3090), `coalescing` and `priority` the reductions in % that the text states,
    `sparsity` that of section 4.1.2 in %. `batches` are the batch sizes by `GPUS`, `speedups` over
    the best baseline by `GPUS`, from section 5.3. The paper does not tell `width`, nor, but for
    LM, the number of tables, nor `blocks`, those that follow each table in the forward pass: they
    are those of the networks whose sizes fit (`DENSE`).
    """

    name: str
    whole: float
    embedding: float
    width: int
    blocks: tuple[int, ...]
    original: float
    coalesced: float
    prioritized: float
    coalescing: float
    priority: float
    sparsity: float
    batches: tuple[int, int]
    speedups: tuple[tuple[float, float], tuple[float, float]]

    @property
    def tables(self) -> int:
        """The number of embedding tables."""
        return len(self.blocks)

    @property
    def rows(self) -> int:
        """The vocabulary of each table, from the size of the embedding."""
        return round(self.embedding * MB / (self.tables * self.width * 4))

    def tokens(self, gpu: int = 0) -> int:
        """The tokens of a worker's batch that each table looks up, from the size of the original
        gradient, in proportion to the batch size."""
        rows = self.original * MB / (self.tables * self.width * 4)
        return round(rows * self.batches[gpu] / self.batches[0])


MODELS = (
    Model("LM", 3186.5, 3099.5, 512, (1, 0), 8.7, 6.9, 2.6, 20.4, 61.8, 99.7, (128, 128),
          ((1.18, 1.77), (1.99, 2.41))),
    Model("GNMT-8", 739.1, 252.5, 1024, (4, 4), 26.0, 12.2, 5.8, 53.1, 52.5, 89.7, (128, 32),
          ((1.103, 1.268), (1.094, 1.296))),
    Model("Transformer", 1067.5, 263.4, 1024, (6, 6), 35.2, 16.6, 8.9, 52.9, 46.3, 86.6,
          (5120, 500), ((1.115, 1.176), (1.105, 1.282))),
    Model("BERT-base", 417.7, 89.4, 768, (12,), 36.0, 5.5, 3.2, 84.7, 41.9, 59.7, (32, 4),
          ((1.02, 1.06), (1.10, 1.40))),
)  # fmt: skip


def lstm(inputs: int, hidden: int) -> int:
    """The parameters of a layer of an LSTM, with both biases."""
    return 4 * hidden * (inputs + hidden + 2)


def linear(inputs: int, outputs: int) -> int:
    """The parameters of a linear layer with a bias."""
    return (inputs + 1) * outputs


def lm(words: int) -> int:
    """One layer of 2,048, a linear layer to 512 after it, and the softmax's bias: its weights are
    the second table."""
    return lstm(512, 2048) + linear(2048, 512) + words


def gnmt(words: int) -> int:
    """NVIDIA's GNMT with two tables: four layers each, the first of the encoder in both directions,
    normalized attention."""
    encoder = 4 * lstm(1024, 1024) + lstm(2048, 1024)
    decoder = lstm(1024, 1024) + 3 * lstm(2048, 1024)
    return encoder + decoder + 2 * 1024 * 1024 + 2 * 1024 + 1 + linear(1024, words)


def transformer(words: int) -> int:
    """The big one of Vaswani and others (2017), table 3, whose last layer shares no weights."""
    attention, norm = 4 * linear(1024, 1024), 2 * 1024
    inner = linear(1024, 4096) + linear(4096, 1024)
    return 6 * (3 * attention + 2 * inner + 5 * norm) + 1024 * words


DENSE = {"LM": lm, "GNMT-8": gnmt, "Transformer": transformer}
"""The parameters beside the embeddings, of a vocabulary: the paper names no sources of its models,
these are networks whose sizes are within 0.3 MB of the printed ones."""

SHARES = {"LM": 97.27, "GNMT-8": 34.16, "Transformer": 24.67, "BERT-base": 21.42}
"""Table 1: the embeddings' share of a model in %."""
STALLS = {"RTX3090": (1.45, 2.56), "RTX2080": (1.37, 3.02)}
"""Figure 8: stalls on 16 GPUs as multiples of EmbRace's, over all models (section 5.4)."""
