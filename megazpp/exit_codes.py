"""What programs say by how they end, to each other and to a shell. Needs nothing: tools without torch import it too."""

from __future__ import annotations

import signal

EXIT_ERROR, EXIT_USER_ERROR, EXIT_ECHO, EXIT_HANG = 1, 2, 3, 4  # an echo: some other rank failed first
EXIT_INTERRUPTED = 128 + signal.SIGINT  # this and the next as a shell has it
EXIT_READER_GONE = 128 + signal.SIGPIPE
