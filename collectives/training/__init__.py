"""Training: a schedule of all-reduces carried out beside the passes of a PyTorch model."""

from linkweave.collectives.training.data_parallel import DataParallel
from linkweave.collectives.training.embedding.prefetch import prefetch
from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
from linkweave.collectives.training.gtopk.options import GTopK, resharded
from linkweave.collectives.training.program import Op, Program, Span

__all__ = [
    "DataParallel", "GTopK", "Op", "Program", "ShardedEmbedding", "Span", "prefetch", "resharded",
]  # fmt: skip
