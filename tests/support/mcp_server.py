"""An MCP server for tests: `python mcp_server.py` speaks over standard input and output, and
`python mcp_server.py http` over HTTP, at a port that it prints."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("fruit")
PRICES = {"apple": 3, "pear": 5}


@server.tool()
def price(fruit: str) -> int:
    """Tells what one fruit costs."""
    if fruit not in PRICES:
        raise ToolError(f"there is no {fruit}")
    return PRICES[fruit]


@server.tool()
def place() -> str:
    """Tells which process this is."""
    return str(os.getpid())


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=0)
    else:
        server.run("stdio")
