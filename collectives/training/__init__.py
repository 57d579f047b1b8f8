"""Training: a schedule of all-reduces carried out beside the passes of a PyTorch model."""

from linkweave.collectives.training.data_parallel import DataParallel
from linkweave.collectives.training.gtopk import GTopK, resharded
from linkweave.collectives.training.prefetch import prefetch
from linkweave.collectives.training.program import Op, Program, Span
from linkweave.collectives.training.sharded_embedding import ShardedEmbedding

__all__ = [
    "DataParallel", "GTopK", "Op", "Program", "ShardedEmbedding", "Span", "prefetch", "resharded",
]  # fmt: skip
