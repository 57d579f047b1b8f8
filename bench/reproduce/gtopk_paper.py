"""What the gTop-k paper and its repository published, and the constants of its cluster.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks"; hclhkbu/gtopkssgd, scripts/icdcs2019/communication.py and allreducer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

ALPHA = 0.436e-3  # start-up of a message between two nodes in seconds (section IV-C)
BETA = 4 * 9e-9  # seconds an element of 4 bytes (section IV-C: 9e-6 ms a byte)
DENSITY = 0.001
PCIE = 250e6  # bytes/s of a GPU's only lane (table III)

WORKERS = (1, 4, 8, 16, 32)
METHODS = ("dense", "topk", "gtopk")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper, with times in seconds and throughputs in images/s.

    `numel` counts parameters of the network that the repository trains: its VGG-16 has one fully
    connected layer, its ResNet-20 shortcuts without parameters, its AlexNet is torchvision's.
    `iteration` is of one GPU (table VI). `throughput` is for each GPU by `METHODS` and `WORKERS`
    (the script's raw figures), `printed` of 32 GPUs and `ratios` of gTop-k over other methods
    (table VII). `selection` and `communication` are of gTop-k on 32 GPUs (figure 11, raw figures).
    """

    name: str
    numel: int
    batch: int
    iteration: float
    throughput: dict[str, tuple[float, ...]]
    printed: dict[str, int]
    ratios: dict[str, float]
    selection: float
    communication: float

    @property
    def k(self) -> int:
        return int(self.numel * DENSITY)


MODELS = (
    Model(
        "VGG-16", 14_728_266, 128, 0.097,
        {"dense": (1317.333, 104.2, 92.56, 39.48, 12.6),
         "topk": (1317.333, 110.576, 109.9, 97.865, 63.002),
         "gtopk": (1317.333, 131.06, 130.551, 126.434, 123.2)},
        {"dense": 403, "topk": 2016, "gtopk": 3020},
        {"dense": 7.5, "topk": 1.5}, 0.091353, 0.811753,
    ),
    Model(
        "ResNet-20", 269_722, 128, 0.146,
        {"dense": (920.632, 821.7, 705.2, 520.4, 287.9),
         "topk": (920.632, 908.837, 752.985, 737.594, 696.029),
         "gtopk": (920.632, 916.26, 868.73, 808.5, 789.3)},
        {"dense": 9212, "topk": 22272, "gtopk": 25280},
        {"dense": 2.7, "topk": 1.1}, 0.001618, 0.024686,
    ),
    Model(
        "AlexNet", 61_100_840, 64, 0.369,
        {"dense": (173.469, 14.01, 12.118, 4.936, 1.234),
         "topk": (173.469, 14.238, 13.865, 13.352, 9.236),
         "gtopk": (173.469, 16.536, 16.446, 16.359, 15.777)},
        {"dense": 39, "topk": 296, "gtopk": 505},
        {"dense": 12.8, "topk": 1.7}, 0.383776, 3.36298,
    ),
    Model(
        "ResNet-50", 25_557_032, 256, 4.842,
        {"dense": (52.873, 39.002, 36.989, 23.176, 10.721),
         "topk": (52.873, 37.729, 35.703, 34.495, 30.583),
         "gtopk": (52.873, 39.795, 39.713, 39.06, 39.119)},
        {"dense": 343, "topk": 978, "gtopk": 1251},
        {"dense": 3.65, "topk": 1.3}, 0.15405, 1.424253,
    ),
)  # fmt: skip
