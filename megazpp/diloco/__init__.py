"""DiLoCo: replica groups of nodes train with local steps and synchronize every H steps."""
