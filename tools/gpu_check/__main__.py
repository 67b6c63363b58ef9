"""``python -m gpu_check``; ``make gpu-check``."""

from gpu_check.check import main

raise SystemExit(main())
