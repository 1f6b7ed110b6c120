"""What several tools' tests begin with."""

from __future__ import annotations

import pytest
from helpers.trained import Trained, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("trained"))
