# SPDX-License-Identifier: Apache-2.0
"""Trains the models under ``models/``: a tiny target and one draft of each kind.

``python -m tools.tiny_models`` runs the stages in order. Each writes its result to
disk, so that any of them can be repeated alone (``--only``).
"""
