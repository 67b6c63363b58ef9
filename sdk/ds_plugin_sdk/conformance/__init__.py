"""The conformance suite: whether a plugin is what DeepSpeed and its users take it for.

    check, target, suite   what a check is, what it looks at, and all of them
    runtime, ops, training, distributed, features, deepspeed     the checks, by level
    op_info                what the ops are compared with
    front_ends             DeepSpeed's classes that call the ops, as test subjects
    programs, in_turn      what checks run in processes of their own
    worker, environment    the process that runs the checks, and what it says of its surroundings
    process, run           its parent: one worker for many cases, a new one after a crash
    outcome, selection, expectations        what came of a case, which to run, which may fail
    reports, contract_page what is written of it
    pytest_plugin          the same cases as pytest's items; `ds_plugin_sdk.cli.conformance` is the other front end
    torch_layer            torch's own tests, for the ops below

Importing this package imports no torch; nor do the modules of the parent.
"""
