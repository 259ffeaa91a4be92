"""What several integrations' tests begin with."""

import pytest

from sagebwd.integrations import transformers as integration


@pytest.fixture
def registered():
    """Transformers knows attn_implementation="sagebwd"."""
    integration.register()
