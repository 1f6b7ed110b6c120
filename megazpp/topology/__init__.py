"""The cluster, and the placement of ranks on its nodes and mesh axes. These modules do not import torch."""
