"""The rooms of the load test: prompts, wire, worker, fleet, summary, report.

`client/load_test.py` is the command over them. They know the wire of the served model (that of vllm_backend) and
nothing of the server's code. Traces and arrivals (`cb_backend.traffic`), charts and types of flags they share with
`cb-backend`; these need NumPy alone, and where the package is not installed they are taken from the checkout around
this folder.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("cb_backend") is None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
