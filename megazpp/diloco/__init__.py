"""DiLoCo: replica groups of nodes train without communication between groups, and synchronize weights every H steps."""
