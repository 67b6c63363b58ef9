"""What the fixtures of these tests are, for annotations."""

import subprocess
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[str]"]
RunChecks = Callable[..., dict[str, str]]
