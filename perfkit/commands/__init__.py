"""The command line: one file per command, thin over the functions of the library.

A command is a function with its options in decorators of click. It checks what was given, calls the
library, and gives an `Answer`: text, figures for ``--json`` and results for ``--report``. Read first
`checking`, a whole command in a page; `outputs` for `Answer` and `OutputFiles`; `options` for what
several commands share; and `group`, which lists all commands and imports each when it is asked for.
`this_machine` is shared by some commands. `command` (words and help), `messages`
(errors in the words of a command line) and `running` (exit codes and the log of a failure) are the
same for all; a new command needs no change there.
"""
