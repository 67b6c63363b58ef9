"""The SDK inside unmodified DeepSpeed, of any release from 0.14.4 on.

import_hook     sees DeepSpeed being imported; all that runs at `import torch`
adopt           makes DeepSpeed use the registry's accelerator
builtin_names   the accelerators that DeepSpeed brings along
rebind          lets what DeepSpeed froze at import follow a later change
launcher        the SDK's settings on every node of a job
op_table        every op in DeepSpeed's table of ops
deepspeed_builders  DeepSpeed's own builders for what the SDK has no native code for
pinned          page-locked memory by DeepSpeed's own allocator
zero            the SDK's optimizers under ZeRO
drift           the SDK's contract against the installed DeepSpeed's
modules         the functions DeepSpeed calls on each op
"""
