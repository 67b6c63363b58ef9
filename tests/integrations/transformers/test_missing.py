"""Where transformers is not installed, or older than the integration needs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["transformers", "transformers.modeling_layers"])
def test_the_error_says_what_to_install(module: str) -> None:
    program = f"""
import sys
sys.modules["{module}"] = None  # what an import finds that fails
from ds_plugin_sdk.errors import MissingLibraryError
try:
    import ds_plugin_sdk.integrations.transformers
except ImportError as error:
    assert isinstance(error, MissingLibraryError), error
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'transformers>=5'" in done.stdout
