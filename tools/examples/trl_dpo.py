"""Train with TRL's DPOTrainer and ZeRO++. Run on each of two nodes; HOST is the first node's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 tools/examples/trl_dpo.py
"""

import copy
import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import megazpp

set_seed(0)
words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(["<eos>", "<pad>", *string.printable])}))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
arguments = DPOConfig(
    tempfile.mkdtemp(),
    max_steps=4,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
texts = {"prompt": "{} plus 1 is", "chosen": " {}", "rejected": " {}0"}
data = Dataset.from_list([{k: text.format(n + (k != "prompt")) for k, text in texts.items()} for n in range(64)])
DPOTrainer(
    model,
    copy.deepcopy(model),  # the reference model of DPO, with the initial weights
    args=arguments,
    train_dataset=data,
    processing_class=tokenizer,
    callbacks=[megazpp.trainer_callback()],
).train()
