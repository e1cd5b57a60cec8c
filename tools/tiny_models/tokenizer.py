# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer that all models share."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from . import corpus
from .settings import BOS, BOS_ID, EOS, EOS_ID, MASK, VOCAB_SIZE, Run

# The models have only seen Python, so a request is given to them as a comment.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}\n"
    "{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}"
    "{% endfor %}"
)


def train(run: Run) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, MASK],  # which get the first ids
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.training_texts(run.stdlib), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    whole.save_pretrained(run.work / "tokenizer")


def load(run: Run) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(run.work / "tokenizer")


def encode_corpus(run: Run) -> torch.Tensor:
    """All training text as one row of token ids, with EOS after each file.

    Returns:
        [tokens] int32 on the CPU.
    """
    rows = load(run).backend_tokenizer.encode_batch_fast(
        corpus.training_texts(run.stdlib), add_special_tokens=False
    )
    ids = [i for row in rows for i in (*row.ids, EOS_ID)]
    return torch.tensor(ids, dtype=torch.int32)
