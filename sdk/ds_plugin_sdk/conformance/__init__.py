"""The conformance suite: whether a plugin is what DeepSpeed and its users take it for.

    check, target          what a check is, and what it looks at
    runtime, ops, training, distributed     the checks, by level
    op_info                what the ops are held against
    mutants                seeded defects, which the checks must find
    worker                 the process that runs them
    process, run           its parent: one worker for many cases, a new one after a crash
    outcome, selection, expectations        what came of a case, which to run, which may fail
    reports, contract_page what is written of it
    pytest_plugin          the same cases as pytest's items; `ds_plugin_sdk.cli.conformance` is the other front end

Importing this package imports no torch; nor do the modules of the parent.
"""
