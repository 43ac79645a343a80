"""Names of the environment variables that mark the processes of a run."""

RUN_VARIABLE = "LEASH_RUN"
"""Id of the run; inherited by all child processes."""
LOG_DIR_VARIABLE = "LEASH_LOG_DIR"
PROCESS_VARIABLE = "LEASH_PROCESS"
"""Name of a process and of its log file, for example trainer-0."""
FORK_SERVERS_VARIABLE = "LEASH_FORK_SERVERS"
"""Folder of the sockets of processes/fork_server.py."""
