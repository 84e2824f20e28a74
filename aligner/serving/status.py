"""`python -m aligner.serving.status HOST:PORT [--token_file F]`, or the path of an endpoint file: what a critic job says of itself."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Optional

from aligner.serving import access, protocol
from aligner.serving.endpoint import parse_address, read_endpoint
from aligner.serving.kserve import Connection
from aligner.serving.protocol import CONTROL, RequestFailed

TIMEOUT = 10.0


def fetch_status(host: str, port: int, *, token: Optional[str]) -> dict[str, Any]:
    """Raises OSError where nobody answers, RequestFailed where the answer is a refusal."""
    request = {"request": protocol.text_array(json.dumps({"op": "status"}))}
    answer = Connection(host, port, timeout=TIMEOUT).infer(CONTROL, request, access.headers(token))
    if len(answer["error"][0]):
        raise RequestFailed(protocol.text_of(answer["error"][0]))
    return protocol.json_of(answer["reply"][0], "reply")


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aligner.serving.status", description=__doc__)
    parser.add_argument("address", help="HOST:PORT, or an endpoint file (runs/NAME/endpoints/critic.json)")
    parser.add_argument(
        "--token_file", type=Path, help="file with the access token, where the endpoint file names none"
    )
    arguments = parser.parse_args(argv)
    try:
        file = Path(arguments.address)
        info = read_endpoint(file) if file.suffix == ".json" else None
        host, port = (info.host, info.port) if info else parse_address(arguments.address, key="address")
        token_file = arguments.token_file or (Path(info.token_file) if info and info.token_file else None)
        status = fetch_status(host, port, token=None if token_file is None else access.read_token(token_file))
    except (OSError, ValueError, RequestFailed) as error:
        print(f"error: no status from {arguments.address}: {error}", file=sys.stderr)
        return 1
    width = max(map(len, status))
    for name, value in status.items():
        print(f"{name:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
