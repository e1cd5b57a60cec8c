# SPDX-License-Identifier: Apache-2.0
"""A weight transfer backend of vLLM, "files", for tests without a network.

Workers import this module because `worker_extension_cls` names a class of it.
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
    """Adds nothing to a worker; it only makes it import this module."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    folder: str


class WeightFiles(WeightTransferEngine[WeightTransferInitInfo, Folder]):
    """Loads the tensors of a checkpoint."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, Folder

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Unlike vLLM's method this also works on a CPU, without synchronizing."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        files = Path(update_info.folder).glob("*.safetensors")
        self.model.load_weights(
            pair for file in files for pair in load_file(file).items()
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No resources to release."""


WeightTransferEngineFactory.register_engine("files", WeightFiles)
