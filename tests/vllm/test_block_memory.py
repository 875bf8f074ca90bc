"""The memory that is made of vLLM's tensors, by device."""

from __future__ import annotations

import pytest
import torch

from tollbridge.errors import StartupError
from tollbridge.vllm.blocks import BlockMemory, _as_bytes, block_memory
from tollbridge.vllm.layout import read_layout


def test_cpu_tensors_are_aliased_whatever_the_order_of_their_dimensions() -> None:
    # logical [block, head, token, content], in memory token before head
    tensors = {f"layers.{i}.attn": torch.zeros(6, 4, 2, 8).transpose(1, 2) for i in range(2)}
    layout = read_layout(tensors, num_blocks=6, backend="TEST")
    memory = block_memory(layout.tensors, layout.regions, num_blocks=6, block_bytes=layout.block_bytes)
    assert isinstance(memory, BlockMemory)
    tensors["layers.1.attn"][4] = 1.0
    (view,) = memory.views(1, [4], 0, 1)
    assert bytes(view) == torch.ones(2 * 4 * 8).numpy().tobytes()


def test_bytes_of_a_permuted_tensor_are_its_storage() -> None:
    whole = torch.arange(2 * 3 * 4 * 2 * 8, dtype=torch.float32)
    tensor = whole.view(2, 3, 4, 2, 8)[1].transpose(1, 2)  # the second layer of one allocation
    rows = _as_bytes(tensor, 3, 4 * 2 * 8 * 4)
    assert rows.shape == (3, 256) and rows.is_contiguous()
    assert bytes(rows[2].numpy()) == whole.view(2, 3, 64)[1, 2].numpy().tobytes()
    rows[0] = 0
    assert not tensor[0].any()  # an alias, no copy


def test_other_devices_are_refused() -> None:
    tensors = [torch.zeros(2, 3, device="meta")]
    with pytest.raises(StartupError, match="from meta memory"):
        block_memory(tensors, [], num_blocks=2, block_bytes=12)
