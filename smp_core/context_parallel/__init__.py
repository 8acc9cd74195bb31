"""Context parallelism: sequences that several ranks hold together
(docs/context-parallelism.md).

``share_sequences`` is the one call of a conversion; it gives a ContextParallel (batch),
which splits batches and gathers outputs. Where a model calls attention, ours takes its
place: Transformers' interface (transformers_models) or torch's operator
(replaced_attention). It exchanges keys and values (attention, key_value_exchange,
kernels), and a trial on the first call shows whether a
model computes over parts of the tokens what it does over all of them (trial).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.context_parallel.batch import (
        BatchLayout as BatchLayout,
        ContextParallel as ContextParallel,
        share_sequences as share_sequences,
    )
    from smp_core.context_parallel.chunked_loss import IGNORED as IGNORED
    from smp_core.context_parallel.chunked_models import (
        chunk_losses as chunk_losses,
        loss_only as loss_only,
        smoothed as smoothed,
    )
    from smp_core.context_parallel.documents import (
        labels_within_documents as labels_within_documents,
    )
    from smp_core.context_parallel.flash import FLASH as FLASH
    from smp_core.context_parallel.learned_positions import (
        require_lengths as require_lengths,
    )
    from smp_core.context_parallel.replaced_attention import (
        SplitBatch as SplitBatch,
        active_split as active_split,
        enabled as enabled,
        part_of_mean as part_of_mean,
        positions as positions,
        try_call as try_call,
        try_output as try_output,
        weighted_mean as weighted_mean,
    )
    from smp_core.context_parallel.rules import (
        CONTEXT_PARALLELISM as CONTEXT_PARALLELISM,
    )
    from smp_core.context_parallel.transformers_models import (
        shifts_labels as shifts_labels,
    )
    from smp_core.context_parallel.trial import Trial as Trial
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
