# SPDX-License-Identifier: Apache-2.0
"""A way of vLLM's to send weights to an engine, "files", for tests without a network.

A worker imports this module as that of its `worker_extension_cls`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


class Worker:
    """Adds nothing to a worker but this module."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    folder: str


class WeightFiles(WeightTransferEngine[WeightTransferInitInfo, Folder]):
    """Takes a checkpoint's tensors."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, Folder

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """There is nobody to meet."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """On a CPU, too, where there is nothing to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        files = Path(update_info.folder).glob("*.safetensors")
        self.model.load_weights(
            pair for file in files for pair in load_file(file).items()
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to release."""


WeightTransferEngineFactory.register_engine("files", WeightFiles)
