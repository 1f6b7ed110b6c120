"""The cluster, and the placement of ranks on its nodes and mesh axes, computed from integers without torch."""
