# SPDX-License-Identifier: Apache-2.0
"""A small real model, and drafters for it, trained by the speculators library.

`python -m tools.real_model` fetches the model and prints its folder; `demo` asks it
questions, with the bundled heads too. The other commands in their order: `data` (the
model writes text), `states` (its hidden states for this text), `train DRAFTER` and
`evaluate NAME`; `slim` and `fill` leave out of a head what is the target's, and put it
back.
`requirements/real_model_train.txt` names what they need.
"""
