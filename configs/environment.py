"""Names of the environment variables by which the processes of a run know where they belong."""

RUN_VARIABLE = "LEASH_RUN"
"""Id of the run; inherited by everything that a process of the run starts."""
LOG_DIR_VARIABLE = "LEASH_LOG_DIR"
PROCESS_VARIABLE = "LEASH_PROCESS"
"""Name of one process, as trainer-0: also that of its log file."""
