"""Imported once by the fork server, so that workers do not each pay for importing torch."""

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

torch.set_num_threads(1)
