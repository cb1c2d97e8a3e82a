"""All invalid inputs of the tests, by kind. Each must give one line and exit status 1, in bounded time."""

from __future__ import annotations

from bad_case import Case
from bad_environment import ENVIRONMENT, FOLDERS, MANIFESTS
from bad_json import JSON
from bad_models import MODELS, TOKENIZERS
from bad_recipes import COMMAND_LINES, YAML
from bad_rows import ROWS

# Run by ``test_malformed``.
TABLE: dict[str, list[Case]] = {
    "options": COMMAND_LINES,
    "YAML": YAML,
    "JSON": JSON,
    "rows": ROWS,
    "models": MODELS,
    "tokenizers": TOKENIZERS,
    "checkpoints": MANIFESTS,
    "environment": ENVIRONMENT,
    "folders": FOLDERS,
}
