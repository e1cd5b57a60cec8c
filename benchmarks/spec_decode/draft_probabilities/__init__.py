# SPDX-License-Identifier: Apache-2.0
"""What draft probabilities gain, by temperature: see `__main__.py`."""
