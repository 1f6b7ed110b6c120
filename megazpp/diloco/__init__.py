"""DiLoCo: groups of nodes (islands) train with local steps and synchronize every H steps."""
